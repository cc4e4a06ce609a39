from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from agentic_rl.sandbox import ExecResult, Interpreter, InterpreterConfig, Limits, Session


def children(pid: int) -> list[int]:
  try:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
      return [int(word) for word in file.read().split()]
  except OSError:
    return []


class Runner:
  """An interpreter with a synchronous `run`, and a look at what it leaves behind."""

  def __init__(self, config: InterpreterConfig) -> None:
    self.loop = asyncio.new_event_loop()
    self.interpreter = self.loop.run_until_complete(Interpreter.start(config))
    self.level = self.interpreter.level

  def run(self, code: str, limits: Limits | None = None, **options: Any) -> ExecResult:
    return self.loop.run_until_complete(self.interpreter.run(code, limits, **options))

  def turns(self, *codes: str, **options: Any) -> list[ExecResult]:
    """Runs the codes as turns of one session."""

    async def body() -> list[ExecResult]:
      async with self.interpreter.session(**options) as session:
        return [await session.run(code) for code in codes]

    return self.loop.run_until_complete(body())

  def in_session(self, session: Session, code: str, limits: Limits | None = None, **options: Any) -> ExecResult:
    return self.loop.run_until_complete(session.run(code, limits, **options))

  def zygotes(self) -> list[int]:
    """The one child of each launcher."""
    return [child for pid in self.interpreter.capabilities()["pids"] for child in children(pid)]

  def leftovers(self) -> list[str]:
    """Children of the zygotes and files in their directories, after a moment to clean up."""
    deadline = time.monotonic() + 3.0
    while True:
      left = [f"process {child}" for zygote in self.zygotes() for child in children(zygote)]
      for pid in self.interpreter.capabilities()["pids"]:
        left += ["file " + name for name in os.listdir(f"/proc/{pid}/cwd") if name != "root"]
      if not left or time.monotonic() > deadline:
        return left
      time.sleep(0.01)

  def close(self) -> None:
    self.loop.run_until_complete(self.interpreter.close())
    self.loop.close()
