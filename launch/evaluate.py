r"""Evaluates a checkpoint on the evaluation sets of a config: avg@k, pass@k, maj@k and tool statistics.

python launch/evaluate.py --config=configs/zerotir_nano.py --checkpoint=runs/study/seed_0/tool \
    --workdir=runs/evaluation --config.evaluation.samples=8
"""

from __future__ import annotations

from absl import flags

from agentic_rl.evaluation.checkpoint import evaluate_checkpoint
from agentic_rl.train import setup
from agentic_rl.train.config_check import define_config, run_app

_CONFIG = define_config()
_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Publication, or run directory (its latest).", required=True)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where tables and episodes are written.", required=True)
_TOOLS = flags.DEFINE_bool("tools", True, "Execute code; --notools evaluates without the interpreter.")


def main(argv: list[str]) -> int:
  del argv
  setup.start_backend(_CONFIG.value)
  evaluation = evaluate_checkpoint(_CONFIG.value, _CHECKPOINT.value, _WORKDIR.value, tools=_TOOLS.value)
  print(evaluation.table())
  print(f"\nwritten to {_WORKDIR.value}: evaluation.json, evaluation.md and the episodes of each set")
  return 0


if __name__ == "__main__":
  run_app(main)
