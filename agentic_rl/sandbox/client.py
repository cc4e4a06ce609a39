"""An interpreter on other machines, with the interface of `Interpreter`.

```python
config = RemoteConfig(urls=("http://10.0.0.7:8080", "http://10.0.0.8:8080"), token="...")
async with await RemoteInterpreter.start(config) as interpreter:
  result = await interpreter.run("print(347 * 29)")
```

A fault of a server is an `infra_error`, never an exception. Nothing runs twice unnoticed: what is asked for again at
the same host has the same `request_id`, or number of the turn, and what moved to another host has `attempt` > 1.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from agentic_rl.sandbox import hosts, wire
from agentic_rl.sandbox.hosts import Host, RemoteConfig
from agentic_rl.sandbox.limits import (
  LEVELS,
  Checkpoint,
  ExecResult,
  Limits,
  LimitsError,
  SandboxClosedError,
  SandboxStartError,
  SourceTypeError,
  State,
)

__all__ = ["RemoteConfig", "RemoteInterpreter", "RemoteSession"]

_CLOSE_S = 5.0
_LARGE_BYTES = 1 << 20
_CALLERS_FAULT = (400, 413, 422)
_log = logging.getLogger(__name__)


class _Tries:
  """How often, and until when, a snippet is tried."""

  def __init__(self, config: RemoteConfig, wall_s: float, closing: asyncio.Event) -> None:
    self._closing = closing
    self.until = asyncio.get_running_loop().time() + wall_s + config.wait_s
    self._config = config
    self._failures = 0

  async def pause(self, error: hosts.HostError) -> bool:
    """Waits before the next try; False if there is none. To be told to come later is no failure."""
    if isinstance(error, hosts.BusyError):
      wait = hosts.backoff_s(self._config, 1)
      if error.wait_s is not None:
        wait = error.wait_s + wait
    else:
      self._failures += 1
      if self._failures > self._config.retries:
        return False
      wait = hosts.backoff_s(self._config, self._failures)
    if asyncio.get_running_loop().time() + wait >= self.until:
      return False
    try:
      await asyncio.wait_for(self._closing.wait(), wait)
    except TimeoutError:
      return True
    return False


class RemoteInterpreter:
  """Runs snippets at servers. Many may be in flight; the loop is never blocked. Make it with `start`.

  With `protocol="sandbox_fusion"`, `value` is always empty, a snippet's `seed` and `owner` are not used, of the limits
  only `wall_s`, `memory_mib` and `output_bytes` count, `level` is "unknown", and there are no sessions. Memory and
  files of a result are as the server tells them; nothing that does not have its form is believed.
  """

  def __init__(self, config: RemoteConfig) -> None:
    self.config = config
    self._pool = hosts.Pool(config)
    self._closed = False
    self._running = 0
    self._sessions: set[RemoteSession] = set()
    self._goodbyes: set[asyncio.Task[None]] = set()
    self._counts = dict.fromkeys(("executions", "turns", "infra_errors", "retries", "busy", "lost"), 0)

  @classmethod
  async def start(cls, config: RemoteConfig) -> RemoteInterpreter:
    """Asks all servers whether they are there. It does if one is; the others are taken in when they answer.

    Raises:
      SandboxStartError: None answers, or one does not accept the token or is no such server.
    """
    self = cls(config)
    try:
      problems = await asyncio.gather(*(self._greet(host) for host in self._pool.hosts))
      if all(problems):
        listed = "; ".join(f"{host.url}: {why}" for host, why in zip(self._pool.hosts, problems, strict=True))
        raise SandboxStartError(f"no server of the sandbox answers: {listed}")
    except BaseException:  # a cancellation above all: nothing of a start that fails is left
      await self.close()
      raise
    for host, problem in zip(self._pool.hosts, problems, strict=True):
      if problem:
        self._pool.fail(host, problem)
    return self

  async def _greet(self, host: Host) -> str:
    """Why a host does not answer, or an empty string."""
    try:
      await self._pool.greet(host, self.config.start_timeout_s)
    except hosts.RejectedError as error:
      if error.status in (401, 403):
        told = "the token is not accepted" if self.config.token else "a token is needed (RemoteConfig.token)"
        raise SandboxStartError(f"{host.url}: {told}: {error}") from error
      raise SandboxStartError(f"{host.url} is no server of protocol {self.config.protocol!r}: {error}") from error
    except (hosts.MalformedError, hosts.TooLargeError) as error:
      raise SandboxStartError(f"{host.url} is no server of protocol {self.config.protocol!r}: {error}") from error
    except hosts.HostError as error:
      return str(error)
    return ""

  async def __aenter__(self) -> RemoteInterpreter:
    return self

  async def __aexit__(self, *_: object) -> None:
    await self.close()

  @property
  def level(self) -> str:
    """Name of the weakest isolation among the servers, or "unknown"."""
    levels = [host.facts["level"] for host in self._pool.hosts if host.facts]
    return min(levels, key=LEVELS.index) if levels else wire.UNKNOWN_LEVEL

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
    """Runs one snippet; see `Interpreter.run`. A full queue is waited for, up to `RemoteConfig.wait_s`.

    Raises:
      SourceTypeError: `code` or `stdin` is not a `str`.
      LimitsError: The server says that files or limits are not allowed.
      SandboxClosedError: The interpreter is closed.
    """
    self._check(code, stdin)
    _check_files(files or {}, fetch)
    used = limits or self.config.limits
    request_id = uuid.uuid4().hex
    asked = wire.RunRequest(
      code, used, seed, stdin, dict(files or {}), tuple(fetch), owner[: wire.MAX_NAME], request_id
    )
    self._running += 1
    try:
      result = await self._run(asked, used)
    finally:
      self._running -= 1
    self._counts["executions"] += 1
    self._counts["infra_errors"] += result.status == "infra_error"
    return result

  async def _run(self, asked: wire.RunRequest, used: Limits) -> ExecResult:
    native = self.config.protocol == "native"
    if not native and not _encodes(asked.code, asked.stdin):
      return ExecResult("refused", error="source code or input has a lone surrogate", level=wire.UNKNOWN_LEVEL)
    encode = _encode_native if native else _encode_fusion
    large = sum(map(len, asked.files.values())) > _LARGE_BYTES
    body = await asyncio.to_thread(encode, asked, used) if large else encode(asked, used)

    def decode(said: Any) -> ExecResult:
      return wire.decode_result(said, asked.fetch) if native else wire.decode_fusion(said, asked, used)

    path = "/v1/run" if native else "/run_code"
    tries = _Tries(self.config, used.wall_s, self._pool.closing)
    begun: list[tuple[Host, str]] = []  # where it may have started: the host, and which process of it
    stay: Host | None = None  # where it may be running, and would be joined
    while True:
      host = stay
      try:
        host = await self._enter(stay, tries)
        instance = host.instance
        try:
          result = await self._pool.call(host, "POST", path, body, tries.until, decode)
        finally:
          self._pool.release(host)
        host.failures = 0
        elsewhere = sum(other != (host, host.instance) for other in begun)
        return _with_attempt(result, elsewhere)
      except hosts.TooLargeError as error:  # a fault of the snippet, not of the host
        return _too_large(error, self.level)
      except hosts.MalformedError as error:
        return self._give_up(host, str(error), begun)
      except hosts.RejectedError as error:
        if error.status in _CALLERS_FAULT:
          raise LimitsError(f"{host.url if host else ''} refuses the snippet: {error.why}") from error
        return self._give_up(host, str(error), begun)
      except hosts.HostError as error:
        if host is not None and not isinstance(error, hosts.BusyError):
          self._pool.fail(host, str(error))
        if isinstance(error, hosts.BrokenError):
          assert host is not None
          if (host, instance) not in begun:
            begun.append((host, instance))
          if not native:
            return self._give_up(None, f"{host.url}: {error}; the snippet may have run", begun)
          stay = host if stay is None else None
        elif isinstance(error, hosts.NotStartedError):
          stay = None
          if error.final:  # whatever answers at this address later knows nothing of the snippet
            begun = [(other, "gone" if other is host else process) for other, process in begun]
        self._counts["busy" if isinstance(error, hosts.BusyError) else "retries"] += 1
        if not await tries.pause(error):
          where = f"{host.url}: " if host is not None else ""
          return self._give_up(None, f"{where}{error}", begun)

  async def _enter(self, stay: Host | None, tries: _Tries) -> Host:
    if stay is None:
      return await self._pool.acquire(tries.until)
    stay.in_flight += 1
    return stay

  def _give_up(self, host: Host | None, why: str, begun: Sequence[object]) -> ExecResult:
    if host is not None:
      self._pool.fail(host, why)
      why = f"{host.url}: {why}"
    return hosts.infra_error(why, self.level, attempt=max(1, len(begun)))

  def session(
    self, limits: Limits | None = None, *, seed: int = 0, checkpoint: Checkpoint = "auto", owner: str = ""
  ) -> RemoteSession:
    """A session; see `Interpreter.session`. It stays at the host where its first turn ran.

    Raises:
      LimitsError: The protocol has no sessions.
      SandboxClosedError: The interpreter is closed.
    """
    self._check("", "")
    if self.config.protocol != "native":
      raise LimitsError("SandboxFusion has no sessions; use RemoteConfig.protocol='native', or run each snippet alone")
    options = {"seed": seed, "checkpoint": checkpoint, "owner": owner[: wire.MAX_NAME]}
    session = RemoteSession(self, self._pool, limits or self.config.limits, options)
    self._sessions.add(session)
    return session

  def stats(self) -> dict[str, int]:
    """Counters since the start; how many are `running`, `queued` here, open `sessions`, and `hosts_up` now."""
    up = sum(host.up for host in self._pool.hosts)
    waiting = self._pool.waiting
    now = {"running": self._running - waiting, "queued": waiting, "sessions": len(self._sessions), "hosts_up": up}
    return self._counts | now

  def capabilities(self) -> dict[str, Any]:
    """Weakest level, slots together, limits, and under `hosts` what each server said of itself at the start."""
    facts = {host.url: dict(host.facts) for host in self._pool.hosts}
    gaps: list[str] = next((f.get("gaps", []) for f in facts.values() if f.get("level") == self.level), [])
    return {
      "level": self.level,
      "gaps": gaps,
      "slots": sum(f.get("slots", 0) for f in facts.values()),
      "limits": wire.encode_limits(self.config.limits),
      "protocol": self.config.protocol,
      "hosts": facts,
    }

  async def close(self) -> None:
    """Closes the sessions and the connections; what runs is given up. Idempotent."""
    if self._closed:
      return
    self._closed = True
    await asyncio.gather(*(session.close() for session in list(self._sessions)))
    if self._goodbyes:
      await asyncio.wait(self._goodbyes)
    await self._pool.close()

  # -- for sessions --------------------------------------------------------------------------------------------------

  def _check(self, code: Any, stdin: Any) -> None:
    for name, text in (("source of a snippet", code), ("standard input", stdin)):
      if not isinstance(text, str):
        raise SourceTypeError(f"the {name} must be a str, got {type(text).__name__}")
    if self._closed:
      raise SandboxClosedError("the interpreter is closed; start a new one with RemoteInterpreter.start")

  def count(self, what: str, by: int = 1) -> None:
    """Adds to a counter of `stats`."""
    self._counts[what] += by

  def forget(self, session: RemoteSession) -> None:
    """The session is closed for good."""
    self._sessions.discard(session)

  def say_goodbye(self, host: Host, name: str) -> asyncio.Task[None]:
    """Closes a session at its server, as far as that can be reached; if not, it is closed there when it is idle."""
    task = asyncio.get_running_loop().create_task(self._say_goodbye(host, name))
    self._goodbyes.add(task)
    task.add_done_callback(self._goodbyes.discard)
    return task

  async def _say_goodbye(self, host: Host, name: str) -> None:
    until = asyncio.get_running_loop().time() + _CLOSE_S
    try:
      await self._pool.call(host, "DELETE", f"/v1/sessions/{name}", None, until, lambda said: None)
    except hosts.HostError as error:
      _log.info("session %s at %s could not be closed: %s", name, host.url, error)


class RemoteSession:
  """Turns whose variables persist, at one server. Made by `RemoteInterpreter.session`.

  When the server is lost, or a turn was cancelled, the state is lost: that turn is an `infra_error` with
  `state="lost"`, and the next one starts empty, maybe at another server.
  """

  def __init__(self, interpreter: RemoteInterpreter, pool: hosts.Pool, limits: Limits, options: dict[str, Any]) -> None:
    self._interpreter, self._pool = interpreter, pool
    self._limits, self._options = limits, options
    self._host: Host | None = None
    self._name = ""
    self._turn = 0
    self._cancelled = False
    self._lock = asyncio.Lock()
    self._closed = False

  async def __aenter__(self) -> RemoteSession:
    return self

  async def __aexit__(self, *_: object) -> None:
    await self.close()

  async def run(self, code: str, limits: Limits | None = None, *, stdin: str = "") -> ExecResult:
    """Runs one turn; see `Session.run`.

    Raises:
      SourceTypeError, LimitsError: As `RemoteInterpreter.run`.
      SandboxClosedError: The session or the interpreter is closed.
    """
    async with self._lock:
      if self._closed:
        raise SandboxClosedError("the session is closed")
      self._interpreter._check(code, stdin)
      used = limits or self._limits
      empty = self._cancelled
      try:
        result = await self._run(code, used, stdin)
      except asyncio.CancelledError:
        self._cancelled = self._turn > 0 or empty
        self._drop()  # nobody knows whether the turn counts
        raise
      self._cancelled = False
      self._interpreter.count("turns")
      self._interpreter.count("infra_errors", result.status == "infra_error")
      if empty and result.state == "kept":
        return _with_state(result, "lost")
      return result

  async def _run(self, code: str, used: Limits, stdin: str) -> ExecResult:
    tries = _Tries(self._interpreter.config, used.wall_s, self._pool.closing)
    why = await self._open(tries)
    if why or self._host is None:
      return self._lost(why)
    turn = self._turn + 1
    asked = {"code": code, "turn": turn, "limits": wire.encode_limits(used), "stdin": stdin}
    body, host, path = wire.dump(asked), self._host, f"/v1/sessions/{self._name}/run"
    while True:
      host.in_flight += 1
      try:
        result = await self._pool.call(host, "POST", path, body, tries.until, wire.decode_result)
        self._turn = turn
        host.failures = 0
        return result
      except hosts.TooLargeError as error:  # nobody has read what became of the session
        self._lost("")
        return _with_state(_too_large(error, self._interpreter.level), "lost")
      except hosts.MalformedError as error:
        self._pool.fail(host, str(error))
        return self._lost(f"{host.url}: {error}")
      except hosts.RejectedError as error:
        if error.status in _CALLERS_FAULT:
          raise LimitsError(f"{host.url} refuses the turn: {error.why}") from error
        return self._lost(f"{host.url}: {error}")
      except hosts.HostError as error:
        if not isinstance(error, hosts.BusyError):
          self._pool.fail(host, str(error))
        self._interpreter.count("busy" if isinstance(error, hosts.BusyError) else "retries")
        # Where nobody listens, or the server shuts down, the session's process is gone as well.
        gone = isinstance(error, hosts.NotStartedError) and error.final
        if gone or not await tries.pause(error):
          return self._lost(f"{host.url}: {error}")
      finally:
        self._pool.release(host)

  async def _open(self, tries: _Tries) -> str:
    """Makes the session at some server, if there is none; says why that cannot be done, or nothing."""
    body = wire.dump(self._options | {"limits": wire.encode_limits(self._limits)})
    while self._host is None:
      host: Host | None = None
      try:
        host = await self._pool.acquire(tries.until)
        try:
          name = await self._pool.call(host, "POST", "/v1/sessions", body, tries.until, wire.session_name)
        finally:
          self._pool.release(host)
        self._host, self._name, self._turn = host, name, 0
      except hosts.HostError as error:
        where = f"{host.url}: " if host is not None else ""
        if isinstance(error, hosts.RejectedError):
          if error.status in _CALLERS_FAULT:
            raise LimitsError(f"{where}the session is refused: {error.why}") from error
          return f"{where}{error}"
        busy = isinstance(error, hosts.BusyError)
        if host is not None and not busy:
          self._pool.fail(host, str(error))
        self._interpreter.count("busy" if busy else "retries")
        if isinstance(error, hosts.MalformedError | hosts.TooLargeError) or not await tries.pause(error):
          return f"{where}{error}"
    return ""

  def _lost(self, why: str) -> ExecResult:
    self._interpreter.count("lost")
    level = self._interpreter.level
    self._drop()
    return hosts.infra_error(why, level, state="lost")

  def _drop(self) -> asyncio.Task[None] | None:
    """Forgets the server's session and has it closed there."""
    host, name = self._host, self._name
    self._host, self._name, self._turn = None, "", 0
    return self._interpreter.say_goodbye(host, name) if host is not None else None

  async def close(self) -> None:
    """Ends the session, also at its server. Idempotent."""
    if not self._closed:
      self._closed = True
      self._interpreter.forget(self)
      task = self._drop()
      if task is not None:
        await asyncio.wait([task])


def _check_files(files: Mapping[str, bytes], fetch: Sequence[str]) -> None:
  """What would be changed on the way, or could not be sent; the rest is for the server to say."""
  if isinstance(fetch, str):
    raise LimitsError(f"fetch must be a sequence of file names, got the str {fetch!r}")
  for name, content in files.items():
    if not isinstance(name, str):
      raise LimitsError(f"the name of a file must be a str, got {name!r}")
    if not isinstance(content, bytes | bytearray | memoryview):
      raise LimitsError(f"the content of file {name!r} must be bytes, got {type(content).__name__}")


def _encode_native(asked: wire.RunRequest, used: Limits) -> bytes:
  return wire.dump(wire.encode_run_request(asked, used))


def _encode_fusion(asked: wire.RunRequest, used: Limits) -> bytes:
  return wire.dump(wire.encode_fusion_request(asked, used))


def _encodes(*texts: str) -> bool:
  try:
    return all(text.encode() is not None for text in texts)
  except UnicodeEncodeError:
    return False


def _too_large(error: hosts.TooLargeError, level: str) -> ExecResult:
  return ExecResult("output", error=str(error), limit="output", level=level)


def _with_attempt(result: ExecResult, elsewhere: int) -> ExecResult:
  return dataclasses.replace(result, attempt=result.attempt + elsewhere) if elsewhere else result


def _with_state(result: ExecResult, state: State) -> ExecResult:
  return dataclasses.replace(result, state=state)
