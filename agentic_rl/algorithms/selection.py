"""Which groups are trained on, and how the groups of an iteration are made up."""

from __future__ import annotations

import chex
import numpy as np

from agentic_rl.algorithms.groups import Groups


def group_filter(
  rewards: np.ndarray, group_ids: np.ndarray, low: float, high: float, *, accuracy: np.ndarray | None = None
) -> np.ndarray:
  """Keeps the groups that teach something: `low < mean accuracy < high`, and not all rewards equal.

  The range alone would keep a group whose rewards are all 0.4; equality alone would keep groups that are too easy or
  too hard. A group of equal rewards has gradient 0 and would still enlarge the denominator of the loss; a dropped group
  is in no denominator.

  Args:
    rewards: f32[N].
    group_ids: int[N].
    low, high: Bounds of the mean accuracy, both exclusive; `0, 1` drops groups that are all wrong or all right, a `low`
      below 0 and a `high` above 1 leave only the test of equality.
    accuracy: f32[N], 0 to 1, where it is not the reward itself (shaped rewards).

  Returns:
    bool[N], true for episodes of kept groups.

  Raises:
    ValueError: if `low >= high`.
  """
  chex.assert_rank([rewards, group_ids], 1)
  chex.assert_equal_shape([rewards, group_ids])
  if not low < high:
    raise ValueError(f"the accuracy range of the group filter is empty: low {low} is not below high {high}")
  groups = Groups.of(group_ids)
  if accuracy is None:
    accuracy = rewards
  chex.assert_equal_shape([rewards, accuracy])
  # Rounding, because a mean such as 0.2 of ten samples must not slip over an equal bound by one unit in the last place.
  mean = np.round(groups.mean(accuracy), 6)
  keep = (mean > low) & (mean < high) & ~groups.equal(rewards)
  return keep[groups.index]


def group_fractions(correct: np.ndarray, group_ids: np.ndarray) -> dict[str, float]:
  """Shares of groups by outcome.

  Args:
    correct: bool[N].
    group_ids: int[N].

  Returns:
    `all_correct_frac`, `all_wrong_frac` and `mixed_frac`, which sum to 1 (all 0 where there are no groups).
  """
  chex.assert_rank([correct, group_ids], 1)
  chex.assert_equal_shape([correct, group_ids])
  chex.assert_type(correct, bool)
  groups = Groups.of(group_ids)
  total = max(len(groups.sizes), 1)
  right = np.bincount(groups.index, correct, minlength=len(groups.sizes)).astype(int)
  all_correct, all_wrong = int(np.sum(right == groups.sizes)), int(np.sum(right == 0))
  mixed = len(groups.sizes) - all_correct - all_wrong
  return {
    "all_correct_frac": all_correct / total,
    "all_wrong_frac": all_wrong / total,
    "mixed_frac": mixed / total,
  }
