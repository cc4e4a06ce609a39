"""Sampling on the device: the right distribution, never an impossible token, the right truncated set."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from agentic_rl.rollout import sampler

# Below, at and above the block of 256 over which the running sums are nested; multiples of it and not.
SIZES = (1, 7, 256, 257, 700)

uniform, inverse_cdf, truncate = jax.jit(sampler.uniform), jax.jit(sampler.inverse_cdf), jax.jit(sampler.truncate)
sample = jax.jit(sampler.sample, static_argnames="truncated")


def seeds(count: int) -> jnp.ndarray:
  return jnp.stack([jnp.zeros(count, jnp.uint32), jnp.arange(count, dtype=jnp.uint32)], axis=1)


def one_by_one(weights: np.ndarray, u: float) -> int:
  """Oracle: the first index whose exact running sum passes u times the whole."""
  x, total = u * float(weights.astype(np.float64).sum()), 0.0
  for index, weight in enumerate(weights.astype(np.float64)):
    total += weight
    if total > x:
      return index
  return int(np.flatnonzero(weights)[-1])


def test_inverse_cdf_by_hand() -> None:
  weights = jnp.array([[1.0, 0.0, 2.0, 1.0]] * 6)
  u = jnp.array([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999])
  assert inverse_cdf(weights, u).tolist() == [0, 0, 2, 2, 3, 3]


def test_inverse_cdf_across_blocks_by_hand() -> None:
  weights = np.zeros((5, 600), np.float32)
  weights[:, [3, 255, 256, 599]] = [1, 2, 3, 4]
  u = jnp.array([0.05, 0.15, 0.31, 0.59, 0.61])
  assert inverse_cdf(jnp.asarray(weights), u).tolist() == [3, 255, 256, 256, 599]


@pytest.mark.parametrize("size", SIZES)
def test_inverse_cdf_equals_an_exact_running_sum(size: int) -> None:
  rng = np.random.default_rng(size)
  weights = rng.integers(0, 3, (200, size)).astype(np.float32)  # Whole numbers: their sums are exact.
  weights[:, rng.integers(size)] += 1
  u = rng.random(200).astype(np.float32)
  got = inverse_cdf(jnp.asarray(weights), jnp.asarray(u))
  assert got.tolist() == [one_by_one(w, x) for w, x in zip(weights, u.tolist(), strict=True)]


@pytest.mark.parametrize("size", [5, 300, 512])
def test_inverse_cdf_has_the_distribution_of_its_weights(size: int) -> None:
  weights = np.random.default_rng(size).gamma(0.5, size=size).astype(np.float32)
  weights[1] = weights[-2] = 0.0
  draws = 20_000
  u = uniform(seeds(draws), jnp.full(draws, 17, jnp.int32))
  index = np.asarray(inverse_cdf(jnp.broadcast_to(jnp.asarray(weights), (draws, size)), u))
  observed = np.bincount(index, minlength=size)
  expected = draws * weights.astype(np.float64) / weights.astype(np.float64).sum()
  assert observed[[1, -2]].sum() == 0
  # Rare ones together, so that every cell of the test expects at least 5 draws.
  common = expected >= 5
  cells = [np.append(x[common], x[~common].sum()) for x in (observed, expected)]
  observed, expected = (c[: len(c) if cells[1][-1] >= 5 else -1] for c in cells)
  assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


def test_an_index_of_weight_zero_is_never_drawn() -> None:
  # A running sum of float32 may rise by a rounding error where nothing is added, so each u that float32 can tell from
  # its neighbours around a step must still land on a positive weight.
  rng = np.random.default_rng(0)
  rows = 20_000
  weights = rng.random((rows, 300), np.float32) * (rng.random((rows, 300)) < 0.3)
  weights[:, 0] = 1e-3
  totals = np.cumsum(weights, axis=1, dtype=np.float32)
  edge = totals[np.arange(rows), rng.integers(0, 250, rows)] / weights.sum(axis=1)
  on_device = jnp.asarray(weights)
  for step in range(-3, 4):
    u = edge
    for _ in range(abs(step)):
      u = np.nextafter(u, np.float32(np.sign(step)), dtype=np.float32)
    index = np.asarray(inverse_cdf(on_device, np.clip(u, 0, np.nextafter(np.float32(1), np.float32(0)))))
    assert (weights[np.arange(rows), index] > 0).all()


@pytest.mark.parametrize("u", [0.0, np.nextafter(np.float32(1), np.float32(0))])
def test_the_ends_of_the_unit_interval_give_the_first_and_last_possible_index(u: float) -> None:
  weights = np.zeros((1, 1000), np.float32)
  weights[0, [10, 700]] = 1e-30, 1.0
  assert inverse_cdf(jnp.asarray(weights), jnp.array([u], jnp.float32)).tolist() == [10 if u == 0 else 700]


def test_uniform_is_a_function_of_seed_and_position_alone() -> None:
  together = uniform(seeds(8), jnp.arange(8, dtype=jnp.int32))
  for i in (0, 3, 7):
    alone = uniform(seeds(8)[i : i + 1], jnp.array([i], jnp.int32))
    assert alone[0] == together[i]
  many = np.asarray(uniform(seeds(4000), jnp.full(4000, 5, jnp.int32)))
  assert (many >= 0).all() and (many < 1).all() and len(np.unique(many)) > 3990
  assert stats.kstest(many, "uniform").pvalue > 1e-3
  along = np.asarray(uniform(jnp.tile(seeds(2)[1:], (4000, 1)), jnp.arange(4000, dtype=jnp.int32)))
  assert stats.kstest(along, "uniform").pvalue > 1e-3
  assert abs(np.corrcoef(along[1:], along[:-1])[0, 1]) < 0.05


def kept(logits: list[float], top_p: float, top_k: int) -> list[int]:
  out = truncate(jnp.array([logits]), jnp.array([top_p]), jnp.array([top_k]))
  return np.flatnonzero(np.isfinite(np.asarray(out[0]))).tolist()


def test_truncation_keeps_the_right_set() -> None:
  logits = np.log([0.1, 0.4, 0.05, 0.3, 0.15]).tolist()
  assert kept(logits, 1.0, -1) == kept(logits, 1.0, 0) == [0, 1, 2, 3, 4]
  assert kept(logits, 1.0, 1) == [1]
  assert kept(logits, 1.0, 3) == [1, 3, 4]
  assert kept(logits, 1.0, 99) == [0, 1, 2, 3, 4]
  assert kept(logits, 0.39, -1) == [1]  # The first token is kept however small top-p is.
  assert kept(logits, 1e-6, -1) == [1]
  assert kept(logits, 0.45, -1) == [1, 3]  # The smallest set whose mass reaches top-p.
  assert kept(logits, 0.86, -1) == [0, 1, 3, 4]
  assert kept(logits, 0.86, 2) == [1, 3]
  assert kept(logits, 0.45, 4) == [1, 3]


def test_top_p_of_one_keeps_what_float32_rounds_away() -> None:
  # The mass before the last tokens rounds to 1; a request that does not truncate must not lose them to a neighbour
  # in its batch that does.
  logits = [0.0] * 3 + [-30.0] * 500
  assert len(kept(logits, 1.0, -1)) == 503


def test_sampled_log_probabilities_are_those_before_truncation() -> None:
  logits = jnp.log(jnp.array([[0.1, 0.6, 0.3]] * 3))
  temperature, u = jnp.array([1.0, 2.0, 0.0]), jnp.array([0.95, 0.95, 0.95])
  token, logprob = sample(logits, u, temperature, jnp.ones(3), jnp.array([2, -1, -1]), truncated=True)
  assert token.tolist() == [2, 2, 1]
  half = np.sqrt([0.1, 0.6, 0.3])
  np.testing.assert_allclose(logprob, np.log([0.3, half[2] / half.sum(), 0.6]), atol=1e-6)


def test_a_row_draws_the_same_token_beside_truncated_rows() -> None:
  rng = np.random.default_rng(3)
  logits = jnp.asarray(4 * rng.standard_normal((500, 300)).astype(np.float32))
  u = uniform(seeds(500), jnp.zeros(500, jnp.int32))
  temperature, top_p, top_k = jnp.full(500, 0.7), jnp.ones(500), jnp.full(500, -1)
  plain = sample(logits, u, temperature, top_p, top_k, truncated=False)
  beside = sample(logits, u, temperature, top_p, top_k, truncated=True)
  assert plain[0].tolist() == beside[0].tolist() and plain[1].tolist() == beside[1].tolist()


def test_greedy_takes_the_largest_logit_whatever_the_random_number() -> None:
  logits = jnp.array([[0.0, 3.0, 3.0, 1.0]] * 2)
  for truncated in (False, True):
    token, _ = sample(
      logits, jnp.array([0.0, 0.99]), jnp.zeros(2), jnp.full(2, 0.5), jnp.full(2, 1), truncated=truncated
    )
    assert token.tolist() == [1, 1]
