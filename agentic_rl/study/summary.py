"""What a study found, in numbers: reads the runs under a root, writes `summary.json`, lays out a table.

A study lies as `<root>/seed_<s>/base/`, `…/tool/` and `…/control/`, each a run directory with its `metrics.jsonl`.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentic_rl.errors import UserError
from agentic_rl.evaluation.tables import text_table
from agentic_rl.study import scaling
from agentic_rl.train.metrics import FILE_NAME, read_metrics

Metrics = Mapping[str, NDArray[np.float64]]

PARTS = ("base", "tool", "control")
"""Runs of a seed: the base model, and from it the run with the interpreter and the one without."""
REWARD = "reward/mean"
CODE = "rollout/code_proportion"
_TRAINING = {
  "code_proportion": CODE,
  "code_in_correct": "rollout/code_in_correct",
  "code_count": "rollout/code_count",
  "response_length": "rollout/response_length",
  "reward": REWARD,
  "entropy": "policy/entropy",
  "tool_error": "tool/error_frac",
}
_EVALUATION = {"accuracy_hard": "eval/hard/accuracy", "accuracy_easy": "eval/easy/accuracy"}


class SeedRuns(NamedTuple):
  """The two runs of one seed; `control` is empty where there is none."""

  seed: int
  tool: Metrics
  control: Metrics


def load_study(root: str | os.PathLike[str]) -> list[SeedRuns]:
  """Reads every `seed_<s>` under `root` whose tool run has metrics, in order of the seed.

  Raises:
    UserError: There is none.
  """
  runs = []
  for directory in pathlib.Path(root).glob("seed_*"):
    number = directory.name.removeprefix("seed_")
    if number.isdigit() and (directory / "tool" / FILE_NAME).exists():
      control = directory / "control"
      runs.append(
        SeedRuns(
          int(number), read_metrics(directory / "tool"), read_metrics(control) if (control / FILE_NAME).exists() else {}
        )
      )
  if not runs:
    raise UserError(f"no runs under {str(root)!r}: expected seed_<s>/tool/{FILE_NAME}; run the study first")
  return sorted(runs, key=lambda run: run.seed)


def column(metrics: Metrics, name: str) -> NDArray[np.float64]:
  """A column, NaN throughout where the run never wrote it."""
  steps = metrics.get("step", np.zeros(0))
  return metrics.get(name, np.full(steps.shape, math.nan))


def summarise(runs: Sequence[SeedRuns], seconds: float, seconds_by_arm: Mapping[str, float]) -> dict[str, Any]:
  """The summary of a study.

  Args:
    runs: One entry a seed.
    seconds: Wall time of computing, all seeds and controls together.
    seconds_by_arm: As `arm_seconds` returns it.

  Returns:
    JSON-serialisable. Each measure has `first` and `last` (means over the seeds of the windows in `windows`),
    `control_first` and `control_last`, and `per_seed`; `spearman` and `pearson` relate `reward/mean` to
    `rollout/code_proportion` over the steps of the tool runs, pooled at the top level, single in `per_seed`.
  """
  summary: dict[str, Any] = {
    "seeds": [run.seed for run in runs],
    "seconds": round(seconds, 1),
    "seconds_by_arm": {arm: round(value, 1) for arm, value in seconds_by_arm.items()},
    "steps": int(max((column(run.tool, "step").max(initial=0) for run in runs), default=0)),
  }
  for name, metric in _TRAINING.items():
    summary[name] = _measure(runs, metric, scaling.training_ends)
  for name, metric in _EVALUATION.items():
    summary[name] = _measure(runs, metric, scaling.evaluation_ends)
  pairs = [(column(run.tool, CODE), column(run.tool, REWARD)) for run in runs]
  single = [scaling.correlate(*pair) for pair in pairs]
  pooled = scaling.pool(pairs)
  summary["spearman"] = {
    "rho": pooled.rho,
    "p": pooled.rho_p,
    "pairs": pooled.pairs,
    "per_seed": {str(run.seed): {"rho": c.rho, "p": c.rho_p} for run, c in zip(runs, single, strict=True)},
  }
  summary["pearson"] = {
    "r": pooled.r,
    "p": pooled.r_p,
    "pairs": pooled.pairs,
    "per_seed": {str(run.seed): {"r": c.r, "p": c.r_p} for run, c in zip(runs, single, strict=True)},
  }
  summary["windows"] = {
    "training_first_steps": scaling.FIRST_STEPS,
    "training_last_steps": scaling.LAST_STEPS,
    "evaluations_first": 1,
    "evaluations_last": scaling.LAST_EVALUATIONS,
  }
  plain: dict[str, Any] = _plain(summary)
  return plain


def _measure(
  runs: Sequence[SeedRuns], metric: str, window: Callable[[NDArray[np.float64]], scaling.Ends]
) -> dict[str, Any]:
  per_seed = {}
  for run in runs:
    values, control = column(run.tool, metric), column(run.control, metric)
    tool_ends, control_ends = window(values), window(control)
    per_seed[str(run.seed)] = {
      "first": tool_ends.first,
      "last": tool_ends.last,
      # A seed that falls back late shows as `last` well below `peak`.
      "peak": _nanmax(scaling.smooth(values[np.isfinite(values)], 3)),
      "control_first": control_ends.first,
      "control_last": control_ends.last,
    }
  keys = ("first", "last", "peak", "control_first", "control_last")
  means = {key: _nanmean([seed[key] for seed in per_seed.values()]) for key in keys}
  return {**means, "per_seed": per_seed}


def _nanmean(values: Sequence[float]) -> float:
  finite = [v for v in values if math.isfinite(v)]
  return float(np.mean(finite)) if finite else math.nan


def _nanmax(values: NDArray[np.float64]) -> float:
  finite = values[np.isfinite(values)]
  return float(finite.max()) if finite.size else math.nan


def _plain(value: Any) -> Any:
  """Replaces what JSON cannot say (NaN) by None, at any depth."""
  if isinstance(value, dict):
    return {key: _plain(item) for key, item in value.items()}
  if isinstance(value, float) and not math.isfinite(value):
    return None
  return value


def computing_seconds(directories: Iterable[str | os.PathLike[str]]) -> float:
  """Wall time that the runs in these directories spent, start-up and compilation included, pauses between a kill and a
  resumption excluded.
  """
  return sum(
    float(np.nansum(metrics.get("time/iteration_s", np.zeros(0)))) for metrics in map(read_metrics, directories)
  )


def run_directories(root: str | os.PathLike[str], seeds: Iterable[int]) -> list[pathlib.Path]:
  """The run directories of some seeds of a study: base model, tool run and control."""
  runs = [pathlib.Path(root) / f"seed_{seed}" / part for seed in seeds for part in PARTS]
  return [run for run in runs if (run / FILE_NAME).exists()]


def arm_seconds(directories: Iterable[str | os.PathLike[str]]) -> dict[str, float]:
  """Computing seconds of a base model, of a tool run and of a control: means over the seeds that have one, or NaN."""
  seconds: dict[str, list[float]] = {part: [] for part in PARTS}
  for directory in map(pathlib.Path, directories):
    seconds[directory.name].append(computing_seconds([directory]))
  return {part: _nanmean(values) for part, values in seconds.items()}


def write_summary(root: str | os.PathLike[str], summary: Mapping[str, Any]) -> pathlib.Path:
  """Writes `<root>/summary.json` atomically and returns its path."""
  from agentic_rl.train.publication import write_text  # Imported here: Orbax takes seconds.

  path = pathlib.Path(root) / "summary.json"
  write_text(path, json.dumps(summary, indent=2, allow_nan=False) + "\n")
  return path


def format_summary(summary: Mapping[str, Any]) -> str:
  """The table that a study ends with: a row a seed, then their mean (correlations: pooled)."""
  rows = []
  for seed in summary["seeds"]:
    key = str(seed)
    cells = {name: summary[name]["per_seed"][key] for name in (*_TRAINING, *_EVALUATION)}
    rows.append(_row(key, cells, summary["spearman"]["per_seed"][key], summary["pearson"]["per_seed"][key]))
  rows.append(_row("all", summary, summary["spearman"], summary["pearson"]))
  notes = (
    f"code: share of training responses that executed code; length: policy tokens a response (each first → last).\n"
    f"{len(summary['seeds'])} seeds, {summary['steps']} steps, {summary['seconds']:.0f} s of computing. "
    "Correlations: reward with code share over the steps of training."
  )
  return text_table(rows) + "\n" + notes


def _row(
  seed: str, cells: Mapping[str, Mapping[str, Any]], spearman: Mapping[str, Any], pearson: Mapping[str, Any]
) -> dict[str, str]:
  hard = cells["accuracy_hard"]
  return {
    "seed": seed,
    "code": _arrow(cells["code_proportion"]),
    "length": _arrow(cells["response_length"], 1),
    "accuracy hard": _arrow(hard),
    "control hard": f"{_f(hard['control_first'])} → {_f(hard['control_last'])}",
    "accuracy easy": _arrow(cells["accuracy_easy"]),
    "Spearman": _f(spearman["rho"]),
    "p": _p(spearman["p"]),
    "Pearson": _f(pearson["r"]),
  }


def _arrow(cell: Mapping[str, Any], digits: int = 2) -> str:
  return f"{_f(cell['first'], digits)} → {_f(cell['last'], digits)}"


def _f(value: float | None, digits: int = 2) -> str:
  return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _p(value: float | None) -> str:
  return "–" if value is None else "<1e-99" if value < 1e-99 else f"{value:.0e}"


def main(argv: Sequence[str]) -> int:
  """`python -m agentic_rl.study.summary runs/study`: summary, table and figure of runs that are there."""
  from agentic_rl.study.plots import plot_study

  if len(argv) != 1:
    sys.stderr.write("usage: python -m agentic_rl.study.summary ROOT\n")
    return 2
  try:
    runs = load_study(argv[0])
    directories = run_directories(argv[0], [run.seed for run in runs])
    summary = summarise(runs, computing_seconds(directories), arm_seconds(directories))
    written = [write_summary(argv[0], summary), plot_study(runs, pathlib.Path(argv[0]) / "study.png")]
  except UserError as error:
    sys.stderr.write(f"error: {error}\n")
    return 2
  sys.stdout.write(format_summary(summary) + "\n" + "\n".join(map(str, written)) + "\n")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
