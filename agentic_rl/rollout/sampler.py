"""Sampling of tokens on the device: pure functions of logits, seeds and positions."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

_BLOCK = 256


def uniform(seeds: jax.Array, positions: jax.Array) -> jax.Array:
  """One uniform number in [0, 1) a row, a function of its seed and position alone.

  Args:
    seeds: uint32[B,2] key data of each request.
    positions: int32[B] position of the token that will be sampled.

  Returns:
    float32[B].
  """
  chex.assert_shape(seeds, (*positions.shape, 2))

  def one(seed: jax.Array, position: jax.Array) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position))

  return jax.vmap(one)(seeds, positions)


def inverse_cdf(weights: jax.Array, u: jax.Array) -> jax.Array:
  """Index i with probability `weights[i] / sum(weights)`; never one of weight 0.

  Sums blocks of 256 first: cheaper than V random numbers a row, and the running sum loses less precision.

  Args:
    weights: float32[B,V], not negative, each row with a positive sum.
    u: float32[B] in [0, 1).

  Returns:
    int32[B].
  """
  chex.assert_rank([weights, u], [2, 1])
  b, v = weights.shape
  blocks = jnp.pad(weights, ((0, 0), (0, -v % _BLOCK))).reshape(b, -1, _BLOCK)
  sums = blocks.sum(-1)
  totals = jnp.cumsum(sums, axis=-1)
  x = u * totals[:, -1]
  block = _first_above(totals, x, sums)
  before = jnp.where(block > 0, jnp.take_along_axis(totals, jnp.maximum(block - 1, 0)[:, None], axis=1)[:, 0], 0.0)
  inner = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  index = _first_above(jnp.cumsum(inner, axis=-1), x - before, inner)
  return (block * _BLOCK + index).astype(jnp.int32)


def _first_above(totals: jax.Array, x: jax.Array, weights: jax.Array) -> jax.Array:
  """First index of positive weight at which the running sum passes `x`; the last of positive weight if none does.

  XLA may add in any order, so a running sum can rise by a rounding error where nothing is added: such an index must not
  be drawn.
  """
  last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
  passed = (totals > x[:, None]) & (weights > 0)
  return jnp.where(passed.any(axis=-1), jnp.argmax(passed, axis=-1), last)


def truncate(logits: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
  """Sets logits outside the top-k and the top-p (nucleus) set to -inf.

  Args:
    logits: float32[B,V], already divided by the temperature.
    top_p: float32[B]; the smallest set of most likely tokens whose mass reaches it is kept; 1 keeps all.
    top_k: int32[B]; values below 1 keep all.

  Returns:
    float32[B,V].
  """
  chex.assert_rank([logits, top_p, top_k], [2, 1, 1])
  v = logits.shape[-1]
  order = jnp.argsort(-logits, axis=-1)
  probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
  mass_before = jnp.cumsum(probabilities, axis=-1) - probabilities
  rank = jnp.arange(v)[None]
  # The mass before an unlikely token rounds to 1, so a row that keeps all is told apart and not compared.
  in_nucleus = (mass_before < top_p[:, None]) | (top_p >= 1)[:, None]
  keep_sorted = in_nucleus & (rank < jnp.where(top_k < 1, v, top_k)[:, None])
  keep = jnp.take_along_axis(keep_sorted, jnp.argsort(order, axis=-1), axis=-1)
  return jnp.where(keep, logits, -jnp.inf)


def sample(
  logits: jax.Array,
  u: jax.Array,
  temperature: jax.Array,
  top_p: jax.Array,
  top_k: jax.Array,
  *,
  truncated: bool,
) -> tuple[jax.Array, jax.Array]:
  """One token a row and its log-probability.

  Args:
    logits: float32[B,V].
    u: float32[B] uniform numbers.
    temperature: float32[B]; 0 is greedy.
    top_p, top_k: float32[B], int32[B]; read only if `truncated`.
    truncated: Static: whether any row truncates its distribution.

  Returns:
    int32[B] tokens and float32[B] log-probabilities under softmax(logits / temperature), untruncated (temperature 1 for
    greedy rows): SGLang's convention.
  """
  greedy = temperature == 0
  scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
  logprobs = jax.nn.log_softmax(scaled, axis=-1)
  kept = truncate(logprobs, top_p, top_k) if truncated else logprobs
  weights = jnp.exp(kept - kept.max(axis=-1, keepdims=True))
  token = jnp.where(greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), inverse_cdf(weights, u))
  return token, jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
