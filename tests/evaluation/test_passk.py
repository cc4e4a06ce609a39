from __future__ import annotations

import itertools
import random

import pytest

from agentic_rl.evaluation import average_at_k, majority_at_k, pass_at_k


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets(n):
  for c in range(n + 1):
    for k in range(1, n + 1):
      subsets = list(itertools.combinations([i < c for i in range(n)], k))
      assert pass_at_k(n, c, k) == sum(map(any, subsets)) / len(subsets)


def test_pass_at_k_by_hand():
  assert pass_at_k(4, 1, 2) == 0.5
  assert pass_at_k(4, 2, 1) == 0.5
  assert pass_at_k(10_000, 1, 10_000) == 1.0  # exact integers do not overflow
  assert pass_at_k(5, 0, 5) == 0.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 0), (4, 1, 5), (4, -1, 1), (4, 5, 1), (0, 0, 1)])
def test_pass_at_k_refuses_contradictions(n, c, k):
  with pytest.raises(ValueError, match="must lie between"):
    pass_at_k(n, c, k)


def test_average():
  assert average_at_k([True, False, False, False]) == 0.25
  with pytest.raises(ValueError, match="no sample"):
    average_at_k([])


def test_majority_by_hand():
  assert majority_at_k(["4", "5", "4"], [True, False, True]) == 1
  assert majority_at_k(["4", "5", "5"], [True, False, False]) == 0
  assert majority_at_k(["4", None, None], [True, False, False]) == 1  # no answer is no vote
  assert majority_at_k([None, None], [False, False]) == 0
  assert majority_at_k(["4", "5"], [True, False]) == 0.5
  assert majority_at_k(["4", "5", "6"], [False, True, False]) == 1 / 3


def test_majority_is_the_mean_over_random_tie_breaks():
  rng = random.Random(0)
  for _ in range(200):
    answers = ["a", *(rng.choice([None, "a", "b", "c", "d"]) for _ in range(rng.randrange(8)))]
    correct = [a == "b" for a in answers]
    # Every order of the votes, the first of the most frequent answers winning: all tied answers win equally often.
    wins = []
    for order in itertools.permutations(sorted({a for a in answers if a})):
      wins.append(max(order, key=answers.count) == "b")
    assert majority_at_k(answers, correct) == pytest.approx(sum(wins) / len(wins))


def test_majority_refuses_contradictions():
  with pytest.raises(ValueError, match="judged both"):
    majority_at_k(["4", "4"], [True, False])
  with pytest.raises(ValueError, match="as many answers"):
    majority_at_k(["4"], [])
