"""User ids and working directories that the zygote lends to its children. Standard library only."""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Callable

from agentic_rl.sandbox import isolation, lowlevel
from agentic_rl.sandbox.scratch import remove_tree

_MOST_IDLE = 256
_REST = 1024  # so many other users come between two uses of one
_FIRST_OWN_DESCRIPTOR = 3


class Lender:
  """Lends a user id and a directory to each child, and takes them back.

  Args:
    plan: The isolation in force.
    directory: Where the directories lie if the children see the host's files.
    on_sweeper: Told of each process that was forked to remove a full directory.
  """

  def __init__(self, plan: isolation.Plan, directory: str, on_sweeper: Callable[[int], None]) -> None:
    self._plan = plan
    self._own_root = plan.level == "namespace"
    self._base = isolation.SCRATCH if self._own_root else directory
    self._on_sweeper = on_sweeper
    self._mounts: dict[int, list[str]] = {}  # empty file systems by size in MiB
    self._users: collections.deque[int] = collections.deque()
    self._idle = 0  # of these, how many there are
    self._next_user = 0
    self._count = 0

  def take(self, disk_mib: int) -> tuple[str, int]:
    """A working directory and a user id that no other child has; 0 where the user is kept.

    Raises:
      OSError: The directory cannot be made.
    """
    uid = self._take_user()
    if self._own_root and not uid:
      return isolation.SCRATCH, 0  # all have the same user, so that each needs a mount that only it sees
    free = self._mounts.get(disk_mib)
    if free:
      directory = free.pop()
      self._idle -= 1
    else:
      self._count += 1
      directory = os.path.join(self._base, str(self._count))
      os.mkdir(directory, 0o700)
      if self._own_root:
        isolation.mount_scratch(directory, disk_mib)
    if uid:
      os.chown(directory, uid, uid)
      os.chmod(directory, 0o700)
      os.utime(directory, (0, 0))  # what the last one left there could be a message
    return directory, uid

  def give_back(self, directory: str, uid: int, disk_mib: int) -> None:
    """Takes back what an ended child had."""
    if uid:
      self._users.append(uid)
    if directory == isolation.SCRATCH:
      return
    if not self._own_root:
      self._remove(directory)
      return
    if os.listdir(directory):  # a new file system is quicker than to remove who knows what
      lowlevel.unmount(directory)
      os.rmdir(directory)
      return
    self._mounts.setdefault(disk_mib, []).append(directory)
    self._idle += 1
    while self._idle > _MOST_IDLE:  # of the size that was used first
      size = next(iter(self._mounts))
      for other in self._mounts.pop(size):
        lowlevel.unmount(other)
        os.rmdir(other)
        self._idle -= 1

  def _take_user(self) -> int:
    if not self._plan.first_uid:
      return 0
    if len(self._users) > _REST:
      return self._users.popleft()
    self._next_user += 1
    return self._plan.first_uid + self._next_user % (isolation.MOST_USERS // 2)

  def _remove(self, directory: str) -> None:
    """Removes a directory; a full one in a child, as that may take long."""
    with contextlib.suppress(OSError):
      os.rmdir(directory)
      return
    try:
      pid = os.fork()
    except OSError:
      remove_tree(directory)
      return
    if pid:
      self._on_sweeper(pid)
      return
    try:
      os.closerange(_FIRST_OWN_DESCRIPTOR, os.sysconf("SC_OPEN_MAX"))  # else the pool would wait for it
      remove_tree(directory)
    finally:
      os._exit(0)
