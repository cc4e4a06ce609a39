"""Snippets that misuse the leave to start processes, where a level can give it."""

from __future__ import annotations

import dataclasses

from snippet import NORMAL, Snippet, tries

_FEW = dataclasses.replace(NORMAL, processes=6, threads=8, memory_mib=128)
_SHORT = dataclasses.replace(_FEW, wall_s=0.6)


def _allowed(name: str, code: str, expected: str = "ok", **more: object) -> Snippet:
  more.setdefault("limits", _FEW)
  return Snippet(name, code, expected, "namespace", **more)  # type: ignore[arg-type]


def _scan(call: str) -> str:
  return f"""
import os
hit = []
for pid in range(2, 33000):
  if pid == os.getpid(): continue
  try: os.{call}(pid, 9)
  except OSError: continue
  hit.append(pid)
hit
"""


_FRAME = "struct.pack('<4sBiQI', b'AGS2', 0, 0, 0, 0)"

ALLOWED = (
  _allowed(
    "kills everybody it can", "import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\n5", "ok crash", companion=True
  ),
  _allowed("kills every number", _scan("kill"), check=r"^\[\]$", companion=True),
  _allowed("kills every group", _scan("killpg"), check=r"^\[\]$", companion=True),
  _allowed("kills its parent", "import os\nos.kill(os.getppid() or 1, 9)\n5", "ok error crash", companion=True),
  _allowed(
    "children that fork on",
    "import os, time\nfor _ in range(6):\n  try: os.fork()\n  except OSError: pass\ntime.sleep(60)",
    "timeout",
    limits=_SHORT,
  ),
  _allowed(
    "children that fork, end and fork for ever",
    "import os\nwhile True:\n  try:\n    if os.fork(): os._exit(0)\n  except OSError: pass",
    "exit timeout cpu",
    limits=_SHORT,
  ),
  _allowed(
    "children that hold all signals back",
    """
import os, signal, time
for _ in range(4):
  if os.fork() == 0:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.setsid()
    time.sleep(60)
5
""",
    check="5",
  ),
  _allowed(
    "daemon that holds the outputs",
    "import subprocess\nsubprocess.Popen(['sleep', '60'], start_new_session=True)\nprint(5)",
    printed="5",
  ),
  _allowed(
    "daemon that floods",
    "import subprocess, time\nsubprocess.Popen(['yes'], start_new_session=True)\ntime.sleep(60)",
    "output",
  ),
  _allowed(
    "child that reports for its parent",
    f"import os, struct, time\nif os.fork() == 0:\n  os.write(3, {_FRAME})\n  os._exit(0)\ntime.sleep(0.1)\n5",
    "exit ok",
  ),
  _allowed(
    "child that reports after its parent",
    f"import os, struct, time\nif os.fork() == 0:\n  time.sleep(0.05)\n  while True: os.write(3, {_FRAME})\n5",
    "ok exit output",
  ),
  _allowed("child that runs on as the snippet", "import os\nos.fork()\nprint(5)", printed="5"),
  _allowed("process without a parent", "import os\nif os.fork(): os._exit(0)\nwhile True: pass", "exit"),
  _allowed(
    "child that stops its parent",
    "import os, signal, time\nif os.fork() == 0:\n  os.kill(os.getppid(), signal.SIGSTOP)\ntime.sleep(60)",
    "timeout",
    limits=_SHORT,
  ),
  _allowed(
    "traces its child",
    tries("pid = os.fork()\nif pid == 0: os.abort()\ncall('ptrace', 16, pid, 0, 0)"),
    check="'EPERM'",
  ),
  _allowed(
    "namespaces by programs",
    "import shutil, subprocess\n[subprocess.run(c, capture_output=True).returncode == 0 for c in"
    " (['unshare', '-r', 'true'], ['mount', '-t', 'tmpfs', 'x', '/tmp'], ['nsenter', '-t', '1', '-m', 'true'])"
    " if shutil.which(c[0])]",
    check=r"^\[(False(, )?)*\]$",
  ),
  _allowed(
    "network by a child",
    """
import subprocess, sys
code = 'import socket; socket.create_connection(("127.0.0.1", @PORT@), 1)'
subprocess.run([sys.executable, '-c', code], capture_output=True).returncode
""",
    check="^1$",
  ),
  _allowed(
    "becomes another program that claims to be new",
    "import os\nos.set_inheritable(3, True)\nos.execv('/bin/sh', ['sh', '-c', 'printf RRRR >&3; printf F >&3'])",
    "exit",
  ),
  _allowed(
    "becomes another program that sleeps",
    "import os\nos.execv('/bin/sh', ['sh', '-c', 'trap \"\" TERM INT HUP; sleep 60'])",
    "timeout",
    limits=_SHORT,
  ),
  _allowed(
    "memory of its children",
    """
import os
for _ in range(6):
  if os.fork() == 0:
    try: x = bytearray(1 << 30)
    except MemoryError: os._exit(7)
    os._exit(0)
sorted(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(6))
""",
    check=r"^\[7, 7, 7, 7, 7, 7\]$",
  ),
  _allowed("a child works", "import subprocess\nsubprocess.run(['true']).returncode", check="^0$"),
)
