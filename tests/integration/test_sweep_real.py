"""A sweep with the real launch scripts: told to end in the middle, it goes on where it was."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from conftest import ROOT

ITERATIONS = 8

pytestmark = pytest.mark.slow


@pytest.fixture
def command(recipe: pathlib.Path, tmp_path: pathlib.Path) -> list[str]:
  """Two cells that share a base model."""
  grid = tmp_path / "grid.py"
  grid.write_text(
    "from agentic_rl.study.sweep import Sweep\n"
    f'def get_sweep(): return Sweep({str(recipe)!r}, {{"dialect.call_budget": (0, 2), "seed": (0,)}}, "budget")\n'
  )
  script = str(ROOT / "launch" / "sweep.py")
  return [sys.executable, script, f"--sweep={grid}", f"--workdir={tmp_path / 'out'}"]


def start(command: list[str], tmp_path: pathlib.Path, iterations: int = ITERATIONS) -> subprocess.Popen[str]:
  environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
    "PYTHONPATH": str(ROOT),
    "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
  }
  return subprocess.Popen(
    [*command, f"--set=train.iterations={iterations}"],
    cwd=tmp_path,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_sweep_that_is_told_to_end_goes_on(command: list[str], tmp_path: pathlib.Path) -> None:
  out = tmp_path / "out"
  first, second = (out / "cells" / f"call_budget={n},seed=0" for n in (0, 2))

  running = start(command, tmp_path)
  deadline = time.monotonic() + 200
  while not (second / "episodes" / "iteration_000003.jsonl").exists():
    assert running.poll() is None and time.monotonic() < deadline, running.communicate()[0]
    time.sleep(0.02)
  running.send_signal(signal.SIGTERM)
  said, _ = running.communicate(timeout=60)
  assert running.returncode == 128 + signal.SIGTERM, said
  assert (first / "done.json").exists() and not (second / "done.json").exists()
  # The trainer was told once, and saved what it had done.
  assert (second / "train.log").read_text().splitlines()[-1].startswith("stopped by SIGTERM")
  saved = max(int(path.name) for path in (second / "checkpoints").iterdir())
  assert 2 <= saved < ITERATIONS and lines(second / "metrics.jsonl")[-1]["step"] == saved
  before = (first / "metrics.jsonl").read_text()

  # Not with other settings, neither the finished cell nor the other.
  refused = start(command, tmp_path, iterations=ITERATIONS + 1)
  said, _ = refused.communicate(timeout=60)
  assert refused.returncode == 2 and said.startswith(f"error: {first} was run with train.iterations={ITERATIONS}, "), (
    said
  )

  running = start(command, tmp_path)
  said, _ = running.communicate(timeout=200)
  assert running.returncode == 0, said
  assert "[1/2] call_budget=0,seed=0: finished before, skipped" in said and "base seed=0: running" not in said
  assert f"going on from the checkpoint of iteration {saved} " in (second / "train.log").read_text()
  assert (first / "metrics.jsonl").read_text() == before
  for cell in (first, second):
    assert [row["step"] for row in lines(cell / "metrics.jsonl")] == list(range(ITERATIONS + 1))
    assert json.loads((cell / "done.json").read_text())["step"] == ITERATIONS
    config = json.loads((cell / "config.json").read_text())
    assert config["init_from"] == str(out / "base" / "seed=0" / "publications" / "000000")
  assert all(row.get("rollout/code_proportion", 0) == 0 for row in lines(first / "metrics.jsonl"))
  assert any(row.get("rollout/code_proportion", 0) > 0 for row in lines(second / "metrics.jsonl"))
  cells = json.loads((out / "sweep.json").read_text())["cells"]
  assert [cell["state"] for cell in cells] == ["done", "done"] and all(cell["accuracy easy"] for cell in cells)
  assert (out / "sweep.png").stat().st_size > 10_000
  assert "accuracy easy" in said
