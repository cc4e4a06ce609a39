from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from agentic_rl.data import Batch, pack, pack_sequences
from agentic_rl.episode import EndStatus, Episode, Problem, Segment
from agentic_rl.errors import UserError


def episode(uid: str, sample: int, lengths: list[tuple[str, int]], status: EndStatus = EndStatus.ANSWERED) -> Episode:
  """An episode of segments `(origin, length)` whose ids, log-probabilities tell where they came from."""
  rng = random.Random(f"{uid}/{sample}")
  segments = []
  for origin, length in lengths:
    ids = tuple(rng.randrange(1, 1000) for _ in range(length))
    own = length if origin == "policy" else 0
    logprobs = tuple(-rng.random() for _ in range(own))
    segments.append(Segment(origin, ids, "", logprobs, (0,) * own))  # type: ignore[arg-type]
  problem = Problem(uid=uid, source="test", domain="math", prompt="?", answer="1")
  return Episode(uid=uid, sample=sample, problem=problem, segments=tuple(segments), calls=(), status=status)


def ragged(count: int, seed: int = 0, longest: int = 50) -> list[Episode]:
  rng = random.Random(seed)
  out = []
  for i in range(count):
    lengths = [("prompt", rng.randint(1, longest // 5))]
    for origin in ("policy", "tool", "policy"):
      lengths.append((origin, rng.randint(0, longest // 4)))
    out.append(episode(f"p{i // 4}", i % 4, lengths))
  return out


def unpack(batch: Batch) -> dict[int, dict[str, np.ndarray]]:
  """Fields of each sequence, by its index, read back row by row and segment by segment."""
  out: dict[int, dict[str, np.ndarray]] = {}
  for row in range(batch.shape[0]):
    for segment in range(1, batch.segment_ids[row].max() + 1):
      at = np.flatnonzero(batch.segment_ids[row] == segment)
      assert np.all(np.diff(at) == 1), "a segment is one run of tokens"
      ids = set(batch.sequence_ids[row, at].tolist())
      assert len(ids) == 1, "a segment is one sequence"
      (index,) = ids
      assert index not in out, "a sequence lies in one row"
      out[index] = {name: value[row, at] for name, value in vars(batch).items()}
  return out


def test_two_episodes_in_a_row_by_hand() -> None:
  a = episode("a", 0, [("prompt", 2), ("policy", 1)])
  b = episode("b", 0, [("prompt", 1), ("policy", 2), ("tool", 1), ("policy", 1)])
  batch = pack([a, b], [0.5, -1.0], length_buckets=[4, 10], row_multiple=2)
  assert batch.shape == (2, 10)
  row = {name: value[0].tolist() for name, value in vars(batch).items()}
  assert row["token_ids"] == [*b.token_ids, *a.token_ids, 0, 0]
  assert row["positions"] == [0, 1, 2, 3, 4, 0, 1, 2, 0, 0]
  assert row["segment_ids"] == [1, 1, 1, 1, 1, 2, 2, 2, 0, 0]
  assert row["sequence_ids"] == [1, 1, 1, 1, 1, 0, 0, 0, -1, -1]
  assert row["loss_mask"] == [False, True, True, False, True, False, False, True, False, False]
  assert row["advantages"] == [0, -1, -1, 0, -1, 0, 0, 0.5, 0, 0]
  np.testing.assert_allclose(row["behaviour_logprobs"], [*b.logprobs, *a.logprobs, 0, 0], rtol=1e-6)
  np.testing.assert_allclose(row["loss_weights"], np.array(row["loss_mask"]) / 4)
  assert np.all(batch.sequence_ids[1] == -1) and not batch.loss_mask[1].any()
  assert batch.padding_fraction == pytest.approx(12 / 20)


def test_every_token_once_and_none_crosses_a_segment() -> None:
  episodes = ragged(200)
  advantages = np.linspace(-1, 1, 200, dtype=np.float32)
  batch = pack(episodes, advantages, length_buckets=[64, 128], row_multiple=4)
  assert batch.shape[0] % 4 == 0
  found = unpack(batch)
  assert sorted(found) == list(range(200))
  for i, e in enumerate(episodes):
    fields = found[i]
    np.testing.assert_array_equal(fields["token_ids"], e.token_ids)
    np.testing.assert_array_equal(fields["positions"], np.arange(len(e.token_ids)))
    np.testing.assert_array_equal(fields["loss_mask"], e.loss_mask)
    np.testing.assert_allclose(fields["behaviour_logprobs"], e.logprobs, rtol=1e-6)
    np.testing.assert_array_equal(fields["advantages"], np.where(e.loss_mask, advantages[i], 0.0))
  padding = batch.segment_ids == 0
  for name, value in vars(batch).items():
    assert np.all(value[padding] == (-1 if name == "sequence_ids" else 0)), name
  assert int(padding.sum()) == batch.token_ids.size - sum(len(e.token_ids) for e in episodes)


def test_layout_does_not_depend_on_the_order_of_finishing() -> None:
  episodes = ragged(60)
  order = random.Random(1).sample(range(60), 60)
  advantages = np.arange(60, dtype=np.float32)
  one = pack(episodes, advantages, length_buckets=[64], row_multiple=4)
  two = pack([episodes[i] for i in order], advantages[order], length_buckets=[64], row_multiple=4)
  for name in set(vars(one)) - {"sequence_ids"}:
    np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
  held = two.sequence_ids >= 0
  np.testing.assert_array_equal(one.sequence_ids[held], np.array(order)[two.sequence_ids[held]])


@pytest.mark.parametrize(
  "lengths, buckets, multiple, shape",
  [
    ([10], [8, 16, 32], 1, (1, 16)),  # the smallest that holds it, although badly filled: 32 is worse
    ([16, 16], [16, 32], 1, (2, 16)),
    ([9, 9, 9], [16, 28], 1, (1, 28)),  # 16 would leave 44 % empty
    ([9, 9, 9], [16, 28], 4, (4, 16)),  # rows are filled up to four anyway, so short rows waste less
    ([33], [32, 64], 1, (1, 64)),
  ],
)
def test_choice_of_bucket(lengths: list[int], buckets: list[int], multiple: int, shape: tuple[int, int]) -> None:
  ids = [np.ones(n, np.int32) for n in lengths]
  masks = [np.arange(n) > 0 for n in lengths]
  assert pack_sequences(ids, masks, length_buckets=buckets, row_multiple=multiple).shape == shape


def test_packing_is_dense() -> None:
  batch = pack(ragged(400), np.zeros(400), length_buckets=[256], row_multiple=1)
  assert batch.padding_fraction < 0.05


def test_best_fit_fills_the_fullest_row() -> None:
  # 6 and 5 open two rows of 8; 2 fits the first exactly, 3 the second.
  ids = [np.full(n, n, np.int32) for n in (6, 5, 3, 2)]
  batch = pack_sequences(ids, [np.arange(len(i)) > 0 for i in ids], length_buckets=[8], row_multiple=1)
  np.testing.assert_array_equal(batch.token_ids, [[6] * 6 + [2] * 2, [5] * 5 + [3] * 3])


def test_advantages_of_single_tokens() -> None:
  e = episode("a", 0, [("prompt", 1), ("policy", 2), ("tool", 1)])
  batch = pack([e], [np.array([9, 1, 2, 9], np.float32)], length_buckets=[4], row_multiple=1)
  np.testing.assert_array_equal(batch.advantages, [[0, 1, 2, 0]])


def test_an_empty_completion_is_packed_and_trains_nothing() -> None:
  empty, full = episode("a", 0, [("prompt", 3), ("policy", 0)]), episode("a", 1, [("prompt", 3), ("policy", 2)])
  batch = pack([empty, full], [5.0, -5.0], length_buckets=[8], row_multiple=1)
  found = unpack(batch)
  assert not found[0]["loss_mask"].any() and np.all(found[0]["advantages"] == 0)
  np.testing.assert_array_equal(found[1]["advantages"], [0, 0, 0, -5, -5])
  np.testing.assert_allclose(found[1]["loss_weights"], [0, 0, 0, 0.5, 0.5])


def test_lengths_by_origin() -> None:
  e = episode("a", 0, [("prompt", 4), ("policy", 2), ("tool", 3), ("policy", 1)])
  assert e.loss_mask[4:] == (True, True, False, False, False, True)
  assert (e.length("policy"), e.length("tool"), e.length("prompt")) == (3, 3, 4)
  assert len(e.token_ids) == 10


def test_rows_keep_the_denominator_of_the_whole_batch() -> None:
  batch = pack(ragged(50), np.ones(50), length_buckets=[64], row_multiple=2)
  half = batch.rows(0, 2)
  assert half.shape == (2, 64)
  np.testing.assert_array_equal(half.loss_weights, batch.loss_weights[:2])
  assert batch.loss_weights.sum() == pytest.approx(1.0, abs=1e-5)


def test_refusals() -> None:
  good = episode("a", 0, [("prompt", 2), ("policy", 3)])
  kind: dict[str, Any] = {"length_buckets": [4, 8], "row_multiple": 1}
  long = episode("long", 3, [("prompt", 2), ("policy", 7)])
  with pytest.raises(UserError, match="'long'/3 has 9 tokens, the largest length bucket 8"):
    pack([good, long], [0.0, 0.0], **kind)
  aborted = episode("b", 1, [("prompt", 1)], status=EndStatus.ABORTED)
  with pytest.raises(ValueError, match="'b'/1 was aborted"):
    pack([good, aborted], [0.0, 0.0], **kind)
  with pytest.raises(ValueError, match="no sequences to pack"):
    pack([], [], **kind)
  with pytest.raises(ValueError, match="1 sequences need as many advantages, got 2"):
    pack([good], [0.0, 0.0], **kind)
  with pytest.raises(ValueError, match="'a'/0 has 5 tokens and 3 entries of advantages"):
    pack([good], [np.zeros(3)], **kind)
  with pytest.raises(ValueError, match="must be positive"):
    pack([good], [0.0], length_buckets=[8], row_multiple=0)
  three = np.ones(3, np.int32)
  with pytest.raises(ValueError, match="'sequence'/0 is trained on its first token"):
    pack_sequences([three], [np.ones(3, bool)], **kind)
  with pytest.raises(ValueError, match="'sequence'/0 has 3 tokens and 2 entries of loss_mask"):
    pack_sequences([three], [np.zeros(2, bool)], **kind)
  with pytest.raises(ValueError, match="'sequence'/1 has no tokens"):
    pack_sequences([three, three[:0]], [np.zeros(3, bool), np.zeros(0, bool)], **kind)


def test_batch_checks_shapes_and_types() -> None:
  batch = pack(ragged(4), np.ones(4), length_buckets=[64], row_multiple=1)
  with pytest.raises(ValueError, match=r"'advantages' must be float32\[\d+, 64\], got float64"):
    dataclasses.replace(batch, advantages=batch.advantages.astype(np.float64))
  with pytest.raises(ValueError, match="first token of a segment"):
    dataclasses.replace(batch, loss_mask=np.ones_like(batch.loss_mask))


def test_speed() -> None:
  episodes = ragged(2000, longest=100)
  tokens = sum(len(e.token_ids) for e in episodes)
  assert 45 < tokens / 2000 < 55
  seconds = []
  for _ in range(3):
    begin = time.process_time()
    pack(episodes, np.ones(2000, np.float32), length_buckets=[64, 128, 256], row_multiple=8)
    seconds.append(time.process_time() - begin)
  print(f"2000 episodes of {tokens / 2000:.0f} tokens packed in {min(seconds):.3f} s")
  assert min(seconds) < 0.2


def test_importing_data_loads_neither_jax_nor_tfds() -> None:
  code = "import sys, agentic_rl.data; sys.exit(bool({'jax', 'tensorflow_datasets', 'tensorflow'} & set(sys.modules)))"
  assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
