"""Losses of single tokens. They are summed with the weights of `aggregation`, so they know nothing of batches.

Arrays of any one shape, aligned to the token that they belong to. What stands at masked positions never matters: value
and gradient are exactly 0 there, even for NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

from agentic_rl.algorithms.registry import Registry

POLICY_LOSSES: Registry[Callable[..., tuple[jax.Array, dict[str, jax.Array]]]] = Registry("policy loss")

MAX_LOG_RATIO = 20.0
"""Bound of `log(pi / behaviour)` in nats: exp stays finite and a broken token cannot end a run by itself."""


@POLICY_LOSSES.register
def clipped_policy_loss(
  logp: jax.Array,
  behaviour_logp: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float,
  clip_high: float,
  dual_clip: float | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """PPO's clipped loss with separate bounds (PPO, 1707.06347, eq. 7; clip-higher: DAPO, 2503.14476).

  With `ratio = exp(logp - behaviour_logp)` the loss of a token is
  `max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))`; with `dual_clip = c` it is at most `-A c` where `A < 0`
  (dual clip, 1912.09729).

  Args:
    logp: f32[...], log-probabilities in nats under the policy that is trained; the only input with a gradient.
    behaviour_logp: f32[...], under the policy that sampled.
    advantages: f32[...].
    mask: bool[...], true where the policy sampled the token.
    clip_low: Lower clip range, in (0, 1].
    clip_high: Upper clip range, above 0.
    dual_clip: Bound of the ratio for negative advantages, above 1; None for none.

  Returns:
    Loss f32[...], and f32[...] statistics without gradient, 0 where masked: `ratio`, `clip_low` and `clip_high` (1
    where that bound cut the gradient off), `dual_clip` likewise, and `kl_behaviour`, the k3 estimate
    `ratio - 1 - log ratio` of KL(behaviour || policy) in nats, never negative.
  """
  chex.assert_equal_shape([logp, behaviour_logp, advantages, mask])
  chex.assert_type([logp, behaviour_logp, advantages, mask], [float, float, float, bool])
  if not (0.0 < clip_low <= 1.0 and clip_high > 0.0):
    raise ValueError(f"clip_low must be in (0, 1] and clip_high above 0, got {clip_low} and {clip_high}")
  if dual_clip is not None and not dual_clip > 1.0:
    raise ValueError(f"dual_clip bounds the ratio and must be above 1, got {dual_clip}")
  # Masked positions are replaced before any arithmetic: a NaN that is only multiplied by 0 afterwards stays a NaN in
  # the gradient.
  logp = jnp.where(mask, logp, 0.0)
  behaviour_logp = jax.lax.stop_gradient(jnp.where(mask, behaviour_logp, 0.0))
  advantages = jax.lax.stop_gradient(jnp.where(mask, advantages, 0.0))

  log_ratio = jnp.clip(logp - behaviour_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  ratio = jnp.exp(log_ratio)
  clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
  loss = jnp.maximum(-advantages * ratio, -advantages * clipped)
  dual = jnp.zeros_like(mask)
  if dual_clip is not None:
    dual = (advantages < 0) & (ratio > dual_clip)
    loss = jnp.where(dual, -advantages * dual_clip, loss)

  statistics = {
    "ratio": ratio,
    "clip_low": (advantages < 0) & (ratio < 1.0 - clip_low),
    "clip_high": (advantages > 0) & (ratio > 1.0 + clip_high),
    "dual_clip": dual,
    "kl_behaviour": ratio - 1.0 - log_ratio,
  }
  statistics = {k: jax.lax.stop_gradient(jnp.where(mask, v, 0).astype(loss.dtype)) for k, v in statistics.items()}
  return jnp.where(mask, loss, 0.0), statistics


def nll_loss(logp: jax.Array, mask: jax.Array) -> jax.Array:
  """Negative log-likelihood of each token in nats: f32[...], exactly 0 (gradient too) where `mask` is false."""
  chex.assert_equal_shape([logp, mask])
  chex.assert_type([logp, mask], [float, bool])
  return jnp.where(mask, -logp, 0.0)
