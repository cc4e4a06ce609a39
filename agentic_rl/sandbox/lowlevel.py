"""The few Linux calls that Python's standard library lacks, and what `/proc` tells about processes.

Used inside the zygote and its children: standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, argument: int) -> bool:
  unused = ctypes.c_ulong(0)
  return _libc.prctl(option, ctypes.c_ulong(argument), unused, unused, unused) == 0


def die_with_parent() -> None:
  """The kernel sends SIGKILL to this process when the thread that forked it ends."""
  _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_subreaper() -> bool:
  """Orphaned descendants become children of this process, so that it can see and kill them."""
  return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> bool:
  """No exec can gain privileges any more (set-uid bits, file capabilities, root's capabilities)."""
  return _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _drop_capabilities() -> bool:
  header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
  return _libc.capset(header, bytes(24)) == 0


def _can_still_import() -> bool:
  for path in sys.path:
    if not os.path.isdir(path):
      continue
    try:
      os.listdir(path)
    except PermissionError:
      return False
  return True


def drop_capabilities() -> bool:
  """Gives up all capabilities, unless the interpreter could then no longer read its own library.

  For uid 0 this closes much: hard limits cannot be raised, other users' files and the memory and environment of a
  process with more capabilities (the trainer) are out of reach, devices and mounts too. A child tries it out first,
  because it cannot be undone. Call `forbid_new_privileges` as well, else uid 0 regains them at the next exec.
  """
  pid = os.fork()
  if pid == 0:
    os._exit(0 if _drop_capabilities() and _can_still_import() else 1)
  _, status = os.waitpid(pid, 0)
  return status == 0 and _drop_capabilities()


def address_space_bytes() -> int:
  """Size of this process's address space."""
  with open("/proc/self/statm", encoding="ascii") as file:
    return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def tasks_of_host() -> int:
  """Number of processes and threads of the host, an upper bound of those of any user."""
  with open("/proc/loadavg", encoding="ascii") as file:
    return int(file.read().split()[3].split("/")[1])


def offer_to_oom_killer() -> None:
  """When the host runs out of memory this process goes first; without a writable `/proc` the kernel chooses freely."""
  try:
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
  except OSError:
    return
  os.write(fd, b"1000")
  os.close(fd)


def set_autogroup_nice(pid: int, nice: int) -> bool:
  """Sets the nice value of a session's scheduling group; without it `nice` has no effect between sessions."""
  try:
    with open(f"/proc/{pid}/autogroup", "w", encoding="ascii") as file:
      file.write(str(nice))
  except OSError:
    return False
  return True


class Children:
  """The children of this single-threaded process, zombies included."""

  def __init__(self) -> None:
    pid = os.getpid()
    self._parent = pid
    try:
      self._fd = os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN, or a user-space kernel
      self._fd = -1

  def pids(self) -> list[int]:
    """Process ids of the children."""
    if self._fd < 0:
      return [int(name) for name in os.listdir("/proc") if name.isdigit() and parent_of(int(name)) == self._parent]
    data = bytearray()
    while chunk := os.pread(self._fd, 65536, len(data)):
      data += chunk
    return [int(word) for word in data.split()]


def parent_of(pid: int) -> int:
  """Process id of the parent; 0 if the process is gone."""
  try:
    with open(f"/proc/{pid}/stat", "rb") as file:
      return int(file.read().rpartition(b")")[2].split()[1])
  except (OSError, ValueError, IndexError):
    return 0
