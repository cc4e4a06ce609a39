"""Landlock: a process gives up all files but a few trees, for ever and for its children.

Linux 5.13, no privilege needed. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Sequence

from agentic_rl.sandbox import lowlevel

# The same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_ALL_FILES = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_ALL_FILES_FROM_5 = (1 << 16) - 1  # device ioctls came with ABI 5
_TRUNCATE_ABI = 3
_TCP = 3  # bind and connect, from ABI 4
_SCOPES = 3  # abstract sockets and signals, from ABI 6

_READABLE = _EXECUTE | _READ_FILE | _READ_DIR
_DEVICE = _READ_FILE | _WRITE_FILE
_NOT_IN_SCRATCH = _MAKE_CHAR | _MAKE_SOCK | _MAKE_BLOCK | _EXECUTE

_libc = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
  """Version of Landlock that the kernel offers; 0 where there is none."""
  version = _libc.syscall(ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint(_GET_VERSION))
  return max(0, version)


def governs_truncation() -> bool:
  """Whether rules hold for `truncate` as well; before, it must be forbidden by other means."""
  return abi() >= _TRUNCATE_ABI


class Rules:
  """What a process may keep, prepared once and applied in each child.

  Args:
    readable: Files and directory trees to read, and to execute from. Those that do not exist are left out.
    devices: Devices to read and write.
  """

  def __init__(
    self,
    readable: Sequence[str],
    devices: Sequence[str] = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
  ) -> None:
    version = abi()
    self._files = _ALL_FILES.get(version, _ALL_FILES_FROM_5)
    tcp = _TCP if version >= 4 else 0
    scopes = _SCOPES if version >= 6 else 0
    size = 8 if version < 4 else 16 if version < 6 else 24  # an older kernel refuses a longer request
    self._request = struct.pack("=QQQ", self._files, tcp, scopes)[:size]
    self._rules: list[tuple[int, int]] = []
    for paths, rights in ((readable, _READABLE), (devices, _DEVICE)):
      for path in paths:
        with contextlib.suppress(FileNotFoundError):
          fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
          self._rules.append((fd, rights if os.path.isdir(path) else rights & ~_READ_DIR))

  def prepare(self) -> int:
    """A ruleset without scratch directory yet, as a descriptor."""
    fd = _libc.syscall(
      ctypes.c_long(_CREATE_RULESET), self._request, ctypes.c_size_t(len(self._request)), ctypes.c_uint(0)
    )
    _check(fd, "landlock_create_ruleset")
    for path_fd, rights in self._rules:
      _add(fd, path_fd, rights & self._files)
    return int(fd)

  def close(self) -> None:
    """Lets go of the descriptors."""
    for fd, _ in self._rules:
      os.close(fd)
    self._rules.clear()


def restrict(ruleset: int, scratch: str) -> None:
  """Gives up everything but the ruleset's trees and one directory to work in. Closes the ruleset.

  Args:
    ruleset: Descriptor from `Rules.prepare`.
    scratch: Directory where files may be made and removed, but no sockets and no devices.
  """
  fd = os.open(scratch, os.O_PATH | os.O_CLOEXEC)
  _add(ruleset, fd, _scratch_rights())
  os.close(fd)
  lowlevel.forbid_new_privileges()
  _check(
    _libc.syscall(ctypes.c_long(_RESTRICT_SELF), ctypes.c_int(ruleset), ctypes.c_uint(0)), "landlock_restrict_self"
  )
  os.close(ruleset)


def _scratch_rights() -> int:
  return _ALL_FILES.get(abi(), _ALL_FILES_FROM_5) & ~_NOT_IN_SCRATCH


def _add(ruleset: int, path_fd: int, rights: int) -> None:
  rule = struct.pack("=Qi", rights, path_fd)
  result = _libc.syscall(
    ctypes.c_long(_ADD_RULE), ctypes.c_int(ruleset), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint(0)
  )
  _check(result, "landlock_add_rule")


def _check(result: int, call: str) -> None:
  if result < 0:
    number = ctypes.get_errno()
    raise OSError(number, f"{call}: {os.strerror(number)}")
