from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.parallel import MeshShape, make_mesh, shardings
from agentic_rl.policy import Policy, PolicyConfig

CONFIG = PolicyConfig(
  vocab_size=16,
  width=8,
  layers=2,
  heads=2,
  kv_heads=2,
  head_width=4,
  mlp_width=1,
  qk_norm=True,
  experts=4,
  experts_per_token=2,
  expert_width=6,
)


def params_of(config: PolicyConfig) -> dict:
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: (0.5 * rng.normal(size=x.shape)).astype(np.float32), Policy(config).abstract_params())


def experts_by_loops(config: PolicyConfig, layer: dict, x: np.ndarray) -> np.ndarray:
  """One token and one expert at a time, in float64."""
  out = np.zeros(x.shape)
  for i, token in enumerate(x.astype(np.float64)):
    logits = token @ layer["router"].astype(np.float64)
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    chosen = np.argsort(-shares)[: config.experts_per_token]
    total = shares[chosen].sum() if config.normalize_experts else 1.0
    for e in chosen:
      gate, up = token @ layer["gate"][e], token @ layer["up"][e]
      out[i] += shares[e] / total * ((gate / (1 + np.exp(-gate)) * up) @ layer["down"][e])
  return out


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("per_token", [1, 2, 4])
def test_experts_equal_the_loops(per_token: int, normalize: bool):
  config = dataclasses.replace(CONFIG, experts_per_token=per_token, normalize_experts=normalize)
  layers = params_of(config)["layers"]
  layer = jax.tree.map(lambda x: x[1], layers)
  x = np.random.default_rng(1).normal(size=(3, 5, 8)).astype(np.float32)
  got = jax.jit(Policy(config)._block(layer).mlp)(jnp.asarray(x))
  want = experts_by_loops(config, layer["mlp"], x.reshape(-1, 8)).reshape(x.shape)
  np.testing.assert_allclose(np.asarray(got), want, atol=2e-5)


def test_all_tokens_may_go_to_one_expert():
  """None is dropped, and an expert without tokens adds nothing and has no gradient."""
  config = dataclasses.replace(CONFIG, experts_per_token=1)
  layer = jax.tree.map(lambda x: x[0], params_of(config)["layers"])
  x = np.abs(np.random.default_rng(1).normal(size=(1, 9, 8))).astype(np.float32)
  layer["mlp"]["router"] = np.zeros((8, 4), np.float32)
  layer["mlp"]["router"][:, 2] = 1.0
  policy = Policy(config)
  grads = jax.jit(jax.grad(lambda layer: policy._block(layer).mlp(jnp.asarray(x)).sum()))(layer)["mlp"]
  np.testing.assert_allclose(
    np.asarray(policy._block(layer).mlp(jnp.asarray(x)))[0], experts_by_loops(config, layer["mlp"], x[0]), atol=2e-5
  )
  for name in ("gate", "up", "down"):
    moved = np.abs(np.asarray(grads[name])).max((1, 2)) > 0
    np.testing.assert_array_equal(moved, [False, False, True, False])


@pytest.mark.parametrize(
  "shape",
  [
    MeshShape(1, 1, 1, expert=4),
    MeshShape(1, 2, 2, expert=2),
    MeshShape(2, 2, 1, expert=2),
    MeshShape(1, 2, 1, context=2, expert=2),
  ],
)
def test_experts_on_a_mesh(shape: MeshShape):
  policy, params = Policy(CONFIG), params_of(CONFIG)
  rng = np.random.default_rng(2)
  ids = rng.integers(0, 16, (8, 8)).astype(np.int32)
  positions, segments = np.tile(np.arange(8, dtype=np.int32), (8, 1)), np.ones((8, 8), np.int32)

  def loss(params: dict) -> jax.Array:
    hidden = policy.hidden(params, ids, positions, segments)
    return jnp.mean(jnp.sin(hidden @ policy.unembedding(params).T))

  want, want_grads = jax.jit(jax.value_and_grad(loss))(params)
  count = shape.data * shape.fsdp * shape.tensor * shape.context * shape.expert
  mesh = make_mesh(shape, jax.devices()[:count])
  placed = jax.device_put(params, shardings(mesh, policy.logical_axes(), policy.abstract_params()))
  with jax.set_mesh(mesh):
    got, grads = jax.jit(jax.value_and_grad(loss))(placed)
  assert float(got) == pytest.approx(float(want), rel=1e-5)
  for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=2e-5)
