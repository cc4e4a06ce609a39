"""Snippets that reach for the network and for the kernel."""

from __future__ import annotations

from snippet import ALL_DENIED, NORMAL, SHORT, Snippet, denied, tries

NETWORK = (
  denied("loopback", "import socket\nattempt(lambda: socket.create_connection(('127.0.0.1', @PORT@), 1))"),
  denied(
    "names",
    "import socket\nattempt(lambda: socket.getaddrinfo('localhost.example', 80))",
    check="'gaierror'|'EPERM'|'E[A-Z]+'",
  ),
  denied(
    "abstract socket of the trainer",
    "import socket\nattempt(lambda: socket.socket(socket.AF_UNIX).connect('\\0@ABSTRACT@'))",
  ),
  denied(
    "socket file of the trainer", "import socket\nattempt(lambda: socket.socket(socket.AF_UNIX).connect('@UNIX@'))"
  ),
  denied("socket by the C library", "libc.socket(2, 1, 0)", check="^-1$"),
  Snippet(
    "urllib",
    "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:@PORT@', timeout=1)",
    "error",
    level="seccomp",
  ),
  denied("listens", "import socket\nattempt(lambda: socket.create_server(('127.0.0.1', 0)))"),
  denied("machine sockets", "import socket\nattempt(lambda: socket.socket(40, socket.SOCK_STREAM))"),
  denied("netlink", "import socket\nattempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))"),
  denied("kernel's ciphers", "import socket\nattempt(lambda: socket.socket(38, socket.SOCK_SEQPACKET))"),
  denied("packets", "import socket\nattempt(lambda: socket.socket(17, socket.SOCK_RAW))"),
  denied(
    "every family and type",
    """
import socket
found = {}
for family in range(48):
  for kind in (1, 2, 3, 5):
    answer = attempt(lambda: socket.socket(family, kind))
    if answer != 'EPERM': found[family, kind] = answer
found
""",
    check=ALL_DENIED,
  ),
  denied(
    "pairs of every family",
    """
found = {}
ends = (ctypes.c_int * 2)()
for family in range(48):
  for kind in (1, 2, 3, 5, 1 | 1 << 11, 2 | 1 << 19):
    if libc.socketpair(family, kind, 0, ends) == 0:
      found[family, kind] = list(ends)
      os.close(ends[0])
      os.close(ends[1])
sorted(found)
""",
    check=r"^\[\(1, 1\), \(1, 2049\)\]$",
  ),
  denied(
    "a pair that leads elsewhere",
    """
import socket
a, b = socket.socketpair()
[attempt(lambda: a.connect('\\0@ABSTRACT@')), attempt(lambda: a.bind('x')), attempt(lambda: a.listen()),
 attempt(a.accept)]
""",
    check=r"\['EPERM', 'EPERM', 'EPERM', 'EPERM'\]",
  ),
  denied(
    "messages with an address",
    """
import socket
a, b = socket.socketpair()
[attempt(lambda: a.sendto(b'x', '\\0@ABSTRACT@')), attempt(lambda: a.sendmsg([b'x'], [], 0, '@UNIX@'))]
""",
    check="'E[A-Z]+', 'E[A-Z]+'",
  ),
  Snippet(
    "descriptors over a pair",
    """
import os, socket
a, b = socket.socketpair()
try:
  for _ in range(2000): socket.send_fds(a, [b'x'], [a.fileno()] * 60)
except OSError: pass
a.close()
5
""",
    "ok timeout",
    limits=SHORT,
  ),
  Snippet(
    "options of a pair",
    tries("""
import socket
a, b = socket.socketpair()
found = {}
for name in ('SO_DEBUG', 'SO_RCVBUFFORCE', 'SO_SNDBUFFORCE', 'SO_MARK'):
  number = {'SO_DEBUG': 1, 'SO_RCVBUFFORCE': 33, 'SO_SNDBUFFORCE': 32, 'SO_MARK': 36}[name]
  if attempt(lambda: a.setsockopt(socket.SOL_SOCKET, number, 1 << 30)) == 'ok': found[name] = True
found
"""),
    check=ALL_DENIED,
  ),
  Snippet("asyncio works", "import asyncio\nasyncio.run(asyncio.sleep(0.01, 5))", check="5"),
  denied("io_uring", "call('io_uring_setup', 8, bytes(120))"),
  denied("older asynchronous input and output", "call('io_setup', 8, bytes(8))"),
)

_MACHINE_CODE = """
import ctypes, mmap
def run(code):
  m = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
  m.write(code)
  address = ctypes.addressof(ctypes.c_char.from_buffer(m))
  return ctypes.CFUNCTYPE(ctypes.c_long)(address)()
"""

KERNEL = (
  denied(
    "new namespaces",
    """
kinds = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80)
{kind: answer for kind in kinds if (answer := call('unshare', kind)) != 'EPERM'}
""",
    check=ALL_DENIED,
  ),
  denied("enters a namespace", "call('setns', 3, 0)"),
  denied("mount", "call('mount', b'none', os.getcwd().encode(), b'tmpfs', 0, 0)"),
  denied(
    "unmount", "[call('umount2', p, 2) for p in (b'/', b'/tmp', b'/usr')]", check=r"\['EPERM', 'EPERM', 'EPERM'\]"
  ),
  denied("remount for writing", "call('mount', b'none', b'/usr', b'', 32 | 4096, 0)"),
  denied(
    "the newer mount calls",
    """
[call('open_tree', -100, b'/', 1), call('move_mount', 0, b'', 0, b'', 0), call('fsopen', b'tmpfs', 0),
 call('fsmount', 0, 0, 0), call('mount_setattr', -100, b'/', 0, 0, 0)]
""",
    check=r"^\[('EPERM'(, )?){5}\]$",
  ),
  denied(
    "mounts, listed",
    "[call('statmount', 0, 0, 0, 0), call('listmount', 0, 0, 0, 0)]",
    check=r"^\[('(EPERM|ENOSYS)'(, )?){2}\]$",
  ),
  denied(
    "change of root", "[attempt(lambda: os.chroot('.')), call('pivot_root', b'.', b'.')]", check=r"\['EPERM', 'EPERM'\]"
  ),
  denied(
    "another user",
    """
[attempt(lambda: os.setuid(12345)), attempt(lambda: os.setgid(12345)), attempt(lambda: os.setgroups([0])),
 attempt(lambda: os.setresuid(0, 0, 0))]
""",
    check=r"^\[('EPERM'(, )?){4}\]$",
  ),
  denied("user of file accesses", "libc.setfsuid(12345)\nlibc.setfsuid(-1)", check=r"^(?!12345).*$"),
  denied(
    "capabilities", "call('capset', (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(*[0xffffffff] * 6))"
  ),
  Snippet(
    "has no capabilities",
    tries("d = (ctypes.c_uint32 * 6)()\nlibc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), d)\nlist(d)"),
    level="seccomp",
    check=r"\[0, 0, 0, 0, 0, 0\]",
  ),
  denied(
    "dangerous calls",
    """
found = {}
for name in ('bpf', 'userfaultfd', 'perf_event_open', 'keyctl', 'add_key', 'kexec_load', 'init_module',
             'finit_module', 'delete_module', 'setns', 'pivot_root', 'open_by_handle_at', 'pidfd_getfd', 'personality',
             'acct', 'quotactl', 'swapon', 'syslog', 'vhangup', 'sethostname', 'setdomainname', 'vmsplice', 'reboot'):
  answer = call(name, 0, 0, 0, 0, 0, 0)
  if answer not in ('EPERM', 'ENOSYS'): found[name] = answer
found
""",
    check=ALL_DENIED,
  ),
  denied(
    "old privileged calls",
    "[call('iopl', 3), call('modify_ldt', 0, 0, 0), call('lookup_dcookie', 0, 0, 0)]",
    check=r"^\[('(EPERM|ENOSYS)'(, )?){3}\]$",
    machine="x86_64",
  ),
  denied(
    "clocks",
    "[call('clock_settime', 0, bytes(16)), call('settimeofday', bytes(16), 0), call('adjtimex', bytes(208))]",
    check=r"^\[('EPERM'(, )?){3}\]$",
  ),
  denied(
    "a filter of its own",
    "[call('seccomp', 1, 0, 0), call('prctl', 22, 1, 0, 0, 0), call('prctl', 22, 2, 0, 0, 0)]",
    check=r"^\[('EPERM'(, )?){3}\]$",
  ),
  denied(
    "calls about itself",
    """
options = (4, 8, 23, 24, 28, 35, 36, 38, 41, 47, 53, 62, 0x59616d61)
{option: answer for option in options if (answer := call('prctl', option, 1, 0, 0, 0)) != 'EPERM'}
""",
    check=ALL_DENIED,
  ),
  denied(
    "Landlock rules of its own",
    "[call('landlock_create_ruleset', 0, 0, 1), call('landlock_restrict_self', 0, 0)]",
    check=r"\['EPERM', 'EPERM'\]",
  ),
  denied(
    "calls newer than any table",
    "libc.syscall(ctypes.c_long(4000))\nerrno.errorcode[ctypes.get_errno()]",
    check="'ENOSYS'",
  ),
  denied(
    "every number from 424 on",
    """
found = {}
for number in range(424, 700):
  if number in (436, 437, 439, 441, 449, 451, 452, 454, 455, 456): continue  # harmless, and allowed
  libc.syscall(ctypes.c_long(number), *[ctypes.c_long(-1)] * 6)
  if ctypes.get_errno() not in (1, 38, 95): found[number] = ctypes.get_errno()
found
""",
    check=ALL_DENIED,
  ),
  Snippet(
    "calls of another architecture",
    _MACHINE_CODE + "run(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')",
    "crash",
    level="seccomp",
    machine="x86_64",
  ),
  Snippet(
    "a fork of another architecture",
    _MACHINE_CODE + "run(b'\\xb8\\x02\\x00\\x00\\x00\\xcd\\x80\\xc3')",
    "crash",
    level="seccomp",
    machine="x86_64",
  ),
  Snippet(
    "x32 calls",
    "import ctypes\nctypes.CDLL(None).syscall(ctypes.c_long(0x40000000 + 39))",
    "crash",
    level="seccomp",
    machine="x86_64",
  ),
  Snippet("machine code", _MACHINE_CODE + "run(b'\\xb8\\x2a\\x00\\x00\\x00\\xc3')", check="^42$", machine="x86_64"),
  Snippet("machine code that spins", _MACHINE_CODE + "run(b'\\xeb\\xfe')", "timeout", machine="x86_64", limits=SHORT),
  Snippet("machine code that is none", _MACHINE_CODE + "run(b'\\x0f\\x0b')", "crash", machine="x86_64"),
  Snippet("privileged instruction", _MACHINE_CODE + "run(b'\\xf4')", "crash", machine="x86_64"),
  Snippet(
    "thread-local base moved",
    "import ctypes\nctypes.CDLL(None).syscall(ctypes.c_long(158), ctypes.c_long(0x1002), ctypes.c_long(0))",
    "crash",
    machine="x86_64",
  ),
  denied(
    "terminal",
    "import fcntl\n[attempt(lambda: fcntl.ioctl(fd, 0x5412, b'x')) for fd in (0, 1, 2)]",
    check=r"^\[('EPERM'(, )?){3}\]$",
  ),
  denied(
    "terminal, with high bits in the request",
    """
found = {}
for fd in (0, 1, 2):
  ctypes.set_errno(0)
  libc.ioctl(fd, ctypes.c_ulong((1 << 32) | 0x5412), b'x')
  if ctypes.get_errno() != 1: found[fd] = ctypes.get_errno()
found
""",
    check=ALL_DENIED,
  ),
  Snippet("controlling terminal", "open('/dev/tty')", "error", level="landlock"),
  Snippet(
    "shared flag in a thread's fork",
    """
import threading, os
r = []
def f():
  try: os.fork()
  except OSError as e: r.append(e.errno)
t = threading.Thread(target=f)
t.start()
t.join()
r
""",
    level="seccomp",
    check=r"^\[1\]$",
  ),
  Snippet(
    "filter holds in threads",
    """
import threading, socket
r = []
def f():
  try: socket.socket()
  except OSError as e: r.append(e.errno)
t = threading.Thread(target=f)
t.start()
t.join()
r
""",
    level="seccomp",
    check=r"^\[1\]$",
    limits=NORMAL,
  ),
)
