"""Inside the child: takes its limits, runs the snippet, reports the outcome. Standard library only.

The child writes to its result pipe first one byte, `READY` (set up, has not looked at the snippet) or `FAILED` with a
message (could not set itself up), and after the snippet one frame. Only what happens before `READY` can be the fault
of the infrastructure, so that nothing a snippet writes passes for that. The snippet may write to the pipe as well; the
zygote treats what it reads as bounded bytes, and the worst that a snippet can forge is its own result.
"""

from __future__ import annotations
import __future__ as future_features

import ast
import builtins
import gc
import io
import linecache
import math
import os
import random
import resource
import signal
import struct
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from agentic_rl.sandbox import lowlevel

READY = b"R"
FAILED = b"F"
MAGIC = b"AGS1"
HEADER = struct.Struct("<4sBiIIII")
"""Magic, index into STATUSES, exit code, then length and dropped bytes of value and of error."""
STATUSES = ("ok", "error", "memory", "exit")

MOST_DESCRIPTORS = 65_536
"""The zygote opens no descriptor beyond this, so that its children can close all."""

SOURCE_NAME = "<snippet>"
_RESULT_FD = 3
_MEMORY_RESERVE = 64 << 20  # for the report on a MemoryError
_FUTURE_FLAGS = 0
for _name in future_features.all_feature_names:
  _FUTURE_FLAGS |= getattr(future_features, _name).compiler_flag


def make_streams() -> None:
  """Replaces `sys.stdout` and `sys.stderr` by ones that never refuse a character and keep whole lines."""
  for name, fd in (("stdout", 1), ("stderr", 2)):
    raw = io.FileIO(fd, "wb", closefd=False)
    raw.name = f"<{name}>"
    stream = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def _set_limit(kind: int, soft: int, slack: int = 0) -> None:
  hard = resource.getrlimit(kind)[1]
  if hard != resource.RLIM_INFINITY:  # never ask for more than the host allows
    soft = min(soft, hard)
    slack = min(slack, hard - soft)
  resource.setrlimit(kind, (soft, soft + slack))


def _connect(pipes: tuple[int, int, int]) -> None:
  """Makes the write ends descriptors 1, 2 and 3 and closes everything else of the zygote."""
  out, err, result = pipes
  os.dup2(out, 1)
  os.dup2(err, 2)
  os.dup2(result, _RESULT_FD, inheritable=False)
  os.closerange(_RESULT_FD + 1, MOST_DESCRIPTORS)


def _confine(zygote: int, limits: dict[str, Any], base_bytes: int, directory: str, nice: int) -> None:
  """Puts this fresh child into its own session and directory and under its limits."""
  os.setsid()
  signal.set_wakeup_fd(-1)
  for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
  signal.signal(signal.SIGINT, signal.default_int_handler)
  lowlevel.die_with_parent()
  if os.getppid() != zygote:
    os._exit(1)
  os.chdir(directory)
  os.environ["HOME"] = os.environ["TMPDIR"] = directory
  lowlevel.offer_to_oom_killer()
  os.nice(nice)
  _set_limit(resource.RLIMIT_CORE, 0)
  _set_limit(resource.RLIMIT_CPU, math.ceil(limits["cpu_s"]), slack=1)
  _set_limit(resource.RLIMIT_FSIZE, limits["file_mib"] << 20)
  _set_limit(resource.RLIMIT_NOFILE, limits["open_files"])
  if os.geteuid() != 0:  # the kernel exempts uid 0
    _set_limit(resource.RLIMIT_NPROC, lowlevel.tasks_of_host() + limits["processes"])
  _set_limit(resource.RLIMIT_AS, base_bytes + (limits["memory_mib"] << 20), slack=_MEMORY_RESERVE)


def _seed(seed: int) -> None:
  random.seed(seed)
  numpy = sys.modules.get("numpy")
  if numpy is not None:
    numpy.random.seed(seed % (1 << 32))


def _run(source: str, namespace: dict[str, Any]) -> Any:
  """Executes the source; returns the value of the last statement if that is an expression, else None."""
  tree = ast.parse(source, SOURCE_NAME)
  last = tree.body[-1] if tree.body else None
  if not isinstance(last, ast.Expr):
    exec(compile(tree, SOURCE_NAME, "exec", dont_inherit=True), namespace)
    return None
  tree.body.pop()
  body = compile(tree, SOURCE_NAME, "exec", dont_inherit=True)
  flags = body.co_flags & _FUTURE_FLAGS
  value = compile(ast.Expression(last.value), SOURCE_NAME, "eval", flags=flags, dont_inherit=True)
  exec(body, namespace)
  return eval(value, namespace)


def _keep_own_frames(report: Any, seen: set[int]) -> None:
  if report is None or id(report) in seen:
    return
  seen.add(id(report))
  if report.stack is not None:
    own = [f for f in report.stack if f.filename[:1] == "<" and not f.filename.startswith("<frozen")]
    report.stack = traceback.StackSummary.from_list(own) if own else None
  _keep_own_frames(report.__cause__, seen)
  _keep_own_frames(report.__context__, seen)
  for inner in report.exceptions or ():
    _keep_own_frames(inner, seen)


def _describe(error: BaseException, source: str) -> str:
  """The traceback as a notebook's user wants it: frames of the snippet only."""
  linecache.cache[SOURCE_NAME] = (len(source), None, source.splitlines(keepends=True), SOURCE_NAME)
  report = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
  _keep_own_frames(report, set())
  return "".join(report.format())


def _type_name(value: object) -> str:
  return str(type.__dict__["__name__"].__get__(type(value)))  # whatever its metaclass says


def _outcome(source: str, namespace: dict[str, Any]) -> tuple[str, int, str, str]:
  """Runs the snippet; returns status, exit code, value and error."""
  try:
    value = _run(source, namespace)
    return "ok", 0, "" if value is None else repr(value), ""
  except SystemExit as stop:
    code = stop.code
    if code is None or isinstance(code, int):
      return "exit", (code or 0) & 0xFF, "", ""
    print(code, file=sys.stderr)
    return "exit", 1, "", ""
  except BaseException as error:
    status = "memory" if isinstance(error, MemoryError) else "error"
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != hard:
      resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
      return status, 0, "", _describe(error, source)
    except BaseException as second:
      name, other = _type_name(error), _type_name(second)
      return status, 0, "", f"{name}: (no traceback: describing the exception raised {other})\n"


def _encode(text: str, cap: int) -> tuple[bytes, int]:
  data = text[: cap + 1].encode("utf-8", "backslashreplace")
  kept = data[:cap]
  return kept, len(data) - len(kept) + max(0, len(text) - cap - 1)


def _report(status: str, code: int, value: str, error: str, cap: int) -> None:
  for stream in (sys.stdout, sys.stderr):
    try:
      stream.flush()
    except (AttributeError, OSError, ValueError):  # closed or replaced by the snippet
      pass
  value_bytes, value_dropped = _encode(value, cap)
  error_bytes, error_dropped = _encode(error, cap)
  header = HEADER.pack(
    MAGIC, STATUSES.index(status), code, len(value_bytes), value_dropped, len(error_bytes), error_dropped
  )
  frame = memoryview(header + value_bytes + error_bytes)
  while frame:
    frame = frame[os.write(_RESULT_FD, frame) :]


def child_main(
  request: dict[str, Any],
  zygote: int,
  pipes: tuple[int, int, int],
  base_bytes: int,
  directory: str,
  nice: int,
  forget: Callable[[], None],
) -> None:
  """Runs one request in this freshly forked process and ends it.

  Args:
    request: `code`, `seed` and `limits`.
    zygote: Process id of the parent.
    pipes: Write ends for stdout, stderr and the result.
    base_bytes: Address space of the zygote.
    directory: Private working directory, exists.
    nice: Added to the nice value.
    forget: Clears what the zygote knows of other requests, so that the snippet cannot find it in memory.
  """
  limits, result_fd = request["limits"], pipes[2]
  try:
    _connect(pipes)
    result_fd = _RESULT_FD
    _confine(zygote, limits, base_bytes, directory, nice)
    _seed(request["seed"])
    forget()
    source, cap = request.pop("code"), limits["output_bytes"]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    gc.enable()
    os.write(_RESULT_FD, READY)
  except BaseException as error:
    os.write(result_fd, FAILED + repr(error).encode()[:1000])
    os._exit(1)
  exit_code = 1
  try:
    _report(*_outcome(source, main.__dict__), cap)
    exit_code = 0
  finally:
    os._exit(exit_code)
