from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.algorithms import clipped_policy_loss, nll_loss

CLIP: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}


def f32(*values: float) -> jax.Array:
  return jnp.array(values, jnp.float32)


def test_by_hand() -> None:
  ratio = f32(1.0, 1.5, 1.5, 0.5, 0.5, 12.0)
  advantages = f32(2.0, 1.0, -1.0, 1.0, -1.0, -1.0)
  loss, stats = clipped_policy_loss(jnp.log(ratio), jnp.zeros(6), advantages, jnp.ones(6, bool), **CLIP)
  np.testing.assert_allclose(loss, [-2.0, -1.28, 1.5, -0.5, 0.8, 12.0], rtol=1e-5)
  np.testing.assert_allclose(stats["ratio"], ratio, rtol=1e-5)
  np.testing.assert_array_equal(stats["clip_low"], [0, 0, 0, 0, 1, 0])
  np.testing.assert_array_equal(stats["clip_high"], [0, 1, 0, 0, 0, 0])
  np.testing.assert_allclose(stats["kl_behaviour"], ratio - 1 - jnp.log(ratio), rtol=1e-4, atol=1e-6)

  loss, stats = clipped_policy_loss(jnp.log(ratio), jnp.zeros(6), advantages, jnp.ones(6, bool), dual_clip=10.0, **CLIP)
  np.testing.assert_allclose(loss, [-2.0, -1.28, 1.5, -0.5, 0.8, 10.0], rtol=1e-5)
  np.testing.assert_array_equal(stats["dual_clip"], [0, 0, 0, 0, 0, 1])


@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_against_loop_with_gradient(dual_clip: float | None) -> None:
  rng = np.random.default_rng(1)
  logp, behaviour, advantages = (rng.normal(size=64).astype(np.float32) for _ in range(3))
  mask = rng.random(64) < 0.7

  def total(x: jax.Array) -> jax.Array:
    loss = clipped_policy_loss(
      x, jnp.asarray(behaviour), jnp.asarray(advantages), jnp.asarray(mask), dual_clip=dual_clip, **CLIP
    )[0]
    return jnp.sum(loss)

  want, slope = 0.0, np.zeros(64)
  for t in range(64):
    if not mask[t]:
      continue
    ratio, a = float(np.exp(logp[t] - behaviour[t])), float(advantages[t])
    clipped = min(max(ratio, 0.8), 1.28)
    value = -min(ratio * a, clipped * a)
    slope[t] = -ratio * a if ratio * a <= clipped * a else 0.0
    if dual_clip is not None and a < 0 and value > -a * dual_clip:
      value, slope[t] = -a * dual_clip, 0.0
    want += value
  np.testing.assert_allclose(total(jnp.asarray(logp)), want, rtol=1e-5)
  np.testing.assert_allclose(jax.grad(total)(jnp.asarray(logp)), slope, rtol=1e-4, atol=1e-6)


def test_unchanged_policy_has_ratio_one_and_the_plain_gradient() -> None:
  logp = f32(-0.5, -3.0, -0.01)
  advantages = f32(1.0, -2.0, 0.5)

  def total(x: jax.Array) -> jax.Array:
    return jnp.sum(clipped_policy_loss(x, logp, advantages, jnp.ones(3, bool), **CLIP)[0])

  _, stats = clipped_policy_loss(logp, logp, advantages, jnp.ones(3, bool), **CLIP)
  assert np.all(stats["ratio"] == 1.0) and np.all(stats["kl_behaviour"] == 0.0)
  np.testing.assert_array_equal(jax.grad(total)(logp), -advantages)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30, -7.5])
def test_masked_tokens_change_nothing(garbage: float) -> None:
  mask = jnp.array([True, False, True, False])
  clean = [f32(-1.0, 0.0, -2.0, 0.0), f32(-1.3, 0.0, -1.8, 0.0), f32(1.0, 0.0, -1.0, 0.0)]
  dirty = [jnp.where(mask, x, garbage) for x in clean]

  def total(logp: jax.Array, behaviour: jax.Array, advantages: jax.Array) -> tuple[jax.Array, Any]:
    loss, stats = clipped_policy_loss(logp, behaviour, advantages, mask, dual_clip=3.0, **CLIP)
    return jnp.sum(loss), (loss, stats)

  for which in (range(3), [0], [1], [2]):
    arrays = [dirty[i] if i in which else clean[i] for i in range(3)]
    want_grad, want = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*clean)
    got_grad, got = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*arrays)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    jax.tree.map(np.testing.assert_array_equal, got_grad, want_grad)
    assert np.all(got[0][~mask] == 0.0) and np.all(got_grad[0][~mask] == 0.0)
    assert all(np.all(s[~mask] == 0.0) for s in got[1].values())


def test_broken_log_ratios_stay_finite() -> None:
  logp, behaviour = f32(-1.0, -1e5, 0.0), f32(-1e5, -1.0, -jnp.inf)
  loss, stats = clipped_policy_loss(logp, behaviour, f32(-1.0, -1.0, -1.0), jnp.ones(3, bool), **CLIP)
  np.testing.assert_allclose(loss, [np.exp(20.0), 0.8, np.exp(20.0)], rtol=1e-5)
  assert np.all(np.isfinite(stats["kl_behaviour"]))


def test_only_the_policy_has_a_gradient() -> None:
  def total(behaviour: jax.Array, advantages: jax.Array) -> jax.Array:
    loss, stats = clipped_policy_loss(f32(-1.0), behaviour, advantages, jnp.ones(1, bool), **CLIP)
    return jnp.sum(loss) + sum(jnp.sum(s) for s in stats.values())

  for gradient in jax.grad(total, argnums=(0, 1))(f32(-1.1), f32(2.0)):
    assert np.all(gradient == 0.0)


def test_refusals() -> None:
  x, mask = f32(-1.0), jnp.ones(1, bool)
  with pytest.raises(ValueError, match="clip_low must be in"):
    clipped_policy_loss(x, x, x, mask, clip_low=0.0, clip_high=0.2)
  with pytest.raises(ValueError, match="dual_clip"):
    clipped_policy_loss(x, x, x, mask, dual_clip=1.0, **CLIP)
  with pytest.raises(AssertionError):
    clipped_policy_loss(x, x, x, x, **CLIP)
  with pytest.raises(AssertionError):
    clipped_policy_loss(x, f32(1, 2), x, mask, **CLIP)


def test_nll() -> None:
  mask = jnp.array([True, False])
  logp = f32(-0.25, np.nan)
  np.testing.assert_array_equal(nll_loss(logp, mask), [0.25, 0.0])
  np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(nll_loss(x, mask)))(logp), [-1.0, 0.0])
