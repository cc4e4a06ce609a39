r"""Reinforcement learning from a base model.

  python launch/train_rl.py --config=configs/zerotir_nano.py --workdir=runs/rl \
    --config.init_from=runs/base/publications/000000

The same command goes on after a kill at any time.
"""

from __future__ import annotations

import pathlib

from absl import flags

from agentic_rl.train import rl, setup
from agentic_rl.train.config_check import define_config, run_app

_CONFIG = define_config()
_WORKDIR = flags.DEFINE_string("workdir", None, "Run directory; an unfinished run in it goes on.", required=True)


def main(argv: list[str]) -> int:
  del argv
  setup.start_backend(_CONFIG.value)
  metrics = rl.train(_CONFIG.value, _WORKDIR.value)
  root = pathlib.Path(_WORKDIR.value)
  print(f"reward {metrics['reward/mean']:.3f}, code {metrics['rollout/code_proportion']:.0%} in the last iteration")
  print(f"metrics:     {root / 'metrics.jsonl'}\nepisodes:    {root / 'episodes'}\ncheckpoints: {root / 'checkpoints'}")
  return 0


if __name__ == "__main__":
  run_app(main)
