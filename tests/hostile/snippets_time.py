"""Snippets that do not end, and snippets that want all memory."""

from __future__ import annotations

import dataclasses

from snippet import BRIEF_CPU, NORMAL, SHORT, Snippet, denied

TIME = (
  Snippet("spin", "while True: pass", "timeout", limits=SHORT),
  Snippet("spin until the CPU time is used up", "while True: pass", "cpu", limits=BRIEF_CPU),
  Snippet("sleep", "import time\ntime.sleep(60)", "timeout", limits=SHORT),
  Snippet("spin in C", "sum(range(10**13))", "timeout", limits=SHORT),
  Snippet("long integer to text", "str(7**20000000)", "timeout", limits=SHORT),
  Snippet("long integer from text", "int('7' * 30_000_000)", "timeout", limits=SHORT),
  Snippet("factorial", "import math\nmath.factorial(20_000_000)", "timeout", limits=SHORT),
  Snippet(
    "regular expression that backtracks", "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')", "timeout", limits=SHORT
  ),
  Snippet(
    "swallow everything",
    "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
    "timeout",
    limits=SHORT,
  ),
  Snippet(
    "signals ignored",
    """
import signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGXCPU, signal.SIGHUP, signal.SIGPROF):
  signal.signal(number, signal.SIG_IGN)
while True: pass
""",
    "timeout",
    limits=SHORT,
  ),
  Snippet(
    "SIGXCPU ignored and blocked",
    """
import signal
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
while True: pass
""",
    "cpu",
    limits=BRIEF_CPU,
  ),
  Snippet(
    "all signals blocked, asleep",
    "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\ntime.sleep(60)",
    "timeout",
    limits=SHORT,
  ),
  Snippet(
    "waits for a signal that never comes",
    "import signal\nsignal.sigwait({signal.SIGUSR1})",
    "timeout",
    limits=SHORT,
  ),
  Snippet("stops itself", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "timeout", limits=SHORT),
  Snippet(
    "four busy threads",
    """
import threading
def spin():
  while True: pass
for _ in range(4): threading.Thread(target=spin).start()
spin()
""",
    "cpu",
    limits=BRIEF_CPU,
  ),
  Snippet(
    "threads that spin in C at the same time",
    """
import hashlib, threading
def spin():
  data = bytes(1 << 20)
  while True: hashlib.sha256(data)
for _ in range(4): threading.Thread(target=spin, daemon=True).start()
threading.Event().wait()
""",
    "cpu",
    limits=BRIEF_CPU,
  ),
  Snippet(
    "daemon thread outlives",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n5",
    check="5",
  ),
  Snippet(
    "thread outlives",
    "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n5",
    "timeout",
    limits=SHORT,
  ),
  Snippet("exit handler sleeps", "import atexit, time\natexit.register(time.sleep, 60)", "timeout", limits=SHORT),
  Snippet(
    "exit handler prints and spins",
    "import atexit\ndef f():\n  print('no')\n  while True: pass\natexit.register(f)",
    "timeout cpu",
    limits=SHORT,
    printed="^no$",
  ),
  Snippet("finalizer spins at exit", "class A:\n  def __del__(self):\n    while True: pass\na = A()"),
  Snippet(
    "finalizer spins now",
    "class A:\n  def __del__(self):\n    while True: pass\na = A()\ndel a",
    "timeout",
    limits=SHORT,
  ),
  Snippet(
    "collector's callback spins",
    "import gc\ndef f(*a):\n  while True: pass\ngc.callbacks.append(f)\ngc.collect()",
    "timeout",
    limits=SHORT,
  ),
  Snippet(
    "alarm with its default action",
    "import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0.02)\ntime.sleep(60)",
    "crash",
  ),
  Snippet(
    "storm of timer signals",
    """
import signal
signal.signal(signal.SIGALRM, lambda *a: None)
signal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-6)
while True: pass
""",
    "timeout",
    limits=SHORT,
  ),
  Snippet(
    "trace function interrupts",
    "import sys\ndef t(*a): raise KeyboardInterrupt\nsys.settrace(t)\n(lambda: 1)()",
    "error",
  ),
  Snippet(
    "profile function spins",
    "import sys\ndef p(*a):\n  while True: pass\nsys.setprofile(p)\nlen('')",
    "timeout",
    limits=SHORT,
  ),
  Snippet(
    "text of the value never ends",
    "class A:\n  def __repr__(self):\n    while True: pass\nA()",
    "timeout",
    limits=SHORT,
  ),
  Snippet(
    "deadlock", "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()", "timeout", limits=SHORT
  ),
  Snippet("reads a pipe that nobody writes", "import os\nr, w = os.pipe()\nos.read(r, 1)", "timeout", limits=SHORT),
  Snippet("selects on nothing", "import select\nselect.select([], [], [])", "timeout", limits=SHORT),
  Snippet(
    "lets go of the interpreter lock for ever",
    "import ctypes\nctypes.CDLL(None).pause()",
    "timeout",
    limits=SHORT,
  ),
  Snippet(
    "keeps the interpreter lock for ever",
    "import ctypes\nctypes.PyDLL(None).pause()",
    "timeout",
    limits=SHORT,
  ),
  Snippet(
    "lies about the time",
    "import time\ntime.monotonic = time.time = lambda: 0.0\ntime.sleep(60)",
    "timeout",
    limits=SHORT,
  ),
  Snippet("prints before it hangs", "print('so far')\nwhile True: pass", "timeout", printed="so far", limits=SHORT),
)

MEMORY = (
  Snippet("list bomb", "x = [0] * 10**10", "memory"),
  Snippet("append bomb", "x = []\nwhile True: x.append(bytearray(10 << 20))", "memory"),
  Snippet("string doubling", "x = 'a'\nwhile True: x += x", "memory"),
  Snippet("dict bomb", "x = dict.fromkeys(range(10**8))", "memory cpu"),
  Snippet("shared map", "import mmap\nmmap.mmap(-1, 8 << 30)", "error memory"),
  Snippet(
    "map without reserve",
    "import mmap\nmmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)",
    "error memory",
  ),
  Snippet(
    "map grown in steps", "import mmap\nm = mmap.mmap(-1, 1 << 20)\nwhile True: m.resize(2 * len(m))", "error memory"
  ),
  Snippet(
    "heap grown by brk",
    "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.sbrk.restype = ctypes.c_long\nlibc.sbrk(ctypes.c_long(8 << 30))",
    check="^-1$",
  ),
  Snippet("huge power", "10**(10**10)", "timeout memory", limits=SHORT),
  Snippet("huge shift", "1 << (1 << 40)", "memory error"),
  Snippet("huge format width", "'%099999999999d' % 1", "memory error"),
  Snippet("huge padding", "f'{1:>99999999999}'", "memory error"),
  Snippet("huge join", "','.join(['x' * 10**6] * 10**6)", "memory"),
  Snippet("long list as value", "[0] * 10**6", check=r"^\[0, 0", limits=NORMAL),
  Snippet("very long list as value", "[0] * 10**7", "ok memory"),
  Snippet("huge exception", "raise ValueError('x' * (100 << 20))", "error memory"),
  Snippet(
    "deep recursion in C",
    "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "crash error memory timeout",
    limits=SHORT,
  ),
  Snippet("deep recursion by repr", "x = []\nfor _ in range(10**6): x = [x]\nprint(x)", "error"),
  Snippet("deep source", "(" * 50_000 + ")" * 50_000, "error memory"),
  Snippet("source nested in blocks", "".join(" " * i + "if 1:\n" for i in range(300)) + " " * 300 + "pass", "error"),
  Snippet("literal that nests", "import ast\nast.literal_eval('-' * 100_000 + '1')", "error memory crash"),
  Snippet("JSON that nests", "import json\njson.loads('[' * 10**6)", "error memory"),
  Snippet(
    "memory error swallowed",
    "x = []\nwhile True:\n  try:\n    x.append(bytearray(10 << 20))\n  except MemoryError: pass",
    "timeout",
    limits=SHORT,
  ),
  Snippet(
    "memory error, and the next object as well",
    "x = []\ntry:\n  while True: x.append(bytearray(4096))\nexcept MemoryError:\n  y = [[] for _ in range(10**9)]",
    "memory cpu",
    limits=dataclasses.replace(NORMAL, memory_mib=64),
  ),
  Snippet(
    "file in memory",
    "import os\nfd = os.memfd_create('x')\nwhile True: os.write(fd, bytes(1 << 20))",
    "error",
  ),
  Snippet("shared memory directory", "open('/dev/shm/battery', 'wb').write(bytes(1 << 20))", "error", level="landlock"),
  Snippet(
    "zlib bomb", "import zlib\nz = zlib.compress(bytes(10**8))\nx = [zlib.decompress(z) for _ in range(10)]", "memory"
  ),
  Snippet("iterator bomb", "import itertools\nx = list(itertools.product(range(10**3), repeat=4))", "memory cpu"),
  Snippet(
    "twenty thousand threads",
    """
import threading, time
for _ in range(20000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
""",
    "error memory",
  ),
  Snippet(
    "threads with small stacks",
    """
import threading, time
threading.stack_size(65536)
n = 0
try:
  for _ in range(500):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    n += 1
except (RuntimeError, MemoryError): pass
n <= 500
""",
    check="True",
  ),
  Snippet("endless device", "open('/dev/zero', 'rb').read()", "memory error", level="seccomp", weaker="memory"),
  Snippet(
    "pipe buffers",
    """
import fcntl, os
ends = []
try:
  while True:
    ends += os.pipe()
    fcntl.fcntl(ends[-1], 1031, 1 << 20)
except OSError: pass
len(ends) < 70
""",
    check="True",
  ),
  denied("System V shared memory", "call('shmget', 0, 1 << 30, 0o1600)"),
  denied(
    "System V messages and semaphores",
    "[call('msgget', 0, 0o1600), call('semget', 0, 1, 0o1600)]",
    check=r"\['EPERM', 'EPERM'\]",
  ),
  denied("POSIX message queue", "call('mq_open', b'battery', 0o102, 0o600, 0)"),
  denied("memory that even the kernel cannot see", "call('memfd_secret', 0)"),
  Snippet("locked memory", "import ctypes\nctypes.CDLL(None).mlockall(3)\nx = [0] * 10**10", "memory"),
)
