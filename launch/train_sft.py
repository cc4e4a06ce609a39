"""The supervised stage: makes the base model that reinforcement learning starts from.

python launch/train_sft.py --config=configs/zerotir_nano.py --workdir=runs/base --config.seed=1
"""

from __future__ import annotations

from absl import flags

from agentic_rl.train import setup, sft
from agentic_rl.train.config_check import define_config, run_app

_CONFIG = define_config()
_WORKDIR = flags.DEFINE_string("workdir", None, "Run directory; an unfinished run in it goes on.", required=True)


def main(argv: list[str]) -> int:
  del argv
  setup.start_backend(_CONFIG.value)
  publication = sft.train(_CONFIG.value, _WORKDIR.value)
  print(f"base model: {publication.path}")
  return 0


if __name__ == "__main__":
  run_app(main)
