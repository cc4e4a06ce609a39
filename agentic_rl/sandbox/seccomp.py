"""A filter of system calls: what Python and numerical code need is allowed, everything else is denied.

The kernel applies it to a process and its children for ever; no privilege is needed. Standard library only.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import select
import struct

from agentic_rl.sandbox import lowlevel, syscalls

_SET_MODE_FILTER = 1
_GET_ACTION_AVAILABLE = 2
_NEW_LISTENER = 1 << 3
_EPERM, _ENOSYS, _ENOTSUP = 1, 38, 95

_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
_USER_NOTIFY = 0x7FC00000
_ALLOW = 0x7FFF0000
_DENY = _ERRNO | _EPERM
_UNKNOWN = _ERRNO | _ENOSYS
_UNSUPPORTED = _ERRNO | _ENOTSUP  # which copies of files take for what it is

_LOAD = 0x20  # load a word of the call's data
_JUMP_EQUAL = 0x15
_JUMP_GREATER_EQUAL = 0x35
_JUMP_ANY_BIT = 0x45
_JUMP = 0x05
_AND = 0x54
_RETURN = 0x06
_INSTRUCTION = struct.Struct("=HBBI")

_NUMBER, _ARCHITECTURE = 0, 4
_X32_BIT = 0x40000000

_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020000 | 0x00000080  # every new namespace, also that of time
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE_MASK = 1, 1, 0xF
_OF_PROCESSES = (
  *("kill", "tgkill", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "getpgid", "getsid", "getpriority"),
  *syscalls.SCHEDULING,
)
"""Calls that name a process: open where snippets have a process table of their own."""
_IOCTLS = (
  0x5401,  # TCGETS
  0x5413,  # TIOCGWINSZ
  0x541B,  # FIONREAD
  0x5421,  # FIONBIO
  0x5450,  # FIONCLEX
  0x5451,  # FIOCLEX
)
_FCNTLS = (
  *range(8),  # descriptors, flags, locks; 8 and more set who gets signals
  36,  # F_OFD_GETLK
  37,  # F_OFD_SETLK
  38,  # F_OFD_SETLKW
  1030,  # F_DUPFD_CLOEXEC
  1032,  # F_GETPIPE_SZ
  1034,  # F_GET_SEALS
)
_PRCTLS = (
  3,  # PR_GET_DUMPABLE
  15,  # PR_SET_NAME
  16,  # PR_GET_NAME
  39,  # PR_GET_NO_NEW_PRIVS
  0x53564D41,  # PR_SET_VMA, by which the C library names its memory
)

_NOTIFICATION = struct.Struct("=QIIiIQ6Q")  # id, pid, flags, then the call: number, architecture, address, arguments
_RESPONSE = struct.Struct("=QqiI")
_RECEIVE = 0xC0502100
_SEND = 0xC0182101
_CONTINUE = 1

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
  _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def _call(operation: int, flags: int, argument: object) -> int:
  number = syscalls.TABLES[platform.machine()]["seccomp"]
  return int(_libc.syscall(ctypes.c_long(number), ctypes.c_uint(operation), ctypes.c_uint(flags), argument))


def unsupported() -> str:
  """Why no filter can be used here, or an empty string."""
  machine = platform.machine()
  if machine not in syscalls.TABLES:
    return f"no table of system calls for {machine}"
  if struct.calcsize("P") != 8:
    return "a 32-bit interpreter"
  if _call(_GET_ACTION_AVAILABLE, 0, struct.pack("=I", _KILL_PROCESS)) != 0:
    return f"not available in this kernel: {os.strerror(ctypes.get_errno())}"
  return ""


def _argument(index: int, high: bool = False) -> int:
  return 16 + 8 * index + (4 if high else 0)  # both architectures are little-endian


class _Assembler:
  """Instructions with jumps relative to the next one."""

  def __init__(self) -> None:
    self.code: list[tuple[int, int, int, int]] = []

  def load(self, offset: int) -> None:
    self.code.append((_LOAD, 0, 0, offset))

  def give(self, action: int) -> None:
    self.code.append((_RETURN, 0, 0, action))

  def unless(self, test: int, value: int, skip: int) -> None:
    """Goes on if the test holds, else skips that many instructions."""
    self.code.append((test, 0, skip, value))

  def when(self, test: int, value: int, skip: int) -> None:
    """Skips that many instructions if the test holds."""
    self.code.append((test, skip, 0, value))

  def block(self, number: int, body: _Assembler) -> None:
    """Runs the body, which must return, for one system call."""
    self.unless(_JUMP_EQUAL, number, len(body.code))
    self.code += body.code


def _one_of(offset: int, values: tuple[int, ...]) -> _Assembler:
  body = _Assembler()
  body.load(offset)
  for i, value in enumerate(values):
    body.when(_JUMP_EQUAL, value, len(values) - i)
  body.give(_DENY)
  body.give(_ALLOW)
  return body


def _only_process(index: int, pid: int, zero_too: bool = False) -> _Assembler:
  """Allows a call whose argument is this process id. A marker stands for it until `Filter.install`."""
  body = _Assembler()
  body.load(_argument(index))
  if zero_too:
    body.when(_JUMP_EQUAL, 0, 2)
  body.when(_JUMP_EQUAL, pid, 1)
  body.give(_DENY)
  body.give(_ALLOW)
  return body


def _opening(index: int, truncate: bool) -> _Assembler:
  """Denies access mode 3, for which Landlock asks no right, and on request to empty a file with the right to read."""
  body = _Assembler()
  body.load(_argument(index))
  body.code.append((_AND, 0, 0, os.O_TRUNC | os.O_ACCMODE))
  denied = [os.O_ACCMODE, os.O_TRUNC | os.O_ACCMODE, *([] if truncate else [os.O_TRUNC | os.O_RDONLY])]
  for i, value in enumerate(denied):
    body.when(_JUMP_EQUAL, value, len(denied) - i)
  body.give(_ALLOW)
  body.give(_DENY)
  return body


def _own_clock() -> _Assembler:
  """Denies the clocks of other processes, whose numbers are negative; the last eight are the caller's own."""
  body = _Assembler()
  body.load(_argument(0))
  body.when(_JUMP_GREATER_EQUAL, 0xFFFF_FFF8, 2)
  body.unless(_JUMP_GREATER_EQUAL, 0x8000_0000, 1)
  body.give(_DENY)
  body.give(_ALLOW)
  return body


class Filter:
  """A filter, prepared once and installed in each child.

  Args:
    processes: Whether processes may be started and signalled, where a process table of their own contains them.
    fork_listener: Whether a fork asks the holder of the listener for leave instead of being denied.
    metadata: Whether modes and times of files may be changed, which is harmless where all files are one's own.
    truncate: Whether files may be shortened by name, which Landlock does not govern before its third version.
  """

  _PID = 0x7FFFFFFE  # larger than any process id, and not the name of a group, as a negative one would be

  def __init__(
    self, *, processes: bool = False, fork_listener: bool = False, metadata: bool = False, truncate: bool = True
  ) -> None:
    machine = platform.machine()
    table = syscalls.TABLES[machine]
    self._listener = fork_listener
    allowed = set(syscalls.ALLOWED)
    if processes:
      allowed |= syscalls.PROCESSES
    if metadata:
      allowed |= syscalls.METADATA
    special = self._special(processes, fork_listener)
    if not truncate:
      allowed.remove("truncate")
    special |= {"open": _opening(1, truncate), "openat": _opening(2, truncate)}
    if processes:
      for name in _OF_PROCESSES:
        del special[name]
        allowed.add(name)
    asm = _Assembler()
    asm.load(_ARCHITECTURE)
    asm.when(_JUMP_EQUAL, syscalls.AUDIT[machine], 1)
    asm.give(_KILL_PROCESS)
    asm.load(_NUMBER)
    if machine == "x86_64":
      asm.unless(_JUMP_GREATER_EQUAL, _X32_BIT, 1)
      asm.give(_KILL_PROCESS)
    for name, body in special.items():
      if name in table:
        asm.block(table[name], body)
    # What is unknown fails as if it did not exist, so that the C library falls back, as from clone3 to clone.
    actions = {table[name]: _ALLOW if name in allowed else _DENY for name in table.keys() - {"clone3"}}
    actions |= {table[name]: _UNSUPPORTED for name in table if "xattr" in name}
    asm.code += _search(_intervals(actions))
    self._pieces = b"".join(_INSTRUCTION.pack(*instruction) for instruction in asm.code)
    marker = struct.pack("=I", self._PID)
    self._places = [i + 4 for i in range(0, len(self._pieces), 8) if self._pieces[i + 4 : i + 8] == marker]

  def _special(self, processes: bool, fork_listener: bool) -> dict[str, _Assembler]:
    clone = _Assembler()
    clone.load(_argument(0))
    clone.unless(_JUMP_ANY_BIT, _CLONE_NEW, 1)
    clone.give(_DENY)
    clone.unless(_JUMP_ANY_BIT, _CLONE_THREAD, 1)
    clone.give(_ALLOW)
    clone.give(_ALLOW if processes else _USER_NOTIFY if fork_listener else _DENY)
    pair = _Assembler()
    pair.load(_argument(0))
    pair.when(_JUMP_EQUAL, _AF_UNIX, 1)
    pair.give(_DENY)
    pair.load(_argument(1))
    pair.code.append((_AND, 0, 0, _SOCK_TYPE_MASK))
    pair.when(_JUMP_EQUAL, _SOCK_STREAM, 1)  # one for datagrams could send to other sockets by name
    pair.give(_DENY)
    pair.give(_ALLOW)
    return {
      "clone": clone,
      "socketpair": pair,
      "ioctl": _one_of(_argument(1), _IOCTLS),
      "fcntl": _one_of(_argument(1), _FCNTLS),
      "prctl": _one_of(_argument(0), _PRCTLS),
      "kill": _only_process(0, self._PID),
      "tkill": _only_process(0, self._PID),
      "tgkill": _only_process(0, self._PID),
      "rt_sigqueueinfo": _only_process(0, self._PID),
      "rt_tgsigqueueinfo": _only_process(0, self._PID),
      **{name: _only_process(0, self._PID, zero_too=True) for name in ("prlimit64", "getpgid", "getsid")},
      **{name: _only_process(0, self._PID, zero_too=True) for name in syscalls.SCHEDULING},
      "getpriority": _only_process(1, self._PID, zero_too=True),
      **{name: _own_clock() for name in ("clock_gettime", "clock_getres", "clock_nanosleep", "timer_create")},
    }

  def install(self, pid: int) -> int:
    """Puts the calling process under the filter.

    Args:
      pid: Its process id, the only one that it may signal; 0 for none.

    Returns:
      Descriptor of the listener, or -1 without one.

    Raises:
      OSError: The kernel refuses. EBUSY means that there is a listener already, of a container's runtime.
    """
    code = bytearray(self._pieces)
    for place in self._places:
      struct.pack_into("=I", code, place, pid or self._PID)
    program = _Program(len(code) // 8, bytes(code))
    lowlevel.forbid_new_privileges()
    result = _call(_SET_MODE_FILTER, _NEW_LISTENER if self._listener else 0, ctypes.byref(program))
    if result < 0:
      number = ctypes.get_errno()
      raise OSError(number, f"seccomp: {os.strerror(number)}")
    return result if self._listener else -1


def _intervals(actions: dict[int, int]) -> list[tuple[int, int]]:
  """Where the action changes: the first number of each interval, and its action."""
  found: list[tuple[int, int]] = []
  for number in range(max(actions) + 2):
    action = actions.get(number, _UNKNOWN)
    if not found or found[-1][1] != action:
      found.append((number, action))
  return found


def _search(intervals: list[tuple[int, int]]) -> list[tuple[int, int, int, int]]:
  """A binary search. The kernel runs a new filter once for every call there is, so its depth decides what it costs."""
  if len(intervals) == 1:
    return [(_RETURN, 0, 0, intervals[0][1])]
  middle = len(intervals) // 2
  left, right = _search(intervals[:middle]), _search(intervals[middle:])
  pivot = intervals[middle][0]
  if len(left) < 256:
    return [(_JUMP_GREATER_EQUAL, len(left), 0, pivot), *left, *right]
  return [(_JUMP_GREATER_EQUAL, 0, 1, pivot), (_JUMP, 0, 0, len(left)), *left, *right]


class ForkGate:
  """The end of a listener where forks ask for leave."""

  def __init__(self, fd: int) -> None:
    self._fd = fd
    self._poll = select.poll()
    self._poll.register(fd, select.POLLIN)

  @property
  def abandoned(self) -> bool:
    """Whether nobody is left who could ask."""
    return any(event & select.POLLHUP for _, event in self._poll.poll(0))

  def fileno(self) -> int:
    """The descriptor, readable when somebody asks."""
    return self._fd

  def receive(self) -> tuple[int, int] | None:
    """Number of the next question and the process id of who asks; None if there is none or it was withdrawn."""
    if not any(event & select.POLLIN for _, event in self._poll.poll(0)):
      return None
    data = bytearray(_NOTIFICATION.size)
    try:
      fcntl.ioctl(self._fd, _RECEIVE, data)
    except OSError:  # it died or was interrupted meanwhile, or nobody is left to ask
      return None
    number, pid = _NOTIFICATION.unpack(data)[:2]
    return number, pid

  def allow(self, number: int) -> bool:
    """Lets the call go on; False if the caller is gone."""
    return self._respond(_RESPONSE.pack(number, 0, 0, _CONTINUE))

  def deny(self, number: int) -> bool:
    """Fails the call with EPERM; False if the caller is gone."""
    return self._respond(_RESPONSE.pack(number, 0, -_EPERM, 0))

  def _respond(self, response: bytes) -> bool:
    try:
      fcntl.ioctl(self._fd, _SEND, response)
    except OSError:
      return False
    return True

  def close(self) -> None:
    """Lets go of the descriptor."""
    os.close(self._fd)
