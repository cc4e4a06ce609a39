"""Statistics of a scaling study: rank and linear correlation, smoothing, and what stands at a curve's two ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

FIRST_STEPS = 3
"""Training steps averaged at the start of a curve of training rollouts."""
LAST_STEPS = 5
"""Training steps averaged at its end."""
LAST_EVALUATIONS = 3
"""Evaluations averaged at the end of a curve of evaluations; at its start the first evaluation stands alone."""


class Correlation(NamedTuple):
  """Rank (Spearman) and linear (Pearson) correlation of two series, with two-sided p-values.

  The p-values are those of independent pairs. Steps of one run are not independent, so they tell how clear the relation
  is within the run (as in Fig. 7 of Agent RL Scaling Law), not how likely another run is to show it: for that, look at
  how the seeds agree.
  """

  rho: float
  rho_p: float
  r: float
  r_p: float
  pairs: int


class Ends(NamedTuple):
  """Mean of a curve's first and last window; NaN where it has no value."""

  first: float
  last: float


def correlate(x: ArrayLike, y: ArrayLike) -> Correlation:
  """Spearman and Pearson correlation of two series, e.g. the reward and the code ratio of every step.

  Pairs with a missing value are left out. Fewer than three pairs, or a constant series, give NaN: there is no relation
  to speak of.

  Args:
    x: float[N].
    y: float[N].

  Raises:
    ValueError: The series differ in length.
  """
  a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
  if a.ndim != 1 or a.shape != b.shape:
    raise ValueError(f"two series of one length are needed, got shapes {a.shape} and {b.shape}")
  both = np.isfinite(a) & np.isfinite(b)
  a, b = a[both], b[both]
  if a.size < 3 or np.all(a == a[0]) or np.all(b == b[0]):
    return Correlation(math.nan, math.nan, math.nan, math.nan, int(a.size))
  spearman, pearson = stats.spearmanr(a, b), stats.pearsonr(a, b)
  return Correlation(
    float(spearman.statistic), float(spearman.pvalue), float(pearson.statistic), float(pearson.pvalue), int(a.size)
  )


def pool(series: Sequence[tuple[ArrayLike, ArrayLike]]) -> Correlation:
  """Correlation over the pairs of all seeds together."""
  if not series:
    return correlate([], [])
  return correlate(
    np.concatenate([np.asarray(x) for x, _ in series]), np.concatenate([np.asarray(y) for _, y in series])
  )


def smooth(values: ArrayLike, window: int = 5) -> NDArray[np.float64]:
  """Centred moving average for plots: float[N] to float[N].

  The window shrinks at both ends, so that no value is invented there and the first and last stay on the curve. Missing
  values are left out of the averages; a window without any value gives NaN.

  Raises:
    ValueError: `window` is even or below 1.
  """
  if window < 1 or window % 2 == 0:
    raise ValueError(f"window must be odd and at least 1, got {window}")
  array = np.asarray(values, np.float64)
  out = np.full(array.shape, math.nan)
  for i in range(array.size):
    half = min(window // 2, i, array.size - 1 - i)
    part = array[i - half : i + half + 1]
    part = part[np.isfinite(part)]
    if part.size:
      out[i] = part.mean()
  return out


def ends(values: ArrayLike, first: int, last: int) -> Ends:
  """Means of the first `first` and the last `last` finite values of a curve, which may overlap on a short one."""
  if first < 1 or last < 1:
    raise ValueError(f"windows must be at least 1, got {first} and {last}")
  array = np.asarray(values, np.float64)
  array = array[np.isfinite(array)]
  if not array.size:
    return Ends(math.nan, math.nan)
  return Ends(float(array[:first].mean()), float(array[-last:].mean()))


def training_ends(values: ArrayLike) -> Ends:
  """Ends of a curve of training rollouts: first `FIRST_STEPS` steps, last `LAST_STEPS` steps."""
  return ends(values, FIRST_STEPS, LAST_STEPS)


def evaluation_ends(values: ArrayLike) -> Ends:
  """Ends of a curve of evaluations: the first evaluation, the last `LAST_EVALUATIONS` evaluations."""
  return ends(values, 1, LAST_EVALUATIONS)


def mean_curve(
  steps: Sequence[ArrayLike], values: Sequence[ArrayLike]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
  """Mean over seeds at every step that all seeds have a value for.

  Returns:
    Steps float[N] and means float[N].
  """
  curves = []
  for step, value in zip(steps, values, strict=True):
    s, v = np.asarray(step, np.float64), np.asarray(value, np.float64)
    curves.append({float(a): float(b) for a, b in zip(s, v, strict=True) if math.isfinite(b)})
  if not curves:
    return np.zeros(0), np.zeros(0)
  shared = sorted(set.intersection(*(set(curve) for curve in curves)))
  return np.array(shared), np.array([np.mean([curve[step] for curve in curves]) for step in shared])
