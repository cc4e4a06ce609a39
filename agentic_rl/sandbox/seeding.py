"""Seeds the generators that a snippet may use, also those of modules that it imports later. Standard library only."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from typing import Any


class _SeedLater:
  """Seeds the generators of modules when they are imported, in front of the finders of `sys.meta_path`."""

  def __init__(self, seeds: dict[str, Callable[[Any], None]]) -> None:
    self._seeds = seeds

  def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
    seed = self._seeds.get(name)
    if seed is None:
      return None
    for finder in sys.meta_path:
      spec = None if finder is self else finder.find_spec(name, path, target)
      if spec is not None:
        spec.loader = _Seeded(spec.loader, seed)  # type: ignore[assignment]  # it does all that a loader does
        return spec
    return None


class _Seeded:
  """A loader that seeds what it has loaded; otherwise as the one it stands for."""

  def __init__(self, loader: Any, seed: Callable[[Any], None]) -> None:
    self._loader, self._seed = loader, seed

  def __getattr__(self, name: str) -> Any:
    return getattr(self._loader, name)

  def create_module(self, spec: Any) -> Any:
    return self._loader.create_module(spec)

  def exec_module(self, module: Any) -> None:
    self._loader.exec_module(module)
    module.__spec__.loader = module.__loader__ = self._loader
    self._seed(module)


def seed_generators(seed: int) -> None:
  """Seeds `random`, `numpy.random` and sympy's generator; to be called once, in a child."""
  random.seed(seed)
  later = {}
  for name, value in (("numpy.random", seed % (1 << 32)), ("sympy.core.random", seed)):
    module = sys.modules.get(name)
    if module is not None:
      module.seed(value)
    else:
      later[name] = functools.partial(_seed_module, value)
  if later:
    sys.meta_path.insert(0, _SeedLater(later))  # type: ignore[arg-type]


def _seed_module(value: int, module: Any) -> None:
  module.seed(value)
