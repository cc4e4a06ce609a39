r"""Plans a run without the hardware: compiles the learner's step for a TPU or GPU topology, on any CPU.

  pip install -e '.[plan-tpu]'   # or '.[plan-gpu]'
  python launch/plan.py --config=configs/zerotir_nano.py --topology=v5e-8 --policy=qwen2_5_1p5b --tokens=4096

Prints memory, FLOPs, collectives and a roofline of the step, and whether it fits. Exit code 1 where it does not.
"""

from __future__ import annotations

from absl import flags

from agentic_rl.planning import Request, make_plan, report
from agentic_rl.train.config_check import check_config, define_config, run_app

_CONFIG = define_config()
_TOPOLOGY = flags.DEFINE_string("topology", None, "E.g. v5e-8, v5p-128, v6e-256, h100-8.", required=True)
_POLICY = flags.DEFINE_string("policy", "", "A known policy or a Hugging Face directory; the config's by default.")
_TOKENS = flags.DEFINE_integer("tokens", 0, "Tokens in a row; the config's longest by default.", lower_bound=0)
_ROWS = flags.DEFINE_integer(
  "rows", 0, "Rows of a micro-batch over all chips; the config's, rounded up.", lower_bound=0
)
_MICRO_BATCHES = flags.DEFINE_integer("micro_batches", 2, "Micro-batches of a step.", lower_bound=1)
_MESH = flags.DEFINE_string("mesh", "", "E.g. data=1,fsdp=8,tensor=1; the config's by default.")
_OPTIONS = flags.DEFINE_string("policy_options", "", "Options of the policy, e.g. remat=none,attention=blocks.")
_FAST = flags.DEFINE_bool(
  "fast", False, "Compile with few optimizations: several times faster, memory nearly the same."
)
_LARGEST = flags.DEFINE_bool("largest", False, "Search for the largest micro-batch that fits; compiles several times.")
_JSON = flags.DEFINE_bool("json", False, "Print one JSON object as the last line.")
_MARKDOWN = flags.DEFINE_bool("markdown", False, "Print a row of a Markdown table instead of the report.")


def main(argv: list[str]) -> int:
  del argv
  check_config(_CONFIG.value)
  plan = make_plan(
    _CONFIG.value,
    Request(
      topology=_TOPOLOGY.value,
      policy=_POLICY.value,
      length=_TOKENS.value,
      rows=_ROWS.value,
      micro_batches=_MICRO_BATCHES.value,
      mesh=_MESH.value,
      options=_OPTIONS.value,
      fast=_FAST.value,
      largest=_LARGEST.value,
    ),
  )
  print(report.markdown(plan) if _MARKDOWN.value else report.text(plan))
  if _JSON.value:
    print(report.json_line(plan))
  return 0 if plan.fits else 1


if __name__ == "__main__":
  run_app(main)
