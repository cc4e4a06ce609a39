"""Estimators over k samples of a problem: average, at least one right, majority. Exact, no resampling."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
  """Unbiased estimate of the chance that at least one of k samples is right (arXiv 2107.03374, equation 1).

  `1 - C(n - c, k) / C(n, k)`, in exact integers: the share of the subsets of size k that hold a right sample.

  Args:
    num_samples: n, samples drawn.
    num_correct: c, right ones among them.
    k: Size of a subset, 1 <= k <= n.

  Raises:
    ValueError: The numbers contradict each other.
  """
  if not 1 <= k <= num_samples:
    raise ValueError(f"k must lie between 1 and the {num_samples} samples, got {k}")
  if not 0 <= num_correct <= num_samples:
    raise ValueError(f"num_correct must lie between 0 and the {num_samples} samples, got {num_correct}")
  subsets = math.comb(num_samples, k)
  return (subsets - math.comb(num_samples - num_correct, k)) / subsets


def average_at_k(correct: Sequence[bool]) -> float:
  """Share of the samples that are right. Raises `ValueError` where there are none."""
  if not correct:
    raise ValueError("there is no sample to average over")
  return sum(correct) / len(correct)


def majority_at_k(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
  """Whether the most frequent answer of k samples is right; under a tie, the chance that a random winner is.

  Args:
    answers: Answer of each sample, equal answers as equal strings; None does not vote.
    correct: Whether each sample is right; equal answers must agree.

  Raises:
    ValueError: The lengths differ, there is no sample, or two equal answers were judged differently.
  """
  if len(answers) != len(correct) or not correct:
    raise ValueError(f"a majority needs as many answers as judgements and at least one: {len(answers)}, {len(correct)}")
  votes: dict[str, int] = {}
  judged: dict[str, bool] = {}
  for answer, right in zip(answers, correct, strict=True):
    if answer is None:
      continue
    votes[answer] = votes.get(answer, 0) + 1
    if judged.setdefault(answer, right) != right:
      raise ValueError(f"the answer {answer!r} was judged both right and wrong; its normal form is too coarse")
  if not votes:
    return 0.0
  most = max(votes.values())
  return average_at_k([judged[answer] for answer, count in votes.items() if count == most])
