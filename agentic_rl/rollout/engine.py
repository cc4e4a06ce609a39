"""The interface of all generation engines: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from agentic_rl.episode import Completion, Publication


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How one request is sampled.

  Attributes:
    max_new_tokens: Most ids to return.
    temperature: Softmax temperature; 0 is greedy.
    stop: Stop strings. Ids up to and including the one that completes a match are returned.
    stop_token_ids: Ids that end generation; the id itself is returned.
    top_p, top_k: Truncated sampling, for evaluation only. The returned log-probabilities are those of the
      temperature-scaled, untruncated softmax (the convention of SGLang).
    seed: Seed of this request: the same seed, ids and weights give the same completion, up to rounding of the logits,
      whatever else is in flight.
  """

  max_new_tokens: int
  temperature: float = 1.0
  stop: tuple[str, ...] = ()
  stop_token_ids: tuple[int, ...] = ()
  top_p: float = 1.0
  top_k: int = -1
  seed: int = 0

  def __post_init__(self) -> None:
    if self.max_new_tokens < 1:
      raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
    if self.temperature < 0:
      raise ValueError(f"temperature must not be negative, got {self.temperature}")
    if not 0 < self.top_p <= 1:
      raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")


class Engine(Protocol):
  """Generates completions. Many requests may be in flight at once."""

  async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
    """Continues `token_ids`. Requests of one `session` share cached keys and values where ids agree."""
    ...

  async def load(self, publication: Publication) -> None:
    """Switches to a publication; on return, new requests use it and no older cached key or value."""
    ...

  async def end_session(self, session: str) -> None:
    """Frees what is cached for a session."""
    ...

  async def close(self) -> None:
    """Stops the engine and frees its memory."""
    ...
