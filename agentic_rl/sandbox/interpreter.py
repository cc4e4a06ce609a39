"""The pool: asyncio in front of parent processes that fork a child for each snippet."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from agentic_rl.sandbox import canaries, framing
from agentic_rl.sandbox.fair_queue import FairQueue
from agentic_rl.sandbox.limits import (
  MAX_SOURCE_BYTES,
  Checkpoint,
  ExecResult,
  InterpreterConfig,
  Limits,
  LimitsError,
  SandboxBusyError,
  SandboxClosedError,
  SandboxStartError,
  SourceTypeError,
)
from agentic_rl.sandbox.parent import Parent, Request
from agentic_rl.sandbox.session import Session

_SCIENTIFIC = {
  "numpy": ("numpy",),
  "sympy": ("sympy",),
  "scipy": ("scipy.integrate", "scipy.linalg", "scipy.optimize", "scipy.special", "scipy.stats"),
}
_BUSY_PARENT = 16
_MOST_ATTEMPTS = 2
_MOST_FILES = 1000
_MOST_NAME = 1024
_MOST_SEED_BITS = 4096
_BACKOFF_S = (0.0, 0.1, 0.5, 2.0, 5.0)
_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _Group:
  """Parents with the same preloaded modules."""

  modules: tuple[str, ...]
  names: frozenset[str]  # top-level names of the modules
  parents: list[Parent] = dataclasses.field(default_factory=list)
  starting: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)
  waiting: list[Request] = dataclasses.field(default_factory=list)
  failures: int = 0
  problem: str = ""  # of the last start that failed


class Interpreter:
  """Runs snippets of untrusted Python, each in a process of its own. Many may be in flight; the loop is never blocked.

  ```python
  interpreter = await Interpreter.start(InterpreterConfig(slots=8))
  result = await interpreter.run("print(347 * 29)")
  async with interpreter.session() as session:
    await session.run("x = 5")
    result = await session.run("x + 1")
  await interpreter.close()
  ```

  It is bound to the event loop that started it. Cancelling the task that awaits `run` kills the snippet. Make it with
  `start`, or use `async with await Interpreter.start(...)`.
  """

  def __init__(self, config: InterpreterConfig) -> None:
    self.config = config
    self._slots = config.resolved_slots()
    self._used = 0
    self._queue = FairQueue()
    self._groups: list[_Group] = []
    self._next_id = 0
    self._watchdog: asyncio.Task[None] | None = None
    self._burials: set[asyncio.Task[None]] = set()
    self._closed = False
    self._closing: asyncio.Task[None] | None = None
    self._facts: dict[str, Any] = {}
    self._default_limits = dataclasses.asdict(config.limits)
    self._open_sessions: dict[str, Session] = {}
    self._counts = dict.fromkeys(
      ("executions", "turns", "infra_errors", "restarts", "recycled", "rolled_back", "replayed", "lost"), 0
    )

  @classmethod
  async def start(cls, config: InterpreterConfig | None = None) -> Interpreter:
    """Starts the parent without modules, waits until it can fork, and checks that its isolation holds.

    Raises:
      SandboxStartError: It did not come up, or the host allows less than `min_isolation`; the message says why.
    """
    self = cls(config or InterpreterConfig())
    parent = await Parent.start(self, ())
    self._facts = parent.facts
    self._groups = [_Group(modules, frozenset(m.split(".")[0] for m in modules)) for modules in self._group_modules()]
    self._groups[0].parents.append(parent)
    self._watchdog = asyncio.get_running_loop().create_task(self._watch())
    try:
      open_ones = await canaries.find_open(self)
    except BaseException:  # a cancellation above all: nothing of a start that fails is left
      await self.close()
      raise
    if open_ones:
      await self.close()
      raise SandboxStartError(
        f"isolation {self._facts['level']!r} does not hold here: a snippet could {', '.join(open_ones)}. This is a "
        f"fault of the sandbox or of the host; please report it. A weaker max_isolation makes no such promise."
      )
    return self

  def _group_modules(self) -> list[tuple[str, ...]]:
    if self.config.preload is not None:
      return [(), *(group for group in self.config.preload if group)]
    groups: list[tuple[str, ...]] = [()]
    for name in self._facts["installed"]:
      groups.append(groups[-1] + _SCIENTIFIC[name])
    return groups

  async def __aenter__(self) -> Interpreter:
    return self

  async def __aexit__(self, *_: object) -> None:
    await self.close()

  @property
  def closed(self) -> bool:
    """Whether `close` has been called."""
    return self._closed

  @property
  def level(self) -> str:
    """Name of the isolation in force."""
    return str(self._facts.get("level", "process"))

  async def warm(self) -> None:
    """Starts the parents of all groups, so that the first snippet that names a module does not wait for them.

    Raises:
      SandboxStartError: One did not come up.
    """
    if self._closed:
      raise SandboxClosedError("the interpreter is closed; start a new one with Interpreter.start")
    for index, group in enumerate(self._groups):
      self._pick(index)
      await asyncio.gather(*group.starting, return_exceptions=True)
      if not group.parents:
        raise SandboxStartError(group.problem or "the interpreter was closed while it started")

  async def run(
    self,
    code: str,
    limits: Limits | None = None,
    *,
    seed: int = 0,
    stdin: str = "",
    files: Mapping[str, bytes] | None = None,
    fetch: Sequence[str] = (),
    owner: str = "",
  ) -> ExecResult:
    """Runs one snippet and returns what it did; whatever the snippet does is a result, never an exception.

    Args:
      code: Python source. One with a NUL, a lone surrogate or more than `MAX_SOURCE_BYTES` bytes is `refused`.
      limits: Limits of this snippet; default are those of the config.
      seed: Seeds `random` (and `numpy.random`), so that the same snippet gives the same result.
      stdin: What it reads from its standard input.
      files: Files put into its working directory first, by relative name.
      fetch: Names of files to bring back from there; those that do not exist are left out.
      owner: On whose behalf; owners that wait are served in turn.

    Raises:
      SourceTypeError: `code` or `stdin` is not a `str`.
      LimitsError: A file name leaves the working directory, files exceed `disk_mib`, or the seed is no integer.
      SandboxBusyError: `config.queue` snippets wait already.
      SandboxClosedError: The interpreter is closed.
    """
    return await self.submit(code, limits, seed=seed, stdin=stdin, files=files, fetch=fetch, owner=owner)

  def session(
    self,
    limits: Limits | None = None,
    *,
    seed: int = 0,
    checkpoint: Checkpoint = "auto",
    owner: str = "",
  ) -> Session:
    """A session, whose variables persist from turn to turn. Use it with `async with`, or close it.

    Args:
      limits: Limits of each turn that brings none; memory, files and threads are those of the whole session.
      seed: Seeds `random` (and `numpy.random`) once, at its first turn.
      checkpoint: What a turn that is killed leaves behind. `fork`: each turn runs in a fork, and the state is what it
        was before. `replay`: the turns before are run again in a new process; turns are faster. `none`: the state is
        lost. `auto`: `fork` where the host allows it, else `replay`.
      owner: On whose behalf, as for `run`.

    Raises:
      LimitsError: `fork` is asked for and not possible here, or the limits allow processes.
      SandboxBusyError: `config.sessions` are open already.
    """
    if self._closed:
      raise SandboxClosedError("the interpreter is closed; start a new one with Interpreter.start")
    if len(self._open_sessions) >= self.config.sessions:
      raise SandboxBusyError(f"{self.config.sessions} sessions are open, as many as InterpreterConfig.sessions allows")
    possible = bool(self._facts.get("fork_checkpoint"))
    if checkpoint == "fork" and not possible:
      raise LimitsError("checkpoint='fork' is not possible at this host; use 'auto' or 'replay'")
    if checkpoint not in ("auto", "fork", "replay", "none"):
      raise LimitsError(f"checkpoint must be 'auto', 'fork', 'replay' or 'none', got {checkpoint!r}")
    limits = limits or self.config.limits
    if limits.processes:
      raise LimitsError("a session may not start processes; set Limits.processes to 0")
    kind: Checkpoint = ("fork" if possible else "replay") if checkpoint == "auto" else checkpoint
    self._next_id += 1
    session = Session(self, f"s{self._next_id}", limits, seed, kind, owner)
    self._open_sessions[session.name] = session
    return session

  async def close(self) -> None:
    """Kills everything that runs and waits until it is gone. Unanswered snippets get `infra_error`. Idempotent."""
    if self._closing is None:
      self._closing = asyncio.get_running_loop().create_task(self._close())
    await asyncio.shield(self._closing)  # who is cancelled while it waits does not leave it half done

  async def _close(self) -> None:
    self._closed = True
    tasks = [task for group in self._groups for task in group.starting]
    if self._watchdog is not None:
      tasks.append(self._watchdog)
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    parents = [parent for group in self._groups for parent in group.parents]
    pending = [r for parent in parents for r in parent.running.values()] + list(self._queue)
    pending += [request for group in self._groups for request in group.waiting]
    await asyncio.gather(*(parent.shut() for parent in parents), *self._burials)
    for request in pending:
      self._fail(request, "the interpreter was closed")

  def stats(self) -> dict[str, int]:
    """Counters since the start, and how many are `running`, `queued` and open `sessions` now."""
    waiting = len(self._queue) + sum(len(group.waiting) for group in self._groups)
    parents = sum(len(group.parents) for group in self._groups)
    return self._counts | {
      "running": self._used,
      "queued": waiting,
      "sessions": len(self._open_sessions),
      "parents": parents,
    }

  def capabilities(self) -> dict[str, Any]:
    """What is in force: level and what it leaves open, facts on each kind of isolation, groups, slots, limits."""
    parents = [parent for group in self._groups for parent in group.parents]
    return {
      **self._facts,
      "slots": self._slots,
      "groups": [list(group.modules) for group in self._groups],
      "limits": dict(self._default_limits),
      "pid": parents[0].pid if parents else 0,
      "pids": [parent.pid for parent in parents],
    }

  # -- sending -------------------------------------------------------------------------------------------------------

  async def submit(
    self,
    code: str,
    limits: Limits | None,
    *,
    seed: int,
    stdin: str = "",
    files: Mapping[str, bytes] | None = None,
    fetch: Sequence[str] = (),
    owner: str = "",
    session: Session | None = None,
    urgent: bool = False,
  ) -> ExecResult:
    """`run`, and a turn of a session, which has to go to the parent where the session lives."""
    for name, text in (("source of a snippet", code), ("standard input", stdin)):
      if not isinstance(text, str):
        raise SourceTypeError(f"the {name} must be a str, got {type(text).__name__}")
    if self._closed or self._watchdog is None:
      raise SandboxClosedError("the interpreter is closed; start a new one with Interpreter.start")
    used = dataclasses.asdict(limits) if limits else self._default_limits
    refusal = _refusal(code)
    if used["processes"] and not self._facts["processes"]:
      refusal = refusal or f"Limits.processes is not 0, but level {self.level!r} cannot keep processes apart"
    if refusal:
      return ExecResult("refused", error=refusal, level=self.level, state="kept" if session else "none")
    seed = _checked_seed(seed)
    named = _checked_files(files or {}, fetch, used["disk_mib"], used["file_mib"])
    if len(stdin) > min(used["file_mib"], used["memory_mib"] // 4) << 20:
      raise LimitsError("the standard input must be at most file_mib and a quarter of memory_mib")
    if not urgent and self.config.queue and len(self._queue) >= self.config.queue:
      raise SandboxBusyError(f"{self.config.queue} snippets wait already, as many as InterpreterConfig.queue allows")
    try:
      names = json.dumps([list(named), list(fetch)]).encode() if named or fetch else b""
      body = (code.encode(), stdin.encode("utf-8", "surrogateescape"), names, *named.values())
    except UnicodeEncodeError as error:
      raise LimitsError(f"the standard input has a lone surrogate at position {error.start}") from error
    header = {
      "sizes": [len(part) for part in body],
      "fetch": bool(fetch),
      "seed": seed,
      "limits": used,
    }
    group = self._group_of(code)
    loop = asyncio.get_running_loop()
    request = Request(header, body, group, owner, loop.create_future(), loop.time(), tuple(fetch))
    if session is not None:
      header |= {"session": session.process, "checkpoint": session.checkpoint}
      request.session, request.parent = session, session.parent
      request.group = session.group if session.group is not None else group
      session.group = request.group
    self._queue.push(request, front=urgent)
    self._pump()
    try:
      return await request.future
    except asyncio.CancelledError:
      self._withdraw(request)
      raise

  def _group_of(self, code: str) -> int:
    """The smallest group that covers the modules that a source mentions; a wrong guess only costs time."""
    known = frozenset[str]().union(*(group.names for group in self._groups))
    mentioned = {name for name in known if name in code}
    if not mentioned:
      return 0
    covering = [i for i, group in enumerate(self._groups) if group.names >= mentioned]
    if covering:
      return min(covering, key=lambda i: len(self._groups[i].names))
    return max(range(len(self._groups)), key=lambda i: len(self._groups[i].names & mentioned))

  def _pump(self) -> None:
    """Sends what waits, as far as there are slots."""
    while self._used < self._slots and len(self._queue):
      request = self._queue.pop()
      if request.parent is not None and request.parent not in self._groups[request.group].parents:
        self._answer(request, ExecResult("infra_error", error="the session's parent process has died", state="lost"))
        continue
      parent = request.parent or self._pick(request.group)
      if parent is None:
        self._groups[request.group].waiting.append(request)
        continue
      self._used += 1
      self._next_id += 1
      request.parent = parent
      request.attempt += 1
      request.waited_s = asyncio.get_running_loop().time() - request.queued
      parent.running[self._next_id] = request
      header = request.header | {"run": self._next_id}
      if request.session is not None:
        header["open"] = request.session.parent is None
        request.session.parent = parent
        parent.sessions.add(request.header["session"])
      parent.send(header, request.body)

  def _pick(self, index: int) -> Parent | None:
    """The least busy parent of a group; starts one where there is none, or another where all are busy."""
    group = self._groups[index]
    ready = [parent for parent in group.parents if not parent.retiring]
    best = min(ready, key=lambda parent: len(parent.running), default=None)
    if best is None or len(best.running) >= _BUSY_PARENT:
      most = math.ceil(self._slots / _BUSY_PARENT)
      if not group.starting and len(ready) < most:
        task = asyncio.get_running_loop().create_task(self._add_parent(group))
        group.starting.add(task)
        task.add_done_callback(group.starting.discard)  # also of one that is cancelled before it begins
    return best

  async def _add_parent(self, group: _Group) -> None:
    await asyncio.sleep(_BACKOFF_S[min(group.failures, len(_BACKOFF_S) - 1)])
    group.failures += 1
    try:
      parent = await Parent.start(self, group.modules)
    except SandboxStartError as error:
      _log.error("the sandbox cannot start a parent process: %s", error)
      group.problem = str(error)
      group.starting.clear()  # before anyone hears of it and asks again
      for request in group.waiting:
        self._fail(request, str(error))
      group.waiting.clear()
      return
    for what, why in parent.facts["warmup_problems"].items():
      _log.warning("the sandbox's warm-up of %s failed: %s", what, why)
    group.parents.append(parent)
    for request in reversed(group.waiting):
      self._queue.push(request, front=True)
    group.waiting.clear()
    self._pump()

  def _withdraw(self, request: Request) -> None:
    """Forgets a request whose caller has gone, and kills what runs."""
    if self._queue.remove(request):
      return
    for group in self._groups:
      if request in group.waiting:
        group.waiting.remove(request)
        return
    parent = request.parent
    if parent is None:
      return
    for number, other in list(parent.running.items()):
      if other is request:  # its slot is free when it has ended, not before
        name = request.header.get("session")
        parent.send({"cancel": number} if name is None else {"close": name})

  def end_session(self, session: Session, parent: Parent | None, process: str) -> None:
    """Ends the process of a session."""
    if parent is not None and process in parent.sessions:
      parent.sessions.discard(process)
      parent.send({"close": process})

  def forget_session(self, session: Session) -> None:
    """The session is closed for good."""
    self._open_sessions.pop(session.name, None)

  def count(self, what: str) -> None:
    """Adds one to a counter of `stats`."""
    self._counts[what] += 1

  # -- what parents say ----------------------------------------------------------------------------------------------

  def on_done(self, parent: Parent, header: dict[str, Any], body: bytearray) -> None:
    """Takes in one result."""
    request = parent.running.pop(header.pop("id"), None)
    if request is None:  # cancelled meanwhile
      return
    self._release()
    self._groups[request.group].failures = 0
    if header["status"] == "infra_error" and request.attempt < _MOST_ATTEMPTS and "session" not in request.header:
      request.parent = None
      self._queue.push(request, front=True)
      self._pump()
      return
    sizes = header.pop("sizes")
    stdout, stderr, value, error, *files = (bytes(part) for part in framing.split(body, sizes))
    if header["state"] == "gone":
      parent.sessions.discard(request.header.get("session", ""))
      header["state"] = "lost" if "session" in request.header else "none"
    texts: dict[str, Any] = {
      name: data.decode("utf-8", "replace")
      for name, data in (("stdout", stdout), ("stderr", stderr), ("value", value), ("error", error))
    }
    names = [name.decode("utf-8", "replace") for name in files[::2]]
    wanted = dict(zip(names, files[1::2], strict=True))
    fetched = {name: wanted[name] for name in request.fetch if name in wanted}
    result = ExecResult(**header, **texts, files=fetched, attempt=request.attempt, queue_s=request.waited_s)
    self._answer(request, result)
    self._retire(parent)

  def on_ended(self, parent: Parent, number: int) -> None:
    """A snippet that was cancelled has ended."""
    if parent.running.pop(number, None) is not None:
      self._release()
      self._retire(parent)

  def on_gone(self, parent: Parent, sessions: Sequence[str]) -> None:
    """Sessions have died between turns; their next turn finds out."""
    parent.sessions.difference_update(sessions)
    self._retire(parent)

  def on_lost(self, parent: Parent) -> None:
    """A parent has died: what ran there is reported, what waits goes on elsewhere."""
    for group in self._groups:
      if parent in group.parents:
        group.parents.remove(parent)
    if self._closed:
      return
    _log.warning("a parent process of the sandbox died with %d snippets in flight; it is replaced", len(parent.running))
    self._counts["restarts"] += 1
    parent.sessions.clear()
    self._bury(parent)
    for request in list(parent.running.values()):
      self._release()
      self._fail(request, "the parent process died while the snippet ran")
    parent.running.clear()
    self._pump()

  def _retire(self, parent: Parent) -> None:
    if not parent.retiring or parent.running or parent.sessions:
      return
    for group in self._groups:
      if parent in group.parents:
        group.parents.remove(parent)
        self._counts["recycled"] += 1
        self._bury(parent)

  def _bury(self, parent: Parent) -> None:
    task = asyncio.get_running_loop().create_task(parent.shut())
    self._burials.add(task)
    task.add_done_callback(self._burials.discard)

  def _release(self) -> None:
    self._used -= 1
    asyncio.get_running_loop().call_soon(self._pump)

  def _answer(self, request: Request, result: ExecResult) -> None:
    if request.future.done():
      return
    self._counts["turns" if "session" in request.header else "executions"] += 1
    if request.session is None:  # a session may still make up for it
      self._counts["infra_errors"] += result.status == "infra_error"
    request.future.set_result(dataclasses.replace(result, level=self.level))

  def _fail(self, request: Request, why: str) -> None:
    state: Any = "lost" if "session" in request.header else "none"
    waited = asyncio.get_running_loop().time() - request.queued
    attempt = max(1, request.attempt)
    self._answer(request, ExecResult("infra_error", error=why, queue_s=waited, attempt=attempt, state=state))

  async def _watch(self) -> None:
    """Replaces a parent that has work but does not answer, e.g. because a snippet stopped it."""
    ticks = 4
    while True:
      await asyncio.sleep(self.config.stall_s / ticks)
      for parent in [parent for group in self._groups for parent in group.parents]:
        if not parent.running and parent.answered:
          parent.missed = 0
          self._retire(parent)
          continue
        parent.missed = 0 if parent.answered else parent.missed + 1
        if parent.missed >= ticks:
          parent.missed = 0
          _log.warning("a parent process of the sandbox has not answered for %g s; killed", self.config.stall_s)
          parent.kill()
        elif parent.answered:
          parent.ping()


def _refusal(code: str) -> str:
  """Why a source cannot be run, or an empty string."""
  if "\0" in code:
    return "source code string cannot contain null bytes"
  try:
    size = len(code) if code.isascii() else len(code.encode())
  except UnicodeEncodeError as error:
    return f"source code has a lone surrogate at position {error.start}"
  if size > MAX_SOURCE_BYTES:
    return f"source code has {size} bytes, more than the allowed {MAX_SOURCE_BYTES}"
  return ""


def _checked_seed(seed: Any) -> int:
  try:
    value = operator.index(seed)
  except TypeError as error:
    raise LimitsError(f"seed must be an integer, got {seed!r}") from error
  if value.bit_length() > _MOST_SEED_BITS:
    raise LimitsError(f"seed must have at most {_MOST_SEED_BITS} bits, got {value.bit_length()}")
  return value


def _checked_files(files: Mapping[str, bytes], fetch: Sequence[str], disk_mib: int, file_mib: int) -> dict[str, bytes]:
  if isinstance(fetch, str):
    raise LimitsError(f"fetch must be a sequence of file names, got the str {fetch!r}")
  if len(files) > _MOST_FILES or len(fetch) > _MOST_FILES:
    raise LimitsError(f"files and fetch must be at most {_MOST_FILES} each, got {len(files)} and {len(fetch)}")
  for name in (*files, *fetch):
    if isinstance(name, str) and len(name) > _MOST_NAME:
      raise LimitsError(f"a file name must be at most {_MOST_NAME} characters, got {len(name)}")
    parts = name.split("/") if isinstance(name, str) else [""]
    if any(part in ("", ".", "..") or len(part.encode("utf-8", "replace")) > 200 for part in parts) or "\0" in name:
      raise LimitsError(f"a file name must be a relative path inside the working directory, got {name!r}")
    if not name.isprintable():
      raise LimitsError(f"a file name must be printable, got {name!r}")
  named = {}
  for name, data in files.items():
    if not isinstance(data, bytes | bytearray | memoryview):
      raise LimitsError(f"the content of file {name!r} must be bytes, got {type(data).__name__}")
    named[name] = bytes(data)
    if len(named[name]) > file_mib << 20:
      raise LimitsError(f"file {name!r} must be at most file_mib, {file_mib} MiB")
  if sum(map(len, named.values())) > disk_mib << 20:
    raise LimitsError(f"files must fit into disk_mib, {disk_mib} MiB")
  return named
