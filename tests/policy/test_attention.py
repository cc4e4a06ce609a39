from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.data import pack_sequences
from agentic_rl.policy import attention


def oracle(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray) -> np.ndarray:
  """Attention one query and one head at a time, in float64. `visible` bool[B,Q,T]; queries that see nothing give 0."""
  b, n, h, c = q.shape
  group = h // k.shape[2]
  out = np.zeros((b, n, h, c))
  for i, t, head in itertools.product(range(b), range(n), range(h)):
    seen = [s for s in range(k.shape[1]) if visible[i, t, s]]
    if seen:
      scores = np.array([q[i, t, head] @ k[i, s, head // group] for s in seen], np.float64) / c**0.5
      weights = np.exp(scores - scores.max())
      out[i, t, head] = sum(w * v[i, s, head // group] for w, s in zip(weights / weights.sum(), seen, strict=True))
  return out


def packed(q: np.ndarray, k: np.ndarray, v: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
  """As one program, with the `QUERY_BLOCK` of the moment."""
  return np.asarray(jax.jit(lambda *args: attention.packed_attention(*args))(q, k, v, segment_ids))


def packed_mask(segment_ids: np.ndarray) -> np.ndarray:
  """A token sees itself and earlier tokens of its own segment; written as loops over what packing means."""
  b, t = segment_ids.shape
  visible = np.zeros((b, t, t), bool)
  for i, q, s in itertools.product(range(b), range(t), range(t)):
    visible[i, q, s] = s <= q and segment_ids[i, q] == segment_ids[i, s] and segment_ids[i, q] != 0
  return visible


def all_rows(length: int) -> np.ndarray:
  """Every row that packing can make: all ways to cut the first n tokens into segments, the rest padding."""
  rows = []
  for filled in range(1, length + 1):
    for cuts in itertools.product((0, 1), repeat=filled - 1):
      segments = np.cumsum([1, *cuts])
      rows.append([*segments, *[0] * (length - filled)])
  return np.array(rows, np.int32)


def arrays(b: int, n: int, t: int, h: int, k: int, c: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  rng = np.random.default_rng(0)
  return tuple(rng.normal(size=s).astype(np.float32) for s in ((b, n, h, c), (b, t, k, c), (b, t, k, c)))  # type: ignore[return-value]


@pytest.mark.parametrize("block", [1, 2, 4, 128])
def test_every_packed_row_equals_the_loops(block: int, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(attention, "QUERY_BLOCK", block)
  segments = all_rows(5)
  assert len(segments) == 31
  q, k, v = arrays(31, 5, 5, 4, 2, 2)
  got = packed(q, k, v, segments)
  real = segments > 0
  np.testing.assert_allclose(got[real], oracle(q, k, v, packed_mask(segments))[real], atol=2e-6)
  assert np.isfinite(got).all(), "padding is meaningless but must not be NaN"


def test_rows_of_the_packer_equal_the_loops(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(attention, "QUERY_BLOCK", 5)  # blocks that end inside segments
  rng = np.random.default_rng(1)
  tokens = [rng.integers(1, 9, n).astype(np.int32) for n in (12, 7, 4, 3, 3, 1, 1)]
  batch = pack_sequences(tokens, [np.zeros(len(t), bool) for t in tokens], length_buckets=(12,), row_multiple=4)
  assert batch.segment_ids.max() > 2
  q, k, v = arrays(4, 12, 12, 2, 1, 4)
  got = packed(q, k, v, batch.segment_ids)
  real = batch.segment_ids > 0
  np.testing.assert_allclose(got[real], oracle(q, k, v, packed_mask(batch.segment_ids))[real], atol=2e-6)


def test_two_tokens_by_hand():
  # One head of width 1. The second token scores ln 3 with itself and 0 with the first: weights 1/4 and 3/4.
  q = np.array([[[[1.0]], [[1.0]]]], np.float32)
  k = np.array([[[[0.0]], [[np.log(3)]]]], np.float32)
  v = np.array([[[[4.0]], [[8.0]]]], np.float32)
  np.testing.assert_allclose(packed(q, k, v, np.array([[1, 1]], np.int32)).ravel(), [4.0, 7.0], rtol=1e-6)
  np.testing.assert_array_equal(packed(q, k, v, np.array([[1, 2]], np.int32)).ravel(), [4.0, 8.0])


def test_nothing_crosses_a_segment_or_comes_from_the_future(monkeypatch: pytest.MonkeyPatch):
  """The derivative of token t by token s is exactly 0 unless s <= t lies in the same segment."""
  monkeypatch.setattr(attention, "QUERY_BLOCK", 3)
  segments = np.array([[1, 1, 2, 2, 2, 0]], np.int32)
  q, k, v = (jnp.asarray(x) for x in arrays(1, 6, 6, 2, 1, 2))
  of_token = jax.jacobian(lambda k, v: attention.packed_attention(q, k, v, segments).sum((2, 3))[0], (0, 1))
  of_k, of_v = jax.jit(of_token)(k, v)
  visible = packed_mask(segments)[0]
  for jacobian in (of_k, of_v):
    touched = np.abs(np.asarray(jacobian)[:, 0]).max((2, 3)) > 0  # [query, key]
    np.testing.assert_array_equal(touched[:5] & ~visible[:5], False)
  np.testing.assert_array_equal(np.abs(np.asarray(of_v)[:5, 0]).max((2, 3)) > 0, visible[:5])


def test_cached_attention_equals_the_loops():
  q, k, v = arrays(3, 2, 7, 4, 2, 2)
  positions = np.array([[0, 1], [3, 4], [5, 6]], np.int32)
  visible = np.arange(7)[None, None, :] <= positions[:, :, None]
  got = np.asarray(jax.jit(attention.cached_attention)(q, k, v, positions))
  np.testing.assert_allclose(got, oracle(q, k, v, visible), atol=2e-6)


def test_softmax_is_float32_in_bfloat16():
  """64 equal scores: bfloat16 weights summed in float32 give the mean; scores far from 0 do not overflow."""
  q, v = np.full((1, 64, 1, 2), 100.0, jnp.bfloat16), np.ones((1, 64, 1, 2), jnp.bfloat16)
  got = packed(q, q, v, np.ones((1, 64), np.int32))
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(got, np.float32), 1.0, atol=0.01)


def test_wrong_ranks_are_refused():
  q, k, v = arrays(1, 2, 2, 2, 1, 2)
  with pytest.raises(AssertionError):
    attention.packed_attention(q, k, v, np.ones(2, np.int32))
  with pytest.raises(AssertionError):
    attention.packed_attention(q, k, v[:, :1], np.ones((1, 2), np.int32))
