"""Metrics files that look like those of a study, for tests."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable

import numpy as np
import pytest


def write_run(workdir: pathlib.Path, seed: int, steps: int = 60, tool: bool = True, gain: float = 1.0) -> None:
  """A run whose code share and accuracy rise along a logistic curve (not for a control), with noise."""
  rng = np.random.default_rng(seed * 2 + tool)
  middle = steps * (0.38 + 0.05 * rng.standard_normal())
  workdir.mkdir(parents=True, exist_ok=True)
  lines = []
  for step in range(steps + 1):
    rise = gain / (1 + np.exp(-(step - middle) / (0.1 * steps))) if tool else 0.0
    noise = rng.standard_normal(8) * 0.02
    code = float(np.clip(0.14 + 0.8 * rise + noise[0], 0, 1)) if tool else 0.0
    reward = float(np.clip(0.22 + 0.64 * rise + noise[1], 0, 1))
    row = {
      "step": step,
      "time": 1000.0 + 2 * step,
      "reward/mean": reward,
      "rollout/code_proportion": code,
      "rollout/code_in_correct": float(np.clip(0.2 + 0.78 * rise + noise[2], 0, 1)) if tool else 0.0,
      "rollout/code_count": code * 1.1,
      "rollout/response_length": 8.5 + 12 * rise + 10 * noise[3],
      "policy/entropy": 0.75 * float(np.exp(-2.2 * rise - 0.01 * step)) + abs(noise[4]),
      "tool/error_frac": max(0.0, 0.28 - 0.26 * rise + noise[5]) if tool else None,
      "time/rollout_s": 1.5,
      "time/update_s": 0.5,
      "time/iteration_s": 2.0,
    }
    if step % 5 == 0:
      row |= {
        "eval/hard/accuracy": float(np.clip(0.06 + 0.84 * rise + noise[6], 0, 1)),
        "eval/easy/accuracy": float(np.clip(0.68 + 0.27 * max(rise, step / steps * 0.5) + noise[7], 0, 1)),
      }
    lines.append(json.dumps(row))
  (workdir / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def study(tmp_path: pathlib.Path) -> pathlib.Path:
  """Root of a study of three seeds with controls."""
  for seed in range(3):
    write_run(tmp_path / f"seed_{seed}" / "tool", seed)
    write_run(tmp_path / f"seed_{seed}" / "control", seed, tool=False)
  return tmp_path


@pytest.fixture
def run_writer() -> Callable[..., None]:
  return write_run
