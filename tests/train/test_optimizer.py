from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.policy import Policy, PolicyConfig
from agentic_rl.train.optimizer import OptimizerConfig


def rates(config: OptimizerConfig, steps: int) -> list[float]:
  rate = config.rate()
  return [float(rate(i)) for i in range(steps)]


def test_constant_rate_with_a_warm_up_by_hand():
  assert rates(OptimizerConfig(learning_rate=0.4), 3) == pytest.approx([0.4, 0.4, 0.4])
  assert rates(OptimizerConfig(learning_rate=0.4, warmup_steps=3), 6) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_cosine_rate_with_a_warm_up_by_hand():
  config = OptimizerConfig(learning_rate=1.0, warmup_steps=1, schedule="cosine", total_steps=5)
  # Halfway down from 1 to 0.1 it is at 0.55; a quarter of the way at 0.1 + 0.9 (1 + cos 45 deg) / 2.
  quarter = 0.1 + 0.45 * (1 + 2**-0.5)
  want = [0.5, 1.0, quarter, 0.55, 1.1 - quarter, 0.1, 0.1]
  assert rates(config, 7) == pytest.approx(want)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 30])
def test_no_step_is_lost(schedule: str, warmup: int):
  """Every rate is above 0, the first included, and the peak is reached."""
  config = OptimizerConfig(learning_rate=2e-3, warmup_steps=warmup, schedule=schedule, total_steps=50)
  values = rates(config, 50)
  assert min(values) > 0
  assert values[0] == pytest.approx(2e-3 / (warmup + 1), rel=1e-4)
  assert max(values) == values[warmup] == pytest.approx(2e-3, rel=1e-4)


def test_only_matrices_are_decayed():
  """Norm scales and biases of stacked layers have two axes or more: their number of axes does not tell."""
  policy = Policy(
    PolicyConfig(
      vocab_size=4,
      width=4,
      layers=2,
      heads=2,
      kv_heads=1,
      head_width=2,
      mlp_width=4,
      qk_norm=True,
      qkv_bias=True,
      tied_embeddings=False,
    )
  )
  params = jax.tree.map(lambda x: np.ones(x.shape, np.float32), policy.abstract_params())
  optimizer = OptimizerConfig(learning_rate=0.5, weight_decay=0.1).build()

  @jax.jit
  def without_gradient(params):
    return optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)[0]

  changes = {
    jax.tree_util.keystr(path, simple=True, separator="/"): set(np.unique(np.asarray(update)).tolist())
    for path, update in jax.tree_util.tree_leaves_with_path(without_gradient(params))
  }
  decayed = {name for name, values in changes.items() if values != {0.0}}
  attention = {f"layers/attention/{name}" for name in "qkvo"}
  mlp = {f"layers/mlp/{name}" for name in ("gate", "up", "down")}
  assert decayed == {"embed/table", "head"} | attention | mlp
  assert all(list(changes[name]) == pytest.approx([-0.05]) for name in decayed), "the rate times the decay"
  kept = set(changes) - decayed
  assert kept == {"final_norm", "layers/attention_norm", "layers/mlp_norm"} | {
    f"layers/attention/{x}" for x in ("q_bias", "k_bias", "v_bias", "q_norm", "k_norm")
  }


def test_first_update_by_hand():
  """Adam's first step is the rate times the sign of the gradient; clipping before it bounds the moments."""
  optimizer = OptimizerConfig(learning_rate=0.1, weight_decay=0.0, clip_norm=1.0, b1=0.9, b2=0.99).build()
  params = {"w": np.zeros((1, 2), np.float32)}
  gradient = {"w": np.array([[3.0, -4.0]], np.float32)}  # of norm 5
  update, state = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(gradient, params)
  np.testing.assert_allclose(update["w"], [[-0.1, 0.1]], rtol=1e-5)
  moments = {x.shape: [] for x in jax.tree.leaves(state)}
  for x in jax.tree.leaves(state):
    moments[x.shape].append(np.asarray(x))
  mean, square = moments[(1, 2)]
  np.testing.assert_allclose(mean, [[0.06, -0.08]], rtol=1e-5)
  np.testing.assert_allclose(square, [[0.0036, 0.0064]], rtol=1e-5)


def test_a_gradient_of_zero_stays_finite():
  optimizer = OptimizerConfig(weight_decay=0.0).build()
  params = {"w": np.ones((1, 2), np.float32)}
  update, _ = jax.jit(lambda p: optimizer.update({"w": jnp.zeros((1, 2))}, optimizer.init(p), p))(params)
  np.testing.assert_array_equal(update["w"], [[0.0, 0.0]])


def test_impossible_schedules_are_refused():
  with pytest.raises(ValueError, match=r"'linear'.*constant, cosine"):
    OptimizerConfig(schedule="linear")
  with pytest.raises(ValueError, match="total_steps"):
    OptimizerConfig(schedule="cosine", warmup_steps=5, total_steps=5)
