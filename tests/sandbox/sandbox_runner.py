from __future__ import annotations

import asyncio
import os
import time

from agentic_rl.sandbox import ExecResult, Interpreter, InterpreterConfig, Limits


class Runner:
  """An interpreter with a synchronous `run`, and a look at what it leaves behind."""

  def __init__(self, config: InterpreterConfig) -> None:
    self.loop = asyncio.new_event_loop()
    self.interpreter = self.loop.run_until_complete(Interpreter.start(config))

  def run(self, code: str, limits: Limits | None = None, seed: int = 0) -> ExecResult:
    return self.loop.run_until_complete(self.interpreter.run(code, limits, seed=seed))

  def leftovers(self) -> list[str]:
    """Children of the zygote and files in its directory, after a moment to clean up."""
    pid = self.interpreter.capabilities()["pid"]
    directory = os.readlink(f"/proc/{pid}/cwd")
    deadline = time.monotonic() + 3.0
    while True:
      with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        left = ["process " + word for word in file.read().split()]
      left += ["file " + name for name in os.listdir(directory) if name != "stderr"]
      if not left or time.monotonic() > deadline:
        return left
      time.sleep(0.01)

  def close(self) -> None:
    self.loop.run_until_complete(self.interpreter.close())
    self.loop.close()
