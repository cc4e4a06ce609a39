"""Which isolation this host allows, and how to enter it.

The launcher tries each kind in a forked child, since none can be undone, and takes the strongest that works. The
namespaces are entered once, by the zygote; a child adds what is its own: a mount for its files, a user id, limits,
system call filter. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

from agentic_rl.sandbox import landlock, lowlevel, seccomp

LEVELS = ("process", "seccomp", "landlock", "namespace")
MOST_USERS = 65_536
"""User ids that a zygote may use, from `Plan.first_uid` on."""

SCRATCH = "/scratch" if any(p.startswith("/tmp/") for p in (sys.prefix, sys.base_prefix, sys.exec_prefix)) else "/tmp"
"""Working directory of a snippet inside a root directory of its own."""

_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_NAMESPACES = lowlevel.CLONE_NEWPID | lowlevel.CLONE_NEWNET | lowlevel.CLONE_NEWIPC | lowlevel.CLONE_NEWUTS
_ENOUGH_INODES = 2048


@dataclasses.dataclass
class Plan:
  """What is in force.

  Attributes:
    level: One of `LEVELS`.
    user_namespace: Whether the namespaces are entered by way of a user namespace, as without privileges.
    first_uid: First of the spare user ids, one for each child; 0 means that children keep the user.
    facts: For each kind of isolation, what was found: what is in force or why it is not.
  """

  level: str = "process"
  user_namespace: bool = False
  first_uid: int = 0
  facts: dict[str, Any] = dataclasses.field(default_factory=dict)

  def at_least(self, level: str) -> bool:
    """Whether the plan is as strong as that level."""
    return LEVELS.index(self.level) >= LEVELS.index(level)


def choose(directory: str, strongest: str) -> Plan:
  """Finds the strongest isolation that works here. Must run in a process with a single thread.

  Args:
    directory: Private directory of the interpreter, where a root directory can be set up.
    strongest: Level beyond which nothing is tried.
  """
  plan = Plan()
  facts = plan.facts
  why = seccomp.unsupported()
  wanted = LEVELS.index(strongest)
  if wanted < 1:
    why = why or "not wanted"
  facts["seccomp"] = why or "in force"
  usable = 0 if why else 1
  abi = landlock.abi()
  if wanted < 2:
    why = "not wanted"
  elif not abi:
    why = "not available in this kernel"
  facts["landlock"] = why or f"ABI {abi}"
  if not why and usable:
    usable = 2
  spare = _spare_users()
  facts["namespaces"] = "not wanted"
  if wanted >= 3 and (why := seccomp.unsupported()):
    facts["namespaces"] = f"need seccomp: {why}"
  elif wanted >= 3:
    with_user = os.geteuid() != 0
    candidates = [Plan("namespace", with_user, 0 if with_user else spare), Plan("namespace", True), Plan("namespace")]
    reasons = []
    for candidate in candidates if spare or with_user else candidates[1:]:
      why = attempt(functools.partial(_enter_and_look, candidate, directory))
      if not why:
        plan.user_namespace, plan.first_uid, usable = candidate.user_namespace, candidate.first_uid, 3
        facts["namespaces"] = ("user, " if plan.user_namespace else "") + "pid, mount, network, IPC, UTS"
        break
      reasons.append(why)
    else:
      facts["namespaces"] = "; ".join(dict.fromkeys(reasons))
  plan.level = LEVELS[usable]
  if usable < 3 and spare:
    why = attempt(lambda: _look_as(spare, directory))
    plan.first_uid = 0 if why else spare
    facts["user"] = why
  if plan.first_uid:
    facts["user"] = f"one to each snippet, from {plan.first_uid} on"
  else:
    facts["user"] = f"kept ({os.geteuid()})" + (f": {facts['user']}" if facts.get("user") else "")
  if usable == 3 and abi:
    facts["landlock"] = f"ABI {abi}, not needed beside a root directory of its own"
  return plan


def _spare_users() -> int:
  """First of `MOST_USERS` ids that nobody uses, or 0 where the user cannot be changed."""
  if os.geteuid() != 0:
    return 0
  try:
    with open("/proc/self/uid_map", encoding="ascii") as file:
      mapped = max(int(first) + int(count) for first, _, count in (line.split() for line in file))
  except (OSError, ValueError):
    return 0
  # Random, so that two interpreters on a host do not count against each other's limits.
  if mapped >= 1 << 31:
    return (1 << 30) + MOST_USERS * random.SystemRandom().randrange(1 << 13)
  return mapped - MOST_USERS // 2 if mapped >= MOST_USERS else 0


def attempt(action: Callable[[], object]) -> str:
  """Runs an action in a forked child; returns what went wrong, or an empty string."""
  reader, writer = os.pipe()
  pid = os.fork()
  if pid == 0:
    try:
      os.close(reader)
      try:
        action()
      except OSError as error:
        os.write(writer, (error.strerror or str(error)).encode()[:500] or b"failed")
      os._exit(0)
    finally:
      os._exit(1)
  os.close(writer)
  with open(reader, "rb") as file:
    said = file.read().decode("utf-8", "replace")
  _, status = os.waitpid(pid, 0)
  return said or (f"the trial ended with wait status {status}" if status else "")


def _enter_and_look(plan: Plan, directory: str) -> None:
  enter_namespaces(plan)
  why = attempt(lambda: _set_up_and_look(plan, directory))
  if why:
    raise OSError(0, why)


def _set_up_and_look(plan: Plan, directory: str) -> None:
  set_up_root(directory)
  private_scratch(1)
  if plan.first_uid:
    os.chown(SCRATCH, plan.first_uid, plan.first_uid)
  _look_as(plan.first_uid, SCRATCH)


def _look_as(uid: int, directory: str) -> None:
  """Checks as another user that the interpreter can be read, else every late import would fail."""
  if uid:
    become(uid)
  for path in dict.fromkeys([os.path.dirname(os.__file__), *library_paths()]):
    if os.path.isdir(path):
      os.listdir(path)
  with open(os.path.join(os.path.dirname(os.__file__), "this.py"), "rb") as file:
    file.read()
  os.stat(os.path.join(directory, "."))


def library_paths() -> list[str]:
  """Directories that imports come from and that belong to the interpreter, not to the trainer's project."""
  homes = [os.path.join(home, "") for home in interpreter_homes()]
  return [path for path in sys.path if os.path.isdir(path) and any((path + "/").startswith(home) for home in homes)]


def interpreter_homes() -> list[str]:
  """Directory trees that the interpreter needs, by each name under which it may look for them."""
  paths: list[str] = []
  for path in (*_SYSTEM, sys.base_prefix, sys.prefix, sys.exec_prefix):
    for name in (os.path.abspath(path), os.path.realpath(path)):
      inside = any(name == other or name.startswith(other.rstrip("/") + "/") for other in paths)
      if not inside and name != "/" and os.path.isdir(name):
        paths.append(name)
  return paths


# -- entering ----------------------------------------------------------------------------------------------------------


def enter_namespaces(plan: Plan) -> None:
  """In the launcher: new namespaces. That of processes is entered by the next fork, that of mounts by `set_up_root`."""
  uid, gid = os.geteuid(), os.getegid()
  lowlevel.unshare(_NAMESPACES | (lowlevel.CLONE_NEWUSER if plan.user_namespace else 0))
  if plan.user_namespace:
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
      with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
        file.write(text)


def set_up_root(directory: str) -> None:
  """In the zygote, inside its namespaces: a small read-only root with the interpreter and nothing of the trainer."""
  lowlevel.unshare(lowlevel.CLONE_NEWNS)
  lowlevel.mount("", "/", "", lowlevel.MS_REC | lowlevel.MS_PRIVATE)
  root = os.path.join(directory, "root")
  os.makedirs(root, 0o755, exist_ok=True)
  lowlevel.mount("tmpfs", root, "tmpfs", lowlevel.MS_NOSUID, "size=1m,nr_inodes=1024,mode=755")
  locked = lowlevel.ATTR_RDONLY | lowlevel.ATTR_NOSUID
  for path in interpreter_homes():
    target = root + path
    if os.path.islink(path):
      os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
      os.symlink(os.readlink(path), target)
      continue
    os.makedirs(target, 0o755, exist_ok=True)
    lowlevel.bind(path, target)
    lowlevel.set_mount_attributes(target, locked | lowlevel.ATTR_NODEV)
  os.mkdir(root + "/dev", 0o755)
  for name in _DEVICES:
    target = f"{root}/dev/{name}"
    os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    lowlevel.bind(f"/dev/{name}", target)
    lowlevel.set_mount_attributes(target, lowlevel.ATTR_NOSUID)
  os.mkdir(root + SCRATCH, 0o711)
  lowlevel.mount("tmpfs", root + SCRATCH, "tmpfs", lowlevel.MS_NOSUID | lowlevel.MS_NODEV, "size=1m,mode=711")
  os.mkdir(root + "/etc", 0o755)
  _write(root + "/etc/passwd", f"sandbox:x:{os.geteuid()}:{os.getegid()}:sandbox:{SCRATCH}:/bin/sh\n")
  _write(root + "/etc/group", f"sandbox:x:{os.getegid()}:\n")
  _write(root + "/etc/hosts", "127.0.0.1 localhost\n")
  with contextlib.suppress(OSError):  # the cache only saves the dynamic loader time
    with open("/etc/ld.so.cache", "rb") as file:
      _write(root + "/etc/ld.so.cache", file.read())
  os.mkdir(root + "/.old", 0o700)
  lowlevel.pivot_root(root)
  lowlevel.set_mount_attributes("/", lowlevel.ATTR_RDONLY | lowlevel.ATTR_NOSUID, recursive=False)
  lowlevel.set_host_name("sandbox")


def _write(path: str, data: str | bytes) -> None:
  with open(path, "wb") as file:
    file.write(data.encode() if isinstance(data, str) else data)


def private_scratch(disk_mib: int) -> None:
  """In a child that shares its user with others: an empty file system on `SCRATCH` that nobody else sees."""
  lowlevel.unshare(lowlevel.CLONE_NEWNS)
  mount_scratch(SCRATCH, disk_mib)


def mount_scratch(path: str, disk_mib: int) -> None:
  """An empty file system of limited size."""
  flags = lowlevel.MS_NOSUID | lowlevel.MS_NODEV
  lowlevel.mount("tmpfs", path, "tmpfs", flags, f"size={disk_mib}m,nr_inodes={_ENOUGH_INODES},mode=700")


def become(uid: int) -> None:
  """In a child: another user, for ever."""
  os.setgroups([])
  os.setresgid(uid, uid, uid)
  os.setresuid(uid, uid, uid)


def landlock_rules() -> landlock.Rules:
  """What a snippet may read where it sees the host's files."""
  return landlock.Rules([*interpreter_homes(), "/etc/ld.so.cache", "/etc/localtime"])


def gaps(plan: Plan) -> Sequence[str]:
  """What the level leaves open, in words."""
  text = {
    "process": [
      "reads and writes what the user can, sees and signals the user's processes, uses the network",
      "can kill or stop its parent, which fails what runs there as infra_error",
    ],
    "seccomp": ["reads and writes what the user can"],
    "landlock": [
      "existence, size and times of files whose names it guesses",
      "scratch space is measured now and then, not limited by the file system; files that are open and deleted escape",
    ],
    "namespace": [],
  }[plan.level]
  common = [
    "faults of the kernel, which it shares with the host",
    "memory and CPU time are limited for each process, not as a whole, unless total_memory_mib is set",
  ]
  if not plan.first_uid and os.geteuid() == 0:
    common.insert(0, "runs as uid 0 (without capabilities); the number of threads is limited by memory alone")
  elif not plan.first_uid:
    common.insert(0, "all snippets are one user: the threads of one count against the limit of the others")
  return [*text, *common]
