"""What the episode loop asks of a dialect and of a tool: one loop drives every dialect through these types.

A dialect is a pure description of how a policy writes a call: it holds no state of an episode. What an episode has done
so far travels in a `DialectState`, which the loop passes back in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from agentic_rl.episode import EndStatus, Finish, Problem
from agentic_rl.tokenizer import Tokenizer

OVER_BUDGET = "over_budget"
"""Status of a call that was written after the call budget was spent, and not run."""
MALFORMED = "malformed"
"""Status of a call that could not be read, and was not run."""
REFUSED = "refused"
"""Status of a call that the interpreter did not accept."""
INFRA_ERROR = "infra_error"
"""Status of a call that failed by no fault of the policy."""
NOT_EXECUTED = frozenset({OVER_BUDGET, MALFORMED, REFUSED, INFRA_ERROR})
"""Statuses of calls whose code did not run."""


@dataclasses.dataclass(frozen=True)
class ToolOutcome:
  """What a tool call gave.

  Attributes:
    text: Text for the policy, before truncation and before the dialect's frame.
    status: `ok`, or how the call failed; `infra_error` aborts the episode.
    wall_s, cpu_s: Seconds that the call took; `wall_s` has the wait for a free worker in it.
  """

  text: str
  status: str = "ok"
  wall_s: float = 0.0
  cpu_s: float = 0.0


class Tool(Protocol):
  """Runs code for the policy. Many calls may be in flight at once."""

  async def run(self, code: str, *, session: str) -> ToolOutcome:
    """Runs `code`; `session` names the episode, for tools that keep state between its calls."""
    ...

  async def end(self, session: str) -> None:
    """The episode is over; what was kept for it is given up."""
    ...


@dataclasses.dataclass(frozen=True)
class DialectState:
  """What a dialect must remember between two completions of one episode.

  Attributes:
    mode: What the policy is writing now; the names are the dialect's own.
    calls: Calls made so far.
    pending: Text of a call that has begun and is not complete.
  """

  mode: str
  calls: int = 0
  pending: str = ""


@dataclasses.dataclass(frozen=True)
class Call:
  """A call read out of a completion. A `malformed` one is not run: that text is its result."""

  code: str
  malformed: str = ""


@dataclasses.dataclass(frozen=True)
class Generate:
  """Ask the engine again: the policy's turn goes on."""

  state: DialectState


@dataclasses.dataclass(frozen=True)
class RunCalls:
  """Run the calls, side by side, then append their rendered results."""

  calls: tuple[Call, ...]
  state: DialectState


@dataclasses.dataclass(frozen=True)
class End:
  """The episode is over; `unrun` are the calls over the budget that ended it."""

  status: EndStatus
  unrun: tuple[Call, ...] = ()


Action = Generate | RunCalls | End


@dataclasses.dataclass(frozen=True)
class Rendered:
  """Results as the policy sees them.

  Attributes:
    text: The whole text to append, encoded once.
    observations: Per call, the tool's text after truncation, without the dialect's frame.
    state: State for the next completion.
  """

  text: str
  observations: tuple[str, ...]
  state: DialectState


class Dialect(Protocol):
  """How a policy and a tool speak with each other."""

  def render_prompt(self, problem: Problem) -> str:
    """The prompt as text. Raises `ValueError` for a problem that this dialect cannot show."""
    ...

  def start(self) -> DialectState:
    """State before the first completion."""
    ...

  def stops(self, state: DialectState) -> tuple[str, ...]:
    """Stop strings of the next completion."""
    ...

  def read(self, state: DialectState, text: str, finish: Finish) -> Action:
    """What follows a completion. Only called for finish reason `stop`, so a call cut off by length is never run."""
    ...

  def render_results(self, state: DialectState, outcomes: Sequence[ToolOutcome], tokenizer: Tokenizer) -> Rendered:
    """Results of the calls of one `RunCalls`, in its order; `state` is that action's state."""
    ...
