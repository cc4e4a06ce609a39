"""Snippets that turn against Python itself and against the harness that shares their process."""

from __future__ import annotations

import dataclasses

from snippet import NORMAL, SHORT, Snippet

ENDS = (
  Snippet("sys.exit", "import sys\nsys.exit(3)", "exit"),
  Snippet("sys.exit with a long text", "import sys\nsys.exit('x' * 10**6)", "exit"),
  Snippet("sys.exit with a huge number", "import sys\nsys.exit(10**100)", "exit"),
  Snippet(
    "sys.exit with a hostile object",
    "import sys\nclass A:\n  def __str__(self): raise SystemExit(A())\nsys.exit(A())",
    "exit error",
  ),
  Snippet(
    "SystemExit whose code is a property",
    "class E(SystemExit):\n  code = property(lambda s: 1 / 0)\nraise E",
    "exit error",
  ),
  Snippet("os._exit", "import os\nos._exit(0)", "exit"),
  Snippet("exit of the C library", "import ctypes\nctypes.CDLL(None).exit(0)", "exit"),
  Snippet("exit of the interpreter", "import ctypes\nctypes.pythonapi.Py_Exit(0)", "exit"),
  Snippet(
    "interpreter finalized", "import ctypes\nctypes.pythonapi.Py_FinalizeEx()", "crash exit timeout error", limits=SHORT
  ),
  Snippet("fatal error", "import ctypes\nctypes.pythonapi.Py_FatalError(b'no')", "crash"),
  Snippet("segmentation fault", "import ctypes\nctypes.string_at(0)", "crash"),
  Snippet("writes to address zero", "import ctypes\nctypes.memset(0, 0, 99)", "crash"),
  Snippet("abort", "import os\nos.abort()", "crash"),
  Snippet(
    "stack overflow in C",
    "import ctypes\nT = ctypes.CFUNCTYPE(None)\nf = T(lambda: f())\nimport sys\nsys.setrecursionlimit(10**8)\nf()",
    "crash error memory timeout ok",
    limits=SHORT,
  ),
  Snippet(
    "code object with wrong instructions",
    "def f(): pass\nf.__code__ = f.__code__.replace(co_code=b'\\xff\\xff' * 40)\nf()",
    "crash error ok timeout",
    limits=SHORT,
  ),
  Snippet(
    "code object with a wrong stack",
    "def f(): return [1, [2, [3]]]\nf.__code__ = f.__code__.replace(co_stacksize=0, co_consts=())\nf()",
    "crash error ok",
  ),
  Snippet(
    "marshal of garbage",
    "import marshal\nfor i in range(256):\n  try: exec(marshal.loads(bytes([i]) * 64))\n  except Exception: pass",
    "crash ok error memory",
  ),
  Snippet(
    "reference count of None",
    "import ctypes\nctypes.c_long.from_address(id(None)).value = 1\nfor i in range(1000): x = None",
    "crash ok error exit",
  ),
  Snippet(
    "small integers exchanged", "import ctypes\nctypes.memmove(id(7) + 24, id(8) + 24, 4)\n7", "ok error exit crash"
  ),
)

HOOKS = (
  Snippet("interrupt", "raise KeyboardInterrupt", "error"),
  Snippet("end of a generator", "raise GeneratorExit", "error"),
  Snippet("a MemoryError that is none", "raise MemoryError('no')", "memory"),
  Snippet("exception whose text raises", "class E(Exception):\n  def __str__(self): raise E\nraise E", "error"),
  Snippet(
    "metaclass with a hostile name",
    """
class M(type):
  __name__ = __qualname__ = __module__ = property(lambda c: 1 / 0)
class E(Exception, metaclass=M):
  def __str__(self): raise E
raise E
""",
    "error",
  ),
  Snippet(
    "exception whose text exits", "import os\nclass E(Exception):\n  def __str__(self): os._exit(0)\nraise E", "exit"
  ),
  Snippet(
    "exception whose text spins",
    "class E(Exception):\n  def __str__(self):\n    while True: pass\nraise E",
    "timeout",
    limits=SHORT,
  ),
  Snippet("ring of causes", "a, b = ValueError(1), ValueError(2)\na.__cause__, b.__cause__ = b, a\nraise a", "error"),
  Snippet(
    "chain of 5 000 causes",
    "e = None\nfor i in range(5000):\n  n = ValueError(i)\n  n.__cause__ = e\n  e = n\nraise e",
    "error",
  ),
  Snippet("group of groups", "e = ValueError()\nfor _ in range(500): e = ExceptionGroup('g', [e])\nraise e", "error"),
  Snippet("wide group", "raise ExceptionGroup('g', [ValueError('x' * 1000)] * 20000)", "error memory cpu"),
  Snippet("notes without end", "e = ValueError()\ne.__notes__ = ['x' * 10**6] * 50\nraise e", "error memory"),
  Snippet(
    "hostile notes",
    "class N(list):\n  def __iter__(self): raise SystemExit\ne = ValueError()\ne.__notes__ = N([1])\nraise e",
    "error",
  ),
  Snippet("value whose text is no text", "class A:\n  __repr__ = lambda s: 5\nA()", "error"),
  Snippet("value whose text exits", "class A:\n  def __repr__(self): raise SystemExit(4)\nA()", "exit"),
  Snippet(
    "text with methods of its own",
    """
class S(str):
  def encode(self, *a): raise SystemExit
  def __getitem__(self, i): return 'x' * 10**6
  def __len__(self): return -1
class A:
  def __repr__(self): return S('v')
A()
""",
    "ok error exit",
  ),
  Snippet(
    "hooks for exceptions",
    "import sys\nsys.excepthook = sys.unraisablehook = lambda *a: print('hooked')\n1/0",
    "error",
    printed="^$",
  ),
  Snippet(
    "hooks for threads",
    """
import threading, time
threading.excepthook = lambda *a: 1/0
threading.Thread(target=lambda: 1/0).start()
time.sleep(0.05)
5
""",
    check="5",
  ),
  Snippet("audit hook", "import sys\ndef h(*a): raise RuntimeError\nsys.addaudithook(h)\nopen('x', 'w')", "error exit"),
  Snippet(
    "audit hook that spins",
    "import sys\ndef h(*a):\n  while True: pass\nsys.addaudithook(h)\nopen('x', 'w')",
    "timeout",
    limits=SHORT,
  ),
  Snippet(
    "little recursion",
    """
import sys
def f(n): return f(n - 1) if n else sys.setrecursionlimit(8)
try: f(1)
except RecursionError: pass
1/0
""",
    "error exit",
  ),
)

HARNESS = (
  Snippet("no builtins", "import builtins\nfor n in dir(builtins): delattr(builtins, n)", "error exit ok"),
  Snippet(
    "poisoned builtins", "import builtins\nfor n in dir(builtins): setattr(builtins, n, None)\n1/0", "error exit"
  ),
  Snippet(
    "builtins that lie",
    "import builtins\nbuiltins.repr = builtins.str = lambda *a: 'lie'\nbuiltins.len = lambda x: 10**9\n[1]",
    "ok exit error",
  ),
  Snippet("own builtins", "__builtins__ = {}\nglobals()['__builtins__'] = None\n5", "ok error", check="^5?$"),
  Snippet(
    "harness without globals",
    "import sys\nf = sys._getframe()\nwhile f.f_back:\n  f = f.f_back\n  f.f_globals.clear()\n1",
    "exit error",
  ),
  Snippet(
    "harness that reports otherwise",
    """
import sys
f = sys._getframe()
while f:
  for name in list(f.f_globals):
    if name in ('_report', '_send', '_outcome', 'STATUSES', 'READY', 'FAILED'): f.f_globals[name] = None
  f = f.f_back
5
""",
    "exit error ok",
  ),
  Snippet(
    "harness whose locals are changed",
    """
import ctypes, sys
f = sys._getframe()
while f:
  f.f_locals.update(status='infra_error', pid=1, job=None)
  ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(f), 0)
  f = f.f_back
5
""",
    "exit error ok crash",
  ),
  Snippet("no modules", "import sys\nsys.modules.clear()\n5", "ok error exit", check="^5?$"),
  Snippet("modules of nothing", "import sys\nfor n in list(sys.modules): sys.modules[n] = None\n1/0", "error exit"),
  Snippet("os without functions", "import os\nos._exit = os.write = os.getpid = None\n1", "ok exit crash error"),
  Snippet("os whose exit does not", "import os\nos._exit = lambda c: None\n5", "ok exit crash", check="^5?$"),
  Snippet(
    "struct that lies",
    "import struct\nstruct.Struct = struct.pack = struct.unpack = lambda *a: b''\n5",
    "ok",
    check="5",
  ),
  Snippet("compiler that lies", "import ast\nast.parse = compile = exec = eval = None\n5", check="5"),
  Snippet(
    "traceback that lies",
    """
import traceback
class T:
  def __init__(self, *a, **k): raise SystemExit(7)
traceback.TracebackException = T
1/0
""",
    "error exit",
  ),
  Snippet(
    "lines that lie",
    "import linecache\nlinecache.cache['<snippet>'] = (1, None, ['lie\\n'] * 10**5, '<snippet>')\n1/0",
    "error",
  ),
  Snippet(
    "codecs that fail",
    "import codecs\ncodecs.register_error('backslashreplace', lambda e: 1 / 0)\n'\\ud800'",
    "ok error exit",
  ),
  Snippet("limits that lie", "import resource\nresource.getrlimit = resource.setrlimit = None\n1/0", "error exit"),
  Snippet("tracing left on", "import sys\ndef t(*a): return t\nsys.settrace(t)\n1/0", "error"),
  Snippet(
    "profile that raises later",
    "import sys\nn = [0]\ndef p(*a):\n  n[0] += 1\n  if n[0] > 5: raise SystemExit(9)\nsys.setprofile(p)\n5",
    "ok exit error",
  ),
  Snippet(
    "line trace of the harness's frames",
    """
import sys
def t(f, e, a):
  f.f_lineno = 1
  return t
f = sys._getframe().f_back
f.f_trace = t
sys.settrace(t)
5
""",
    "ok error exit crash",
  ),
  Snippet(
    "asynchronous exception for the harness",
    """
import ctypes, threading
ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.main_thread().ident), ctypes.py_object(SystemExit))
5
""",
    "ok exit error",
  ),
  Snippet(
    "late interrupts",
    """
import ctypes, threading, time
main = threading.main_thread().ident
def f():
  while True:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(KeyboardInterrupt))
threading.Thread(target=f, daemon=True).start()
5
""",
    "ok exit error",
  ),
  Snippet("no environment", "import os\nos.environ.clear()\n5", check="5"),
  Snippet("other main module", "import sys\nsys.modules['__main__'] = None\n5", check="5"),
  Snippet(
    "garbage collector off, all frozen", "import gc\ngc.disable()\ngc.freeze()\ngc.set_threshold(1)\n5", check="5"
  ),
  Snippet(
    "finds the harness and calls it",
    """
import gc
fs = [o for o in gc.get_objects() if getattr(o, '__name__', '') in ('run_once', 'run_session', 'serve')]
for f in fs:
  try: f(None, None, (1, 2, 3))
  except TypeError: pass
5
""",
    "exit crash ok error timeout",
    limits=SHORT,
  ),
)

SOURCES = (
  Snippet("syntax error", "def f(:\n", "error"),
  Snippet("nothing", "", check="^$"),
  Snippet("a NUL", "x = 1\0", "refused"),
  Snippet("a lone surrogate", "x = '\ud800'", "refused"),
  Snippet("carriage returns", "x = 1\r\ny = 2\r\nx + y\r\n", check="3"),
  Snippet("form feeds and byte order mark", "\ufeffx = 1\n\x0c\nx", "ok error"),
  Snippet("false encoding", "# -*- coding: utf-16 -*-\nx = 1\nx", "ok error"),
  Snippet("input", "input()", "error"),
  Snippet("main guard", "if __name__ == '__main__': print(5)", printed="5"),
  Snippet("await at the top", "await x", "error"),
  Snippet("two megabytes", "x = 1\n" * 350_000, "refused"),
  Snippet("nine hundred kilobytes", "x = 1\n" * 150_000 + "x", "ok memory cpu", check="1"),
  Snippet("line of a megabyte", "x = '" + "a" * 990_000 + "'\nlen(x)", check="990000"),
  Snippet("sum of ten thousand terms", "1" + "+1" * 10_000, "error ok memory"),
  Snippet("constant folding", "(" + "'x' * 4096," * 200 + ")[0][0]", "ok", check="x"),
  Snippet("identifier that changes", "ﬁ = 5\nfi", check="5"),
  Snippet(
    "pickle that runs",
    "import pickle\npickle.loads(b\"cposix\\nsystem\\n(S'echo > @TREE@/made'\\ntR.\")",
    "ok error",
    level="seccomp",
  ),
  Snippet(
    "pickle bomb",
    """
import pickle
p = b']' + b''.join(b'(' + b'2' * 60 + b'l' for _ in range(12)) + b'.'
try: pickle.loads(p)
except pickle.UnpicklingError: pass
5
""",
    "ok error memory cpu",
  ),
  Snippet(
    "import of the trainer's library",
    "import jax",
    "ok error memory crash cpu timeout",
    limits=dataclasses.replace(NORMAL, wall_s=2.0),
  ),
  Snippet(
    "import of another large library",
    "import torch",
    "ok error memory crash cpu timeout",
    limits=dataclasses.replace(NORMAL, wall_s=2.0),
  ),
  Snippet("import of the trainer's project", "import agentic_rl", "error", level="landlock"),
)
