"""A plan that no compiler was needed for."""

from __future__ import annotations

import dataclasses

import pytest

from agentic_rl.planning.compile import Memory, Program
from agentic_rl.planning.flops import Work
from agentic_rl.planning.hlo import Collective, Collectives
from agentic_rl.planning.plan import Plan
from agentic_rl.planning.roofline import Assumptions, Roofline
from agentic_rl.planning.topologies import parse_topology
from agentic_rl.policy import PolicyConfig

GIB = 2**30


@pytest.fixture
def plan() -> Plan:
  """One that fits; its numbers are round, not true."""
  memory = Memory(
    params=GIB,
    optimizer=2 * GIB,
    batch=GIB // 4,
    arguments=3 * GIB + GIB // 4,
    temporaries=4 * GIB,
    outputs=0,
    code=GIB // 8,
    peak=7 * GIB,
  )
  found = (Collective("all-gather", 8, 56, 4e9, 3.5e9), Collective("all-reduce", 4, 2, 1e9, 1.5e9))
  return Plan(
    name="small",
    policy=PolicyConfig(
      vocab_size=8,
      width=8,
      layers=28,
      heads=4,
      kv_heads=4,
      head_width=2,
      mlp_width=8,
      dtype="bfloat16",
      remat="layer",
    ),
    topology=parse_topology("v5e-8"),
    mesh={"data": 1, "fsdp": 8, "expert": 1, "context": 1, "tensor": 1},
    rows=8,
    length=4096,
    micro_batches=2,
    parameters=1_500_000_000,
    program=Program(memory, 3e12, 5e10, Collectives(found, (28,), 1, 0), 1.5, 30.0),
    params_bytes=memory.params,
    optimizer_bytes=memory.optimizer,
    needed_bytes=memory.peak,
    fits=True,
    advice=(),
    work=Work(32768, 1_400_000_000, 3e14, 3e13, 4e14),
    hbm_bytes=2e11,
    assumed=Assumptions(),
    roofline=Roofline(0.9, 0.3, 0.2, 0.9, "compute", 8000.0, 0.45),
  )


@pytest.fixture
def too_large(plan: Plan) -> Plan:
  """One that the compiler refused."""
  return dataclasses.replace(
    plan, program=None, roofline=None, needed_bytes=20 * GIB, fits=False, advice=("fewer rows", "more chips")
  )
