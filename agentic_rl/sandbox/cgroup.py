"""A control group for all snippets of one interpreter, where the host lets us make one. Standard library only."""

from __future__ import annotations

import contextlib
import os
import time

_ROOT = "/sys/fs/cgroup"
_MEMORY = {"memory.max": "memory.swap.max", "memory.limit_in_bytes": "memory.memsw.limit_in_bytes"}
"""Limit of memory in version 2 and in version 1, with the limit of memory and swap, which may be missing."""


class Group:
  """A control group, or none.

  Attributes:
    path: Its directory; empty if there is none.
    text: What is in force or why it is not.
  """

  def __init__(self, path: str, text: str) -> None:
    self.path, self.text = path, text

  @classmethod
  def make(cls, memory_mib: int) -> Group:
    """Makes a group below our own, or beside it, with a limit of memory; without a limit there is no group."""
    if not memory_mib:
      return cls("", "not wanted")
    reasons = []
    for parent in _candidates():
      path = os.path.join(parent, f"agentic_rl-sandbox-{os.getpid()}")
      try:
        os.mkdir(path)
      except OSError as error:
        reasons.append(f"{parent}: {error.strerror}")
        continue
      for name, with_swap in _MEMORY.items():
        if os.path.exists(os.path.join(path, name)):
          try:
            _write(os.path.join(path, name), str(memory_mib << 20))
            with contextlib.suppress(OSError):  # no swap accounting
              _write(os.path.join(path, with_swap), "0" if name == "memory.max" else str(memory_mib << 20))
            return cls(path, f"memory of all snippets at most {memory_mib} MiB")
          except OSError as error:
            reasons.append(f"{path}: {error.strerror}")
      reasons.append(f"{parent}: memory is not delegated")
      os.rmdir(path)
    return cls(
      "", "total_memory_mib needs a control group, which cannot be made: " + ("; ".join(reasons) or "none here")
    )

  def join(self) -> None:
    """Moves the calling process, and so its future children, into the group."""
    if self.path:
      _write(os.path.join(self.path, "cgroup.procs"), "0")

  def remove(self) -> None:
    """Removes the group when its last process has gone."""
    if not self.path:
      return
    for _ in range(100):
      try:
        os.rmdir(self.path)
        return
      except OSError:  # a process is still on its way out
        time.sleep(0.02)


def _candidates() -> list[str]:
  """Directories of our own group and of its parent, in whichever hierarchy limits memory."""
  found = []
  try:
    with open("/proc/self/cgroup", encoding="utf-8") as file:
      lines = file.read().splitlines()
  except OSError:
    return []
  for line in lines:
    number, controllers, path = line.split(":", 2)
    if "memory" in controllers.split(","):
      mount = os.path.join(_ROOT, "memory")
    elif number == "0" and not controllers:
      mount = _ROOT
    else:
      continue
    own = os.path.join(mount, path.lstrip("/")).rstrip("/")
    found += [own] if own == mount else [own, os.path.dirname(own)]
  return [path for path in found if os.path.exists(os.path.join(path, "cgroup.procs"))]


def _write(path: str, text: str) -> None:
  with open(path, "w", encoding="ascii") as file:
    file.write(text)
