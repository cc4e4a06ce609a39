"""The nouns of the project: what a problem, a completion, an episode and a publication are.

Every class is frozen and checks its invariants where it is made, so that a wrong mask or a missing log-probability
fails at its source and not in a loss curve. This module imports nothing else of the project and no numerical library.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Message = Mapping[str, Any]
"""One chat message: `{"role": ..., "content": ...}`."""


@dataclasses.dataclass(frozen=True)
class Problem:
  """A question whose answer can be verified.

  Attributes:
    uid: Unique and stable over runs; the samples of one problem form a group under it.
    source: Name of the data set or generator, e.g. `orz_57k` or `arithmetic/product`.
    domain: `math`, `science` or `code`.
    prompt: Raw question text, or chat messages for chat models.
    answer: Specification of the right answer, read by the verifier.
    verifier: Name of the verifier in `agentic_rl.rewards`.
    metadata: Anything else, e.g. the difficulty; must be JSON-serialisable.
  """

  uid: str
  source: str
  domain: str
  prompt: str | tuple[Message, ...]
  answer: str
  verifier: str = "boxed"
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    if not self.uid:
      raise ValueError(f"a problem of source {self.source!r} has no uid")
    if not self.prompt:
      raise ValueError(f"problem {self.uid!r} has an empty prompt")
    if not self.answer.strip():
      raise ValueError(
        f"problem {self.uid!r} has no answer, so it cannot be verified; remove the row or add its answer"
      )


class FinishKind(enum.StrEnum):
  """Why an engine stopped."""

  STOP = "stop"
  LENGTH = "length"
  ABORT = "abort"


@dataclasses.dataclass(frozen=True)
class Finish:
  """Typed finish reason; `matched` is the stop string or stop token id for `STOP`, the engine's message for `ABORT`."""

  kind: FinishKind
  matched: str | int | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
  """What an engine returned for one request.

  Attributes:
    token_ids: Sampled ids, including those that completed the stop.
    logprobs: Natural log-probability of each id under the distribution that it was sampled from.
    finish: Why generation ended.
    versions: Version of the weights that sampled each id.
    cached_tokens: Prompt tokens whose keys and values were reused.
  """

  token_ids: tuple[int, ...]
  logprobs: tuple[float, ...]
  finish: Finish
  versions: tuple[int, ...]
  cached_tokens: int = 0

  def __post_init__(self) -> None:
    if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
      raise ValueError(
        f"a completion needs one log-probability and one version for every id: "
        f"{len(self.token_ids)} ids, {len(self.logprobs)} log-probabilities, {len(self.versions)} versions"
      )
    if not all(math.isfinite(x) and x <= 1e-4 for x in self.logprobs):
      raise ValueError("a completion has a log-probability that is positive or not finite")


Origin = Literal["prompt", "policy", "tool"]


@dataclasses.dataclass(frozen=True)
class Segment:
  """A run of tokens with one origin. Only `policy` segments carry log-probabilities and versions.

  `text` is the decoded form for readers and verifiers; it is never encoded again.
  """

  origin: Origin
  token_ids: tuple[int, ...]
  text: str
  logprobs: tuple[float, ...] = ()
  versions: tuple[int, ...] = ()

  def __post_init__(self) -> None:
    if self.origin not in ("prompt", "policy", "tool"):
      raise ValueError(f"unknown segment origin {self.origin!r}")
    want = len(self.token_ids) if self.origin == "policy" else 0
    if len(self.logprobs) != want or len(self.versions) != want:
      raise ValueError(
        f"a {self.origin} segment of {len(self.token_ids)} tokens needs {want} log-probabilities and versions, "
        f"got {len(self.logprobs)} and {len(self.versions)}"
      )


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """One executed (or refused) tool call of an episode.

  Attributes:
    code: Source that was run.
    observation: Text that the policy saw.
    status: Status of the interpreter's result (`ok`, `error`, `timeout`, ...).
    wall_s, cpu_s: Seconds that the call took.
  """

  code: str
  observation: str
  status: str
  wall_s: float = 0.0
  cpu_s: float = 0.0


class EndStatus(enum.StrEnum):
  """How an episode ended."""

  ANSWERED = "answered"  # the policy ended its turn by itself
  LENGTH = "length"  # the token budget ran out
  CALL_BUDGET = "call_budget"  # a call over the budget ended it
  ABORTED = "aborted"  # the engine or the interpreter failed; must not be trained on


@dataclasses.dataclass(frozen=True)
class Episode:
  """One finished trajectory.

  Invariants: the concatenated ids are exactly what the engine saw and returned; `loss_mask[t]` is true iff the policy
  sampled token t; the first segment is the prompt.
  """

  uid: str
  sample: int
  problem: Problem
  segments: tuple[Segment, ...]
  calls: tuple[ToolCall, ...]
  status: EndStatus
  reward: float | None = None
  reward_parts: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    if self.uid != self.problem.uid:
      raise ValueError(f"episode uid {self.uid!r} is not its problem's uid {self.problem.uid!r}")
    if not self.segments or self.segments[0].origin != "prompt":
      raise ValueError(f"episode {self.uid!r}/{self.sample} does not start with its prompt")
    if any(s.origin == "prompt" for s in self.segments[1:]):
      raise ValueError(f"episode {self.uid!r}/{self.sample} has a second prompt segment")
    if self.reward is not None and not math.isfinite(self.reward):
      raise ValueError(f"episode {self.uid!r}/{self.sample} has reward {self.reward}")

  @property
  def token_ids(self) -> tuple[int, ...]:
    return tuple(t for s in self.segments for t in s.token_ids)

  @property
  def loss_mask(self) -> tuple[bool, ...]:
    return tuple(s.origin == "policy" for s in self.segments for _ in s.token_ids)

  @property
  def logprobs(self) -> tuple[float, ...]:
    """Behaviour log-probabilities, 0 where the policy did not sample."""
    return tuple(x for s in self.segments for x in (s.logprobs or (0.0,) * len(s.token_ids)))

  @property
  def versions(self) -> tuple[int, ...]:
    """Policy version of each token, -1 where the policy did not sample."""
    return tuple(v for s in self.segments for v in (s.versions or (-1,) * len(s.token_ids)))

  def length(self, origin: Origin) -> int:
    """Number of tokens of one origin."""
    return sum(len(s.token_ids) for s in self.segments if s.origin == origin)

  def text(self, origin: Origin | None = None) -> str:
    """Decoded text of all segments, or of those of one origin."""
    return "".join(s.text for s in self.segments if origin is None or s.origin == origin)

  @property
  def last_turn_text(self) -> str:
    """Policy text after the last tool result: the only place where an answer counts."""
    turn: list[str] = []
    for s in reversed(self.segments):
      if s.origin != "policy":
        break
      turn.append(s.text)
    return "".join(reversed(turn))

  def with_reward(self, reward: float, parts: Mapping[str, float]) -> Episode:
    return dataclasses.replace(self, reward=reward, reward_parts=dict(parts))


def policy_segment(completion: Completion, text: str) -> Segment:
  """The segment of an engine's completion, ids untouched."""
  return Segment("policy", completion.token_ids, text, completion.logprobs, completion.versions)


@dataclasses.dataclass(frozen=True)
class Publication:
  """One immutable, complete set of policy weights on disk.

  Attributes:
    version: Counts up by one an iteration; version 0 is the base model.
    path: Directory that holds the Orbax checkpoint and the manifest.
    fingerprint: Hash of the tree structure, shapes and dtypes.
    policy: The policy's configuration as plain values.
  """

  version: int
  path: str
  fingerprint: str
  policy: Mapping[str, Any]


def group_by_uid(episodes: Sequence[Episode]) -> dict[str, list[Episode]]:
  """Groups episodes by problem, samples sorted, whatever order they finished in."""
  groups: dict[str, list[Episode]] = {}
  for episode in episodes:
    groups.setdefault(episode.uid, []).append(episode)
  for group in groups.values():
    group.sort(key=lambda e: e.sample)
  return dict(sorted(groups.items()))
