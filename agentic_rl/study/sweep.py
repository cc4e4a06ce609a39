"""Runs a grid of recipes: one process after another, or one cell a SLURM array task; ends in a table and a figure.

A sweep lies as `<workdir>/base/<…>/` (supervised stages, shared by cells that agree in the fields they depend on) and
`<workdir>/cells/<…>/` (RL runs). A base with a publication, and a cell with a `done.json`, is finished and skipped; any
other is resumed by its trainer, so the same command goes on after a kill. `launched.json` in each directory says what a
run was started with; a sweep with other settings does not go on there.
"""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import json
import math
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from agentic_rl.errors import UserError
from agentic_rl.evaluation.tables import Cell as TableCell
from agentic_rl.evaluation.tables import text_table
from agentic_rl.study import scaling, settings
from agentic_rl.study.plots import plot_sweep
from agentic_rl.study.summary import CODE, Metrics, column
from agentic_rl.train.metrics import FILE_NAME, read_metrics

LOG = "train.log"
_GRACE_S = 60.0  # For a child that was told to end to finish its checkpoint.


@dataclasses.dataclass(frozen=True)
class Sweep:
  """A grid of overrides on one recipe.

  Attributes:
    config: Recipe, relative to the repository's root.
    grid: Config field to the values that it takes; the first field is the x axis, the cells are the product.
    label: What the first field is called on a figure's axis.
    base_fields: Fields that change the supervised stage. Cells that agree in them start from one base model.
    train_base: Whether the recipe has a supervised stage at all.
  """

  config: str
  grid: Mapping[str, Sequence[Any]]
  label: str
  base_fields: tuple[str, ...] = ("seed",)
  train_base: bool = True

  def __post_init__(self) -> None:
    if not self.grid or not all(self.grid.values()):
      raise UserError("a sweep needs at least one field, and each field at least one value")

  def cells(self) -> list[Cell]:
    """All cells in a fixed order, so that an array index means the same cell on every machine."""
    products = itertools.product(*self.grid.values())
    return [Cell(number, dict(zip(self.grid, values, strict=True))) for number, values in enumerate(products)]


class Cell(NamedTuple):
  """One point of the grid."""

  number: int
  overrides: dict[str, Any]

  @property
  def name(self) -> str:
    return _name(self.overrides)


def _name(overrides: Mapping[str, Any]) -> str:
  return ",".join(f"{label}={value}" for label, value in _labels(overrides).items()) or "all"


def _labels(overrides: Mapping[str, Any]) -> dict[str, Any]:
  """The last part of each field's name, or the whole where two fields share it."""
  lasts = [field.rsplit(".", 1)[-1] for field in overrides]
  return {
    last if lasts.count(last) == 1 else field: value
    for (field, value), last in zip(overrides.items(), lasts, strict=True)
  }


def load_sweep(path: str | os.PathLike[str]) -> Sweep:
  """The `Sweep` that `get_sweep()` of a file returns. Raises `UserError` when there is none."""
  if not pathlib.Path(path).is_file():
    raise UserError(f"sweep file {str(path)!r} does not exist; sweeps are in configs/sweeps/")
  get_sweep = runpy.run_path(str(path)).get("get_sweep")
  sweep = get_sweep() if get_sweep is not None else None
  if not isinstance(sweep, Sweep):
    raise UserError(f"sweep file {str(path)!r} must define get_sweep() returning an agentic_rl.study.sweep.Sweep")
  return sweep


class Runner:
  """Starts the launch scripts of the cells.

  Args:
    sweep: What to run.
    workdir: Directory of the sweep.
    root: Root of the repository: holds `launch/` and the recipe.
    extra: Overrides for every run, `field=value`, e.g. to try a sweep with few iterations.
  """

  def __init__(
    self, sweep: Sweep, workdir: str | os.PathLike[str], root: str | os.PathLike[str], extra: Sequence[str] = ()
  ):
    self.sweep, self.extra = sweep, tuple(extra)
    self.workdir, self.root = pathlib.Path(workdir).resolve(), pathlib.Path(root).resolve()
    self._failed_bases: set[pathlib.Path] = set()
    if both := settings.split_overrides(self.extra).keys() & self.sweep.grid.keys():
      raise UserError(f"{sorted(both)[0]} is a field of the sweep's grid and cannot be set for every run as well")

  def directory(self, cell: Cell) -> pathlib.Path:
    return self.workdir / "cells" / cell.name

  def run(self, index: int | None = None) -> list[Cell]:
    """Runs all cells, or the one with `index`; returns those that failed. Finished ones are skipped.

    Raises:
      UserError: There is no cell of that index, or a cell or base was begun with other settings.
    """
    cells = self.sweep.cells()
    if index is not None:
      if not 0 <= index < len(cells):
        raise UserError(f"the sweep has cells 0 to {len(cells) - 1}, got index {index}; see --array of the job script")
      cells = [cells[index]]
    for cell in cells:  # All of them first: an hour later is a bad time to learn of it.
      directory = self.directory(cell)
      # A run without a checkpoint has nothing that could be mixed up: its trainer begins anew.
      if is_done(directory) or _has_files(directory / "checkpoints"):
        settings.check(directory, self._settings(cell.overrides))
      if self.sweep.train_base and not is_done(directory):
        self._check_base(*self._base_of(cell))
    return [cell for place, cell in enumerate(cells, start=1) if not self._run_cell(cell, f"[{place}/{len(cells)}]")]

  def _run_cell(self, cell: Cell, place: str) -> bool:
    directory = self.directory(cell)
    if is_done(directory):
      _say(f"{place} {cell.name}: finished before, skipped")
      return True
    overrides = dict(cell.overrides)
    if self.sweep.train_base:
      base = self._base(cell)
      if base is None:
        _say(f"{place} {cell.name}: FAILED, its base model is missing")
        return False
      overrides["init_from"] = base
    _say(f"{place} {cell.name}: running, log in {directory / LOG}")
    settings.note(directory, self._settings(cell.overrides))
    if not self._launch("train_rl.py", directory, overrides):
      return False
    if not is_done(directory):
      _say(f"  FAILED: the trainer ended without {done_file(directory).name} in {directory}")
      return False
    return True

  def _base(self, cell: Cell) -> str | None:
    """The publication of a cell's base model, trained if need be; None if that failed."""
    from agentic_rl.train.publication import latest

    directory, overrides = self._base_of(cell)
    if directory in self._failed_bases:
      return None
    with _lock(directory.with_name(directory.name + ".lock")):  # Array tasks that share a base train it once.
      self._check_base(directory, overrides)  # Again: another task may have begun it.
      publication = latest(directory / "publications")
      if publication is None:
        settings.note(directory, self._settings(overrides))
        _say(f"base {directory.name}: running, log in {directory / LOG}")
        if self._launch("train_sft.py", directory, overrides):
          publication = latest(directory / "publications")
        if publication is None:
          _say(f"  FAILED: base {directory.name} has no publication")
          self._failed_bases.add(directory)
          return None
    return publication.path

  def _base_of(self, cell: Cell) -> tuple[pathlib.Path, dict[str, Any]]:
    """Directory and overrides of the base model that a cell starts from."""
    overrides = {field: cell.overrides[field] for field in self.sweep.base_fields if field in cell.overrides}
    return self.workdir / "base" / _name(overrides), overrides

  def _check_base(self, directory: pathlib.Path, overrides: Mapping[str, Any]) -> None:
    if _has_files(directory / "checkpoints") or _has_files(directory / "publications"):
      settings.check(directory, self._settings(overrides))

  def _settings(self, overrides: Mapping[str, Any]) -> settings.Settings:
    return settings.resolve(self.root / self.sweep.config, {**overrides, **settings.split_overrides(self.extra)})

  def _launch(self, script: str, directory: pathlib.Path, overrides: Mapping[str, Any]) -> bool:
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(self.root / "launch" / script)]
    command += [f"--config={self.root / self.sweep.config}", f"--workdir={directory}"]
    command += [f"--config.{field}={value}" for field, value in overrides.items()]
    command += [f"--config.{override}" for override in self.extra]
    log = directory / LOG
    with open(log, "ab") as output:
      code = _run_child(command, output.fileno(), self.root)
    if code != 0:
      tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
      _say(f"  FAILED with code {code}; the log ends with\n" + "\n".join(f"  | {line}" for line in tail))
    return code == 0

  def collect(self) -> str:
    """Writes `sweep.json` and `sweep.png` of what is there, and returns the table.

    Raises:
      UserError: No cell has metrics yet.
    """
    cells = self.sweep.cells()
    metrics = {c.number: read_metrics(self.directory(c)) for c in cells if (self.directory(c) / FILE_NAME).exists()}
    if not metrics:
      raise UserError(f"no cell under {self.workdir / 'cells'} has metrics yet; run the sweep first")
    x_field = next(iter(self.sweep.grid))
    groups: dict[Any, list[Metrics]] = {value: [] for value in self.sweep.grid[x_field]}
    rows: list[Mapping[str, TableCell]] = []
    records = []
    for cell in cells:
      state = "done" if is_done(self.directory(cell)) else "unfinished" if cell.number in metrics else "missing"
      figures = _figures(metrics.get(cell.number, {}))
      rows.append(
        {**{label: str(value) for label, value in _labels(cell.overrides).items()}, "state": state, **figures}
      )
      records.append({"overrides": cell.overrides, "state": state} | figures)
      if cell.number in metrics:
        groups[cell.overrides[x_field]].append(metrics[cell.number])
    groups = {value: runs for value, runs in groups.items() if runs}
    means: list[Mapping[str, TableCell]] = [
      {x_field.rsplit(".", 1)[-1]: str(value), "runs": len(runs), **_means([_figures(run) for run in runs])}
      for value, runs in groups.items()
    ]
    _write_json(self.workdir / "sweep.json", {"config": self.sweep.config, "cells": records})
    plot_sweep(self.sweep.label, groups, self.workdir / "sweep.png")
    return text_table(rows) + "\n\n" + text_table(means)


def _figures(metrics: Metrics) -> dict[str, float | None]:
  """What stands at the end of a run; None where it has no value."""
  values = {
    "accuracy hard": scaling.evaluation_ends(column(metrics, "eval/hard/accuracy")).last,
    "accuracy easy": scaling.evaluation_ends(column(metrics, "eval/easy/accuracy")).last,
    "code": scaling.training_ends(column(metrics, CODE)).last,
    "executions": scaling.training_ends(column(metrics, "rollout/code_count")).last,
    "length": scaling.training_ends(column(metrics, "rollout/response_length")).last,
  }
  return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _means(figures: Sequence[Mapping[str, float | None]]) -> dict[str, float | None]:
  means: dict[str, float | None] = {}
  for name in figures[0]:
    known = [value for values in figures if (value := values[name]) is not None]
    means[name] = float(np.mean(known)) if known else None
  return means


def is_done(directory: pathlib.Path) -> bool:
  """Whether the trainer has finished in this run directory."""
  try:
    json.loads(done_file(directory).read_bytes())
  except (FileNotFoundError, ValueError):
    return False
  return True


def done_file(directory: pathlib.Path) -> pathlib.Path:
  """What the trainer leaves in a run directory when it has finished."""
  from agentic_rl.train.rl import DONE  # Imported here: it loads the whole trainer, for which `--list` need not wait.

  return directory / DONE


def _write_json(path: pathlib.Path, value: Any) -> None:
  from agentic_rl.train.publication import write_text

  write_text(path, json.dumps(value, indent=2) + "\n")


def _has_files(directory: pathlib.Path) -> bool:
  return directory.is_dir() and any(directory.iterdir())


@contextmanager
def _lock(path: pathlib.Path) -> Iterator[None]:
  """Holds a lock file; the system lets go of it when the process dies."""
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(path, "ab") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _run_child(command: Sequence[str], output: int, cwd: pathlib.Path) -> int:
  """Runs a process to its end; when this one is told to end, so is the child, and this one follows it.

  The child has `_GRACE_S` from the first signal on to end by itself. It is in a session of its own: what a terminal
  sends to all of its processes would reach it twice, and a trainer takes a second signal as "at once".
  """
  child: subprocess.Popen[bytes] | None = None
  received: list[int] = []
  deadline = math.inf

  def forward(number: int, frame: FrameType | None) -> None:
    nonlocal deadline
    deadline = min(deadline, time.monotonic() + _GRACE_S)
    received.append(number)
    if child is not None:
      child.send_signal(signal.SIGTERM)

  # What is ignored stays so (`nohup`, a job in the background of a script).
  heard = [n for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
  previous = {number: signal.signal(number, forward) for number in heard}
  try:
    child = subprocess.Popen(
      command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=cwd, start_new_session=True
    )
    if received:  # while it was being started
      child.send_signal(signal.SIGTERM)
    while True:
      try:
        code = child.wait(timeout=1.0)
        break
      except subprocess.TimeoutExpired:
        if time.monotonic() > deadline:
          child.kill()
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
  if received:
    raise SystemExit(128 + received[0])
  return code


def _say(text: str) -> None:
  sys.stdout.write(text + "\n")
  sys.stdout.flush()
