"""Runs a grid of recipes and tabulates it.

  python launch/sweep.py --sweep=configs/sweeps/interaction_budget.py --workdir=runs/interaction_budget

runs one cell after another; the same command goes on after a kill, and finished cells are skipped. On a cluster,
`launch/cluster/sweep.sbatch` runs one cell an array task (`--index`); `--collect` then makes the table and the figure.
"""

from __future__ import annotations

import pathlib

from absl import flags

from agentic_rl.study.sweep import Runner, load_sweep
from agentic_rl.train.config_check import run_app

_SWEEP = flags.DEFINE_string("sweep", None, "Sweep file, e.g. configs/sweeps/interaction_budget.py.", required=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the sweep.", required=True)
_INDEX = flags.DEFINE_integer("index", None, "Run only this cell, e.g. $SLURM_ARRAY_TASK_ID.", lower_bound=0)
_COLLECT = flags.DEFINE_bool("collect", False, "Run nothing, only write the table and the figure.")
_LIST = flags.DEFINE_bool("list", False, "Run nothing, only list the cells with their index.")
_SET = flags.DEFINE_multi_string("set", [], "Override for every run: section.field=value. May be given often.")


def main(argv: list[str]) -> int:
  del argv
  root = pathlib.Path(__file__).resolve().parents[1]
  sweep = load_sweep(_SWEEP.value)
  if _LIST.value:
    print("\n".join(f"{cell.number:4d}  {cell.name}" for cell in sweep.cells()))
    return 0
  runner = Runner(sweep, _WORKDIR.value, root, _SET.value)
  failed = [] if _COLLECT.value else runner.run(_INDEX.value)
  if failed:
    print("failed: " + "; ".join(cell.name for cell in failed) + ". Run the same command to try again.")
  if _INDEX.value is None or _COLLECT.value:
    print(runner.collect())
    print(f"figure: {runner.workdir / 'sweep.png'}\nnumbers: {runner.workdir / 'sweep.json'}")
  return 1 if failed else 0


if __name__ == "__main__":
  run_app(main)
