"""The nano study: base model, tool run and control for every seed, then a table and a figure.

  python launch/study.py --workdir=runs/study --seeds=1

The same command goes on after a kill at any time; finished runs are not repeated.
"""

from __future__ import annotations

from absl import flags

from agentic_rl.study.zerotir import run_study
from agentic_rl.train import setup
from agentic_rl.train.config_check import define_config, run_app

_CONFIG = define_config("configs/zerotir_nano.py")
_WORKDIR = flags.DEFINE_string("workdir", "runs/study", "Directory of the study.")
_SEEDS = flags.DEFINE_integer("seeds", 1, "Number of seeds.", lower_bound=1)


def main(argv: list[str]) -> int:
  del argv
  setup.start_backend(_CONFIG.value)
  run_study(_CONFIG.value, _WORKDIR.value, _SEEDS.value)
  return 0


if __name__ == "__main__":
  run_app(main)
