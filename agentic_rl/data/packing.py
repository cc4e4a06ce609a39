"""Ragged sequences into rows of equal length, several to a row.

The arrays are aligned to the token that they belong to: `loss_mask[r, t]` says that token t was sampled. Its
log-probability comes from the hidden state of token t - 1 of the same segment; the learner does that shift.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from agentic_rl.episode import EndStatus, Episode
from agentic_rl.errors import UserError

GOOD_PADDING = 0.1
"""Share of padding below which no longer row is tried."""

_DTYPES = {
  "token_ids": np.int32,
  "positions": np.int32,
  "segment_ids": np.int32,
  "sequence_ids": np.int32,
  "loss_mask": np.bool_,
  "behaviour_logprobs": np.float32,
  "advantages": np.float32,
  "loss_weights": np.float32,
}


@dataclasses.dataclass(frozen=True)
class Batch:
  """Packed rows for the learner: B rows of T tokens, T one of a small set of lengths.

  Attributes:
    token_ids: int32[B, T], 0 where padded.
    positions: int32[B, T], counted from 0 in each segment.
    segment_ids: int32[B, T], 1, 2, ... within a row; 0 is padding. Attention stays within a segment.
    sequence_ids: int32[B, T], index of the sequence in the list that was packed; -1 is padding.
    loss_mask: bool[B, T], true for tokens that are trained. Never the first token of a segment.
    behaviour_logprobs: f32[B, T], nats, 0 where not sampled.
    advantages: f32[B, T], 0 where not trained.
    loss_weights: f32[B, T]: the loss of the update is the sum of weights times token losses. Packing sets the mean over
      all trained tokens; the learner replaces it to follow its aggregation (`dataclasses.replace`).
  """

  token_ids: np.ndarray
  positions: np.ndarray
  segment_ids: np.ndarray
  sequence_ids: np.ndarray
  loss_mask: np.ndarray
  behaviour_logprobs: np.ndarray
  advantages: np.ndarray
  loss_weights: np.ndarray

  def __post_init__(self) -> None:
    for name, dtype in _DTYPES.items():
      array = getattr(self, name)
      if array.ndim != 2 or array.shape != self.token_ids.shape or array.dtype != dtype:
        raise ValueError(
          f"batch field {name!r} must be {np.dtype(dtype).name}{list(self.token_ids.shape)}, "
          f"got {array.dtype}{list(array.shape)}"
        )
    if np.any(self.loss_mask & (self.positions == 0)):
      raise ValueError("the first token of a segment is marked as trained, but no token before it can predict it")

  @property
  def shape(self) -> tuple[int, int]:
    """Rows and tokens in a row."""
    rows, length = self.token_ids.shape
    return rows, length

  @property
  def padding_fraction(self) -> float:
    """Share of all positions that hold no token."""
    return float(np.mean(self.segment_ids == 0))

  def rows(self, start: int, stop: int) -> Batch:
    """Rows `start` to `stop`, as views. Weights keep the denominator of the whole batch, as micro-batches need."""
    return Batch(**{name: getattr(self, name)[start:stop] for name in _DTYPES})


def pack(
  episodes: Sequence[Episode],
  advantages: Sequence[float] | Sequence[np.ndarray] | np.ndarray,
  *,
  length_buckets: Sequence[int],
  row_multiple: int,
) -> Batch:
  """Packs episodes, trained where the policy sampled.

  Episodes of like length come to lie in neighbouring rows. To make several optimizer steps of one iteration, split the
  episodes first and pack each part, so that no step sees only long ones.

  Args:
    episodes: N finished episodes.
    advantages: N numbers, or N arrays with one number for each token of the episode.
    length_buckets: Permitted row lengths in tokens.
    row_multiple: The number of rows becomes a multiple of it, filled up with padding.

  Returns:
    A batch whose `sequence_ids` index `episodes`. The layout depends on the lengths, uids and sample numbers of the
    episodes and not on their order.

  Raises:
    UserError: for an episode longer than the largest bucket.
    ValueError: for an aborted episode, and what `pack_sequences` refuses.
  """
  for episode in episodes:
    if episode.status is EndStatus.ABORTED:
      raise ValueError(f"episode {episode.uid!r}/{episode.sample} was aborted and must not be trained on; drop it")
  return pack_sequences(
    [np.array(e.token_ids, np.int32) for e in episodes],
    [np.array(e.loss_mask, np.bool_) for e in episodes],
    behaviour_logprobs=[np.array(e.logprobs, np.float32) for e in episodes],
    advantages=advantages,
    names=[(e.uid, e.sample) for e in episodes],
    length_buckets=length_buckets,
    row_multiple=row_multiple,
  )


def pack_sequences(
  token_ids: Sequence[np.ndarray],
  loss_mask: Sequence[np.ndarray],
  *,
  length_buckets: Sequence[int],
  row_multiple: int,
  behaviour_logprobs: Sequence[np.ndarray] | None = None,
  advantages: Sequence[float] | Sequence[np.ndarray] | np.ndarray | None = None,
  names: Sequence[tuple[str, int]] | None = None,
) -> Batch:
  """Packs N token sequences, e.g. documents of a corpus, by best fit, longest first.

  The row length is the smallest bucket that holds the longest sequence and leaves at most `GOOD_PADDING` of padding; if
  none does, the bucket with the least padding.

  Args:
    token_ids: N arrays int[L_i] of at least one token.
    loss_mask: N arrays bool[L_i]; false for the first token, which nothing predicts.
    length_buckets: Permitted row lengths in tokens.
    row_multiple: The number of rows becomes a multiple of it, filled up with padding.
    behaviour_logprobs: N arrays f32[L_i]; 0 if omitted.
    advantages: N numbers or N arrays f32[L_i]; 0 if omitted. Untrained tokens get 0.
    names: Name and number of each sequence, for messages and to order equal lengths; default `("sequence", i)`.

  Returns:
    A batch with `sequence_ids` in 0..N-1.

  Raises:
    UserError: for a sequence longer than the largest bucket.
    ValueError: for nothing to pack, an empty sequence, arrays of different lengths, a trained first token, a bucket or
      `row_multiple` that is not positive.
  """
  if not token_ids:
    raise ValueError("there are no sequences to pack")
  if not length_buckets or min(length_buckets) < 1 or row_multiple < 1:
    raise ValueError(f"length buckets and row_multiple must be positive, got {list(length_buckets)} and {row_multiple}")
  count = len(token_ids)
  if names is None:
    names = [("sequence", i) for i in range(count)]
  lengths = _lengths(token_ids, names)
  _check_lengths("loss_mask", loss_mask, lengths, names)
  if behaviour_logprobs is not None:
    _check_lengths("behaviour_logprobs", behaviour_logprobs, lengths, names)
  for (name, number), mask in zip(names, loss_mask, strict=True):
    if mask[0]:
      raise ValueError(f"{name!r}/{number} is trained on its first token, but no token before it can predict it")

  order = sorted(range(count), key=lambda i: (-lengths[i], names[i]))
  longest = order[0]
  buckets = sorted({b for b in length_buckets if b >= lengths[longest]})
  if not buckets:
    name, number = names[longest]
    raise UserError(
      f"{name!r}/{number} has {lengths[longest]} tokens, the largest length bucket {max(length_buckets)}; "
      f"add a bucket or lower the token budget"
    )
  width, (row_of, segment_of, offset_of) = _best_layout(lengths, order, buckets, row_multiple)
  rows = _round_up(int(row_of.max()) + 1, row_multiple)

  # Where each token of the concatenated sequences goes in the flattened rows.
  within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
  to = np.repeat(row_of * width + offset_of, lengths) + within

  def scatter(values: np.ndarray, dtype: type, padding: int = 0) -> np.ndarray:
    flat: np.ndarray = np.full(rows * width, padding, dtype)
    flat[to] = values
    return flat.reshape(rows, width)

  mask = np.concatenate(loss_mask).astype(np.bool_)
  logprobs = np.zeros(len(mask)) if behaviour_logprobs is None else np.concatenate(behaviour_logprobs)
  if advantages is None:
    advantage = np.zeros(len(mask), np.float32)
  else:
    advantage = np.where(mask, _advantages_of_tokens(advantages, lengths, names), 0.0)
  return Batch(
    token_ids=scatter(np.concatenate(token_ids), np.int32),
    positions=scatter(within, np.int32),
    segment_ids=scatter(np.repeat(segment_of, lengths), np.int32),
    sequence_ids=scatter(np.repeat(np.arange(count), lengths), np.int32, -1),
    loss_mask=scatter(mask, np.bool_),
    behaviour_logprobs=scatter(logprobs, np.float32),
    advantages=scatter(advantage, np.float32),
    loss_weights=scatter(mask / max(mask.sum(), 1), np.float32),
  )


def _lengths(token_ids: Sequence[np.ndarray], names: Sequence[tuple[str, int]]) -> np.ndarray:
  lengths = np.array([len(t) for t in token_ids], np.int64)
  if len(names) != len(lengths):
    raise ValueError(f"{len(lengths)} sequences need as many names, got {len(names)}")
  if np.any(lengths == 0):
    name, number = names[int(np.argmin(lengths))]
    raise ValueError(f"{name!r}/{number} has no tokens; drop it")
  return lengths


def _check_lengths(
  field: str, arrays: Sequence[np.ndarray], lengths: np.ndarray, names: Sequence[tuple[str, int]]
) -> None:
  if len(arrays) != len(lengths):
    raise ValueError(f"{len(lengths)} sequences need as many {field}, got {len(arrays)}")
  for array, length, (name, number) in zip(arrays, lengths, names, strict=True):
    if len(array) != length:
      raise ValueError(f"{name!r}/{number} has {length} tokens and {len(array)} entries of {field}")


def _advantages_of_tokens(
  advantages: Sequence[float] | Sequence[np.ndarray] | np.ndarray, lengths: np.ndarray, names: Sequence[tuple[str, int]]
) -> np.ndarray:
  """f32[sum of lengths]: a sequence's number repeated, or its array."""
  if len(advantages) != len(lengths):
    raise ValueError(f"{len(lengths)} sequences need as many advantages, got {len(advantages)}")
  if all(np.ndim(a) == 0 for a in advantages):
    return np.repeat(np.asarray(advantages, np.float32), lengths)
  tokens = [np.asarray(a, np.float32) for a in advantages]
  _check_lengths("advantages", tokens, lengths, names)
  return np.concatenate(tokens)


def _round_up(count: int, multiple: int) -> int:
  return -(-count // multiple) * multiple


Layout = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Row, segment number and offset of each sequence, int[N] each."""


def _best_layout(
  lengths: np.ndarray, order: Sequence[int], buckets: Sequence[int], row_multiple: int
) -> tuple[int, Layout]:
  """The first bucket that packs well, or the one that packs best."""
  best: tuple[float, int, Layout] | None = None
  for width in buckets:
    layout = _best_fit(lengths, order, width)
    rows = _round_up(int(layout[0].max()) + 1, row_multiple)
    padding = 1.0 - float(lengths.sum()) / (rows * width)
    if best is None or padding < best[0]:
      best = (padding, width, layout)
    if padding <= GOOD_PADDING:
      break
  assert best is not None, "there is at least one bucket"
  return best[1], best[2]


def _best_fit(lengths: np.ndarray, order: Sequence[int], width: int) -> Layout:
  """Puts each sequence into the fullest row that still holds it."""
  rows, segments, offsets = (np.zeros(len(lengths), np.int64) for _ in range(3))
  open_rows: list[tuple[int, int]] = []  # (free tokens, row), sorted
  filled: list[int] = []  # segments in each row
  for i in order:
    length = int(lengths[i])
    at = bisect.bisect_left(open_rows, (length, 0))
    if at < len(open_rows):
      free, row = open_rows.pop(at)
    else:
      free, row = width, len(filled)
      filled.append(0)
    filled[row] += 1
    rows[i], segments[i], offsets[i] = row, filled[row], width - free
    if free > length:
      bisect.insort(open_rows, (free - length, row))
  return rows, segments, offsets
