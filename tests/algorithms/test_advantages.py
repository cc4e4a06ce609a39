from __future__ import annotations

import numpy as np
import pytest

from agentic_rl.algorithms import ADVANTAGES, group_ids_of
from agentic_rl.algorithms.advantages import dr_grpo, grpo, reinforce_baseline, rloo
from agentic_rl.errors import UserError


def f32(*values: float) -> np.ndarray:
  return np.array(values, np.float32)


def test_grpo_by_hand() -> None:
  # Group 7 holds 1, 0, 0, 1: mean 1/2, unbiased variance 4 * (1/4) / 3 = 1/3. Group 2 holds 3, 1: mean 2, variance 2.
  rewards, ids = f32(1, 3, 0, 0, 1, 1), np.array([7, 2, 7, 7, 2, 7])
  half = 0.5 / (np.sqrt(1 / 3) + 1e-6)
  one = 1 / (np.sqrt(2) + 1e-6)
  np.testing.assert_allclose(grpo(rewards, ids), [half, one, -half, -half, -one, half], rtol=1e-6)
  np.testing.assert_allclose(grpo(rewards, ids, normalize_std=False), [0.5, 1, -0.5, -0.5, -1, 0.5])
  np.testing.assert_allclose(dr_grpo(rewards, ids), [0.5, 1, -0.5, -0.5, -1, 0.5])


def test_rloo_by_hand() -> None:
  # Others of the first are 2 and 6: 1 - 4; of the second 1 and 6: 2 - 3.5; of the third 1 and 2: 6 - 1.5.
  np.testing.assert_allclose(rloo(f32(1, 2, 6), np.zeros(3, int)), [-3, -1.5, 4.5], rtol=1e-6)


def test_reinforce_baseline_whitens_over_tokens_by_hand() -> None:
  # Centred: 1/2, -1/2. Tokens 3 and 1: mean 1/4, variance (3 * 1/16 + 9/16) / 4 = 3/16.
  got = reinforce_baseline(f32(1, 0), np.zeros(2, int), np.array([3, 1]))
  np.testing.assert_allclose(got, np.array([0.25, -0.75]) / np.sqrt(3 / 16), rtol=1e-6)
  np.testing.assert_allclose(reinforce_baseline(f32(1, 0), np.zeros(2, int), whiten=False), [0.5, -0.5])
  np.testing.assert_allclose(
    rloo(f32(1, 0), np.zeros(2, int), np.array([3, 1]), whiten=True),
    np.array([0.25, -0.75]) / np.sqrt(3 / 16),
    rtol=1e-6,
  )


def oracle(name: str, rewards: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
  """The formulas by loops."""
  out = np.zeros(len(rewards))
  for i in range(len(rewards)):
    group = [float(rewards[j]) for j in range(len(rewards)) if ids[j] == ids[i]]
    mean = sum(group) / len(group)
    if name == "grpo":
      std = (sum((r - mean) ** 2 for r in group) / (len(group) - 1)) ** 0.5
      out[i] = (rewards[i] - mean) / (std + 1e-6)
    elif name == "rloo":
      out[i] = rewards[i] - (sum(group) - rewards[i]) / (len(group) - 1)
    else:
      out[i] = rewards[i] - mean
  if name == "reinforce_baseline":
    tokens = [out[i] for i in range(len(out)) for _ in range(counts[i])]
    mean = sum(tokens) / len(tokens)
    variance = sum((t - mean) ** 2 for t in tokens) / len(tokens)
    out = (out - mean) / variance**0.5
  return out


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "reinforce_baseline"])
def test_against_loops_and_in_any_order(name: str) -> None:
  rng = np.random.default_rng(0)
  ids = np.repeat([3, 0, 9, 5], [2, 5, 3, 6])
  rewards = rng.normal(size=16).astype(np.float32)
  counts = rng.integers(0, 30, 16)
  got = ADVANTAGES[name](rewards, ids, counts)
  assert got.dtype == np.float32
  np.testing.assert_allclose(got, oracle(name, rewards, ids, counts), rtol=1e-4, atol=1e-6)
  # Episodes finish in any order: nothing but the order of the result changes.
  order = rng.permutation(16)
  np.testing.assert_allclose(ADVANTAGES[name](rewards[order], ids[order], counts[order]), got[order], atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_equal_rewards_are_exactly_zero(name: str, dtype: type) -> None:
  # The mean of ten numbers 0.1 is not exactly 0.1, nor is their deviation exactly 0: neither must decide.
  rewards = np.full(10, 0.1, dtype)
  assert sum([0.1] * 10) / 10 != 0.1
  got = ADVANTAGES[name](rewards, np.zeros(10, int), np.arange(1, 11))
  assert np.all(got == 0.0)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_an_equal_group_among_others_is_exactly_zero(name: str) -> None:
  rewards = f32(*[0.1] * 8, 1, 0)
  got = ADVANTAGES[name](rewards, np.array([0] * 8 + [1] * 2), None)
  assert np.all(got[:8] == 0.0) and np.all(got[8:] != 0.0)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_group_of_one(name: str) -> None:
  rewards, ids, counts = f32(1, 0, 0.7), np.array([0, 0, 1]), np.array([1, 1, 0])
  got = ADVANTAGES[name](rewards, ids, counts)
  if name != "reinforce_baseline":
    assert got[2] == pytest.approx(0.7, rel=1e-5)
    assert ADVANTAGES[name](rewards, ids, counts, singleton="zero")[2] == 0.0
  with pytest.raises(ValueError, match="episode 2 is alone in group 1"):
    ADVANTAGES[name](rewards, ids, counts, singleton="refuse")
  with pytest.raises(ValueError, match="unknown rule 'drop'"):
    ADVANTAGES[name](rewards, ids, counts, singleton="drop")


def test_an_empty_completion_counts_once_in_its_group_and_in_no_token_mean() -> None:
  # Rewards 1, 1, 0 with the last completion empty: the mean is 2/3 for its peers.
  rewards, ids = f32(1, 1, 0), np.zeros(3, int)
  np.testing.assert_allclose(dr_grpo(rewards, ids), [1 / 3, 1 / 3, -2 / 3], rtol=1e-6)
  # Whitening sees 4 tokens with 1/3 and, in the second group, 4 with 1/2 and 4 with -1/2: mean 1/9.
  rewards, ids = f32(1, 1, 0, 1, 0), np.array([0, 0, 0, 1, 1])
  variance = ((1 / 3 - 1 / 9) ** 2 + (1 / 2 - 1 / 9) ** 2 + (1 / 2 + 1 / 9) ** 2) / 3
  got = reinforce_baseline(rewards, ids, np.array([2, 2, 0, 4, 4]))
  np.testing.assert_allclose(got[[0, 1, 3, 4]], np.array([2, 2, 3.5, -5.5]) / 9 / np.sqrt(variance), rtol=1e-6)


def test_nothing_but_empty_completions() -> None:
  assert np.all(reinforce_baseline(f32(1, 0), np.zeros(2, int), np.zeros(2, int)) == 0.0)


def test_refusals() -> None:
  with pytest.raises(ValueError, match="reward of episode 1 is nan"):
    grpo(f32(0, np.nan), np.zeros(2, int))
  with pytest.raises(ValueError, match="pass token_counts"):
    reinforce_baseline(f32(0, 1), np.zeros(2, int))
  with pytest.raises(AssertionError):
    grpo(f32(0, 1), np.zeros(3, int))
  with pytest.raises(UserError, match=r"unknown advantage 'gpro'; did you mean 'grpo'\? Known: dr_grpo, grpo"):
    ADVANTAGES["gpro"]


def test_registering_a_name_twice_is_refused() -> None:
  with pytest.raises(ValueError, match="two advantage functions named 'grpo'"):
    ADVANTAGES.register(grpo)


def test_group_ids_of_uids() -> None:
  np.testing.assert_array_equal(group_ids_of(["b", "a", "b", "c"]), [0, 1, 0, 2])
