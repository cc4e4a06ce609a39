from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from sandbox_runner import Runner

from agentic_rl.sandbox import ExecResult, InterpreterConfig, Limits


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
  runner = Runner(InterpreterConfig(slots=4, limits=Limits(wall_s=8, cpu_s=2, memory_mib=256)))
  yield runner
  runner.close()


@pytest.fixture(scope="module")
def run(runner: Runner) -> Callable[..., ExecResult]:
  return runner.run
