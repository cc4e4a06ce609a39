"""Correlations, windows and smoothing against cases worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from agentic_rl.study import scaling


def test_spearman_by_hand() -> None:
  # Ranks of x: 1 2 3 4 5, of y: 2 1 4 3 5. Differences 1 1 1 1 0: rho = 1 - 6 * 4 / (5 * 24) = 0.8.
  result = scaling.correlate([10, 20, 30, 40, 50], [2.0, 1.0, 40.0, 3.0, 500.0])
  assert result.rho == pytest.approx(0.8)
  # t = 0.8 * sqrt(3 / (1 - 0.64)) = 2.3094, two-sided with 3 degrees of freedom: p = 0.1041.
  assert result.rho_p == pytest.approx(0.1041, abs=1e-4)
  assert result.pairs == 5


def test_spearman_gives_ties_their_mean_rank() -> None:
  # Ranks of x: 1.5 1.5 3 4, of y: 1 2 3 4. Covariance sum 4.5, variance sums 4.5 and 5: rho = 4.5 / sqrt(22.5).
  result = scaling.correlate([0, 0, 1, 2], [1, 2, 3, 4])
  assert result.rho == pytest.approx(4.5 / math.sqrt(22.5))


def test_pearson_by_hand() -> None:
  # Deviations x: -1.5 -0.5 0.5 1.5, y: -2 1 -1 2. Products 3 -0.5 -0.5 3, sum 5; squares 5 and 10: r = 5 / sqrt(50).
  result = scaling.correlate([1, 2, 3, 4], [0, 3, 1, 4])
  assert result.r == pytest.approx(5 / math.sqrt(50))
  # t = r * sqrt(2 / (1 - r^2)) = 1 * sqrt(2), 2 degrees of freedom: p = 1 - sqrt(2) / sqrt(2 + 2).
  assert result.r_p == pytest.approx(1 - math.sqrt(2) / 2)


def test_rank_correlation_sees_any_rising_curve_and_the_linear_one_does_not() -> None:
  x = np.arange(10.0)
  result = scaling.correlate(x, np.exp(x))
  assert result.rho == pytest.approx(1.0) and result.r < 0.8
  assert scaling.correlate(x, -x).rho == pytest.approx(-1.0)


def test_missing_values_leave_out_their_pair() -> None:
  result = scaling.correlate([1, 2, math.nan, 3, 4], [1, 2, 3, math.nan, 4])
  assert result.pairs == 3 and result.rho == pytest.approx(1.0)


@pytest.mark.parametrize(("x", "y"), [([1, 2], [1, 2]), ([], []), ([1, 1, 1, 1], [1, 2, 3, 4]), ([1, 2, 3], [5, 5, 5])])
def test_no_relation_to_speak_of_is_nan_without_a_warning(x: list[float], y: list[float]) -> None:
  result = scaling.correlate(x, y)
  assert all(math.isnan(v) for v in result[:4])


def test_lengths_must_agree() -> None:
  with pytest.raises(ValueError, match="one length"):
    scaling.correlate([1, 2, 3], [1, 2])


def test_pooling_takes_the_pairs_of_all_seeds_together() -> None:
  # Each seed rises; together they are 1 2 3 4 against 3 4 1 2: ranks differ by 2 throughout, rho = 1 - 6 * 16 / 60.
  pooled = scaling.pool([([1, 2], [3, 4]), ([3, 4], [1, 2])])
  assert pooled.rho == pytest.approx(-0.6) and pooled.pairs == 4
  assert math.isnan(scaling.pool([]).rho)


def test_smooth_is_a_centred_average_that_shrinks_at_the_ends() -> None:
  np.testing.assert_allclose(scaling.smooth([1, 2, 6, 4, 10], 3), [1, 3, 4, 20 / 3, 10])
  np.testing.assert_allclose(scaling.smooth([0, 10, 20, 60, 0, 3], 5), [0, 10, 18, 18.6, 21, 3])
  np.testing.assert_allclose(scaling.smooth([1, math.nan, 3], 3), [1, 2, 3])
  np.testing.assert_array_equal(scaling.smooth([math.nan], 3), [math.nan])
  with pytest.raises(ValueError, match="odd"):
    scaling.smooth([1, 2], 2)


def test_ends_are_means_of_the_first_and_last_windows() -> None:
  assert scaling.training_ends([1, 2, 3, 9, 9, 0, 2, 4, 6, 8]) == (2.0, 4.0)
  assert scaling.evaluation_ends([0.1, math.nan, 0.5, 0.6, math.nan, 0.7]) == (0.1, pytest.approx(0.6))
  assert scaling.evaluation_ends([0.3]) == (0.3, 0.3)
  assert all(math.isnan(v) for v in scaling.training_ends([math.nan]))


def test_mean_curve_is_over_the_steps_that_all_seeds_have() -> None:
  steps, mean = scaling.mean_curve([[0, 1, 2], [1, 2, 3]], [[1, 2, math.nan], [4, 5, 6]])
  np.testing.assert_array_equal(steps, [1])
  np.testing.assert_array_equal(mean, [3])
