"""The Python interpreter as a tool, and the one place that decides what the policy sees of a result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentic_rl.tools.dialect import INFRA_ERROR, ToolOutcome

if TYPE_CHECKING:
  from agentic_rl.sandbox import ExecResult, Interpreter, Limits, RemoteInterpreter, RemoteSession, Session

_ENDINGS = {
  "timeout": "TimeoutError: the code ran longer than its time limit",
  "cpu": "TimeoutError: the code used more CPU time than its limit",
  "memory": "MemoryError: the code used more memory than its limit",
  "output": "The output was cut off at its limit",
  "disk": "OSError: the code wrote more files than its limit",
  "crash": "The Python process crashed",
  "refused": "The code was not accepted",
  INFRA_ERROR: "The interpreter failed",
}


def render_observation(result: ExecResult, error_lines: int = 1) -> str:
  """Text of a result for the policy.

  What was printed, or else the value of the last expression; then, where the code failed, the last lines of its error,
  and where a limit ended it or cut what it printed, that. Line ends at the end are dropped, since the dialect's frame
  brings its own.

  Args:
    result: Result of the interpreter.
    error_lines: Last lines of the traceback to show, at least 1; the very last names the exception.
  """
  shown = result.stdout.rstrip("\n") or result.value
  ending = _ENDINGS.get(result.status, "")
  error = result.error.strip("\n")
  if error and result.status in ("error", "refused", INFRA_ERROR):
    ending = "\n".join(error.split("\n")[-error_lines:])
  elif not ending and (result.stdout_dropped or result.value_dropped):
    ending = _ENDINGS["output"]
  return "\n".join(part for part in (shown, ending) if part)


class InterpreterTool:
  """Runs calls in a sandboxed interpreter, here or at a server.

  Args:
    interpreter: A started interpreter; its owner closes it.
    limits: Limits of each call; the interpreter's own if None.
    error_lines: Last lines of a traceback that the policy sees.
    stateful: Whether the calls of an episode share their variables, as cells of a notebook do. Else each call runs in
      a fresh process, as in both papers.
  """

  def __init__(
    self,
    interpreter: Interpreter | RemoteInterpreter,
    limits: Limits | None = None,
    error_lines: int = 1,
    stateful: bool = False,
  ):
    if error_lines < 1:
      raise ValueError(f"error_lines must be at least 1, got {error_lines}")
    self._interpreter, self._limits, self._error_lines = interpreter, limits, error_lines
    self._stateful = stateful
    self._sessions: dict[str, Session | RemoteSession] = {}

  async def run(self, code: str, *, session: str) -> ToolOutcome:
    if self._stateful:
      if session not in self._sessions:
        self._sessions[session] = self._interpreter.session(self._limits, owner=session)
      result = await self._sessions[session].run(code)
    else:
      result = await self._interpreter.run(code, self._limits, owner=session)
    text = render_observation(result, self._error_lines)
    return ToolOutcome(text, result.status, result.queue_s + result.wall_s, result.cpu_s)

  async def end(self, session: str) -> None:
    kept = self._sessions.pop(session, None)
    if kept is not None:
      await kept.close()
