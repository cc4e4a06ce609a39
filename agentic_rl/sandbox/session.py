"""A session as its user sees it: turns that share their variables, and what happens when one is killed."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from agentic_rl.sandbox.limits import (
  DIED_EARLY,
  Checkpoint,
  ExecResult,
  Limits,
  LimitsError,
  SandboxClosedError,
  SandboxError,
  State,
)

if TYPE_CHECKING:
  from agentic_rl.sandbox.interpreter import Interpreter
  from agentic_rl.sandbox.parent import Parent

_MOST_REPLAYED_BYTES = 4 << 20


class Session:
  """Turns whose variables persist. Made by `Interpreter.session`; its process is forked at the first turn.

  A turn that ends by itself, also with an exception or `sys.exit`, is kept. One that is killed by a limit, crashes or
  leaves with `os._exit` is undone as `checkpoint` says, and `ExecResult.state` tells what became of the session.

  Attributes:
    name: Identifies it in logs.
    checkpoint: `fork`, `replay` or `none`.
    process: Name of its present process.
    parent: Where that lives; None before the first turn and after it has gone.
    group: Index of the preload group, chosen by the first turn.
    turns: How many turns have been kept.
  """

  def __init__(
    self, interpreter: Interpreter, name: str, limits: Limits, seed: int, checkpoint: Checkpoint, owner: str
  ) -> None:
    self.name, self.checkpoint = name, checkpoint
    self.process = name
    self.parent: Parent | None = None
    self.group: int | None = None
    self.turns = 0
    self._interpreter = interpreter
    self._limits, self._seed, self._owner = limits, seed, owner
    self._log: list[tuple[str, Limits, str]] = []
    self._log_bytes = 0
    self._replayable = True
    self._processes = 0
    self._stale = False
    self._begun = False  # whether a turn has run, in any of its processes
    self._lock = asyncio.Lock()
    self._closed = False

  async def __aenter__(self) -> Session:
    return self

  async def __aexit__(self, *_: object) -> None:
    await self.close()

  async def run(self, code: str, limits: Limits | None = None, *, stdin: str = "") -> ExecResult:
    """Runs one turn; turns that are asked for at the same time run one after the other.

    Args:
      code: Python source, as for `Interpreter.run`.
      limits: Limits of this turn; of these only the times and the outputs matter, the rest is set by the session's.
      stdin: What the turn reads from its standard input.

    Raises:
      SourceTypeError, SandboxBusyError: As `Interpreter.run`.
      LimitsError: The input is larger than the session's limits allow.
      SandboxClosedError: The session or the interpreter is closed.
    """
    async with self._lock:
      if self._closed:
        raise SandboxClosedError("the session is closed")
      used = limits or self._limits
      most = min(self._limits.file_mib, self._limits.memory_mib // 4)
      if isinstance(stdin, str) and len(stdin) > most << 20:
        raise LimitsError("the standard input must be at most file_mib and a quarter of memory_mib of the session")
      try:
        return await self._run(code, used, stdin)
      except SandboxError:  # it was not sent
        raise
      except BaseException:  # a cancellation above all: nobody knows what has become of the process
        self._stale = True
        raise
      finally:
        if self._closed:  # meanwhile; what it has begun since then goes as well
          self._interpreter.end_session(self, self.parent, self.process)

  async def _run(self, code: str, limits: Limits, stdin: str) -> ExecResult:
    died = self._stale or (self.parent is not None and self.process not in self.parent.sessions)
    before: State | None = await self._revive() if died else None
    result = await self._turn(code, limits, stdin)
    if self._died_by_itself(result) and not self._closed:
      before = await self._revive()
      result = await self._turn(code, limits, stdin)
      if self._died_by_itself(result):
        text = "The session's process died between two turns, by what an earlier turn had left running.\n"
        result = dataclasses.replace(result, status="crash", error=text)
    self._begun = self._begun or result.status not in ("infra_error", "refused")
    if result.state == "kept" and result.status != "refused":
      self.turns += 1
      self._remember(code, limits, stdin)
    elif result.state == "lost" and not self._interpreter.closed and not self._closed:
      result = dataclasses.replace(result, state=await self._revive())
    elif result.state == "rolled_back":
      self._interpreter.count("rolled_back")
    if result.status == "infra_error":
      self._interpreter.count("infra_errors")
    return dataclasses.replace(result, state=before) if before and result.state == "kept" else result

  def _died_by_itself(self, result: ExecResult) -> bool:
    """Whether the process was dead before the turn began, which in a session is what earlier turns have done."""
    early = result.status == "infra_error" and result.error.startswith(DIED_EARLY)
    return early and self._begun

  async def close(self) -> None:
    """Ends its process. Idempotent."""
    if not self._closed:
      self._closed = True
      self._interpreter.end_session(self, self.parent, self.process)
      self._interpreter.forget_session(self)

  async def _turn(self, code: str, limits: Limits, stdin: str, urgent: bool = False) -> ExecResult:
    owner = self._owner or self.name
    return await self._interpreter.submit(
      code, limits, seed=self._seed, stdin=stdin, owner=owner, session=self, urgent=urgent
    )

  def _remember(self, code: str, limits: Limits, stdin: str) -> None:
    if self.checkpoint == "none" or not self._replayable:
      return
    self._log.append((code, limits, stdin))
    self._log_bytes += len(code) + len(stdin)
    if self._log_bytes > _MOST_REPLAYED_BYTES:
      self._replayable = False
      self._log.clear()

  async def _revive(self) -> State:
    """Gives the session a new process with the state of the old one, as far as it can be built again."""
    self._interpreter.end_session(self, self.parent, self.process)
    self._processes += 1
    self.process = f"{self.name}.{self._processes}"
    self.parent, self._stale = None, False
    if self.checkpoint != "none" and self._replayable:
      for code, limits, stdin in self._log:
        result = await self._turn(code, limits, stdin, urgent=True)
        if result.state != "kept":
          break
      else:
        self._interpreter.count("replayed")
        return "replayed"
      self._interpreter.end_session(self, self.parent, self.process)
      self._processes += 1
      self.process = f"{self.name}.{self._processes}"
      self.parent = None
    self._log.clear()
    self._log_bytes, self._replayable = 0, True
    self.turns = 0
    self._interpreter.count("lost")
    return "lost"
