"""One episode: the engine writes, the dialect reads, the tool answers, until the policy, a budget or a failure ends it.

Token in, token out: sampled ids go from the engine into the episode as they are. Only the prompt and what tools return
are encoded, each once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging

from agentic_rl.episode import EndStatus, Episode, FinishKind, Problem, Segment, ToolCall, policy_segment
from agentic_rl.errors import UserError
from agentic_rl.rollout.engine import Engine, Sampling
from agentic_rl.tokenizer import Tokenizer
from agentic_rl.tools import (
  INFRA_ERROR,
  MALFORMED,
  OVER_BUDGET,
  Call,
  Dialect,
  DialectState,
  End,
  Generate,
  Tool,
  ToolOutcome,
)

log = logging.getLogger(__name__)


def request_seed(seed: int, uid: str, sample: int, turn: int) -> int:
  """Seed of one engine request, 0 <= seed < 2**63: a stable hash, the same in every process and on every machine."""
  digest = hashlib.blake2b(f"{seed}\0{uid}\0{sample}\0{turn}".encode(), digest_size=8).digest()
  return int.from_bytes(digest, "big") >> 1


def encode_prompt(tokenizer: Tokenizer, dialect: Dialect, problem: Problem, max_tokens: int) -> Segment:
  """The prompt segment of a problem. Raises `UserError` where it leaves no token of the budget to the policy."""
  text = dialect.render_prompt(problem)
  ids = tuple(tokenizer.encode_prompt(text))
  if len(ids) >= max_tokens:
    raise UserError(
      f"the prompt of problem {problem.uid!r} has {len(ids)} tokens and max_tokens is {max_tokens}, which leaves none "
      f"to the policy; raise max_tokens or drop the problem"
    )
  return Segment("prompt", ids, text)


async def run_episode(
  engine: Engine,
  tokenizer: Tokenizer,
  dialect: Dialect,
  tool: Tool | None,
  problem: Problem,
  sample: int,
  *,
  sampling: Sampling,
  max_tokens: int,
  prompt: Segment | None = None,
) -> Episode:
  """Runs one sample of a problem to its end.

  Args:
    engine: Generates; its cached session `uid/sample` is ended in any case.
    tokenizer: The engine's tokenizer.
    dialect: How the policy calls the tool.
    tool: Runs the calls; None only where the dialect never asks for one.
    problem: The problem.
    sample: Number of the sample within its group.
    sampling: Temperature and the like. `max_new_tokens` bounds one completion, `seed` is the base from which the seed
      of every request is derived, `stop` must be empty since the dialect decides on it.
    max_tokens: Most tokens of the whole sequence: prompt, policy and tool. A result is appended iff it fits.
    prompt: The segment of `encode_prompt`, where many samples share it.

  Returns:
    The unscored episode. Status `aborted` where the engine aborted the request or the tool failed by no fault of the
    policy.

  Raises:
    UserError: The prompt leaves no room, or a call is made and there is no tool.
    ValueError: `sampling.stop` is set.
    Exception: Whatever the engine raises.
  """
  if sampling.stop:
    raise ValueError(f"stop strings belong to the dialect; remove {sampling.stop!r} from the sampling")
  if prompt is None:
    prompt = encode_prompt(tokenizer, dialect, problem, max_tokens)
  session = f"{problem.uid}/{sample}"
  try:
    run = _Run(engine, tokenizer, dialect, tool, session, sampling, max_tokens, [prompt], [], len(prompt.token_ids))
    status = await run.to_end(problem.uid, sample)
  finally:
    if tool is not None:
      await tool.end(session)
    await engine.end_session(session)
  return Episode(problem.uid, sample, problem, tuple(run.segments), tuple(run.calls), status)


@dataclasses.dataclass
class _Run:
  """An episode while it runs."""

  engine: Engine
  tokenizer: Tokenizer
  dialect: Dialect
  tool: Tool | None
  session: str
  sampling: Sampling
  max_tokens: int
  segments: list[Segment]
  calls: list[ToolCall]
  length: int

  async def to_end(self, uid: str, sample: int) -> EndStatus:
    ids = list(self.segments[0].token_ids)
    ends = tuple(dict.fromkeys((self.tokenizer.eos_id, *self.sampling.stop_token_ids)))
    state = self.dialect.start()
    turn = 0
    while self.length < self.max_tokens:
      request = dataclasses.replace(
        self.sampling,
        max_new_tokens=min(self.sampling.max_new_tokens, self.max_tokens - self.length),
        stop=self.dialect.stops(state),
        stop_token_ids=ends,
        seed=request_seed(self.sampling.seed, uid, sample, turn),
      )
      completion = await self.engine.generate(tuple(ids), request, session=self.session)
      turn += 1
      text = self.tokenizer.decode(completion.token_ids)
      if completion.token_ids:
        self._append(policy_segment(completion, text), ids)
      if completion.finish.kind is FinishKind.ABORT:
        log.warning("episode %s: the engine aborted turn %d: %s", self.session, turn, completion.finish.matched)
        return EndStatus.ABORTED
      # How a turn ended is what the engine says; a call that was cut off is never read, let alone run.
      if completion.finish.kind is FinishKind.LENGTH:
        return EndStatus.LENGTH
      if not completion.token_ids:
        raise RuntimeError(f"the engine returned no token and finish reason stop in turn {turn} of {self.session}")
      action = self.dialect.read(state, text, completion.finish)
      if isinstance(action, End):
        self.calls += [ToolCall(call.code, "", OVER_BUDGET) for call in action.unrun]
        return action.status
      if isinstance(action, Generate):
        state = action.state
        continue
      ended, state = await self._answer(action.calls, action.state, ids)
      if ended is not None:
        return ended
    return EndStatus.LENGTH

  async def _answer(
    self, calls: tuple[Call, ...], state: DialectState, ids: list[int]
  ) -> tuple[EndStatus | None, DialectState]:
    """Runs calls side by side and appends their results, in order. Gives the end status if the episode ends here."""
    outcomes = await asyncio.gather(*(self._run_call(call) for call in calls))
    rendered = self.dialect.render_results(state, outcomes, self.tokenizer)
    for call, outcome, observation in zip(calls, outcomes, rendered.observations, strict=True):
      self.calls.append(ToolCall(call.code, observation, outcome.status, outcome.wall_s, outcome.cpu_s))
    failed = [outcome.text for outcome in outcomes if outcome.status == INFRA_ERROR]
    if failed:
      log.warning("episode %s: the tool failed: %s", self.session, failed[0])
      return EndStatus.ABORTED, state
    encoded = tuple(self.tokenizer.encode(rendered.text))
    if self.length + len(encoded) > self.max_tokens:
      return EndStatus.LENGTH, state
    self._append(Segment("tool", encoded, rendered.text), ids)
    return None, rendered.state

  async def _run_call(self, call: Call) -> ToolOutcome:
    if call.malformed:
      return ToolOutcome(call.malformed, MALFORMED)
    if self.tool is None:
      raise UserError(f"episode {self.session} called a tool and has none; pass a tool, or a call budget of 0")
    return await self.tool.run(call.code, session=self.session)

  def _append(self, segment: Segment, ids: list[int]) -> None:
    self.segments.append(segment)
    ids.extend(segment.token_ids)
    self.length += len(segment.token_ids)
