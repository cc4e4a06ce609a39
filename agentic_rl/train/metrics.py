"""Metrics of a run: `metrics.jsonl` and TensorBoard event files, one documented name each.

The JSONL file is the record that studies read; the event files are a view of it. A run that is killed at any time loses
at most the line that it was writing, and a resumed run leaves exactly the lines that an uninterrupted one would have.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

from agentic_rl.errors import UserError
from agentic_rl.train.metric_guide import check_names

FILE_NAME = "metrics.jsonl"
TENSORBOARD_DIR = "tensorboard"


class MetricWriter:
  """Writes the metrics of one run.

  Event files are written in this thread, record by record: tensorboardX's own `SummaryWriter` hands records to a
  thread, which on a full disk dies quietly and then blocks the run.

  Args:
    workdir: Run directory; made if it is missing.
    resume_step: Last step that the restored checkpoint holds: lines of later steps, and a half-written last line, are
      dropped before the first write. None starts a new record; an older one is kept as `metrics.jsonl.previous`.

  Raises:
    UserError: When the files cannot be written (a full disk, no permission); what was written before is kept.
  """

  def __init__(self, workdir: str | os.PathLike[str], resume_step: int | None = None):
    self._path = pathlib.Path(workdir) / FILE_NAME
    self._last_step = -1 if resume_step is None else resume_step
    try:
      self._path.parent.mkdir(parents=True, exist_ok=True)
      if resume_step is not None:
        _drop_after(self._path, resume_step)
      elif self._path.exists():
        os.replace(self._path, self._path.with_name(FILE_NAME + ".previous"))
      self._file: BinaryIO = open(self._path, "ab", buffering=0)
      self._events = _open_events(self._path.parent / TENSORBOARD_DIR, resume_step)
    except OSError as error:
      raise _write_error(self._path, error) from error

  def write(self, step: int, metrics: Mapping[str, float]) -> None:
    """Appends one line and the same scalars as events, and flushes both.

    Args:
      step: Iteration; must not go back. Two lines of one step are read as one.
      metrics: Name to number. NaN means that there is no value (`null` in the file).

    Raises:
      ValueError: A name is not in the metric guide, a value is not a number, or the step goes back.
      UserError: The file cannot be written. The partial line is removed; earlier lines stay.
    """
    check_names(metrics)
    if step < self._last_step:
      raise ValueError(f"metrics of step {step} come after those of step {self._last_step}; steps must not go back")
    values = {name: _number(name, value) for name, value in metrics.items()}
    now = time.time()
    record = {"step": int(step), "time": round(now, 3)} | {name: _to_json(value) for name, value in values.items()}
    try:
      _append_whole(self._file, json.dumps(record, allow_nan=False).encode() + b"\n")
      for name, value in values.items():
        if not math.isnan(value):
          event = Event(wall_time=now, step=int(step), summary=scalar(name, value))
          self._events.write_event(event)
      self._events.flush()
    except OSError as error:
      raise _write_error(self._path, error) from error
    self._last_step = step

  def close(self) -> None:
    """Closes both files."""
    try:
      self._file.close()
      self._events.close()
    except OSError as error:
      raise _write_error(self._path, error) from error

  def __enter__(self) -> MetricWriter:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    if kind is None:
      self.close()
    else:
      self._file.close()  # A second failure here would hide the first.


def read_metrics(workdir: str | os.PathLike[str]) -> dict[str, NDArray[np.float64]]:
  """Reads `metrics.jsonl` of a run.

  Returns:
    One float64 array a name, all as long as `step` and in rising order of it; NaN where a step has no value. A
    half-written last line is left out. Lines of one step are merged, the later one wins.

  Raises:
    UserError: There is no such file, or a line before the last is not valid.
  """
  path = pathlib.Path(workdir) / FILE_NAME
  try:
    lines = path.read_bytes().split(b"\n")
  except FileNotFoundError as error:
    raise UserError(f"{path} does not exist; is {str(workdir)!r} the directory of a run?") from error
  rows: dict[int, dict[str, Any]] = {}
  for number, line in enumerate(lines, start=1):
    record = _parse(line)
    if record is not None:
      rows.setdefault(record["step"], {}).update(record)
    elif number < len(lines) and line.strip():  # Only the last, unterminated line may be broken.
      raise UserError(f"{path}, line {number}, is not a metrics record; remove the line or restore the file")
  ordered = [rows[step] for step in sorted(rows)]
  names = dict.fromkeys(name for row in ordered for name in row)
  columns = {name: np.array([_from_json(row.get(name)) for row in ordered], np.float64) for name in names}
  return columns or {"step": np.zeros(0), "time": np.zeros(0)}


def _parse(line: bytes) -> dict[str, Any] | None:
  try:
    record = json.loads(line)
  except ValueError:
    return None
  return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _drop_after(path: pathlib.Path, step: int) -> None:
  """Keeps the whole lines up to `step`, atomically: a kill leaves the old file or the new one."""
  if not path.exists():
    return
  keep = []
  for line in path.read_bytes().split(b"\n")[:-1]:  # What follows the last newline is a half-written line.
    record = _parse(line)
    if record is not None and record["step"] <= step:
      keep.append(line + b"\n")
  partial = path.with_name(path.name + ".partial")
  with open(partial, "wb") as file:
    file.writelines(keep)
    file.flush()
    os.fsync(file.fileno())
  os.replace(partial, path)


def _open_events(directory: pathlib.Path, resume_step: int | None) -> EventsWriter:
  """Opens a new event file whose first record hides older events from `resume_step + 1` on."""
  directory.mkdir(parents=True, exist_ok=True)
  resumed = any(directory.iterdir())
  # The name would otherwise repeat within a second, and a repeated name overwrites the older file.
  writer = EventsWriter(str(directory / "events"), f".{os.getpid()}.{time.time_ns() % 10**9:09d}")
  if resumed:
    purge = 0 if resume_step is None else resume_step + 1
    writer.write_event(Event(wall_time=time.time(), step=purge, session_log=SessionLog(status=SessionLog.START)))
  writer.flush()
  return writer


def _append_whole(file: BinaryIO, data: bytes) -> None:
  """Appends all of `data`, or none of it."""
  start = file.seek(0, os.SEEK_END)
  try:
    view = memoryview(data)
    while view:
      view = view[file.write(view) :]  # A nearly full disk takes a part and refuses the rest.
  except OSError:
    file.truncate(start)
    raise


def _number(name: str, value: Any) -> float:
  array = np.asarray(value)
  if array.shape != () or array.dtype.kind not in "biuf":
    raise ValueError(f"metric {name!r} must be a number, got {type(value).__name__} of shape {array.shape}")
  return float(array)


def _to_json(value: float) -> float | str | None:
  if math.isfinite(value):
    return value
  return None if math.isnan(value) else str(value)


def _from_json(value: Any) -> float:
  return math.nan if value is None else float(value)


def _write_error(path: pathlib.Path, error: OSError) -> UserError:
  reason = error.strerror or str(error)
  return UserError(
    f"cannot write metrics to {path}: {reason}; make room (or fix the permission) and start the same command again, "
    "everything written before is kept"
  )
