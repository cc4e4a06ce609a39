from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.data import Batch, pack_sequences
from agentic_rl.policy import Params, Policy, PolicyConfig
from agentic_rl.policy.decoder import rms_norm, sequence_positions
from agentic_rl.policy.rope import frequencies, rotate

TINY = PolicyConfig(
  vocab_size=13,
  width=8,
  layers=2,
  heads=4,
  kv_heads=2,
  head_width=4,
  mlp_width=12,
  rope_theta=100.0,
  qk_norm=True,
  qkv_bias=True,
)


def random_params(policy: Policy, seed: int = 0) -> Params:
  """Parameters without special values: biases are not 0 and norm scales are not 1."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: (0.4 * rng.normal(size=x.shape)).astype(np.float32), policy.abstract_params())


@functools.cache
def tiny() -> tuple[Policy, Params, Callable[..., jax.Array]]:
  """The tiny policy, its parameters, and logits [B,T,V] of packed rows."""
  policy = Policy(TINY)

  def logits(params: Params, ids: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
    return policy.hidden(params, ids, positions, segments) @ policy.unembedding(params).T

  return policy, random_params(policy), jax.jit(logits)


def packed(sequences: list[np.ndarray], length: int) -> Batch:
  return pack_sequences(
    sequences, [np.zeros(len(s), bool) for s in sequences], length_buckets=(length,), row_multiple=1
  )


def sequences(*lengths: int, seed: int = 0) -> list[np.ndarray]:
  rng = np.random.default_rng(seed)
  return [rng.integers(0, TINY.vocab_size, n).astype(np.int32) for n in lengths]


# ---- parts, by hand ----


def test_rotary_embedding_by_hand():
  # Width 4, theta 100: pairs (0, 2) and (1, 3) turn by 1 and 1/10 radian a position.
  x = np.array([[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 2.0, 5.0]], np.float32)
  want = [
    [np.cos(3), 0.0, np.sin(3), 0.0],
    [0.0, np.cos(0.3), 0.0, np.sin(0.3)],
    [-2 * np.sin(3), -5 * np.sin(0.3), 2 * np.cos(3), 5 * np.cos(0.3)],
  ]
  got = rotate(jnp.asarray(x).reshape(3, 1, 1, 4), np.full((3, 1), 3, np.int32), frequencies(4, 100.0)[0])
  np.testing.assert_allclose(np.asarray(got).reshape(3, 4), want, atol=1e-6)
  at_zero = rotate(jnp.asarray(x).reshape(3, 1, 1, 4), np.zeros((3, 1), np.int32), frequencies(4, 100.0)[0])
  np.testing.assert_array_equal(np.asarray(at_zero).reshape(3, 4), x)


def test_rotary_products_depend_on_the_distance_alone():
  rng = np.random.default_rng(0)
  q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))

  def product(at_q: int, at_k: int) -> float:
    a, b = (rotate(x, np.array([[at]], np.int32), frequencies(8, 10_000.0)[0]) for x, at in ((q, at_q), (k, at_k)))
    return float((a * b).sum())

  assert product(7, 3) == pytest.approx(product(1004, 1000), abs=1e-4)
  assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-2)


def test_rms_norm_by_hand():
  # The mean square of (3, 4) is 12.5; with epsilon 12.5 it is 25.
  x, scale = jnp.array([[3.0, 4.0]]), jnp.array([1.0, 2.0])
  np.testing.assert_allclose(rms_norm(x, scale, 0.0), [[3 / 12.5**0.5, 8 / 12.5**0.5]], rtol=1e-6)
  np.testing.assert_allclose(rms_norm(x, scale, 12.5), [[3 / 5, 8 / 5]], rtol=1e-6)
  assert rms_norm(x.astype(jnp.bfloat16), scale, 0.0).dtype == jnp.bfloat16


def test_positions_restart_with_every_segment():
  assert sequence_positions([1, 1, 1, 2, 3, 3, 0, 0]) == [0, 1, 2, 0, 0, 1, 0, 1]
  assert sequence_positions([]) == []


# ---- the decoder against a second, plain one ----


def plain_logits(config: PolicyConfig, params: Params, ids: np.ndarray) -> np.ndarray:
  """Logits [T,V] of one sequence in float64, one head at a time."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  t, c = len(ids), config.head_width

  def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * scale

  def turn(x: np.ndarray) -> np.ndarray:
    angle = np.arange(t)[:, None] * config.rope_theta ** (-2.0 * np.arange(c // 2) / c)
    pair = (x[:, : c // 2] + 1j * x[:, c // 2 :]) * np.exp(1j * angle)
    return np.concatenate([pair.real, pair.imag], -1)

  def heads_of(x: np.ndarray, layer: dict[str, np.ndarray], name: str, head: int) -> np.ndarray:
    out = x @ layer[name][:, head]
    if config.qkv_bias:
      out = out + layer[f"{name}_bias"][head]
    if config.qk_norm and name != "v":
      out = norm(out, layer[f"{name}_norm"])
    return out if name == "v" else turn(out)

  x = p["embed"]["table"][ids]
  for i in range(config.layers):
    layer = jax.tree.map(lambda a, i=i: a[i], p["layers"])
    att, mlp = layer["attention"], layer["mlp"]
    y = norm(x, layer["attention_norm"])
    for head in range(config.heads):
      shared = head // (config.heads // config.kv_heads)
      q, k, v = heads_of(y, att, "q", head), heads_of(y, att, "k", shared), heads_of(y, att, "v", shared)
      scores = np.where(np.tril(np.ones((t, t), bool)), q @ k.T / c**0.5, -np.inf)
      weights = np.exp(scores - scores.max(-1, keepdims=True))
      x = x + weights / weights.sum(-1, keepdims=True) @ v @ att["o"][head]
    y = norm(x, layer["mlp_norm"])
    gate = y @ mlp["gate"]
    x = x + (gate / (1 + np.exp(-gate)) * (y @ mlp["up"])) @ mlp["down"]
  head = p["embed"]["table"] if config.tied_embeddings else p["head"]
  return norm(x, p["final_norm"]) @ head.T


@pytest.mark.parametrize("form", ["qwen3_biased_tied", "llama_untied"])
def test_logits_equal_a_plain_decoder(form: str):
  if form == "qwen3_biased_tied":
    policy, params, logits = tiny()
  else:
    policy = Policy(dataclasses.replace(TINY, qk_norm=False, qkv_bias=False, tied_embeddings=False, kv_heads=1))
    params = random_params(policy)
    logits = jax.jit(lambda p, *args: policy.hidden(p, *args) @ policy.unembedding(p).T)
  (ids,) = sequences(9)
  batch = packed([ids], 12)
  got = np.asarray(logits(params, batch.token_ids, batch.positions, batch.segment_ids))[0, :9]
  np.testing.assert_allclose(got, plain_logits(policy.config, params, ids), atol=2e-5)


# ---- packing ----


def test_packed_equals_unpacked():
  policy, params, logits = tiny()
  parts = sequences(5, 4, 2, 1, 7)
  together = packed(parts, 12)
  assert together.shape[0] == 2 and together.segment_ids.max() >= 3
  got = np.asarray(logits(params, together.token_ids, together.positions, together.segment_ids))
  for index, ids in enumerate(parts):
    own = got[together.sequence_ids == index]
    np.testing.assert_allclose(own, plain_logits(policy.config, params, ids), atol=2e-5)


def test_tokens_of_one_segment_change_no_logit_of_another():
  """Exactly, not nearly (resetting positions alone would let them see each other)."""
  _, params, logits = tiny()
  a, b, c = sequences(5, 4, 2)
  batch = packed([a, b, c], 12)

  def run(ids: np.ndarray) -> np.ndarray:
    return np.asarray(logits(params, ids, batch.positions, batch.segment_ids))

  before = run(batch.token_ids)
  for changed in range(3):
    ids = batch.token_ids.copy()
    mine = batch.sequence_ids == changed
    ids[mine] = (ids[mine] + 1) % TINY.vocab_size
    after = run(ids)
    others = (batch.sequence_ids != changed) & (batch.segment_ids > 0)
    np.testing.assert_array_equal(after[others], before[others])
    assert np.abs(after[mine] - before[mine]).max() > 1e-2


def test_padding_is_told_by_segments_not_by_ids():
  """With `pad == eos == 0`: zeros inside a sequence are tokens, and whatever stands in the padding is not."""
  policy, params, logits = tiny()
  ids = np.array([3, 0, 0, 5, 0], np.int32)
  batch = packed([ids], 9)
  want = plain_logits(policy.config, params, ids)
  for padding in (0, 7):
    token_ids = np.where(batch.segment_ids > 0, batch.token_ids, padding).astype(np.int32)
    got = np.asarray(logits(params, token_ids, batch.positions, batch.segment_ids))
    np.testing.assert_allclose(got[0, :5], want, atol=2e-5)
    assert np.isfinite(got).all()


# ---- the cache ----


@pytest.mark.parametrize("attend_length", [None, 10])
def test_extending_a_cache_equals_the_packed_forward(attend_length: int | None):
  """Two sequences of different lengths, fed in ragged pieces that are padded on the right with garbage."""
  policy, params, _ = tiny()
  a, b = sequences(9, 6)
  unstacked = policy.unstack(params)
  extend = jax.jit(functools.partial(policy.extend, attend_length=attend_length))
  cache = policy.init_cache(2, 12)
  got: list[list[np.ndarray]] = [[], []]
  done = np.zeros(2, np.int32)
  for pieces in ((3, 1), (1, 3), (2, 0), (3, 2)):
    ids = np.full((2, 3), 11, np.int32)
    for row, (sequence, n) in enumerate(zip((a, b), pieces, strict=True)):
      ids[row, :n] = sequence[done[row] : done[row] + n]
    hidden, cache = extend(unstacked, ids, done.copy(), cache)
    for row, n in enumerate(pieces):
      got[row].append(np.asarray(hidden)[row, :n])
    done += np.array(pieces, np.int32)
  assert done.tolist() == [9, 6]
  head = np.asarray(policy.unembedding(params))
  for row, ids in enumerate((a, b)):
    np.testing.assert_allclose(np.concatenate(got[row]) @ head.T, plain_logits(policy.config, params, ids), atol=2e-5)


def test_tokens_beyond_the_cache_are_dropped():
  """A padded step at the end of a full cache must not wrap around and overwrite its beginning."""
  policy, params, _ = tiny()
  (ids,) = sequences(4)
  extend = jax.jit(policy.extend)
  _, cache = extend(policy.unstack(params), ids[None], np.zeros(1, np.int32), policy.init_cache(1, 4))
  _, after = extend(policy.unstack(params), ids[None], np.array([3], np.int32), cache)
  # One real token at the last place, without padding.
  _, want = extend(policy.unstack(params), ids[None, :1], np.array([3], np.int32), cache)
  for before, wanted, got in zip(cache, want, after, strict=True):
    for old, one, new in zip(before, wanted, got, strict=True):
      assert new.shape == (1, 4, 2, 4)
      np.testing.assert_array_equal(old[:, :3], new[:, :3])
      np.testing.assert_allclose(one[:, 3], new[:, 3], atol=1e-6)


# ---- how it is computed does not matter ----


def batch_loss(policy: Policy, batch: Batch) -> Callable[[Params], jax.Array]:
  weights = np.random.default_rng(2).normal(size=(*batch.shape, policy.config.width)).astype(np.float32)
  weights = weights * (batch.segment_ids > 0)[..., None]

  def loss(params: Params) -> jax.Array:
    hidden = policy.hidden(params, batch.token_ids, batch.positions, batch.segment_ids)
    return jnp.sum(hidden.astype(jnp.float32) * weights)

  return loss


@functools.cache
def reference_gradient() -> tuple[jax.Array, Params]:
  policy, params, _ = tiny()
  return jax.jit(jax.value_and_grad(batch_loss(policy, packed(sequences(5, 4, 7), 12))))(params)


def test_remat_and_unrolling_change_no_gradient():
  _, params, _ = tiny()
  policy = Policy(dataclasses.replace(TINY, remat="layer", unroll_layers=True))
  gradient = jax.value_and_grad(batch_loss(policy, packed(sequences(5, 4, 7), 12)))
  jaxpr = str(jax.make_jaxpr(gradient)(params))
  assert "remat" in jaxpr and "unroll=2" in jaxpr, "the options reach the program"
  got = jax.jit(gradient)(params)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(reference_gradient()), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_close_to_float32():
  _, params, _ = tiny()
  policy = Policy(dataclasses.replace(TINY, dtype="bfloat16"))
  batch = packed(sequences(5, 4, 7), 12)
  hidden = jax.eval_shape(policy.hidden, params, batch.token_ids, batch.positions, batch.segment_ids)
  assert hidden.dtype == jnp.bfloat16
  value, gradient = jax.jit(jax.value_and_grad(batch_loss(policy, batch)))(params)
  want_value, want = reference_gradient()
  assert float(value) == pytest.approx(float(want_value), rel=0.05, abs=0.5)
  for a, b in zip(jax.tree.leaves(jax.device_get(gradient)), jax.tree.leaves(jax.device_get(want)), strict=True):
    assert a.dtype == np.float32, "gradients of float32 parameters are float32"
    assert (a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b)) > 0.99


def test_gradient_of_a_frequent_token_is_summed_in_float32():
  """In bfloat16 a sum of ones stalls at 256."""
  policy = Policy(dataclasses.replace(TINY, dtype="bfloat16"))
  ids = np.full((1, 1000), 3, np.int32)
  embed = jax.jit(jax.grad(lambda p: policy._embed(p, ids).astype(jnp.float32).sum()))
  table = embed(tiny()[1])["embed"]["table"]
  np.testing.assert_array_equal(table[3], np.full(TINY.width, 1000.0))


# ---- parameters and configuration ----


@pytest.mark.parametrize("tied", [True, False])
def test_every_leaf_has_its_axes_and_its_abstract_shape(tied: bool):
  policy = Policy(dataclasses.replace(TINY, tied_embeddings=tied))
  abstract, axes = policy.abstract_params(), policy.logical_axes()
  params = jax.eval_shape(policy.init, jax.random.key(0))
  assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
  sizes = {
    "vocab": TINY.vocab_size,
    "embed": TINY.width,
    "layers": TINY.layers,
    "heads": TINY.heads,
    "kv_heads": TINY.kv_heads,
    "head_width": TINY.head_width,
    "mlp": TINY.mlp_width,
  }
  named = jax.tree.map(lambda names: tuple(sizes[n] for n in names), axes, is_leaf=lambda x: isinstance(x, tuple))
  assert named == jax.tree.map(lambda x: x.shape, abstract), "a name stands for one size everywhere"
  assert ("head" in params) == (not tied)
  # 13*8 embedding, 8 norm; a layer: 2*8 norms, 8*16 + 2*8*8 + 16*8 attention, 32 biases, 2*4 qk norms, 3*8*12 mlp.
  assert policy.parameter_count() == 104 + 8 + 2 * (16 + 384 + 32 + 8 + 288) + (0 if tied else 104)


def test_init_is_seeded_and_of_unit_scale():
  policy = Policy(dataclasses.replace(TINY, width=64))
  init = jax.jit(policy.init)
  params, again, other = (jax.device_get(init(jax.random.key(seed))) for seed in (0, 0, 1))
  assert all(jax.tree.leaves(jax.tree.map(np.array_equal, params, again)))
  assert not (params["embed"]["table"] == other["embed"]["table"]).any()
  attention = params["layers"]["attention"]
  assert float(attention["q"].std()) == pytest.approx(64**-0.5, rel=0.1)
  assert not attention["q_bias"].any() and np.all(attention["q_norm"] == 1.0)
  assert not (attention["q"][0] == attention["q"][1]).any(), "each layer is drawn by itself"
  assert not (attention["k"] == attention["v"]).any()


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"kv_heads": 3}, "must divide heads"),
    ({"kv_heads": 0}, "kv_heads must be at least 1"),
    ({"layers": 0}, "layers must be at least 1"),
    ({"head_width": 3}, "must be even"),
    ({"remat": "block"}, "choose one of none, layer"),
    ({"dtype": "float16"}, "float32 or bfloat16"),
  ],
)
def test_impossible_shapes_are_refused(change: dict[str, Any], words: str):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(TINY, **change)


def test_config_from_plain_values():
  assert PolicyConfig.from_dict(TINY.to_dict()) == TINY
  with pytest.raises(ValueError, match="unknown policy option 'depth'"):
    PolicyConfig.from_dict({**TINY.to_dict(), "depth": 2})
  values = TINY.to_dict()
  del values["mlp_width"]
  with pytest.raises(ValueError, match="'mlp_width' is missing"):
    PolicyConfig.from_dict(values)


def test_architecture_leaves_out_how_it_is_computed():
  faster = dataclasses.replace(TINY, dtype="bfloat16", remat="layer", unroll_layers=True)
  assert faster.architecture() == TINY.architecture()
  assert dataclasses.replace(TINY, rope_theta=1e6).architecture() != TINY.architecture()
