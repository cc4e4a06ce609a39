"""Sessions that cheat at the one fork of a turn; snippets that try to get past the filter or to hold up the parent."""

from __future__ import annotations

import dataclasses

from snippet import ALL_DENIED, NORMAL, SHORT, Snippet, Turns, denied, tries

_FIRST = ("x = 41\nprint('once')", "ok", "")
_ANY = "ok error exit crash timeout cpu output"
_ONE_FORK = r"^(?!forks ([2-9]|\d\d))"
"""Beside the session's process there is at most one other."""

_BETWEEN = """
import ctypes, os, signal, struct, time
libc = ctypes.CDLL(None)
def frame(text):
  field = struct.pack('<BII', 0, len(text), 0) + text.encode()
  return struct.pack('<4sBiQI', b'AGS2', 0, 0, 0, len(field)) + field
made, turns = [], []
def count():
  alive = 0
  for pid in made:
    try: alive += os.waitpid(pid, os.WNOHANG)[0] == 0
    except OSError: pass
  return f'forks {alive}'
def serve(*_):
  # In place of the harness: takes each turn, uses its one fork for something else, and reports.
  signal.setitimer(signal.ITIMER_REAL, 0)
  while True:
    if not os.read(3, 1 << 20): os._exit(0)
    turns.append(1)
    pid = libc.fork()
    if pid == 0:
      while True: time.sleep(0.01)
    if pid > 0: made.append(pid)
    report()
signal.signal(signal.SIGALRM, serve)
signal.setitimer(signal.ITIMER_REAL, 0.03)
"""


def _between(name: str, report: str, turns: int = 6, check: str = _ONE_FORK) -> Turns:
  """What the first turn leaves behind acts before the second begins."""
  return Turns(
    name,
    (_FIRST, (_BETWEEN + report, "ok", ""), *[("5", _ANY, check)] * turns),
    level="seccomp",
    checkpoints=("auto",),
    pause_s=0.1,
  )


def _death(name: str, seconds: str, status: str = "0") -> Turns:
  code = f"def report(): os.write(3, struct.pack('<cidQ', b'D', {status}, {seconds}, 2**64 - 1))"
  return _between(name, code, turns=2)


GATES = (
  _between(
    "forks that are kept from turn to turn",
    "def report():\n  os.write(3, b'R')\n  time.sleep(0.02)\n  os.write(3, frame(count()))",
  ),
  _between(
    "forks that are kept while deaths are claimed",
    """
def report():
  if len(turns) < 5: return os.write(3, struct.pack('<cidQ', b'D', 0x300, 0.0, 0))
  os.write(3, b'R')
  time.sleep(0.02)
  os.write(3, frame(count()))
""",
  ),
  _between("reports that come early", "def report():\n  os.write(3, frame(count()))", turns=3),
  _between(
    "reports and deaths at once",
    "def report(): os.write(3, b'R' + frame('x') + struct.pack('<cidQ', b'D', 0, 0.0, 0))",
    turns=3,
  ),
  _death("claims no number of seconds", "float('nan')"),
  _death("claims endless seconds", "float('inf')"),
  _death("claims negative seconds", "-1e300"),
  _death("claims a death that is none", "0.0", "0x7f"),
  _death("claims a death by an unknown signal", "0.0", "0x7e"),
  _death("claims a negative status", "0.0", "-1"),
  _death("claims the signal of a limit", "1e6", "24"),
  Turns(
    "a fork by a hook that the C library does not know",
    (
      _FIRST,
      (
        "import ctypes, os\nmade = []\nos.register_at_fork(before=lambda: made.append(ctypes.CDLL(None).fork()))",
        "ok",
        "",
      ),
      ("made", _ANY, ""),
      ("made", _ANY, ""),
    ),
    level="seccomp",
    checkpoints=("auto",),
  ),
  Turns(
    "a hook that makes the fork's parent report",
    (
      _FIRST,
      (
        """
import os, struct
def f():
  os.write(3, b'R')
  os.write(3, struct.pack('<4sBiQI', b'AGS2', 0, 0, 0, 0))
os.register_at_fork(after_in_parent=f)
""",
        "ok",
        "",
      ),
      ("import time\ntime.sleep(0.1)\n5", _ANY, ""),
      ("6", _ANY, ""),
      ("7", _ANY, ""),
    ),
    level="seccomp",
    checkpoints=("auto",),
  ),
  Turns(
    "a channel that is not read",
    (
      _FIRST,
      (
        "import signal, time\nsignal.signal(signal.SIGALRM, lambda *a: time.sleep(60))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.03)",
        "ok",
        "",
      ),
      ("y = '" + "a" * 900_000 + "'", _ANY, ""),
      ("5", _ANY, "^5?$"),
    ),
    pause_s=0.1,
    checkpoints=("auto",),
    disturbs=True,
  ),
  Turns(
    "forks asked for by many threads",
    (
      _FIRST,
      (
        """
import ctypes, threading, time
fork = ctypes.CDLL(None).fork
def f():
  while True: fork()
for _ in range(16): threading.Thread(target=f, daemon=True).start()
time.sleep(60)
""",
        "timeout cpu",
        "",
      ),
      ("x + 1", "ok", "^42$"),
    ),
    level="seccomp",
    limits=dataclasses.replace(NORMAL, wall_s=1.0),
    disturbs=True,
  ),
  *(
    Turns(
      f"standard input {name}",
      (_FIRST, ("import os\n" + code, "ok exit", ""), ("5", _ANY, "^5?$"), ("6", _ANY, "^6?$")),
      checkpoints=("auto",),
    )
    for name, code in (
      ("closed", "os.close(0)"),
      ("that is the channel", "os.dup2(3, 0)"),
      ("that is full", "os.dup2(os.open('/dev/full', os.O_RDWR), 0)"),
      (
        "that blocks",
        "r, w = os.pipe()\nos.set_blocking(w, False)\ntry:\n  while True: os.write(w, bytes(4096))\n"
        "except OSError: os.set_blocking(w, True)\nos.dup2(w, 0)",
      ),
      ("that is a directory", "os.dup2(os.open('.', os.O_RDONLY), 0)"),
    )
  ),
  *(
    Turns(
      f"lowered for ever: {kind}",
      (
        _FIRST,
        (f"import resource as r\nr.setrlimit(r.RLIMIT_{kind}, ({low}, {low}))", "ok exit error", ""),
        ("5", "ok error exit crash memory cpu", "^5?$"),
        ("6", "ok error exit crash memory cpu", "^6?$"),
      ),
    )
    for kind, low in (("NOFILE", 0), ("FSIZE", 0), ("AS", 1 << 20), ("NPROC", 0), ("STACK", 4096), ("DATA", 4096))
  ),
)

_MANY_BITS = "(0, 1 << 32, 0xFFFFFFFF << 32)"

PASSING = (
  denied(
    "owners of signals, with high bits and by other calls",
    f"""
import socket
a, b = socket.socketpair()
found = {{}}
pair = (ctypes.c_int * 2)(1, @BYSTANDER@)
pid = (ctypes.c_int * 1)(@BYSTANDER@)
for name, number, request, argument in (
  ('F_SETOWN', 72, 8, @BYSTANDER@), ('F_SETSIG', 72, 10, 9), ('F_SETOWN_EX', 72, 15, ctypes.byref(pair)),
  ('F_NOTIFY', 72, 1026, 1), ('F_SETLEASE', 72, 1024, 1), ('FIOSETOWN', 16, 0x8901, ctypes.byref(pid)),
  ('SIOCSPGRP', 16, 0x8902, ctypes.byref(pid)), ('FIOASYNC', 16, 0x5452, ctypes.byref(pid)),
):
  for high in {_MANY_BITS}:
    wide = ctypes.c_long(argument) if isinstance(argument, int) else argument
    if libc.syscall(ctypes.c_long(number), ctypes.c_long(a.fileno()), ctypes.c_ulong(high | request), wide) >= 0:
      found[name, high] = True
found
""",
    check=ALL_DENIED,
    machine="x86_64",
  ),
  denied(
    "signals, with high bits in the process",
    """
found = {}
for name in ('tkill', 'tgkill', 'rt_sigqueueinfo'):
  for pid in (1 << 32 | @BYSTANDER@, 0xFFFFFFFF << 32 | @BYSTANDER@, os.getpid() << 32 | @BYSTANDER@, -1, 0, 1):
    arguments = (pid, pid, 9) if name == 'tgkill' else (pid, 9, bytes(128)) if name[0] == 'r' else (pid, 9)
    if call(name, *arguments) == 'ok': found[name, pid] = True
found
""",
    check=ALL_DENIED,
  ),
  denied(
    "limits of others, with high bits",
    "{p for p in (1 << 32 | @BYSTANDER@, 1 << 32 | 1) if libc.syscall(ctypes.c_long(302), ctypes.c_long(p), 7,"
    " (ctypes.c_uint64 * 2)(1, 1), None) == 0}",
    check=r"^set\(\)$",
    machine="x86_64",
  ),
  denied(
    "pairs and threads, with high bits",
    """
ends = (ctypes.c_int * 2)()
found = []
for family, kind in ((1 << 32 | 1, 1 << 32 | 2), (1 << 32 | 1, 1 << 32 | 5), (1 << 32 | 2, 1)):
  if libc.syscall(ctypes.c_long(53), ctypes.c_long(family), ctypes.c_long(kind), 0, ends) == 0: found.append(family)
for flags in (1 << 32 | 17, 0xFFFE << 32 | 17, 1 << 63 | 17):
  pid = libc.syscall(ctypes.c_long(56), ctypes.c_ulong(flags), None, None, None, None)
  if pid == 0: os._exit(7)
  if pid > 0: found.append(hex(flags))
found
""",
    check=r"^\[\]$",
    machine="x86_64",
  ),
  denied(
    "calls about itself, with high bits",
    "{o for o in (1, 4, 22, 23, 24, 35, 36, 38, 47, 53) if call('prctl', 1 << 32 | o, 1, 0, 0, 0) == 'ok'}",
    check=r"^set\(\)$",
  ),
  denied(
    "numbers of calls with high bits",
    "[libc.syscall(ctypes.c_long(h << 32 | 57)) for h in (1, 0x4000, 0xFFFF)]",
    check=r"^\[-1, -1, -1\]$",
    machine="x86_64",
  ),
  Snippet(
    "places that can be written",
    """
import os
found = []
for top, folders, names in os.walk('/'):
  if top.count('/') > 3 or top.startswith(os.getcwd()): folders.clear()
  for path in [top, *(os.path.join(top, n) for n in names if top.count('/') < 4)]:
    if path.startswith((os.getcwd(), '/dev/')) or os.path.islink(path): continue
    if os.access(path, os.W_OK): found.append(path)
found
""",
    level="namespace",
    check=r"^\[\]$",
  ),
  Snippet(
    "devices that are written",
    "import os\nfor n in ('null', 'zero', 'random', 'urandom'): os.write(os.open('/dev/' + n, 1), b'x' * 4096)",
    "ok error",
  ),
  Snippet(
    "flags of its files",
    tries("""
import fcntl
fd = os.open('f', os.O_CREAT | os.O_RDWR)
[attempt(lambda: fcntl.ioctl(fd, request, bytes(8))) for request in (0x40086602, 0x401C5820, 0x5877, 0x40049409)]
"""),
    level="seccomp",
    check=r"^\[('EPERM'(, )?){4}\]$",
  ),
  Snippet(
    "sixty thousand maps",
    "import mmap\nm = []\ntry:\n  for i in range(60000): m.append(mmap.mmap(-1, 4096, prot=1 + 2 * (i % 2)))\n"
    "except OSError: pass\n5",
    "ok memory error cpu",
  ),
  Snippet(
    "pages made faulty",
    tries("m = (ctypes.c_char * 8192)()\n[libc.madvise(m, 4096, advice) for advice in (100, 101)]"),
    level="seccomp",
    check=r"^\[-1, -1\]$",
  ),
  Snippet(
    "memory below all others",
    tries("libc.mmap.restype = ctypes.c_long\nlibc.mmap(ctypes.c_void_p(0), 4096, 3, 0x32, -1, ctypes.c_long(0))"),
    level="seccomp",
    check="^-1$",
  ),
  Snippet(
    "thousands of timers",
    "import ctypes\nlibc = ctypes.CDLL(None)\n"
    "for _ in range(5000): libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p()))\n5",
    check="5",
  ),
  Snippet(
    "ring of watchers",
    "import select\ne = [select.epoll() for _ in range(20)]\ntry:\n"
    "  for i in range(20): e[i].register(e[(i + 1) % 20])\nexcept OSError: pass\n5",
    check="5",
  ),
  Snippet(
    "flood in single bytes",
    """
import os, threading
def f(fd):
  while True: os.write(fd, b'x')
for fd in (1, 2, 3) * 5: threading.Thread(target=f, args=(fd,), daemon=True).start()
threading.Event().wait()
""",
    "output timeout cpu",
    limits=dataclasses.replace(NORMAL, wall_s=1.5),
    disturbs=True,
  ),
  Snippet(
    "flood at full speed beside a neighbour",
    "import os\nwhile True: os.write(1, bytes(1 << 20))",
    "output",
    limits=dataclasses.replace(NORMAL, flood_mib=256),
    disturbs=True,
  ),
  Snippet(
    "as many files as it can",
    """
import os, time
end = time.monotonic() + 1.2
n = 0
try:
  while time.monotonic() < end:
    os.mkdir(str(n))
    for i in range(60): os.symlink('x' * 200, f'{n}/{i}')
    n += 1
except OSError: pass
5
""",
    "ok disk",
    disturbs=True,
  ),
  Snippet(
    "directories in a long chain",
    """
import os, time
end = time.monotonic() + 1.0
try:
  while time.monotonic() < end:
    os.mkdir('d')
    os.chdir('d')
except OSError: pass
5
""",
    "ok disk",
    disturbs=True,
  ),
  Snippet(
    "many busy threads beside a neighbour",
    "import threading\ndef f():\n  while True: pass\n"
    "for _ in range(30): threading.Thread(target=f, daemon=True).start()\nf()",
    "timeout cpu",
    limits=dataclasses.replace(NORMAL, wall_s=1.2),
    disturbs=True,
  ),
  Snippet(
    "closes its channel and goes on",
    "import os\nos.close(3)\nos.close(1)\nos.close(2)\nwhile True: pass",
    "timeout",
    limits=SHORT,
  ),
  Snippet("modes left behind", "import os\nos.umask(0o777)\nos.mkdir('d', 0)\nos.chdir('..')\n5", "ok error"),
  Snippet("closes its directory", tries("attempt(lambda: os.chmod('.', 0))\nattempt(lambda: os.chmod('.', 0o1777))")),
  Snippet(
    "pages of a library changed",
    "import mmap, os\nf = os.open(os.__file__, os.O_RDONLY)\n"
    "m = mmap.mmap(f, 0, flags=mmap.MAP_PRIVATE, prot=3)\nm[:9] = b'x' * 9\n"
    "try: mmap.mmap(f, 0, flags=mmap.MAP_SHARED, prot=3)\nexcept OSError: print('no')",
    printed="no",
  ),
  Snippet("standard input sealed", "import fcntl\n[fcntl.fcntl(0, 1033, s) for s in (1, 2, 4, 8)]", "error"),
  Snippet("standard input grown", "import os\nos.truncate(0, 1 << 40)", "error"),
)
