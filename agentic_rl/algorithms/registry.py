"""Functions by name, so that a configuration can choose one and a misspelt name is answered with the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast

from agentic_rl.errors import UserError

F = TypeVar("F", bound=Callable[..., object])
G = TypeVar("G", bound=Callable[..., object])


class Registry(Generic[F]):
  """A table of functions of one kind.

  A new function joins with `@TABLE.register` above it; its file is imported in `agentic_rl/algorithms/__init__.py`.
  """

  def __init__(self, noun: str):
    """`noun` names the kind of function in error messages, e.g. `advantage`."""
    self.noun = noun
    self._functions: dict[str, F] = {}

  def register(self, function: G) -> G:
    """Adds `function` under its own name and returns it. Raises `ValueError` for a name that is taken."""
    name = function.__name__
    if name in self._functions:
      raise ValueError(f"there are two {self.noun} functions named {name!r}; rename one")
    self._functions[name] = cast(F, function)
    return function

  def __getitem__(self, name: str) -> F:
    """The function of that name. Raises `UserError` that names the nearest known one."""
    if name not in self._functions:
      nearest = difflib.get_close_matches(name, self._functions, n=1, cutoff=0.0)[0]
      known = ", ".join(sorted(self._functions))
      raise UserError(f"unknown {self.noun} {name!r}; did you mean {nearest!r}? Known: {known}")
    return self._functions[name]

  def __contains__(self, name: object) -> bool:
    return name in self._functions

  def __iter__(self) -> Iterator[str]:
    return iter(sorted(self._functions))
