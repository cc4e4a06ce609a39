"""Inside the child: takes its limits, runs the snippet, reports the outcome. Standard library only.

A child writes to its result channel first one byte, `READY` (set up, has not looked at the snippet) or `FAILED` with a
message (could not set itself up), and after the snippet one frame. Only what happens before `READY` can be the fault
of the infrastructure, so that nothing a snippet writes passes for that. The snippet may write to the channel as well;
the zygote treats what it reads as bounded bytes, and the worst that a snippet can forge is its own result.

A session is such a child that reads turns from its channel, one after the other. With checkpoints each turn runs in a
fork of it: the fork, when done, is the session from then on (the zygote ends the old process); when the fork dies the
old process reports that with `DIED` and is the session still.
"""

from __future__ import annotations
import __future__ as future_features

import _signal  # type: ignore[import-not-found]
import ast
import atexit as _atexit
import builtins
import dataclasses
import errno
import gc
import io
import json
import linecache
import math
import os
import random
import resource
import socket
import struct
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

from agentic_rl.sandbox import framing, isolation, landlock, lowlevel, seccomp
from agentic_rl.sandbox.seeding import seed_generators

READY = b"R"
FAILED = b"F"
DIED = b"D"
DEATH = struct.Struct("<cidQ")
"""`DIED`, wait status, CPU seconds, peak resident bytes."""
MAGIC = b"AGS2"
HEADER = struct.Struct("<4sBiQI")
"""Magic, index into STATUSES, exit code, peak resident bytes, length of the fields that follow."""
FIELD = struct.Struct("<BII")
"""Kind, length and dropped bytes of a field."""
STATUSES = ("ok", "error", "memory", "exit")
VALUE, ERROR, FILE_NAME, FILE = range(4)

MOST_DESCRIPTORS = 65_536
"""The zygote opens no descriptor beyond this, so that its children can close all."""

_RESULT_FD = 3
_DEFAULT_SIGNALS = (_signal.SIGCHLD, _signal.SIGTERM, _signal.SIGHUP)
_RULESET_FD = 4
_INPUT_FD = 5  # of a session: keeps the file that is its standard input, whatever becomes of descriptor 0
MEMORY_RESERVE = 64 << 20  # for the report on a MemoryError
_NOTE = "Note: this sandbox has no network, starts no processes and opens no files but its own.\n"
leave = os._exit
"""Ends the process at once. Bound here, since a snippet may change the module."""
_getpid = os.getpid
_write = os.write
_fork = os.fork
_wait4 = os.wait4
_get_random_state = random.getstate
_set_random_state = random.setstate
_INHERITED_CALLBACKS = 0
_BUILTINS = dict(vars(builtins))
_builtins = vars(builtins)
_FUTURE_FLAGS = 0
for _name in future_features.all_feature_names:
  _FUTURE_FLAGS |= getattr(future_features, _name).compiler_flag


@dataclasses.dataclass
class Job:
  """One snippet, as it came from the pool."""

  limits: dict[str, Any]
  seed: int
  code: bytearray
  stdin: bytearray
  names: bytearray  # JSON: names of the files that it gets, and of those to bring back; empty for none
  contents: list[bytearray]
  fork: bool = False  # for a turn of a session: whether it runs in a fork

  def wipe(self) -> None:
    """Overwrites what others must not find in memory."""
    for data in (self.code, self.stdin, self.names, *self.contents):
      framing.wipe(data, len(data))


@dataclasses.dataclass
class Room:
  """What a fresh child needs to know to shut itself in.

  Attributes:
    plan: The isolation in force.
    parent: Process id of the zygote if the child can see it, else 0.
    base_bytes: Address space of the zygote.
    tasks: Processes and threads that count against the child's user already.
    uid: User to become; 0 keeps the user.
    directory: Working directory; if it is `isolation.SCRATCH` the child mounts it for itself.
    nice: Added to the nice value.
    filter: System call filter, or None.
    rules: Landlock rules, or None.
    forget: Clears what the zygote knows of other requests, so that the snippet cannot find it in memory.
  """

  plan: isolation.Plan
  parent: int
  base_bytes: int
  tasks: int
  uid: int
  directory: str
  nice: int
  filter: seccomp.Filter | None
  rules: landlock.Rules | None
  forget: Callable[[], None]


# -- shutting in -------------------------------------------------------------------------------------------------------


def make_streams() -> None:
  """Replaces `sys.stdout` and `sys.stderr` by ones that never refuse a character and keep whole lines."""
  for name, fd in (("stdout", 1), ("stderr", 2)):
    raw = io.FileIO(fd, "wb", closefd=False)
    raw.name = f"<{name}>"
    stream = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def _make_stdin(fd: int) -> None:
  sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(fd, "rb", closefd=False)), "utf-8", "surrogateescape")


def _set_limit(kind: int, soft: int, slack: int = 0) -> None:
  hard = resource.getrlimit(kind)[1]
  if hard != resource.RLIM_INFINITY:  # never ask for more than the host allows
    soft = min(soft, hard)
    slack = min(slack, hard - soft)
  resource.setrlimit(kind, (soft, soft + slack))


def _connect(ends: Sequence[int], rules: landlock.Rules | None) -> None:
  """Makes the write ends descriptors 1, 2 and 3, a Landlock ruleset 4, and closes everything else of the zygote."""
  out, err, result = ends
  ruleset = -1 if rules is None else rules.prepare()
  os.dup2(out, 1)
  os.dup2(err, 2)
  os.dup2(result, _RESULT_FD, inheritable=False)
  if ruleset >= 0:
    os.dup2(ruleset, _RULESET_FD, inheritable=False)
  os.closerange(_RULESET_FD + (ruleset >= 0), MOST_DESCRIPTORS)


def _open_null() -> None:
  """An open file of its own as descriptor 0: flags and locks of the one that was inherited are shared by all."""
  fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
  os.dup2(fd, 0)
  os.close(fd)


def _offer_input(data: bytes | bytearray) -> None:
  """Makes descriptor 0 a file in memory."""
  fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
  os.dup2(fd, 0)
  os.close(fd)
  _write_input(0, data)
  _make_stdin(0)


def _write_input(fd: int, data: bytes | bytearray) -> None:
  os.ftruncate(fd, 0)
  os.lseek(fd, 0, os.SEEK_SET)
  left = memoryview(data)
  while left:
    left = left[os.write(fd, left) :]
  os.lseek(fd, 0, os.SEEK_SET)


def _renew_input(data: bytes | bytearray) -> None:
  """The input of the next turn. An earlier one may have closed descriptor 0, and a file of its own may be there now."""
  _write_input(_INPUT_FD, data)
  try:
    there = os.fstat(0)
  except OSError:
    os.dup2(_INPUT_FD, 0)
    there = os.fstat(0)
  kept = os.fstat(_INPUT_FD)
  _make_stdin(0 if (there.st_dev, there.st_ino) == (kept.st_dev, kept.st_ino) else _INPUT_FD)


def _shut_in(room: Room, limits: dict[str, Any], session: bool) -> int:
  """Puts this fresh child under its limits, for ever. Returns the fork listener of a session's filter, or -1."""
  os.setpgid(0, 0)
  _signal.set_wakeup_fd(-1)  # of the module in C, which spares the making of enumerations
  for number in _DEFAULT_SIGNALS:
    _signal.signal(number, _signal.SIG_DFL)
  _signal.signal(_signal.SIGINT, _signal.default_int_handler)
  if room.directory == isolation.SCRATCH:
    isolation.private_scratch(limits["disk_mib"])
  os.nice(room.nice)
  _set_limit(resource.RLIMIT_CORE, 0)
  if not session:  # the zygote watches the time; this holds should it be gone
    _set_limit(resource.RLIMIT_CPU, math.ceil(limits["cpu_s"]) + 1, slack=1)
  _set_limit(resource.RLIMIT_FSIZE, limits["file_mib"] << 20)
  if not session:
    _set_limit(resource.RLIMIT_NOFILE, limits["open_files"])
  if room.uid or os.geteuid() != 0:  # the kernel exempts uid 0
    processes = limits["processes"] + (2 if session else 1)
    _set_limit(resource.RLIMIT_NPROC, room.tasks + processes + limits["threads"])
  _set_limit(resource.RLIMIT_AS, room.base_bytes + (limits["memory_mib"] << 20), slack=MEMORY_RESERVE)
  if room.rules is not None:
    landlock.restrict(_RULESET_FD, room.directory)
  if room.uid:
    isolation.become(room.uid)
  lowlevel.drop_capabilities()
  lowlevel.forbid_new_privileges()
  lowlevel.die_with_parent()  # after the change of user, which undoes it
  if room.parent and os.getppid() != room.parent:
    leave(1)
  os.chdir(room.directory)
  os.environ["HOME"] = os.environ["TMPDIR"] = room.directory
  return -1 if room.filter is None else room.filter.install(0 if session else _getpid())


def _write_files(files: Sequence[tuple[str, bytearray]]) -> str:
  """Puts the files into the working directory; returns why that cannot be done, or an empty string."""
  try:
    _write_each(files)
  except (OSError, MemoryError, RecursionError) as error:
    return f"The files cannot be put into the working directory: {type(error).__name__}: {error}\n"
  return ""


def _write_each(files: Sequence[tuple[str, bytearray]]) -> None:
  for name, data in files:
    folder = os.path.dirname(name)
    if folder:
      os.makedirs(folder, exist_ok=True)
    with open(name, "wb") as file:
      file.write(data)


def _collect_garbage() -> None:
  """Turns the collector on, less eager than by default: a short program need not pay for it."""
  gc.enable()
  gc.set_threshold(50_000, 20, 20)


def _make_main() -> dict[str, Any]:
  main = types.ModuleType("__main__")
  main.__dict__["__builtins__"] = builtins
  if sys.version_info < (3, 14):
    main.__annotations__ = {}
  sys.modules["__main__"] = main
  return main.__dict__


# -- running -----------------------------------------------------------------------------------------------------------


def _run(source: str, name: str, namespace: dict[str, Any]) -> Any:
  """Executes the source; returns the value of the last statement if that is an expression, else None."""
  body, value = _compile(source, name)
  exec(body, namespace)
  return None if value is None else eval(value, namespace)


def _compile(source: str, name: str) -> tuple[types.CodeType, types.CodeType | None]:
  """The statements, and the last of them apart if it is an expression."""
  try:
    tree = ast.parse(source, name)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
      return compile(tree, name, "exec", dont_inherit=True), None
    tree.body.pop()
    body = compile(tree, name, "exec", dont_inherit=True)
    flags = body.co_flags & _FUTURE_FLAGS
    return body, compile(ast.Expression(last.value), name, "eval", flags=flags, dont_inherit=True)
  except RecursionError:  # the compiler alone goes deeper than it does by way of a tree
    return compile(source, name, "exec", dont_inherit=True), None


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


def _describe(error: BaseException, note: str) -> str:
  """The traceback as a notebook's user wants it: frames of the snippet only."""
  report = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
  _keep_own_frames(report, set())
  text = "".join(report.format())
  denied = isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EACCES)
  return text + note if denied else text


def _type_name(value: object) -> str:
  return str(type.__dict__["__name__"].__get__(type(value)))  # whatever its metaclass says


def _outcome(source: bytearray, name: str, namespace: dict[str, Any], note: str) -> tuple[str, int, str, str]:
  """Runs the snippet; returns status, exit code, value and error."""
  try:
    text = source.decode()
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    value = _run(text, name, namespace)
    return "ok", 0, "" if value is None else repr(value), ""
  except SystemExit as stop:
    sys.settrace(None)
    _builtins.update(_BUILTINS)
    code = stop.code
    if code is None or isinstance(code, int):
      return "exit", (code or 0) & 0xFF, "", ""
    print(code, file=sys.stderr)
    return "exit", 1, "", ""
  except BaseException as error:
    sys.settrace(None)
    _builtins.update(_BUILTINS)
    status = "memory" if isinstance(error, MemoryError) else "error"
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != hard:
      resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
      return status, 0, "", _describe(error, note)
    except BaseException as second:
      name, other = _type_name(error), _type_name(second)
      return status, 0, "", f"{name}: (no traceback: describing the exception raised {other})\n"


# -- reporting ---------------------------------------------------------------------------------------------------------


def _encode(text: str, cap: int) -> tuple[bytes, int]:
  data = text[: cap + 1].encode("utf-8", "backslashreplace")
  kept = data[:cap]
  return kept, len(data) - len(kept) + max(0, len(text) - cap - 1)


def _fetched(names: Sequence[str], room: int) -> list[bytes]:
  """Fields with the files that exist and fit, each file as a name and its content."""
  parts: list[bytes] = []
  for name in names:
    try:
      with open(name, "rb") as file:
        data = file.read(room + 1)
    except (OSError, MemoryError):
      continue
    label = name.encode()
    if len(data) <= room:
      room -= len(data)
      parts += [FIELD.pack(FILE_NAME, len(label), 0), label, FIELD.pack(FILE, len(data), 0), data]
  return parts


def _flush() -> None:
  for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
    try:
      stream.flush()  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError):  # closed or replaced by the snippet
      pass


def _end_as_python_does(
  outcome: tuple[str, int, str, str], namespace: dict[str, Any], note: str, files: bool
) -> tuple[str, int, str, str]:
  """Waits for threads that are no daemons, runs what `atexit` has been given, and lets go of open files."""
  try:
    threading = sys.modules.get("threading")
    if threading is not None and threading.active_count() > 1:
      threading._shutdown()
    if _atexit._ncallbacks() > _INHERITED_CALLBACKS:  # those of the parent's modules have nothing to do here
      _atexit._run_exitfuncs()
    if files:
      namespace.clear()  # what an open file has not written yet is to be fetched as well
  except BaseException as error:
    if outcome[0] == "ok":
      return "error", 0, outcome[2], _describe(error, note)
  return outcome


def _report(outcome: tuple[str, int, str, str], limits: dict[str, Any], fetch: Sequence[str] = ()) -> None:
  status, code, value, error = outcome
  _flush()
  cap = limits["output_bytes"]
  parts = []
  for kind, text in ((VALUE, value), (ERROR, error)):
    if text:
      data, dropped = _encode(text, cap)
      parts += [FIELD.pack(kind, len(data), dropped), data]
  if fetch:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    parts += _fetched(fetch, limits["disk_mib"] << 20)
  body = b"".join(parts)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  _send(HEADER.pack(MAGIC, STATUSES.index(status), code, peak, len(body)) + body)


def _send(data: bytes) -> None:
  left = memoryview(data)
  while left:
    left = left[_write(_RESULT_FD, left) :]


# -- the two kinds of child --------------------------------------------------------------------------------------------


def run_once(job: Job, room: Room, ends: Sequence[int]) -> None:
  """Runs one snippet in this freshly forked process and ends it.

  Args:
    job: The snippet.
    room: How to shut itself in.
    ends: Write ends for stdout, stderr and the result.
  """
  result_fd = ends[2]
  note = _NOTE if room.filter is not None else ""
  try:
    _connect(ends, room.rules)
    result_fd = _RESULT_FD
    if job.stdin:
      _offer_input(job.stdin)
    else:
      _open_null()
    _shut_in(room, job.limits, session=False)
    global _INHERITED_CALLBACKS
    _INHERITED_CALLBACKS = _atexit._ncallbacks()
    names, fetch = json.loads(job.names or b"[[],[]]")
    problem = _write_files(list(zip(names, job.contents, strict=True)))
    seed_generators(job.seed)
    room.forget()
    namespace = _make_main()
    _collect_garbage()
    os.write(_RESULT_FD, READY)
  except BaseException as error:
    os.write(result_fd, FAILED + repr(error).encode()[:1000])
    leave(1)
  exit_code = 1
  pid = _getpid()
  try:
    outcome = ("error", 0, "", problem) if problem else _outcome(job.code, "<snippet>", namespace, note)
    if _getpid() == pid:  # else the snippet has forked and this is not the one that reports
      outcome = _end_as_python_does(outcome, namespace, note, bool(fetch))
      _report(outcome, job.limits, fetch)
    else:
      _flush()
    exit_code = 0
  finally:
    leave(exit_code)


def run_session(job: Job, room: Room, ends: Sequence[int]) -> None:
  """Runs turns in this freshly forked process until the zygote hangs up. Its first message carries the fork listener.

  Args:
    job: Seed and limits of the session.
    room: How to shut itself in.
    ends: Write ends for stdout and stderr, and this end of the channel's socket.
  """
  channel_fd = ends[2]
  try:
    _connect(ends, room.rules)
    channel_fd = _RESULT_FD
    _offer_input(b"")
    os.dup2(0, _INPUT_FD, inheritable=False)
    listener = _shut_in(room, job.limits, session=True)
    seed_generators(job.seed)
    room.forget()
    namespace = _make_main()
    _collect_garbage()
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=_RESULT_FD)
    if listener >= 0:
      socket.send_fds(channel, [READY], [listener])
      os.close(listener)
    else:
      channel.send(READY)
    # Not before: descriptors that other snippets of the same user have on the way count against this limit.
    _set_limit(resource.RLIMIT_NOFILE, job.limits["open_files"])
  except BaseException as error:
    os.write(channel_fd, FAILED + repr(error).encode()[:1000])
    leave(1)
  try:
    _take_turns(channel, namespace, _NOTE if room.filter is not None else "")
  finally:
    leave(1)


def _take_turns(channel: socket.socket, namespace: dict[str, Any], note: str) -> None:
  inbox = framing.Inbox()
  memory = resource.getrlimit(resource.RLIMIT_AS)
  turn = 0
  while True:
    with inbox.free() as room:
      count = channel.recv_into(room)
    if not count:
      leave(0)
    inbox.received(count)
    for header, body in inbox.frames():
      turn += 1
      code, stdin = framing.split(body, header["sizes"])
      job = Job(header["limits"], 0, code, stdin, bytearray(), [], header["fork"])
      if job.fork and _fork_and_wait():
        continue
      _take_turn(job, turn, namespace, note, memory)


def _fork_and_wait() -> bool:
  """Forks; in the old process, waits until the fork has died, reports that and returns True."""
  state = _get_random_state()
  pid = _fork()
  if pid == 0:
    _set_random_state(state)  # which the module has changed, as it does in every fork
    return False
  _, status, usage = _wait4(pid, 0)
  _send(DEATH.pack(DIED, status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024))
  return True


def _take_turn(job: Job, turn: int, namespace: dict[str, Any], note: str, memory: tuple[int, int]) -> None:
  _renew_input(job.stdin)
  for name in ("stdout", "stderr"):
    setattr(sys, name, getattr(sys, f"__{name}__"))
  pid = _getpid()
  _send(READY)
  outcome = _outcome(job.code, f"<turn {turn}>", namespace, note)
  if _getpid() != pid:
    leave(0)
  sys.settrace(None)
  sys.setprofile(None)
  _builtins.update(_BUILTINS)
  if resource.getrlimit(resource.RLIMIT_AS) != memory:  # raised to describe an error
    resource.setrlimit(resource.RLIMIT_AS, memory)
  _report(outcome, job.limits)
