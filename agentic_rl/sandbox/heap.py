"""Lays a parent's heap out for forks: the fewer of its pages parent and child write, the cheaper a child is.

A page that is written after a fork is copied first, at some microseconds each. Python writes all over the heap even to
read: every use of an object changes its reference count. Standard library only.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import sys
import sysconfig
import types
from collections.abc import Sequence
from typing import Any

_ALIGNMENT = 16
_LARGEST = 512  # what Python's allocator of small blocks takes
_POOL_BYTES, _POOL_HEAD = 16 << 10, 48
_MOST_BYTES = 8 << 20
_IMMORTAL = 0xFFFF_FFFF  # all 32 bits of what PEP 683 checks
_KNOWN_VERSIONS = ((3, 12), (3, 13))
_CODE_PARTS = tuple(name for name in dir(types.CodeType) if name.startswith("co_") and name != "co_lines")


def settle() -> int:
  """Makes all that is in memory now as read-only as can be; to be called once, before the first fork.

  Returns:
    How many objects no longer count their references; 0 before Python 3.12.
  """
  gc.collect()
  count = _make_immortal() if _can_be_immortal() else 0
  gc.collect()  # this empties Python's lists of free objects, which are holes like others
  _FILLERS.extend(_fill_holes())
  gc.freeze()  # a collection in a child would write to every object
  return count


_FILLERS: list[Any] = []


def _fill_holes() -> list[Any]:
  """Takes the free blocks between used ones, so that what is allocated from now on lies together.

  Returns:
    What fills the holes.
  """
  fillers: list[Any] = []
  for size in range(_ALIGNMENT, _LARGEST + 1, _ALIGNMENT):
    pool = (_POOL_BYTES - _POOL_HEAD) // size
    for _ in range(_MOST_BYTES // (3 * pool * size)):
      batch = [_block(size) for _ in itertools.repeat(None, 3 * pool)]
      fillers += batch
      if _longest_run([id(item) for item in batch], size) >= pool:  # a pool without holes: there are none left
        break
  return fillers


def _block(size: int) -> object:
  """An object that takes a block of so many bytes and is in no list of free objects when it dies."""
  if size <= 2 * _ALIGNMENT:
    return object() if size == _ALIGNMENT else complex(0.0, size)
  return bytes(size - sys.getsizeof(b""))


def _longest_run(addresses: Sequence[int], step: int) -> int:
  longest = run = 1
  for before, after in itertools.pairwise(addresses):
    run = run + 1 if after - before == step else 1
    longest = max(longest, run)
  return longest


def _can_be_immortal() -> bool:
  return sys.version_info[:2] in _KNOWN_VERSIONS and not sysconfig.get_config_var("Py_GIL_DISABLED")


def _make_immortal() -> int:
  """Sets the reference counts of all objects to what PEP 683 reserves: they are neither changed nor freed any more."""
  found: list[Any] = []
  seen: set[int] = set()
  stack: list[Any] = [*gc.get_objects(), sys.modules]
  own = {id(found), id(seen), id(stack)}
  while stack:
    item = stack.pop()
    if id(item) in seen or id(item) in own or isinstance(item, types.FrameType):
      continue
    seen.add(id(item))
    found.append(item)
    stack.extend(gc.get_referents(item))
    if isinstance(item, types.CodeType):  # the collector does not look into it
      stack.extend(getattr(item, name) for name in _CODE_PARTS)
  for item in found:
    ctypes.c_uint32.from_address(id(item)).value = _IMMORTAL
  return len(found)
