"""From token losses to the loss of one update, by weights that are known before the update.

The loss of an update is `sum(weights * token_loss)` over all its tokens. The weights have one denominator for the whole
update, whatever the split into micro-batches, packed rows or devices: each part sums its share, shares are added and
never averaged. With `n_s` the policy tokens of sequence s, S the number of sequences with `n_s > 0` and `l` the losses:

| mode                   | loss                             | used by                             |
|------------------------|----------------------------------|-------------------------------------|
| `token_mean`           | sum_s sum_t l / sum_s n_s        | DAPO, GRPO-T, GRPO-TCR, ZeroTIR     |
| `seq_mean_token_mean`  | 1/S sum_s (1/n_s sum_t l)        | GRPO as published, GSPO             |
| `seq_mean_token_sum`   | 1/S sum_s sum_t l                | the plain policy gradient           |
| `token_sum_fixed_norm` | 1/S sum_s (1/fixed_norm sum_t l) | Dr.GRPO                             |

A sequence without policy tokens has no part in S. A sequence with advantage 0 has: it adds no gradient but enlarges the
denominator. Whoever does not want that drops it before (`selection.group_filter`).
"""

from __future__ import annotations

from collections.abc import Callable

import chex
import numpy as np

from agentic_rl.algorithms.registry import Registry
from agentic_rl.errors import UserError

AGGREGATIONS: Registry[Callable[[np.ndarray, float | None], np.ndarray]] = Registry("aggregation")
"""Functions `(counts int[S] of at least 1, fixed_norm) -> float64[S]`, the weight of one token of each sequence."""


@AGGREGATIONS.register
def token_mean(counts: np.ndarray, fixed_norm: float | None) -> np.ndarray:
  """Every token weighs the same."""
  del fixed_norm
  return np.full(len(counts), 1.0 / counts.sum())


@AGGREGATIONS.register
def seq_mean_token_mean(counts: np.ndarray, fixed_norm: float | None) -> np.ndarray:
  """Every sequence weighs the same."""
  del fixed_norm
  return 1.0 / (len(counts) * counts)


@AGGREGATIONS.register
def seq_mean_token_sum(counts: np.ndarray, fixed_norm: float | None) -> np.ndarray:
  """A sequence weighs as many times as it has tokens."""
  del fixed_norm
  return np.full(len(counts), 1.0 / len(counts))


@AGGREGATIONS.register
def token_sum_fixed_norm(counts: np.ndarray, fixed_norm: float | None) -> np.ndarray:
  """As `seq_mean_token_sum`, scaled by a constant such as the token budget, so that learning rates stay comparable."""
  if fixed_norm is None or not fixed_norm > 0:
    raise UserError(f"aggregation 'token_sum_fixed_norm' needs a positive fixed_norm in tokens, got {fixed_norm}")
  return np.full(len(counts), 1.0 / (len(counts) * fixed_norm))


def token_weights(
  mask: np.ndarray, sequence_ids: np.ndarray, mode: str, *, fixed_norm: float | None = None
) -> np.ndarray:
  """Weights of all tokens of one update, computed on the host from what is trained, not from how it is laid out.

  Args:
    mask: bool[...], true for policy tokens.
    sequence_ids: int[...], equal for the tokens of one sequence and unique in the update; -1 for padding.
    mode: A name of `AGGREGATIONS`.
    fixed_norm: Tokens, for `token_sum_fixed_norm`.

  Returns:
    f32[...], 0 where masked; all 0 if nothing is trained. In the two mean modes they sum to 1.

  Raises:
    UserError: for an unknown mode or a missing `fixed_norm`.
    ValueError: for a trained token that belongs to no sequence.
  """
  chex.assert_equal_shape([mask, sequence_ids])
  chex.assert_type([mask, sequence_ids], [bool, int])
  aggregate = AGGREGATIONS[mode]
  trained = sequence_ids[mask]
  if np.any(trained < 0):
    raise ValueError(f"{int(np.sum(trained < 0))} tokens are marked as trained but belong to no sequence")
  weights = np.zeros(mask.shape, np.float32)
  if trained.size:
    _, index, counts = np.unique(trained, return_inverse=True, return_counts=True)
    weights[mask] = aggregate(counts, fixed_norm)[index]
  return weights
