"""Where a decode step may stop by itself: tables of the ids that end a request for sure."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from agentic_rl.tokenizer import Tokenizer

StopSet = tuple[tuple[str, ...], tuple[int, ...]]
"""Stop strings and stop ids of a request."""

CAPACITY = 32
"""Stop sets in the table at a time. Its shape is part of the compiled program, so it never grows."""


class StopTable:
  """For each stop set in use, the ids at which generation surely ends: stop ids, and tokens that hold a stop string.

  The host decides where a completion ends; the table only saves decode steps beyond that.
  """

  def __init__(self, tokenizer: Tokenizer, vocab_size: int):
    self._tokenizer = tokenizer
    self._texts: list[str] | None = None
    self._rows: dict[StopSet, int] = {}
    self._table = np.zeros((1 + CAPACITY, vocab_size), bool)  # row 0 stops at nothing
    self._on_device: jax.Array | None = None

  def use(self, sets: Iterable[StopSet]) -> None:
    """Gives each of the stop sets a row, as far as there are rows; the others are left to the host."""
    wanted = set(sets)
    new = sorted(wanted - self._rows.keys())
    if not new:
      return
    if len(self._rows) + len(new) > CAPACITY:
      self._rows = {}
      self._table[:] = False
      new = sorted(wanted)[:CAPACITY]
    for stop, stop_ids in new:
      row = self._rows[stop, stop_ids] = 1 + len(self._rows)
      self._table[row, list(stop_ids)] = True
      if stop:
        self._table[row, [i for i, text in enumerate(self._vocabulary()) if any(x in text for x in stop)]] = True
    self._on_device = None

  def row(self, stop_set: StopSet) -> int:
    """Row of a stop set, 0 if it has none."""
    return self._rows.get(stop_set, 0)

  def on_device(self) -> jax.Array:
    """bool[1 + CAPACITY, V]."""
    if self._on_device is None:
      self._on_device = jnp.array(self._table)  # a copy: the table changes
    return self._on_device

  def _vocabulary(self) -> list[str]:
    if self._texts is None:
      self._texts = [self._tokenizer.decode([i]) for i in range(self._tokenizer.vocab_size)]
    return self._texts
