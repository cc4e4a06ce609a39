"""The few Linux calls that Python's standard library lacks, and what `/proc` tells about processes.

Used by the launcher, the zygote and its children: standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
_SYS_MOUNT_SETATTR = 442  # the same number on every architecture, as all calls since Linux 5.1
_AT_FDCWD = -100
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 << 20
_AT_RECURSIVE = 0x8000

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 2
MS_NODEV = 4
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
ATTR_RDONLY = 1
ATTR_NOSUID = 2
ATTR_NODEV = 4

_libc = ctypes.CDLL(None, use_errno=True)
_EMPTY_CAPABILITIES = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)


def _check(result: int, call: str) -> int:
  if result < 0:
    number = ctypes.get_errno()
    raise OSError(number, f"{call}: {os.strerror(number)}")
  return result


def _prctl(option: int, argument: int) -> bool:
  unused = ctypes.c_ulong(0)
  return _libc.prctl(option, ctypes.c_ulong(argument), unused, unused, unused) == 0


def die_with_parent() -> None:
  """The kernel sends SIGKILL to this process when the thread that forked it ends. A change of user undoes it."""
  _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_subreaper() -> bool:
  """Orphaned descendants become children of this process, so that it can see and kill them."""
  return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def forbid_new_privileges() -> bool:
  """No exec can gain privileges any more (set-uid bits, file capabilities, root's capabilities)."""
  return _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def forbid_inspection() -> None:
  """Other processes of the same user can neither trace this process nor read its memory, and it leaves no core."""
  _prctl(_PR_SET_DUMPABLE, 0)


def drop_capabilities() -> bool:
  """Gives up all capabilities of this process; for uid 0 effective only together with `forbid_new_privileges`."""
  return _libc.capset(*_EMPTY_CAPABILITIES) == 0


def unshare(flags: int) -> None:
  """Moves this process (its future children, for the process table) into namespaces of its own."""
  _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, kind: int) -> None:
  """Moves this process (its future children, for the process table) into the namespace that `fd` stands for."""
  _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)), "setns")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
  """Mounts a file system of some kind."""
  result = _libc.mount(
    source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode() or None
  )
  _check(result, f"mount {kind or 'bind'} on {target}")


def bind(source: str, target: str) -> None:
  """Makes the tree at `source`, with what is mounted below, visible at `target`."""
  flags = ctypes.c_ulong(MS_BIND | MS_REC)
  _check(_libc.mount(os.fsencode(source), os.fsencode(target), None, flags, None), f"bind {source}")


def set_mount_attributes(path: str, attributes: int, recursive: bool = True) -> None:
  """Adds attributes such as ATTR_RDONLY to the mount at `path` and to those below (Linux 5.12)."""
  request = struct.pack("=QQQQ", attributes, 0, 0, 0)
  result = _libc.syscall(
    ctypes.c_long(_SYS_MOUNT_SETATTR),
    ctypes.c_int(_AT_FDCWD),
    os.fsencode(path),
    ctypes.c_uint(_AT_RECURSIVE if recursive else 0),
    request,
    ctypes.c_size_t(len(request)),
  )
  _check(result, f"mount_setattr {path}")


def pivot_root(new: str) -> None:
  """Makes the mount at `new` the root and detaches the old root and all below it. `new` needs an empty `.old`."""
  old = os.path.join(new, ".old")
  number = {"x86_64": 155, "aarch64": 41}[os.uname().machine]
  _check(_libc.syscall(ctypes.c_long(number), os.fsencode(new), os.fsencode(old)), "pivot_root")
  os.chdir("/")
  unmount("/.old")
  os.rmdir("/.old")


def unmount(path: str) -> None:
  """Takes a mount away; what still uses it keeps it alive until it ends."""
  _check(_libc.umount2(os.fsencode(path), MNT_DETACH), f"umount2 {path}")


def set_host_name(name: str) -> None:
  """Names the host of this UTS namespace."""
  data = name.encode()
  _check(_libc.sethostname(data, ctypes.c_size_t(len(data))), "sethostname")


def trim_heap() -> None:
  """Gives free memory back, so that a fork has less to copy; where the C library can."""
  if hasattr(_libc, "malloc_trim"):
    _libc.malloc_trim(ctypes.c_size_t(0))


def cpu_seconds(pid: int) -> float:
  """CPU time of a process with all its threads, exact to the nanosecond; 0 if it is gone."""
  try:
    return time.clock_gettime((~pid << 3) | 2)  # the kernel's clock id of another process's CPU time
  except OSError:
    return 0.0


class OwnProc:
  """What `/proc` tells about this process and the host, also when it can no longer be seen under that name."""

  def __init__(self) -> None:
    self._maps = os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC)
    self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    self._load = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
    self.process_table = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    self._page = os.sysconf("SC_PAGE_SIZE")

  def address_space_bytes(self) -> int:
    """Size of the address space."""
    return int(os.pread(self._statm, 256, 0).split()[0]) * self._page

  def collapse_memory(self) -> int:
    """Puts private memory into huge pages, so that there is less to copy in a fork; returns how many there are now.

    Linux 6.1; without it, or where the host is short of huge pages, nothing changes.
    """
    text = bytearray()
    while chunk := os.pread(self._maps, 1 << 16, len(text)):
      text += chunk
    count = 0
    for line in text.decode("ascii", "replace").splitlines():
      words = line.split()
      if words[1] != "rw-p" or (len(words) > 5 and words[5] != "[heap]"):
        continue
      first, last = (int(word, 16) for word in words[0].split("-"))
      first, last = -(-first // _HUGE_PAGE), last // _HUGE_PAGE
      for page in range(first, last):
        start = ctypes.c_void_p(page * _HUGE_PAGE)
        count += _libc.madvise(start, ctypes.c_size_t(_HUGE_PAGE), ctypes.c_int(_MADV_COLLAPSE)) == 0
    return count

  def anonymous_bytes(self) -> int:
    """Resident memory that belongs to no file."""
    words = os.pread(self._statm, 256, 0).split()
    return (int(words[1]) - int(words[2])) * self._page

  def tasks_of_host(self) -> int:
    """Number of processes and threads of the host, an upper bound of those of any user."""
    return int(os.pread(self._load, 256, 0).split()[3].split(b"/")[1])


def offer_to_oom_killer() -> bool:
  """When the host runs out of memory this process and its descendants go first."""
  return _write("/proc/self/oom_score_adj", "1000")


def set_autogroup_nice(nice: int) -> bool:
  """Sets the nice value of this session's scheduling group; without it `nice` has no effect between sessions."""
  return _write("/proc/self/autogroup", str(nice))


def _write(path: str, text: str) -> bool:
  try:
    with open(path, "w", encoding="ascii") as file:
      file.write(text)
  except OSError:
    return False
  return True


def is_child(pid: int) -> bool:
  """Whether there is such a child, alive or not yet collected."""
  try:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
  except ChildProcessError:
    return False
  return True


class Children:
  """The children of this single-threaded process, zombies included. Needs `/proc` of the own process table."""

  def __init__(self) -> None:
    self._parent = os.getpid()
    try:
      self._fd = os.open(f"/proc/{self._parent}/task/{self._parent}/children", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN, or a user-space kernel
      self._fd = -1

  def pids(self) -> list[int]:
    """Process ids of the children."""
    if self._fd < 0:
      return [int(name) for name in os.listdir("/proc") if name.isdigit() and _stat(int(name))[0] == self._parent]
    data = bytearray()
    while chunk := os.pread(self._fd, 65536, len(data)):
      data += chunk
    return [int(word) for word in data.split()]


def _stat(pid: int) -> tuple[int, int]:
  """Process ids of the parent and of the session's leader; zeros if the process is gone."""
  try:
    with open(f"/proc/{pid}/stat", "rb") as file:
      words = file.read().rpartition(b")")[2].split()
      return int(words[1]), int(words[3])
  except (OSError, ValueError, IndexError):
    return 0, 0


def kill_everywhere(session: int, mark: bytes) -> None:
  """Kills every process that is in a session or was born with a mark in its environment, until there is none.

  Args:
    session: Process id of the session's leader, or 0.
    mark: Bytes in the environment.
  """
  own = os.getpid()
  for _ in range(200):  # more may be forked while we look
    found = False
    for name in os.listdir("/proc"):
      if not name.isdigit() or int(name) == own:
        continue
      pid = int(name)
      try:
        if not (session and _stat(pid)[1] == session):
          with open(f"/proc/{name}/environ", "rb") as file:
            if mark not in file.read():
              continue
        os.kill(pid, signal.SIGKILL)
        found = found or _is_alive(pid)
      except OSError:  # gone, or not ours
        continue
    if not found:
      return
    time.sleep(0.01)


def _is_alive(pid: int) -> bool:
  try:
    with open(f"/proc/{pid}/stat", "rb") as file:
      return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
  except (OSError, IndexError):
    return False
