"""SIGINT and SIGTERM end a run between two iterations, where everything is saved."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Stop:
  """Remembers that a signal has asked the run to end."""

  def __init__(self) -> None:
    self.signal: int | None = None

  def raise_if_set(self) -> None:
    """Raises `KeyboardInterrupt` if the run was asked to end."""
    if self.signal is not None:
      raise KeyboardInterrupt(f"stopped by {signal.Signals(self.signal).name}")


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
  """Catches the first SIGINT or SIGTERM; a second one interrupts at once. Outside the main thread nothing is caught."""
  stop = Stop()
  if threading.current_thread() is not threading.main_thread():
    yield stop
    return

  def handle(number: int, _: FrameType | None) -> None:
    if stop.signal is not None:
      raise KeyboardInterrupt
    stop.signal = number

  before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
  try:
    yield stop
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
