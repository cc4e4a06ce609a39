"""Snippets that try to harm their host, all bounded, so that a failure of the interpreter does not take the machine.

After each, the next snippet is answered and no process and no file is left.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator

import pytest
from sandbox_runner import Runner

from agentic_rl.sandbox import InterpreterConfig, Limits

pytestmark = pytest.mark.hostile

LIMITS = Limits(wall_s=5.0, cpu_s=3.0, memory_mib=256, flood_mib=4, output_bytes=4096)
SHORT = dataclasses.replace(LIMITS, wall_s=0.4)  # for those that wait for it


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
  runner = Runner(InterpreterConfig(slots=2, limits=LIMITS, stall_s=5))
  yield runner
  runner.close()


BATTERY = {
  # time
  "spin": ("while True: pass", "timeout"),
  "sleep": ("import time\ntime.sleep(60)", "timeout"),
  "spin in C": ("sum(range(10**13))", "timeout"),
  "long integer to text": ("str(7**20000000)", "timeout"),
  "regex backtracking": ("import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')", "timeout"),
  "swallow everything": ("while True:\n  try:\n    while True: pass\n  except BaseException: pass", "timeout"),
  "signals ignored": (
    "import signal, time\n"
    "for s in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGXCPU, signal.SIGHUP):\n"
    "  signal.signal(s, signal.SIG_IGN)\n"
    "while True: pass",
    "timeout",
  ),
  "thread outlives": ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n5", "ok"),
  "exit handler sleeps": ("import atexit, time\natexit.register(time.sleep, 60)", "ok"),
  "repr never ends": ("class A:\n  def __repr__(self):\n    while True: pass\nA()", "timeout"),
  "trace function interrupts": (
    "import sys\ndef t(*a): raise KeyboardInterrupt\nsys.settrace(t)\n(lambda: 1)()",
    "error",
  ),
  # memory
  "list bomb": ("x = [0] * 10**10", "memory"),
  "append bomb": ("x = []\nwhile True: x.append(bytearray(10 << 20))", "memory"),
  "string doubling": ("x = 'a'\nwhile True: x += x", "memory"),
  "shared map": ("import mmap\nmmap.mmap(-1, 8 << 30)", "error memory"),
  "memory error swallowed": (
    "x = []\nwhile True:\n  try:\n    x.append(bytearray(10 << 20))\n  except MemoryError: pass",
    "timeout",
  ),
  "huge exception": ("raise ValueError('x' * (100 << 20))", "error memory"),
  "deep recursion in C": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", "crash error memory timeout"),
  "deep source": ("(" * 50000 + ")" * 50000, "error memory"),
  # processes
  "bounded fork bomb": (
    "import os, time\nfor i in range(30):\n  if os.fork() == 0:\n    os.fork()\n    time.sleep(60)\ntime.sleep(60)",
    "timeout error",
  ),
  "daemons in sessions of their own": (
    "import os, time\n"
    "for i in range(6):\n"
    "  if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0: time.sleep(60)\n"
    "    os._exit(0)\n"
    "5",
    "ok error",
  ),
  "grandchild holds stdout": ("import subprocess\nsubprocess.Popen(['sleep', '60'])\nprint(5)", "ok"),
  "grandchild floods": ("import subprocess\nsubprocess.Popen(['yes'], start_new_session=True)\nprint(5)", "ok output"),
  "daemon that forks on": (
    "import os, time\n"
    "if os.fork() == 0:\n"
    "  os.setsid()\n"
    "  for i in range(300):\n"
    "    if os.fork(): os._exit(0)\n"
    "    time.sleep(0.01)\n"
    "  os._exit(0)",
    "ok",
  ),
  "kills its group": ("import os\nos.killpg(0, 9)", "crash"),
  "signals by name of a limit": ("import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)", "crash"),
  "stops itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
  # output and the result channel
  "print one line of 1 GB": ("print('x' * 10**9)", "memory output"),
  "print flood": ("while True: print('x' * 100)", "output timeout"),
  "stderr flood": ("import sys\nwhile True: sys.stderr.write('x' * 10000)", "output timeout"),
  "raw flood": ("import os\nwhile True: os.write(1, b'x' * 65536)", "output timeout"),
  "closed outputs": ("import os\nos.close(1)\nos.close(2)\nprint(5)", "error ok"),
  "result channel flood": ("import os\nwhile True: os.write(3, b'x' * 65536)", "output timeout"),
  "result channel garbage": ("import os\nos.write(3, b'x' * 100)\nos._exit(0)", "exit"),
  "claims that it never started": ("import os\nos.write(3, b'F the host is broken')\nos._exit(1)", "exit"),
  "claims an unknown status": (
    "import os, struct\nos.write(3, struct.pack('<4sBiIIII', b'AGS1', 9, 0, 0, 0, 0, 0))\nos._exit(0)",
    "exit",
  ),
  "claims an endless value": (
    "import os, struct\nos.write(3, struct.pack('<4sBiIIII', b'AGS1', 0, 0, 2**32 - 1, 0, 0, 0))\nos._exit(0)",
    "exit",
  ),
  "patches the harness": (
    "import sys\nf = sys._getframe()\nwhile f.f_back:\n  f = f.f_back\n  f.f_globals.clear()\n1",
    "exit error",
  ),
  "breaks the exit": ("import os\nos._exit = os.write = None\n1", "exit crash error"),
  # the interpreter's own parts
  "no builtins": ("import builtins\nfor n in dir(builtins): delattr(builtins, n)", "error exit ok"),
  "exception hooks": ("import sys\nsys.excepthook = lambda *a: print('hooked')\n1/0", "error"),
  "metaclass with a hostile name": (
    "class M(type):\n"
    "  __name__ = __qualname__ = property(lambda c: 1/0)\n"
    "class E(Exception, metaclass=M):\n"
    "  def __str__(self): raise E\n"
    "raise E",
    "error exit",
  ),
  "ctypes writes to zero": ("import ctypes\nctypes.memset(0, 0, 99)", "crash"),
  # files
  "10 000 small files": ("for i in range(10000): open(str(i), 'w').close()", "ok timeout"),
  "unwritable directories": ("import os\nos.makedirs('a/b/c')\nos.chmod('a/b', 0)\nos.chmod('a', 0)", "ok"),
  "too deep for a path": ("import os\nfor i in range(120):\n  os.mkdir('d' * 50)\n  os.chdir('d' * 50)", "ok"),
  "links outwards": ("import os\nos.symlink('/', 'root')\nos.symlink('/etc', 'etc')", "ok"),
  "sparse terabyte": ("open('f', 'wb').truncate(10**12)", "error"),
  # privileges
  "raise a hard limit": ("import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))", "error"),
  "mount": (
    "import ctypes, os\nassert ctypes.CDLL(None).mount(b'none', os.getcwd().encode(), b'tmpfs', 0, None) == -1",
    "ok",
  ),
  "become another user": ("import os\nos.setuid(12345)", "error"),
}


@pytest.mark.parametrize("name", BATTERY)
def test_hostile(runner: Runner, name: str):
  code, expected = BATTERY[name]
  limits = SHORT if "timeout" in expected else LIMITS
  begin = time.monotonic()
  result = runner.run(code, limits)
  assert result.status in expected.split(), result
  assert time.monotonic() - begin < limits.wall_s + 2.0
  assert runner.run("1+1").value == "2"
  assert runner.leftovers() == []
  assert runner.interpreter.stats()["restarts"] == 0


def test_the_zygote_does_not_grow(runner: Runner):
  pid = runner.interpreter.capabilities()["pid"]

  def size() -> tuple[int, int]:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
      pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))

  codes = [
    BATTERY[name][0] for name in ("raw flood", "list bomb", "claims an endless value", "grandchild holds stdout")
  ]
  for code in codes:
    runner.run(code, SHORT)
  bytes_before, fds_before = size()
  for code in codes * 10:
    runner.run(code, SHORT)
  bytes_after, fds_after = size()
  assert fds_after == fds_before
  assert bytes_after - bytes_before < 4 << 20
