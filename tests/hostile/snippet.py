"""What a hostile snippet is, and the limits and helpers that the tables share."""

from __future__ import annotations

import dataclasses
import platform

from agentic_rl.sandbox import Limits

LEVELS = ("process", "seccomp", "landlock", "namespace")

NORMAL = Limits(wall_s=10.0, cpu_s=4.0, memory_mib=256, flood_mib=4, output_bytes=4096)
SHORT = dataclasses.replace(NORMAL, wall_s=0.5)
"""For those that only the wall time ends."""
BRIEF_CPU = dataclasses.replace(NORMAL, cpu_s=0.3)
"""For those that only the CPU time ends."""

NUMBERS = {
  "x86_64": {
    "clone": 56, "ptrace": 101, "mount": 165, "umount2": 166, "swapon": 167, "reboot": 169, "syslog": 103,
    "setns": 308, "unshare": 272, "pivot_root": 155, "chroot": 161, "kexec_load": 246, "init_module": 175,
    "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "keyctl": 250, "add_key": 248, "personality": 135,
    "open_by_handle_at": 304, "name_to_handle_at": 303, "process_vm_readv": 310, "process_vm_writev": 311,
    "kcmp": 312, "rt_sigqueueinfo": 129, "tkill": 200, "tgkill": 234, "ioprio_set": 251, "acct": 163,
    "quotactl": 179, "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240, "inotify_init1": 294,
    "fanotify_init": 300, "capset": 126, "seccomp": 317, "prctl": 157, "execveat": 322, "socket": 41,
    "memfd_create": 319, "sethostname": 170, "clock_settime": 227, "getpid": 39, "write": 1, "fchmodat": 268,
    "utimensat": 280, "mknodat": 259, "iopl": 172, "modify_ldt": 154, "lookup_dcookie": 212, "sched_setattr": 314,
    "migrate_pages": 256, "move_pages": 279, "vmsplice": 278, "finit_module": 313, "settimeofday": 164,
    "adjtimex": 159, "vhangup": 153, "setdomainname": 171, "delete_module": 176, "io_setup": 206,
  },
  "aarch64": {
    "clone": 220, "ptrace": 117, "mount": 40, "umount2": 39, "swapon": 224, "reboot": 142, "syslog": 116,
    "setns": 268, "unshare": 97, "pivot_root": 41, "chroot": 51, "kexec_load": 104, "init_module": 105,
    "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "keyctl": 219, "add_key": 217, "personality": 92,
    "open_by_handle_at": 265, "name_to_handle_at": 264, "process_vm_readv": 270, "process_vm_writev": 271,
    "kcmp": 272, "rt_sigqueueinfo": 138, "tkill": 130, "tgkill": 131, "ioprio_set": 30, "acct": 89,
    "quotactl": 60, "shmget": 194, "msgget": 186, "semget": 190, "mq_open": 180, "inotify_init1": 26,
    "fanotify_init": 262, "capset": 91, "seccomp": 277, "prctl": 167, "execveat": 281, "socket": 198,
    "memfd_create": 279, "sethostname": 161, "clock_settime": 112, "getpid": 172, "write": 64, "fchmodat": 53,
    "utimensat": 88, "mknodat": 33, "lookup_dcookie": 18, "sched_setattr": 274, "migrate_pages": 238,
    "move_pages": 239, "vmsplice": 75, "finit_module": 273, "settimeofday": 170, "adjtimex": 171, "vhangup": 58,
    "setdomainname": 162, "delete_module": 106, "io_setup": 0,
  },
}.get(platform.machine(), {})  # fmt: skip
"""Numbers of system calls from the kernel's public headers; those from 424 on are the same everywhere."""
NUMBERS |= {
  "pidfd_send_signal": 424, "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432,
  "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442,
  "landlock_create_ruleset": 444, "landlock_restrict_self": 446, "memfd_secret": 447, "process_mrelease": 448,
  "fchmodat2": 452, "statmount": 457, "listmount": 458, "setxattrat": 463,
}  # fmt: skip

PRELUDE = f"""\
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
nr = {NUMBERS!r}
def call(name, *arguments):
  # A system call by name: "ok", or the name of its error.
  wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
  ctypes.set_errno(0)
  result = libc.syscall(ctypes.c_long(nr[name]), *wide)
  return "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()]
def attempt(action):
  # What an action does: "ok", or the name of its error.
  try:
    action()
  except OSError as error:
    return errno.errorcode.get(error.errno, type(error).__name__)
  except Exception as error:
    return type(error).__name__
  return "ok"
"""

DENIED = r"'(EPERM|EACCES|ENOSYS)'"
DENIED_OR_ABSENT = r"'(EPERM|EACCES|ENOSYS|ENOENT|ESRCH|EROFS|ENODEV|ENXIO|ENOTSUP|EOPNOTSUPP)'"
ALL_DENIED = r"\{\}"
"""For snippets whose value is a dict of what was not denied."""


@dataclasses.dataclass(frozen=True)
class Snippet:
  """A snippet and how it has to end.

  Attributes:
    name: Short description.
    code: Source; `@SECRET@` and the like are replaced by what `watch.Canaries.names` says.
    expected: Statuses that will do, separated by spaces.
    level: Lowest level at which that holds.
    weaker: Statuses that will do at weaker levels; empty means that it is not run there, where it could do harm.
    check: Pattern that must be found in the value at `level` and above.
    printed: The same for stdout.
    limits: What it may use.
    needs: Modules that it uses; where one is missing it is left out.
    fetch: Files to bring back.
    companion: Whether another snippet with a secret of its own runs at the same time.
    machine: The only architecture it is for; empty means any.
    disturbs: Whether a neighbour is asked all the while and has to be answered promptly.
  """

  name: str
  code: str
  expected: str = "ok"
  level: str = "process"
  weaker: str = ""
  check: str = ""
  printed: str = ""
  limits: Limits = NORMAL
  needs: tuple[str, ...] = ()
  fetch: tuple[str, ...] = ()
  companion: bool = False
  machine: str = ""
  disturbs: bool = False

  def statuses(self, level: str) -> list[str]:
    """Statuses that will do at a level; none if it is not to be run there."""
    return (self.expected if self.holds(level) else self.weaker).split()

  def holds(self, level: str) -> bool:
    """Whether the full expectation holds at a level."""
    return LEVELS.index(level) >= LEVELS.index(self.level)


@dataclasses.dataclass(frozen=True)
class Turns:
  """Turns of a session and how each has to end.

  Attributes:
    name: Short description.
    turns: Source, statuses that will do, and pattern in the value, of each turn.
    level: Lowest level at which it is run.
    limits: Of each turn.
    checkpoints: With which kinds of session it is run.
    machine: The only architecture it is for; empty means any.
    pause_s: Wait before each turn but the first, for what a turn has left behind to act.
    disturbs: Whether a neighbour is asked all the while and has to be answered promptly.
  """

  name: str
  turns: tuple[tuple[str, str, str], ...]
  level: str = "process"
  limits: Limits = SHORT
  checkpoints: tuple[str, ...] = ("auto", "replay")
  machine: str = ""
  pause_s: float = 0.0
  disturbs: bool = False


def tries(code: str) -> str:
  """Puts the helpers `call` and `attempt` before a snippet."""
  return PRELUDE + code


def denied(name: str, code: str, level: str = "seccomp", check: str = DENIED, **more: object) -> Snippet:
  """A snippet whose value must tell that something was denied."""
  return Snippet(name, tries(code), "ok", level, check=check, **more)  # type: ignore[arg-type]
