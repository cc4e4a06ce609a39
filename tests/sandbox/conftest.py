from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sandbox_runner import Runner

from agentic_rl.sandbox import LEVELS, ExecResult, InterpreterConfig, Limits

LIMITS = Limits(wall_s=8, cpu_s=2, memory_mib=256)


@pytest.fixture(scope="module", params=LEVELS)
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
  """One interpreter for each level of isolation; skipped where the host does not allow the level."""
  runner = Runner(InterpreterConfig(slots=4, limits=LIMITS, min_isolation="process", max_isolation=request.param))
  if runner.level != request.param:
    facts = runner.interpreter.capabilities()["facts"]
    runner.close()
    pytest.skip(f"this host does not allow level {request.param}: {facts}")
  yield runner
  runner.close()


@pytest.fixture(scope="module")
def run(runner: Runner) -> Callable[..., ExecResult]:
  return runner.run


@pytest.fixture(scope="module")
def level(runner: Runner) -> str:
  return runner.level
