"""The planner: compiles the learner's step for accelerators that are not there, and says whether it fits and how fast.

`topologies` names the accelerators, `compile` lowers and compiles for them, `hlo` reads the collectives out of the
program, `flops` counts operations, `roofline` turns numbers into a time, `report` prints it all, `plan` ties them.
"""

from agentic_rl.planning.plan import Plan, Request, make_plan

__all__ = ["Plan", "Request", "make_plan"]
