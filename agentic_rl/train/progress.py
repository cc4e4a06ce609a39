"""What the person who waits sees: a bar in a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TextIO

from tqdm import tqdm

# The supervised stage has no rollouts: there the learner's speed is the one to show.
_SHOWN = (
  (("reward/mean",), "reward", "{:.2f}"),
  (("rollout/code_proportion",), "code", "{:.0%}"),
  (("loss/supervised",), "loss", "{:.3f}"),
  (("throughput/rollout_tokens_per_s", "throughput/update_tokens_per_s"), "tok/s", "{:,.0f}"),
)


class Progress:
  """Progress of a loop over steps: reward, code ratio, tokens a second, time left.

  On a terminal this is a bar; into a file or a pipe (SLURM, CI) it is one plain line at most every `interval_s`
  seconds, and always one for the first and the last step.

  Args:
    total: Steps in all.
    initial: Steps done before (a resumed run); the time left counts from here.
    label: Word before the bar.
    stream: Where to write; standard error if None.
    interval_s: Least seconds between two plain lines.
    clock: Seconds, rising; for tests.
  """

  def __init__(
    self,
    total: int,
    initial: int = 0,
    label: str = "train",
    stream: TextIO | None = None,
    interval_s: float = 5.0,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._stream = stream or sys.stderr
    self._total, self._initial, self._done, self._label = total, initial, initial, label
    self._interval_s, self._clock = interval_s, clock
    self._start, self._last_line = clock(), -math.inf
    self._bar: tqdm[None] | None = None
    if self._stream.isatty():
      self._bar = tqdm(total=total, initial=initial, desc=label, file=self._stream, dynamic_ncols=True, leave=True)

  def update(self, done: int, metrics: Mapping[str, float]) -> None:
    """Shows that `done` steps are done, with those of `metrics` that matter to a watcher."""
    text = describe(metrics)
    if self._bar is not None:
      self._bar.set_postfix_str(text, refresh=False)
      self._bar.update(done - self._done)
    self._done = done
    now = self._clock()
    if self._bar is None and (now - self._last_line >= self._interval_s or done >= self._total):
      self._last_line = now
      rate = (now - self._start) / max(1, done - self._initial)
      left = f"{_duration(now - self._start)} gone, {_duration(rate * (self._total - done))} left"
      self._print(f"{self._label} {done}/{self._total}  {text}  {left}")

  def close(self) -> None:
    """Leaves the bar as it stands."""
    if self._bar is not None:
      self._bar.close()

  def __enter__(self) -> Progress:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self.close()

  def _print(self, text: str) -> None:
    self._stream.write(text + "\n")
    self._stream.flush()


def describe(metrics: Mapping[str, float]) -> str:
  """The few numbers of `metrics` that a watcher wants, in one line."""
  shown = []
  for names, label, form in _SHOWN:
    values = [metrics[name] for name in names if name in metrics]
    shown += [f"{label} {form.format(value)}" for value in values[:1]]
  shown += [f"{name.split('/')[1]} {metrics[name]:.2f}" for name in metrics if _is_accuracy(name)]
  return ", ".join(shown)


def _is_accuracy(name: str) -> bool:
  return name.startswith("eval/") and name.endswith("/accuracy")


def _duration(seconds: float) -> str:
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
