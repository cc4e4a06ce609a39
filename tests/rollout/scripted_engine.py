"""A policy that writes what a test tells it to, token by token, under the stops and limits of the Engine interface."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from agentic_rl.episode import Completion, Finish, FinishKind, Problem, Publication
from agentic_rl.rollout.engine import Sampling
from agentic_rl.tokenizer import PieceTokenizer
from agentic_rl.tools import ToolOutcome

# "he" + "llo" is not what "hello" encodes to, and a fence comes glued to its line end.
TOKENIZER = PieceTokenizer(
  [
    *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;()+-*/=<>_{}[]\\\n`'?",
    *(
      "he",
      "llo",
      "hello",
      "```python\n",
      "```python",
      "\n```\n",
      "```",
      "```output\n",
      "print(",
      "\\boxed{",
      "</answer>",
    ),
  ],
  unknown="?",
)


def ids(*pieces: str) -> list[int]:
  """Ids of exactly these pieces; `ids("he", "llo")` is not `TOKENIZER.encode("hello")`."""
  return [TOKENIZER.pieces.index(piece) for piece in pieces]


def encode(text: str) -> list[int]:
  return TOKENIZER.encode(text)


EOS = [TOKENIZER.eos_id]


def logprob(token: int, position: int) -> float:
  """A log-probability that tells token and position, not exact in decimal."""
  return -(token + 1) / 7 - position / 1000


@dataclasses.dataclass
class Request:
  session: str
  token_ids: tuple[int, ...]
  sampling: Sampling
  completion: Completion | None = None


class ScriptedEngine:
  """Emits the stream of a session from request to request; an exception in a stream is raised there."""

  def __init__(
    self,
    streams: Mapping[str, Sequence[int | BaseException]] | Callable[[str], Sequence[int | BaseException]],
    *,
    version: int = 3,
    delay_s: float = 0.0,
  ):
    self._streams = streams if callable(streams) else streams.__getitem__
    self._left: dict[str, list[int | BaseException]] = {}
    self._version, self._delay_s = version, delay_s
    self.requests: list[Request] = []
    self.ended: list[str] = []
    self.running = self.most_running = 0

  async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
    request = Request(session, tuple(token_ids), sampling)
    self.requests.append(request)
    self.running += 1
    self.most_running = max(self.most_running, self.running)
    try:
      await asyncio.sleep(self._delay_s)
      request.completion = self._complete(request)
      return request.completion
    finally:
      self.running -= 1

  def _complete(self, request: Request) -> Completion:
    left = self._left.setdefault(request.session, list(self._streams(request.session)))
    sampling, new, finish = request.sampling, [], Finish(FinishKind.LENGTH)
    while len(new) < sampling.max_new_tokens:
      if not left:
        finish = Finish(FinishKind.ABORT, "the script ended")
        break
      token = left.pop(0)
      if isinstance(token, BaseException):
        raise token
      new.append(token)
      if token in sampling.stop_token_ids:
        finish = Finish(FinishKind.STOP, token)
        break
      matched = [stop for stop in sampling.stop if stop in TOKENIZER.decode(new)]
      if matched:
        finish = Finish(FinishKind.STOP, matched[0])
        break
    start = len(request.token_ids)
    logprobs = tuple(logprob(t, start + i) for i, t in enumerate(new))
    return Completion(tuple(new), logprobs, finish, (self._version,) * len(new))

  async def load(self, publication: Publication) -> None:
    self._version = publication.version

  async def end_session(self, session: str) -> None:
    self.ended.append(session)

  async def close(self) -> None:
    pass


class ScriptedTool:
  """Answers calls in order from a list, or each with the same outcome."""

  def __init__(self, *outcomes: ToolOutcome | BaseException, delay_s: float = 0.0):
    self.outcomes, self.delay_s = list(outcomes) or [ToolOutcome("4")], delay_s
    self.codes: list[str] = []
    self.ended: list[str] = []

  async def end(self, session: str) -> None:
    self.ended.append(session)

  async def run(self, code: str, *, session: str) -> ToolOutcome:
    self.codes.append(code)
    await asyncio.sleep(self.delay_s)
    outcome = self.outcomes[0] if len(self.outcomes) == 1 else self.outcomes.pop(0)
    if isinstance(outcome, BaseException):
      raise outcome
    return outcome


def problem(uid: str = "p", prompt: str = "2+2=", answer: str = "4", verifier: str = "boxed") -> Problem:
  return Problem(uid, "test", "math", prompt, answer, verifier)


def call(code: str) -> list[int]:
  """Ids of a whole call as the study's policy writes it: both fences glued to line ends."""
  return ids("```python\n") + encode(code) + ids("\n```\n")
