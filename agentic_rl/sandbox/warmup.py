"""x"""

from collections.abc import Iterable


def warm(modules: Iterable[str]) -> dict[str, str]:
  """X"""
  return {}
