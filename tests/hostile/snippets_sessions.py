"""Sessions whose turns try to end, poison or leave them."""

from __future__ import annotations

from snippet import NORMAL, Turns, tries

_FIRST = ("x = 41\nprint('once')", "ok", "")
_AFTER = ("x + 1", "ok", "^42$")


def _survives(name: str, code: str, expected: str, **more: object) -> Turns:
  """The state before the hostile turn is there after it."""
  return Turns(name, (_FIRST, (code, expected, ""), _AFTER), **more)  # type: ignore[arg-type]


SESSIONS = (
  _survives("state after an exception", "1/0", "error"),
  _survives("state after an endless loop", "x = 0\nwhile True: pass", "timeout"),
  _survives("state after an endless loop in C", "x = 0\nsum(range(10**13))", "timeout"),
  _survives(
    "state after a sleep with all signals blocked",
    "x = 0\nimport signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\ntime.sleep(60)",
    "timeout",
  ),
  _survives(
    "state after a loop that swallows everything",
    "x = 0\nwhile True:\n  try:\n    while True: pass\n  except BaseException: pass",
    "timeout",
  ),
  _survives("state after os._exit", "x = 0\nimport os\nos._exit(0)", "exit"),
  _survives("state after a segmentation fault", "x = 0\nimport ctypes\nctypes.string_at(0)", "crash"),
  _survives("state after an abort", "x = 0\nimport os\nos.abort()", "crash"),
  _survives("state after a kill by itself", "import os\nos.kill(os.getpid(), 9)\nx = 0", "crash exit error"),
  _survives("state after sys.exit", "import sys\nsys.exit(3)", "exit"),
  _survives("state after a flood", "x = 0\nwhile True: print('y' * 10000)", "output"),
  _survives("state after too much memory", "y = bytearray(10**12)", "memory"),
  _survives(
    "state after memory in small pieces", "y = []\nwhile True: y.append(bytearray(1 << 20))", "memory", limits=NORMAL
  ),
  _survives(
    "state after it stopped itself",
    "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nx = 0",
    "timeout error crash",
  ),
  _survives("state after broken syntax", "x = = 0", "error"),
  _survives("state after a source that is refused", "x = 0\0", "refused"),
  _survives(
    "state after builtins are gone", "import builtins\nfor n in dir(builtins): delattr(builtins, n)", "ok error exit"
  ),
  _survives(
    "state after modules are gone",
    "import sys\nfor n in list(sys.modules): sys.modules[n] = None",
    "ok error exit timeout crash",
  ),
  _survives(
    "state after streams are gone",
    "import sys\nsys.stdin = sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = None",
    "ok",
  ),
  _survives(
    "state after a trace function", "import sys\ndef t(*a): raise KeyboardInterrupt\nsys.settrace(t)", "ok error exit"
  ),
  _survives("state after the channel is closed", "x = 0\nimport os\nos.close(3)", "exit crash timeout"),
  _survives("state after all is closed", "x = 0\nimport os\nos.closerange(0, 64)", "exit crash timeout"),
  _survives("state after garbage in the channel", "x = 0\nimport os\nos.write(3, b'x' * 1000)", "exit crash timeout"),
  _survives(
    "state after a flood of the channel",
    "x = 0\nimport os\nwhile True: os.write(3, bytes(65536))",
    "exit crash output timeout",
  ),
  _survives(
    "state after the harness lost its globals",
    "x = 0\nimport sys\nf = sys._getframe()\nwhile f.f_back:\n  f = f.f_back\n  f.f_globals.clear()",
    "exit error crash",
  ),
  _survives(
    "state after a message of death",
    "x = 0\nimport os, struct\nos.write(3, struct.pack('<cidQ', b'D', 0, 0.0, 0))\nimport time\ntime.sleep(5)",
    "exit crash timeout",
  ),
  _survives(
    "state after a claim not to have started", "x = 0\nimport os\nos.write(3, b'F no')\nos._exit(0)", "exit crash"
  ),
  Turns(
    "a forged result is only its own",
    (
      _FIRST,
      (
        """
import os, struct
os.write(3, struct.pack('<4sBiQI', b'AGS2', 0, 0, 0, 0))
x = 41
import time
time.sleep(0.05)
""",
        "ok exit crash timeout",
        "",
      ),
      ("x + 1", "ok exit crash", "^(42)?$"),
    ),
  ),
  Turns(
    "descriptors sent up the channel",
    (
      _FIRST,
      (
        """
import socket
s = socket.socket(fileno=3)
for _ in range(50): socket.send_fds(s, [b''], [0] * 50)
s.detach()
""",
        "ok error exit crash",
        "",
      ),
      (
        """
import socket
s = socket.socket(fileno=3)
socket.send_fds(s, [b'x'], [0] * 50)
s.detach()
import time
time.sleep(0.2)
""",
        "ok error exit crash timeout",
        "",
      ),
      _AFTER,
    ),
  ),
  Turns(
    "descriptors smuggled in before the next turn",
    (
      _FIRST,
      (
        """
import socket, threading, time
def f():
  s = socket.socket(fileno=3)
  time.sleep(0.05)
  for _ in range(100):
    try: socket.send_fds(s, [b'R'], [1, 2, 3])
    except OSError: break
threading.Thread(target=f, daemon=True).start()
""",
        "ok",
        "",
      ),
      ("import time\ntime.sleep(0.2)", "ok exit crash error timeout", ""),
      ("5", "ok error exit crash", ""),
    ),
  ),
  Turns("a fork", (_FIRST, ("import os\nos.fork()", "error", ""), _AFTER), level="seccomp"),
  Turns(
    "a fork from a thread",
    (
      _FIRST,
      (
        """
import os, threading
r = []
def f():
  try: os.fork()
  except OSError as e: r.append(e.errno)
t = threading.Thread(target=f)
t.start()
t.join()
r
""",
        "ok",
        r"^\[1\]$",
      ),
      _AFTER,
    ),
    level="seccomp",
  ),
  Turns(
    "forks that race with the next turn's",
    (
      _FIRST,
      (
        """
import os, threading, time
made = []
def f():
  while True:
    try:
      pid = os.fork()
      if pid == 0: os._exit(0)
      made.append(pid)
    except OSError: pass
for _ in range(3): threading.Thread(target=f, daemon=True).start()
""",
        "ok",
        "",
      ),
      ("made", "ok error exit crash timeout", r"^(\[\])?$"),
      ("5", "ok error exit crash timeout", ""),
    ),
    level="seccomp",
  ),
  Turns(
    "signals to the other process of the session",
    (
      _FIRST,
      (
        tries(
          "sorted({attempt(lambda: os.kill(p, 9)) for p in [*range(1, 3000), os.getppid() or 1] if p != os.getpid()})"
        ),
        "ok",
        r"^\['EPERM'\]$",
      ),
      _AFTER,
    ),
    level="seccomp",
  ),
  Turns(
    "trace of the other process of the session",
    (_FIRST, (tries("sorted({call('ptrace', 16, p, 0, 0) for p in range(1, 3000)})"), "ok", r"^\['EPERM'\]$"), _AFTER),
    level="seccomp",
  ),
  Turns(
    "a turn's process outlived by a thread",
    (_FIRST, ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()", "ok", ""), _AFTER),
  ),
  Turns(
    "a thread that floods between turns",
    (
      _FIRST,
      (
        """
import os, threading, time
def f():
  time.sleep(0.05)
  while True: os.write(1, bytes(65536))
threading.Thread(target=f, daemon=True).start()
""",
        "ok",
        "",
      ),
      ("import time\ntime.sleep(0.3)", "ok output", ""),
      ("5", "ok output", "^5?$"),
    ),
  ),
  Turns(
    "a thread that exits between turns",
    (
      _FIRST,
      (
        """
import os, threading, time
def f():
  time.sleep(0.05)
  os._exit(0)
threading.Thread(target=f, daemon=True).start()
""",
        "ok",
        "",
      ),
      ("import time\ntime.sleep(0.3)", "ok exit crash", ""),
      ("5", "ok exit crash", "^5?$"),
    ),
  ),
  Turns(
    "a timer that kills between turns",
    (
      _FIRST,
      ("import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.05)", "ok crash", ""),
      ("import time\ntime.sleep(0.3)", "ok crash", ""),
      ("5", "ok crash", "^5?$"),
    ),
  ),
  Turns(
    "limits lowered for ever",
    (
      _FIRST,
      ("import resource as r\nr.setrlimit(r.RLIMIT_NOFILE, (0, 0))", "ok error exit", ""),
      ("5", "ok error exit crash", "^5?$"),
      ("6", "ok error exit crash", "^6?$"),
    ),
    checkpoints=("auto",),
  ),
  Turns(
    "files up to the limit",
    (_FIRST, ("for i in range(40): open(str(i), 'wb').write(bytes(1 << 20))", "ok error disk", ""), _AFTER),
  ),
  Turns("many killed turns", (_FIRST, *[("import os\nos._exit(0)", "exit", "")] * 5, _AFTER)),
  Turns(
    "many descriptors kept",
    (
      _FIRST,
      ("import os\nfds = []\ntry:\n  while True: fds.append(os.dup(0))\nexcept OSError: pass", "ok exit error", ""),
      ("for f in fds: os.close(f)", "ok error exit", ""),
    ),
    checkpoints=("auto",),
  ),
  Turns(
    "a hook of forks that sleeps",
    (
      _FIRST,
      ("import os, time\nos.register_at_fork(before=lambda: time.sleep(600))", "ok", ""),
      ("5", "ok timeout crash exit", "^5?$"),
    ),
    checkpoints=("auto",),
  ),
  Turns(
    "a hook of forks that spins in the child",
    (
      _FIRST,
      ("import os\ndef f():\n  while True: pass\nos.register_at_fork(after_in_child=f)", "ok", ""),
      ("5", "ok timeout cpu crash exit", "^5?$"),
    ),
    checkpoints=("auto",),
  ),
  Turns(
    "a hook of forks that exits",
    (
      _FIRST,
      ("import os\nos.register_at_fork(after_in_child=lambda: os._exit(0))", "ok", ""),
      ("5", "ok crash exit", "^5?$"),
      ("6", "ok crash exit", "^6?$"),
    ),
    checkpoints=("auto",),
  ),
  Turns(
    "a hook of forks that exits the old process",
    (
      _FIRST,
      ("import os\nos.register_at_fork(after_in_parent=lambda: os._exit(0))", "ok", ""),
      ("5", "ok crash exit", "^5?$"),
      ("6", "ok crash exit", "^6?$"),
    ),
    checkpoints=("auto",),
  ),
  Turns(
    "a hook of forks that forks",
    (
      _FIRST,
      (
        """
import os
made = []
def f():
  try: made.append(os.fork())
  except OSError: pass
os.register_at_fork(before=f)
""",
        "ok",
        "",
      ),
      ("made", "ok crash exit", r"^(\[\])?$"),
      ("made", "ok crash exit", r"^(\[\])?$"),
    ),
    level="seccomp",
    checkpoints=("auto",),
  ),
  Turns(
    "a fork by a signal handler between turns",
    (
      _FIRST,
      (
        """
import os, signal
made = []
def f(*a):
  try: made.append(os.fork())
  except OSError: pass
signal.signal(signal.SIGALRM, f)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
""",
        "ok",
        "",
      ),
      ("made", "ok crash exit timeout", r"^(\[\])?$"),
      ("made", "ok crash exit timeout", r"^(\[\])?$"),
      ("made", "ok crash exit timeout", r"^(\[\])?$"),
    ),
    level="seccomp",
    checkpoints=("auto",),
  ),
  Turns(
    "fork replaced by a sleep",
    (
      _FIRST,
      ("import os, time\nos.fork = lambda: time.sleep(600)", "ok", ""),
      ("5", "ok timeout crash exit", "^5?$"),
    ),
    checkpoints=("auto",),
  ),
  Turns(
    "fork replaced by nothing",
    (
      _FIRST,
      ("import os\nos.fork = lambda: 0", "ok", ""),
      ("x = 0\nos._exit(3)", "exit crash", ""),
      ("x + 1", "ok", "^42$"),
    ),
    checkpoints=("auto",),
  ),
  Turns(
    "reading of turns replaced",
    (
      _FIRST,
      (
        """
import sys
f = sys._getframe()
while f:
  for name, value in list(f.f_globals.items()):
    if name in ('framing', 'Job', '_take_turn', '_fork_and_wait'): f.f_globals[name] = None
  f = f.f_back
""",
        "ok exit crash error",
        "",
      ),
      ("5", "ok crash exit error", "^5?$"),
      ("6", "ok crash exit error", "^6?$"),
    ),
  ),
)
