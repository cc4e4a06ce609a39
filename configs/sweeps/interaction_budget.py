"""How far does a larger interaction budget carry? N in {0, 1, 2, 4} calls a response, three seeds each.

  python launch/sweep.py --sweep=configs/sweeps/interaction_budget.py --workdir=runs/interaction_budget

N = 0 is the run without an interpreter. The cells of one seed start from the same base model, which is trained once.
The question is that of Agent RL Scaling Law, Sec. 4: there, accuracy rises with the budget and levels off beyond 4.
"""

from agentic_rl.study.sweep import Sweep


def get_sweep() -> Sweep:
  return Sweep(
    config="configs/zerotir_nano.py",
    grid={"dialect.call_budget": (0, 1, 2, 4), "seed": (0, 1, 2)},
    label="interaction budget",
  )
