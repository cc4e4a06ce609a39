"""The nano study of *Agent RL Scaling Law*: for every seed a base model, a run with the interpreter, and its control.

<root>/seed_<s>/base/      pre-training on mixed text
<root>/seed_<s>/tool/      reinforcement learning with the interpreter
<root>/seed_<s>/control/   the same, as many episodes from the same base model and seed, without it (ZeroRL)
<root>/summary.json, <root>/study.png
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
from ml_collections import ConfigDict

from agentic_rl.errors import UserError
from agentic_rl.study.plots import plot_study
from agentic_rl.study.summary import (
  arm_seconds,
  computing_seconds,
  format_summary,
  load_study,
  run_directories,
  summarise,
  write_summary,
)
from agentic_rl.train import rl, sft

ARMS = ("tool", "control")


def run_study(config: ConfigDict, root: str | os.PathLike[str], seeds: int) -> dict[str, Any]:
  """Runs what is not there yet, prints the table, and writes the summary and the figure.

  Args:
    config: The recipe; its `seed` is that of the first seed, the others count up from it.
    root: Directory of the study.
    seeds: Number of seeds.

  Returns:
    The summary, as in `summary.json`.
  """
  if config.dialect.call_budget < 1:
    raise UserError(
      f"config.dialect.call_budget={config.dialect.call_budget}: the study needs a run with calls; set 1 or more"
    )
  path = pathlib.Path(root).absolute()
  # Both arms compile the same programs.
  jax.config.update("jax_compilation_cache_dir", str(path / "compiled"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
  jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
  for seed in range(config.seed, config.seed + seeds):
    directory = path / f"seed_{seed}"
    base = sft.train(_with(config, seed=seed), directory / "base")
    for arm in ARMS:
      options = _with(config, seed=seed, init_from=base.path)
      if arm == "control":
        options.dialect.call_budget = 0
        options.dialect.budget_end = "free"
      rl.train(options, directory / arm)
  runs = [run for run in load_study(path) if config.seed <= run.seed < config.seed + seeds]
  directories = run_directories(path, [run.seed for run in runs])
  summary = summarise(runs, computing_seconds(directories), arm_seconds(directories))
  print(format_summary(summary))
  print(f"\nsummary:     {write_summary(path, summary)}")
  print(f"figure:      {plot_study(runs, path / 'study.png')}")
  last = path / f"seed_{config.seed}" / "tool"
  print(f"metrics:     {last / 'metrics.jsonl'} (TensorBoard: {last / 'tensorboard'})")
  print(f"episodes:    {last / 'episodes'} (python -m agentic_rl.study.viewer FILE)")
  print(f"checkpoint:  {last / 'checkpoints'}")
  return summary


def _with(config: ConfigDict, **values: Any) -> ConfigDict:
  copy = config.copy_and_resolve_references()
  copy.update(values)
  return copy
