"""What a verifier is, and the registry of verifiers by name."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Protocol

from agentic_rl.episode import Episode
from agentic_rl.errors import UserError


@dataclasses.dataclass(frozen=True)
class Reward:
  """Outcome of a verification.

  Attributes:
    value: The reward that the learner sees.
    parts: Named parts, each a metric; `correct` (0 or 1) and `answered` (0 or 1) are always there.
  """

  value: float
  parts: Mapping[str, float]

  def __post_init__(self) -> None:
    if not math.isfinite(self.value):
      raise ValueError(f"a reward must be finite, got {self.value}")
    missing = {"correct", "answered"} - set(self.parts)
    if missing:
      raise ValueError(f"a reward lacks its part {sorted(missing)[0]!r}; give parts for correct and answered")


class Verifier(Protocol):
  """Scores a finished episode. Must be safe to call from any thread, and must not use signals."""

  def __call__(self, episode: Episode) -> Reward:
    """Scores the whole episode. Raises where it cannot tell: a failure is never a reward of zero."""
    ...

  def answer(self, episode: Episode) -> str | None:
    """The episode's answer in a form in which equal answers are equal strings; None where there is none."""
    ...


_VERIFIERS: dict[str, Verifier] = {}


def register_verifier(name: str, verifier: Verifier) -> None:
  """Makes a verifier known under a name. Raises `ValueError` for a name that is taken."""
  if name in _VERIFIERS:
    raise ValueError(f"a verifier named {name!r} is registered already; choose another name")
  _VERIFIERS[name] = verifier


def get_verifier(name: str) -> Verifier:
  """The verifier of that name. Raises `UserError` with the nearest known name."""
  if name not in _VERIFIERS:
    near = difflib.get_close_matches(name, _VERIFIERS, n=1, cutoff=0.0)
    raise UserError(f"no verifier is named {name!r}; did you mean {near[0]!r}? Known: {', '.join(sorted(_VERIFIERS))}")
  return _VERIFIERS[name]
