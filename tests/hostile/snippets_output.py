"""Snippets that flood, forge or break the channels by which their result comes back."""

from __future__ import annotations

from snippet import NORMAL, SHORT, Snippet

FLOODS = (
  Snippet("print flood", "while True: print('x' * 100)", "output", limits=NORMAL),
  Snippet("one line of 100 MB", "print('x' * 10**8)", "output memory"),
  Snippet("stderr flood", "import sys\nwhile True: sys.stderr.write('x' * 10000)", "output"),
  Snippet("raw flood", "import os\nwhile True: os.write(1, b'x' * 65536)", "output"),
  Snippet(
    "flood from a thread, the first one asleep",
    """
import os, threading
def f():
  while True: os.write(2, b'x' * 65536)
threading.Thread(target=f).start()
threading.Event().wait()
""",
    "output",
  ),
  Snippet(
    "flood by the kernel",
    "import os\nfd = os.open('/dev/zero', 0)\nwhile True: os.sendfile(1, fd, None, 1 << 20)",
    "output error",
  ),
  Snippet(
    "200 000 lines by the C library",
    "import ctypes\nlibc = ctypes.CDLL(None)\nfor i in range(200_000): libc.puts(b'x' * 8)\nlibc.fflush(None)\n5",
    check="5",
    printed="^x",
  ),
  Snippet("long integer as value", "import sys\nsys.set_int_max_str_digits(0)\n7 << 1_000_000", "ok", check="^[0-9]+"),
  Snippet(
    "characters of every kind", "print('\\ud800', '\\0', '\\x1b[2J', '\\r', '\\u202e')\n'\\udfff'", printed="ud800"
  ),
  Snippet("every byte", "import os\nos.write(1, bytes(range(256)) * 16)", printed="."),
  Snippet("bytes that are cut within a character", "import os\nos.write(1, ('é' * 4096).encode()[:-1])", printed="é"),
  Snippet("closed outputs", "import os\nos.close(1)\nos.close(2)\nprint(5)", "error ok"),
  Snippet("no outputs", "import sys\nsys.stdout = sys.stderr = sys.__stdout__ = None\nprint(5)\n5", check="5"),
  Snippet(
    "outputs that raise",
    """
import sys
class S:
  def write(self, x): raise SystemExit(9)
  flush = write
sys.stdout = sys.stderr = S()
5
""",
    "ok exit error",
  ),
  Snippet(
    "outputs that never flush",
    "import sys\nclass S:\n  def write(self, x): pass\n  def flush(self):\n    while True: pass\nsys.stdout = S()\n5",
    "timeout",
    limits=SHORT,
  ),
  Snippet("output on descriptor zero", "import os\nos.write(0, b'x')", "error ok"),
  Snippet(
    "larger pipe", "import fcntl\n[fcntl.fcntl(fd, 1031, 1 << 20) for fd in (1, 2)]\nprint('x' * 10**6)\n5", "ok error"
  ),
  Snippet(
    "outputs that never block",
    "import os\nos.set_blocking(1, False)\nos.set_blocking(3, False)\nprint('x' * 10**6)",
    "ok error exit",
  ),
)

_FRAME = """
import os, struct
def field(kind, data, dropped=0): return struct.pack('<BII', kind, len(data), dropped) + data
def frame(status=0, *fields, length=None, magic=b'AGS2', code=0, peak=0):
  body = b''.join(fields)
  return struct.pack('<4sBiQI', magic, status, code, peak, len(body) if length is None else length) + body
"""


def _forged(name: str, code: str, expected: str = "exit", **more: object) -> Snippet:
  return Snippet(name, _FRAME + code, expected, **more)  # type: ignore[arg-type]


FORGERIES = (
  _forged("its own result, forged", "os.write(3, frame(0, field(0, b'mine')))\nos._exit(0)", "ok", check="^mine$"),
  _forged("its own result, forged, and the true one", "os.write(3, frame(0, field(0, b'mine')))\n5"),
  _forged("two results", "os.write(3, frame() * 2)\nos._exit(0)"),
  _forged("a result and a byte", "os.write(3, frame() + b'x')\nos._exit(0)"),
  _forged("a result, and a crash", "os.write(3, frame())\nos.abort()", "crash"),
  _forged("a result, and no end", "os.write(3, frame())\nwhile True: pass", "timeout", limits=SHORT),
  _forged("a result, and a flood", "os.write(3, frame())\nwhile True: os.write(1, bytes(65536))", "output"),
  _forged(
    "a result, and a flood of its channel", "os.write(3, frame())\nwhile True: os.write(3, bytes(65536))", "output"
  ),
  _forged("a result that lags", "os.write(3, frame()[:9])\nimport time\ntime.sleep(60)", "timeout", limits=SHORT),
  _forged("a result by another process's exit code", "os.write(3, frame(3, code=-1))\nos._exit(0)", "exit"),
  _forged("a result with a negative status", "os.write(3, frame(255))\nos._exit(0)"),
  _forged("a result with an unknown status", "os.write(3, frame(9))\nos._exit(0)"),
  _forged("a result of another version", "os.write(3, frame(magic=b'AGS1'))\nos._exit(0)"),
  _forged("a result that claims much", "os.write(3, frame(length=2**32 - 1))\nos._exit(0)"),
  _forged("a field that claims much", "os.write(3, frame(0, struct.pack('<BII', 0, 2**32 - 1, 0)))\nos._exit(0)"),
  _forged(
    "a field that dropped much",
    "os.write(3, frame(0, field(0, b'x', 2**32 - 1), peak=0))\nos._exit(0)",
    "ok exit",
    check="^x?$",
  ),
  _forged("a peak beyond all memory", "os.write(3, frame(0, peak=2**64 - 1))\nos._exit(0)", "ok exit"),
  _forged("a field of unknown kind", "os.write(3, frame(0, field(200, b'x')))\nos._exit(0)"),
  _forged(
    "a file that nobody asked for",
    "os.write(3, frame(0, field(2, b'../../x'), field(3, b'data')))\nos._exit(0)",
    "ok exit",
  ),
  _forged("a file without a name", "os.write(3, frame(0, field(3, b'data')))\nos._exit(0)"),
  _forged(
    "another file than asked for",
    "os.write(3, frame(0, field(2, b'@FILE@'), field(3, b'data')))\nos._exit(0)",
    "ok exit",
    fetch=("out",),
  ),
  _forged("ten thousand fields", "os.write(3, frame(0, *[field(0, b'')] * 6000))\nos._exit(0)", "ok exit"),
  _forged("a value that is no text", "os.write(3, frame(0, field(0, bytes(range(256)))))\nos._exit(0)", "ok"),
  Snippet("garbage for a result", "import os\nos.write(3, b'x' * 100)\nos._exit(0)", "exit"),
  Snippet("garbage in large amounts", "import os\nwhile True: os.write(3, b'x' * 65536)", "output"),
  Snippet("random garbage", "import os\nfor _ in range(50): os.write(3, os.urandom(999))\nos._exit(0)", "exit"),
  Snippet("claims that it never started", "import os\nos.write(3, b'F the host is broken')\nos._exit(1)", "exit"),
  Snippet("claims that it starts again", "import os\nos.write(3, b'R' * 100)\nos._exit(0)", "exit"),
  Snippet(
    "claims that it has died",
    "import os, struct\nos.write(3, struct.pack('<cidQ', b'D', 9, 0.0, 0))\nos._exit(0)",
    "exit",
  ),
  Snippet(
    "claims a fault of the sandbox",
    "import os, sys\nos.write(2, b'sandbox: infra_error: the host is broken')\nos._exit(97)",
    "exit",
  ),
  Snippet("closes its channel", "import os\nos.close(3)\n5", "exit"),
  Snippet("closes all", "import os\nos.closerange(0, 9)\n5", "exit"),
  Snippet("channel and output exchanged", "import os\nos.dup2(1, 3)\nprint(5)", "exit"),
  Snippet("output to the channel", "import os\nos.dup2(3, 1)\nprint('x' * 100)", "exit"),
  Snippet("channel to nowhere", "import os\nos.dup2(os.open('/dev/null', 1), 3)\n5", "exit"),
  Snippet("channel read", "import os\nos.read(3, 9)", "error"),
  Snippet(
    "channel with a signal",
    "import fcntl, os\nfcntl.fcntl(3, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)\n5",
    "ok exit",
    check="5",
  ),
  Snippet(
    "channel seized by a thread that goes on",
    """
import os, threading, time
def f():
  while True: os.write(3, b'y')
threading.Thread(target=f, daemon=True).start()
time.sleep(0.05)
5
""",
    "exit output ok",
  ),
)
