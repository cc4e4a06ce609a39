"""Becomes the kind of process that the interpreter is run as elsewhere, then executes a command.

`python tests/hostile/confine.py ENVIRONMENT COMMAND...`; needs root. Environments:

* `native`: as we are.
* `user`: user 65534 without capabilities.
* `container`: root with the fourteen capabilities and a filter of system calls like those of a common container.
* `container-user`: user 1000 without capabilities, under the same filter.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

ENVIRONMENTS = ("native", "user", "container", "container-user")

_NEWNS = 0x20000
_REC, _PRIVATE, _BIND = 16384, 1 << 18, 4096
_KEPT = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)
"""chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, net_raw, sys_chroot, mknod,
audit_write, setfcap: what a container keeps by default."""

_NUMBERS = {
  "x86_64": {
    "arch": 0xC000003E, "clone": 56, "seccomp": 317, "unshare": 272, "mount": 165, "umount2": 166, "setns": 308,
    "pivot_root": 155, "ptrace": 101, "keyctl": 250, "add_key": 248, "request_key": 249, "bpf": 321,
    "perf_event_open": 298, "userfaultfd": 323, "kexec_load": 246, "init_module": 175, "finit_module": 313,
    "delete_module": 176, "open_by_handle_at": 304, "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163,
    "personality": 135, "kcmp": 312, "process_vm_readv": 310, "process_vm_writev": 311, "quotactl": 179,
    "syslog": 103, "iopl": 172, "ioperm": 173, "move_pages": 279, "settimeofday": 164, "clock_settime": 227,
  },
  "aarch64": {
    "arch": 0xC00000B7, "clone": 220, "seccomp": 277, "unshare": 97, "mount": 40, "umount2": 39, "setns": 268,
    "pivot_root": 41, "ptrace": 117, "keyctl": 219, "add_key": 217, "request_key": 218, "bpf": 280,
    "perf_event_open": 241, "userfaultfd": 282, "kexec_load": 104, "init_module": 105, "finit_module": 273,
    "delete_module": 106, "open_by_handle_at": 265, "reboot": 142, "swapon": 224, "swapoff": 225, "acct": 89,
    "personality": 92, "kcmp": 272, "process_vm_readv": 270, "process_vm_writev": 271, "quotactl": 60,
    "syslog": 116, "move_pages": 239, "settimeofday": 170, "clock_settime": 112,
  },
}  # fmt: skip
_NEWER = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442)  # io_uring, the newer mount calls, pidfd_getfd
_CLONE3 = 435
_CLONE_NEW = 0x7E020000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
  if result < 0:
    number = ctypes.get_errno()
    raise OSError(number, f"{what}: {os.strerror(number)}")


def _make_interpreter_readable() -> None:
  """Where a parent of the interpreter is closed to others, puts an open directory in its place, in our mounts only."""
  wanted = {
    os.path.realpath(p) for p in (sys.prefix, sys.base_prefix, os.path.dirname(os.path.abspath(__file__)), os.getcwd())
  }
  closed: dict[str, list[str]] = {}
  for path in sorted(wanted):
    parts = path.split("/")
    for i in range(2, len(parts) + 1):
      ancestor = "/".join(parts[:i])
      if os.stat(ancestor).st_mode & 5 != 5:
        if ancestor == path:
          raise PermissionError(f"{path} itself is closed to other users")
        closed.setdefault(ancestor, []).append(path)
        break
  _check(_libc.unshare(_NEWNS), "unshare")
  _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_REC | _PRIVATE), None), "mount private")
  for ancestor, paths in closed.items():
    held = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in paths]
    _check(_libc.mount(b"tmpfs", ancestor.encode(), b"tmpfs", ctypes.c_ulong(0), b"mode=755"), "mount tmpfs")
    for path, fd in zip(paths, held, strict=True):
      os.makedirs(path, 0o755, exist_ok=True)
      source = f"/proc/self/fd/{fd}".encode()
      _check(_libc.mount(source, path.encode(), None, ctypes.c_ulong(_BIND | _REC), None), f"bind {path}")
      os.close(fd)


def _become(uid: int) -> None:
  os.setgroups([])
  os.setresgid(uid, uid, uid)
  os.setresuid(uid, uid, uid)


def _keep_capabilities() -> None:
  """Drops all capabilities but those of a container, also from the bounding set."""
  for capability in range(64):
    if capability not in _KEPT and _libc.prctl(23, capability, 0, 0, 0) == 1:
      _check(_libc.prctl(24, capability, 0, 0, 0), f"drop capability {capability}")
  mask = sum(1 << capability for capability in _KEPT)
  data = struct.pack("=6I", mask, mask, 0, 0, 0, 0)
  _check(_libc.capset(struct.pack("=Ii", 0x20080522, 0), data), "capset")


def _filter() -> None:
  """A filter like the default one of containers: what it denies fails with EPERM, clone3 with ENOSYS."""
  table = _NUMBERS[platform.machine()]
  allow, deny, unknown = 0x7FFF0000, 0x00050001, 0x00050026
  code: list[tuple[int, int, int, int]] = [
    (0x20, 0, 0, 4),
    (0x15, 1, 0, table["arch"]),
    (0x06, 0, 0, allow),
    (0x20, 0, 0, 0),
  ]
  code += [(0x15, 0, 1, _CLONE3), (0x06, 0, 0, unknown)]
  for name, number in table.items():
    if name not in ("arch", "clone", "seccomp"):
      code += [(0x15, 0, 1, number), (0x06, 0, 0, deny)]
  for number in _NEWER:
    code += [(0x15, 0, 1, number), (0x06, 0, 0, deny)]
  code += [(0x15, 0, 3, table["clone"]), (0x20, 0, 0, 16), (0x45, 0, 1, _CLONE_NEW), (0x06, 0, 0, deny)]
  code += [(0x06, 0, 0, allow)]
  program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code), 8 * len(code))
  description = struct.pack("=H6xQ", len(code), ctypes.addressof(program))
  # Privileges are still there, so that no_new_privs need not be set here; the runner then has to do that itself.
  _check(_libc.syscall(ctypes.c_long(table["seccomp"]), 1, 0, description), "seccomp")


def confine(environment: str) -> None:
  """Turns this process into that of an environment, for ever."""
  if environment == "native":
    return
  _make_interpreter_readable()
  if environment == "user":
    _become(65534)
  else:
    _filter()
    if environment == "container":
      _keep_capabilities()
    else:
      _become(1000)


def main() -> None:
  environment, *command = sys.argv[1:]
  if environment not in ENVIRONMENTS or not command:
    sys.exit(f"usage: confine.py {{{','.join(ENVIRONMENTS)}}} COMMAND...")
  confine(environment)
  if environment != "native":
    os.environ["HOME"] = "/tmp"
  os.execvp(command[0], command)


if __name__ == "__main__":
  main()
