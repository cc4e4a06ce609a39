"""Advantages of whole episodes from their rewards, by group: GRPO, Dr.GRPO, RLOO, REINFORCE++ with a group baseline.

Every function takes `(rewards f32[N], group_ids int[N], token_counts int[N] | None, *, options)` and returns f32[N].
They run on the host, because episodes are host objects and groups are ragged. `token_counts` are policy tokens: only
what is averaged over tokens reads it. Within a group of equal rewards the advantage is exactly 0 before whitening.

A group of one sample has no baseline. `singleton` says what becomes of it: `reward` takes mean 0 and standard deviation
1, so that the advantage is the reward itself (as verl does), `zero` ignores the sample, `refuse` raises `ValueError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import chex
import numpy as np

from agentic_rl.algorithms.groups import Groups
from agentic_rl.algorithms.registry import Registry

Singleton = Literal["reward", "zero", "refuse"]


ADVANTAGES: Registry[Callable[..., np.ndarray]] = Registry("advantage")


@ADVANTAGES.register
def grpo(
  rewards: np.ndarray,
  group_ids: np.ndarray,
  token_counts: np.ndarray | None = None,
  *,
  normalize_std: bool = True,
  eps: float = 1e-6,
  singleton: Singleton = "reward",
) -> np.ndarray:
  """`(r - mean_g) / (std_g + eps)` with the group's unbiased standard deviation (DeepSeekMath, 2402.03300, §4.1.2).

  Args:
    rewards: f32[N], one an episode.
    group_ids: int[N], equal for the samples of one problem.
    token_counts: Not read: every episode weighs the same.
    normalize_std: Whether to divide by the standard deviation.
    eps: Added to the standard deviation.
    singleton: Rule for groups of one sample, see the module.

  Returns:
    f32[N].

  Raises:
    ValueError: for a reward that is not finite, or a group of one where `singleton` is `refuse`.
  """
  del token_counts
  groups, centred = _centre(rewards, group_ids, singleton)
  if normalize_std:
    squares = np.bincount(groups.index, centred**2, minlength=len(groups.sizes))
    std = np.where(groups.sizes > 1, np.sqrt(squares / np.maximum(groups.sizes - 1, 1)), 1.0)
    centred = centred / (std + eps)[groups.index]
  return centred.astype(np.float32)


@ADVANTAGES.register
def dr_grpo(
  rewards: np.ndarray,
  group_ids: np.ndarray,
  token_counts: np.ndarray | None = None,
  *,
  singleton: Singleton = "reward",
) -> np.ndarray:
  """`r - mean_g`, without the division that favours groups of nearly equal rewards (Dr.GRPO, 2503.20783).

  Its other half is the aggregation `token_sum_fixed_norm`. Shapes and errors as in `grpo`.
  """
  return grpo(rewards, group_ids, token_counts, normalize_std=False, singleton=singleton)


@ADVANTAGES.register
def rloo(
  rewards: np.ndarray,
  group_ids: np.ndarray,
  token_counts: np.ndarray | None = None,
  *,
  whiten: bool = False,
  singleton: Singleton = "reward",
) -> np.ndarray:
  """`r` minus the mean of the group's other rewards (RLOO, 2402.14740). Shapes and errors as in `grpo`.

  `whiten` as in `reinforce_baseline`; ZeroTIR's code whitens here, the paper of RLOO does not.
  """
  groups, centred = _centre(rewards, group_ids, singleton)
  # r_i - mean of the others = (r_i - mean of all) * n / (n - 1); written so, equal rewards stay exactly 0.
  scale = np.where(groups.sizes > 1, groups.sizes / np.maximum(groups.sizes - 1, 1), 1.0)
  advantages = centred * scale[groups.index]
  return (_whiten(advantages, token_counts) if whiten else advantages).astype(np.float32)


@ADVANTAGES.register
def reinforce_baseline(
  rewards: np.ndarray,
  group_ids: np.ndarray,
  token_counts: np.ndarray | None = None,
  *,
  whiten: bool = True,
  singleton: Singleton = "reward",
) -> np.ndarray:
  """REINFORCE++ with a group baseline: `r - mean_g`, whitened over all policy tokens (2501.03262).

  Whitening subtracts one mean over all tokens, hence a group of equal rewards among unequal ones does not keep exactly
  0; filter such groups before where that is unwanted. If all groups have equal rewards, all is exactly 0.

  Args:
    rewards: f32[N].
    group_ids: int[N].
    token_counts: int[N], policy tokens of each episode; needed where `whiten`. An episode without policy tokens counts
      in its group's mean and nowhere else.
    whiten: Whether to scale to mean 0 and variance 1 over policy tokens.
    singleton: Rule for groups of one sample, see the module.

  Returns:
    f32[N].

  Raises:
    ValueError: as in `grpo`, or if `whiten` lacks `token_counts`.
  """
  _, centred = _centre(rewards, group_ids, singleton)
  return (_whiten(centred, token_counts) if whiten else centred).astype(np.float32)


def _centre(rewards: np.ndarray, group_ids: np.ndarray, singleton: Singleton) -> tuple[Groups, np.ndarray]:
  """Groups, and float64[N] rewards minus their group's mean: exactly 0 in groups of equal rewards."""
  chex.assert_rank([rewards, group_ids], 1)
  chex.assert_equal_shape([rewards, group_ids])
  chex.assert_type(rewards, float)
  if singleton not in ("reward", "zero", "refuse"):
    raise ValueError(f"unknown rule {singleton!r} for groups of one sample; use 'reward', 'zero' or 'refuse'")
  if not np.all(np.isfinite(rewards)):
    at = int(np.flatnonzero(~np.isfinite(rewards))[0])
    raise ValueError(f"the reward of episode {at} is {rewards[at]}; drop the episode before advantages are taken")
  groups = Groups.of(group_ids)
  alone = groups.sizes[groups.index] == 1
  if singleton == "refuse" and np.any(alone):
    at = int(np.flatnonzero(alone)[0])
    raise ValueError(f"episode {at} is alone in group {group_ids[at]}, so it has no baseline; sample at least two")
  centred = np.where(groups.equal(rewards)[groups.index], 0.0, rewards - groups.mean(rewards)[groups.index])
  if singleton == "reward":
    centred = np.where(alone, rewards, centred)
  return groups, centred


def _whiten(advantages: np.ndarray, token_counts: np.ndarray | None) -> np.ndarray:
  """Scales to mean 0 and variance 1 over tokens; episode i counts `token_counts[i]` times."""
  if token_counts is None:
    raise ValueError("whitening averages over policy tokens; pass token_counts")
  chex.assert_equal_shape([advantages, token_counts])
  chex.assert_type(token_counts, int)
  counted = advantages[token_counts > 0]
  if not counted.size or counted.min() == counted.max():
    return np.zeros_like(advantages)
  mean = np.average(advantages, weights=token_counts)
  variance = np.average((advantages - mean) ** 2, weights=token_counts)
  # The floor keeps tiny differences from being blown up to unit size.
  return (advantages - mean) / np.sqrt(max(variance, 1e-8))
