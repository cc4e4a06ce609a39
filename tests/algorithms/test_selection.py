from __future__ import annotations

import numpy as np
import pytest

from agentic_rl.algorithms import group_filter, group_fractions


def kept(rewards: list[float], low: float, high: float, ids: list[int] | None = None) -> list[bool]:
  group_ids = np.zeros(len(rewards), int) if ids is None else np.array(ids)
  return list(group_filter(np.array(rewards, np.float32), group_ids, low, high))


def test_equal_rewards_are_dropped_whatever_their_mean() -> None:
  assert kept([0.4] * 8, 0.0, 1.0) == [False] * 8
  assert kept([0.1] * 8, -9.0, 9.0) == [False] * 8
  assert kept([0, 1] * 4, 0.0, 1.0) == [True] * 8


def test_range_is_exclusive() -> None:
  assert kept([0, 0, 0, 0, 1], 0.2, 0.8) == [False] * 5
  assert kept([0, 0, 0, 1, 1], 0.2, 0.8) == [True] * 5
  assert kept([0, 1, 1, 1, 1], 0.2, 0.8) == [False] * 5
  assert kept([0, 0, 0, 1], 0.2, 0.8) == [True] * 4


def test_groups_in_any_order() -> None:
  assert kept([0, 1, 1, 1], 0.0, 1.0, ids=[5, 2, 5, 2]) == [True, False, True, False]


def test_accuracy_apart_from_shaped_reward() -> None:
  rewards = np.array([0.9, 0.7, 1.3, 1.1], np.float32)
  accuracy = np.array([1, 1, 1, 0], np.float32)
  np.testing.assert_array_equal(
    group_filter(rewards, np.array([0, 0, 1, 1]), 0.0, 1.0, accuracy=accuracy), [False, False, True, True]
  )


def test_empty_range_is_refused() -> None:
  with pytest.raises(ValueError, match="range of the group filter is empty"):
    kept([0, 1], 0.8, 0.2)


def test_fractions_by_hand_and_sum() -> None:
  correct = np.array([1, 1, 0, 0, 1, 0, 1, 0], bool)
  got = group_fractions(correct, np.array([0, 0, 1, 1, 2, 2, 3, 3]))
  assert got == {"all_correct_frac": 0.25, "all_wrong_frac": 0.25, "mixed_frac": 0.5}
  rng = np.random.default_rng(0)
  for _ in range(20):
    fractions = group_fractions(rng.random(30) < 0.5, rng.integers(0, 12, 30))
    assert sum(fractions.values()) == pytest.approx(1.0)
  assert sum(group_fractions(np.zeros(0, bool), np.zeros(0, int)).values()) == 0.0
