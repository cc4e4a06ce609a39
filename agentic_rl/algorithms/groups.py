"""Statistics per group of episodes, in whatever order the episodes finished.

A group is the set of samples of one problem. Groups are told apart by an integer for each episode, never by position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import chex
import numpy as np


def group_ids_of(uids: Sequence[str]) -> np.ndarray:
  """int32[N]: one number a uid, equal exactly where uids are equal."""
  numbers: dict[str, int] = {}
  return np.array([numbers.setdefault(uid, len(numbers)) for uid in uids], np.int32)


@dataclasses.dataclass(frozen=True)
class Groups:
  """N episodes in M groups.

  Attributes:
    index: int[N], group of each episode, dense in 0..M-1.
    sizes: int[M], episodes in each group, at least 1.
  """

  index: np.ndarray
  sizes: np.ndarray

  @classmethod
  def of(cls, group_ids: np.ndarray) -> Groups:
    """Groups of arbitrary integers int[N]."""
    chex.assert_rank(group_ids, 1)
    chex.assert_type(group_ids, int)
    _, index, sizes = np.unique(group_ids, return_inverse=True, return_counts=True)
    return cls(index, sizes)

  def mean(self, values: np.ndarray) -> np.ndarray:
    """float64[M]: mean of `values` [N] in each group."""
    return np.bincount(self.index, values.astype(np.float64), minlength=len(self.sizes)) / self.sizes

  def equal(self, values: np.ndarray) -> np.ndarray:
    """bool[M]: whether all `values` [N] of a group are the same number.

    Asked of the values themselves: their standard deviation is seldom exactly zero in floating point.
    """
    low = np.full(len(self.sizes), np.inf)
    np.minimum.at(low, self.index, values)
    high = np.full(len(self.sizes), -np.inf)
    np.maximum.at(high, self.index, values)
    return low == high
