"""Which ids the device may stop at, for which request."""

from __future__ import annotations

import numpy as np

from agentic_rl.rollout.stops import CAPACITY, StopSet, StopTable
from agentic_rl.tokenizer import PieceTokenizer

TOKENIZER = PieceTokenizer([*"abc", "ab", "xaby"])  # ids 2 to 6


def ids(table: StopTable, stop_set: StopSet) -> list[int]:
  return np.flatnonzero(np.asarray(table.on_device())[table.row(stop_set)]).tolist()


def test_a_row_holds_stop_ids_and_tokens_that_contain_a_stop_string() -> None:
  table = StopTable(TOKENIZER, TOKENIZER.vocab_size)
  by_hand: dict[StopSet, list[int]] = {
    ((), (1,)): [1],
    (("ab",), ()): [5, 6],
    (("b", "never"), (1, 2)): [1, 2, 3, 5, 6],
    (("abc",), ()): [],  # over several tokens: the host finds it
    ((), ()): [],
  }
  table.use(by_hand)
  assert {stop_set: ids(table, stop_set) for stop_set in by_hand} == by_hand
  assert len({table.row(stop_set) for stop_set in by_hand}) == len(by_hand)
  assert ids(table, (("c",), ())) == []  # not in use: the host alone stops it


def test_a_full_table_keeps_its_shape_and_starts_anew() -> None:
  table = StopTable(TOKENIZER, TOKENIZER.vocab_size)
  shape = table.on_device().shape
  old: list[StopSet] = [((), (2, i)) for i in range(100, 100 + CAPACITY)]
  large = StopTable(TOKENIZER, 1000)
  large.use(old)
  assert ids(large, old[-1]) == [2, 100 + CAPACITY - 1]
  before = large.on_device()
  large.use(old[:3])
  assert large.on_device() is before  # nothing new, nothing sent to the device
  new: StopSet = (("a",), (7,))  # `<pad>` is text as well
  large.use([new, old[0]])
  assert ids(large, new) == [0, 2, 5, 6, 7] and ids(large, old[0]) == [2, 100]
  assert ids(large, old[1]) == []
  # More at once than there are rows: those without one are left to the host.
  many: list[StopSet] = [((), (i,)) for i in range(CAPACITY + 20)]
  large.use(many)
  found = [ids(large, stop_set) for stop_set in many]
  assert sum(f == [i] for i, f in enumerate(found)) == CAPACITY and sum(f == [] for f in found) == 20
  assert large.on_device().shape == (shape[0], 1000)
