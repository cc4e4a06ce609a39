"""The interpreter behind HTTP, for trainers on other machines and for those that speak SandboxFusion's protocol.

```python
service = SandboxService(interpreter, token="...")
await service.serve("127.0.0.1", 8080)   # until SIGTERM or SIGINT
```

Nothing that is asked for twice runs twice: a snippet with a `request_id`, and a turn by its number, join the one in
flight, or get the stored answer. `docs/sandbox_service.md` describes the endpoints.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib
import hmac
import logging
import math
import secrets
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from aiohttp import web

from agentic_rl.sandbox import wire
from agentic_rl.sandbox.limits import (
  Checkpoint,
  ExecResult,
  Limits,
  LimitsError,
  SandboxBusyError,
  SandboxClosedError,
)
from agentic_rl.sandbox.service_metrics import Metrics

_LARGE_BYTES = 1 << 20  # JSON of this size is read and written beside the loop
_OPEN_PATHS = ("/health", "/metrics")
_RATE_SAMPLES = 64
_log = logging.getLogger(__name__)

_T = TypeVar("_T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SessionLike(Protocol):
  """What the service needs of a session."""

  async def run(self, code: str, limits: Limits | None = None, *, stdin: str = "") -> ExecResult: ...

  async def close(self) -> None: ...


class InterpreterLike(Protocol):
  """What the service needs of an interpreter; `Interpreter` and `RemoteInterpreter` have it."""

  async def run(
    self,
    code: str,
    limits: Limits | None = None,
    *,
    seed: int = 0,
    stdin: str = "",
    files: Any = None,
    fetch: Any = (),
    owner: str = "",
  ) -> ExecResult: ...

  def session(
    self, limits: Limits | None = None, *, seed: int = 0, checkpoint: Checkpoint = "auto", owner: str = ""
  ) -> SessionLike: ...

  def stats(self) -> dict[str, int]: ...

  def capabilities(self) -> dict[str, Any]: ...

  async def close(self) -> None: ...


@dataclasses.dataclass(eq=False)
class _Job:
  """One execution, with all who wait for it.

  Attributes:
    digest: Of the request, so that an id is not used for two of them.
    task: Gives the body of the answer.
    waiters: How many requests wait.
    ended: When it was done, by the loop's clock.
    orphaned: Cancels it if nobody joins in time.
    attempt: 1, or more if it was asked for, given up and asked for again.
  """

  digest: bytes
  task: asyncio.Task[bytes]
  waiters: int = 0
  ended: float = math.inf
  orphaned: asyncio.TimerHandle | None = None
  attempt: int = 1

  @property
  def failed(self) -> bool:
    """Whether it ended without an answer."""
    return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


@dataclasses.dataclass(eq=False)
class _Session:
  """A session and its last turn.

  Attributes:
    session: The interpreter's.
    turn: Number of the last turn.
    job: The last turn, or None before the first.
    before: The turn before that, which counts again if the last one has failed.
    used: When it was last asked for anything, by the loop's clock.
  """

  session: SessionLike
  turn: int = 0
  job: _Job | None = None
  before: _Job | None = None
  used: float = 0.0

  def settle(self) -> None:
    """A turn that was not run, or was cancelled and so undone, does not count."""
    if self.job is not None and self.job.failed:
      self.turn -= 1
      self.job = self.before


class _Refused(Exception):
  """Answered with an error.

  Attributes:
    status: HTTP status.
    reason: For the metrics.
    retry_after_s: When to come again, or None.
  """

  def __init__(self, status: int, text: str, reason: str, retry_after_s: float | None = None) -> None:
    super().__init__(text)
    self.status, self.reason, self.retry_after_s = status, reason, retry_after_s


class SandboxService:
  """Serves an interpreter. It owns it from `serve` on: `serve` closes it at the end.

  Args:
    interpreter: What runs the snippets.
    token: What a client has to send as `Authorization: Bearer ...`; empty means that anybody may come.
    max_queue: Requests that may wait for a slot; more are told to come again.
    max_body_mib: Largest request.
    session_idle_s: A session that is not used for this long is closed.
    remember: Answers kept for those who ask again with the same `request_id`.
    remember_s: How long they are kept.
    remember_mib: Their size together.
    linger_s: A snippet that could be asked for again goes on for this long after its client has hung up; one that
      could not is killed at once.
  """

  def __init__(
    self,
    interpreter: InterpreterLike,
    *,
    token: str = "",
    max_queue: int = 1024,
    max_body_mib: float = 64,
    session_idle_s: float = 600.0,
    remember: int = 4096,
    remember_s: float = 300.0,
    remember_mib: float = 256,
    linger_s: float = 1.0,
  ) -> None:
    for name, value in (("max_queue", max_queue), ("remember", remember)):
      if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise LimitsError(f"SandboxService.{name} must be an integer from 0 on, got {value!r}")
    for name, size in (("max_body_mib", max_body_mib), ("session_idle_s", session_idle_s), ("remember_s", remember_s)):
      if not size > 0:
        raise LimitsError(f"SandboxService.{name} must be above 0, got {size!r}")
    facts = interpreter.capabilities()
    self.level = str(facts["level"])
    self.limits = Limits(**facts["limits"])
    self._interpreter = interpreter
    self._slots = int(facts["slots"])
    self._token = token.encode()
    self._max_queue = max_queue
    self._max_body = int(max_body_mib * (1 << 20))
    self._session_idle_s = session_idle_s
    self._remember, self._remember_s, self._remember_bytes = remember, remember_s, int(remember_mib * (1 << 20))
    self._linger_s = linger_s
    self._jobs: set[asyncio.Task[bytes]] = set()
    self._running: dict[str, _Job] = {}  # those with a request_id
    self._answered: collections.OrderedDict[str, _Job] = collections.OrderedDict()  # the oldest first
    self._kept_bytes = 0
    self._sessions: dict[str, _Session] = {}
    self._ends: collections.deque[float] = collections.deque(maxlen=_RATE_SAMPLES)
    self._draining = False
    self._instance = secrets.token_urlsafe(9)
    self._housekeeper: asyncio.Task[None] | None = None
    self._runner: web.AppRunner | None = None
    self._metrics = Metrics(self.level, self.load)

  def load(self) -> dict[str, int]:
    """How many requests are `in_flight` and how many of them `queued`, and how many `sessions` are open."""
    queued = max(0, len(self._jobs) - self._slots)
    return {"in_flight": len(self._jobs), "queued": queued, "sessions": len(self._sessions)}

  # -- life --------------------------------------------------------------------------------------------------------

  def make_app(self) -> web.Application:
    """The application. Run with `handler_cancellation=True`, else a client that hangs up does not end its snippet."""
    app = web.Application(client_max_size=self._max_body, middlewares=[self._guard])
    app.on_response_prepare.append(self._sign)
    app.router.add_get("/", self._on_root)
    app.router.add_get("/v1/ping", self._on_ping)
    app.router.add_get("/health", self._on_health)
    app.router.add_get("/capabilities", self._on_capabilities)
    app.router.add_get("/metrics", self._on_metrics)
    app.router.add_post("/run_code", self._on_run_code)
    app.router.add_post("/v1/run", self._on_run)
    app.router.add_post("/v1/sessions", self._on_open)
    app.router.add_post("/v1/sessions/{id}/run", self._on_turn)
    app.router.add_delete("/v1/sessions/{id}", self._on_close)
    return app

  async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
    """Listens; returns the port, which the system chooses if it is 0."""
    self._runner = web.AppRunner(self.make_app(), handler_cancellation=True, access_log=None, shutdown_timeout=2.0)
    await self._runner.setup()
    try:
      await web.TCPSite(self._runner, host, port, backlog=1024).start()
    except OSError:
      await self._runner.cleanup()
      raise
    self._housekeeper = asyncio.get_running_loop().create_task(self._keep_house())
    return int(self._runner.addresses[0][1])

  async def drain(self, drain_s: float = 30.0, hurry: asyncio.Event | None = None) -> None:
    """Takes in nothing new, lets what runs end, then stops to listen and closes the sessions.

    Args:
      drain_s: What still runs after this long is killed, and answered with 500.
      hurry: Ends the waiting when it is set.
    """
    self._draining = True
    waiting = [asyncio.ensure_future((hurry or asyncio.Event()).wait())]
    if self._jobs:
      every = asyncio.ensure_future(asyncio.wait(set(self._jobs)))
      await asyncio.wait([every, *waiting], timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
      waiting.append(every)  # type: ignore[arg-type]
    for task in [*waiting, *self._jobs]:
      task.cancel()
    await asyncio.gather(*waiting, *self._jobs, return_exceptions=True)
    if self._housekeeper is not None:
      self._housekeeper.cancel()
    if self._runner is not None:
      await self._runner.cleanup()
    for name in list(self._sessions):
      await self._end_session(name)

  async def serve(
    self,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    drain_s: float = 30.0,
    on_ready: Callable[[int], None] = lambda port: None,
  ) -> None:
    """Listens until SIGTERM or SIGINT, then drains and closes the interpreter. A second signal ends the draining.

    Args:
      host: Address to listen at.
      port: Port, or 0 for one that the system chooses.
      drain_s: As for `drain`.
      on_ready: Called with the port.
    """
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
      (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
      loop.add_signal_handler(number, on_signal)
    try:
      on_ready(await self.start(host, port))
      await stop.wait()
      _log.info("draining: %d requests are in flight", len(self._jobs))
      await self.drain(drain_s, hurry)
    finally:
      await self._interpreter.close()
      for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)

  async def _keep_house(self) -> None:
    """Closes idle sessions and forgets old answers."""
    now = asyncio.get_running_loop().time
    while True:
      await asyncio.sleep(min(5.0, self._session_idle_s / 4, self._remember_s / 4))
      for name, entry in list(self._sessions.items()):
        idle = entry.job is None or entry.job.task.done()
        if idle and now() - entry.used > self._session_idle_s:
          _log.info("session %s was idle for %g s; closed", name, self._session_idle_s)
          await self._end_session(name)
      self._forget()

  # -- every request -------------------------------------------------------------------------------------------------

  async def _sign(self, _: web.Request, response: web.StreamResponse) -> None:
    """Tells clients which process answers: one that has been started anew knows nothing of earlier requests."""
    response.headers[wire.INSTANCE_HEADER] = self._instance

  @web.middleware
  async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
    """Checks the token and turns every refusal into JSON."""
    try:
      if self._token and request.path not in _OPEN_PATHS:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, b"Bearer " + self._token):
          raise _Refused(401, "the header 'Authorization: Bearer TOKEN' is missing or wrong", "token")
      if (request.content_length or 0) > self._max_body:
        raise _Refused(413, f"the body is larger than the allowed {self._max_body} bytes", "size")
      return await handler(request)
    except web.HTTPRequestEntityTooLarge:
      return self._refuse(_Refused(413, f"the body is larger than the allowed {self._max_body} bytes", "size"))
    except _Refused as refusal:
      return self._refuse(refusal)
    except wire.WireError as error:
      return self._refuse(_Refused(422 if request.path == "/run_code" else 400, str(error), "request"))
    except LimitsError as error:
      return self._refuse(_Refused(422 if request.path == "/run_code" else 400, str(error), "request"))
    except SandboxBusyError as error:
      return self._refuse(_Refused(429, str(error), "busy", self._wait_s()))
    except SandboxClosedError as error:
      return self._refuse(_Refused(503, str(error), "closed", 1.0))
    except web.RequestPayloadError as error:
      return self._refuse(_Refused(400, f"the body cannot be read: {error}"[:500], "unreadable"))
    except web.HTTPException as error:
      where = f"{request.method} {request.path[:200]}"
      return self._refuse(_Refused(error.status, f"{error.reason}: {where}", "path"))
    except Exception as error:  # noqa: BLE001  (a fault of the service has to be told in JSON as well)
      _log.exception("%s %s failed", request.method, request.path[:200])
      return self._refuse(_Refused(500, f"a fault of the service: {type(error).__name__}", "fault"))

  def _refuse(self, refusal: _Refused) -> web.Response:
    self._metrics.rejected(refusal.reason)
    said: dict[str, Any] = {"error": str(refusal)}
    headers = {}
    if refusal.reason in ("size", "unreadable"):
      headers["Connection"] = "close"  # the rest of the body is still on the way, so that nothing can follow it
    if refusal.status == 422:
      said["detail"] = str(refusal)
    if refusal.status == 401:
      headers["WWW-Authenticate"] = "Bearer"
    if refusal.retry_after_s is not None:
      headers["Retry-After"] = str(max(1, math.ceil(refusal.retry_after_s)))
      said["retry_after_s"] = round(refusal.retry_after_s, 3)
    return _answer(wire.dump(said), refusal.status, headers)

  async def _read(self, request: web.Request, decode: Callable[[Any, Limits], _T]) -> tuple[bytes, _T]:
    """A digest of the body, and what it says."""
    body = await request.read()

    def read() -> tuple[bytes, _T]:
      return hashlib.sha256(body).digest(), decode(wire.parse(body), self.limits)

    return await asyncio.to_thread(read) if len(body) > _LARGE_BYTES else read()

  def _wait_s(self) -> float:
    """How long until half of those that wait are served, going by the last answers."""
    if len(self._ends) < 2:
      return 1.0
    rate = len(self._ends) / max(1e-3, asyncio.get_running_loop().time() - self._ends[0])
    return min(60.0, max(0.05, (self.load()["queued"] + 1) / 2 / rate))

  # -- executions ----------------------------------------------------------------------------------------------------

  def _begin(
    self, kind: str, digest: bytes, execute: Callable[[], Coroutine[Any, Any, ExecResult]], attempt: int = 1
  ) -> _Job:
    """Starts an execution, unless too many wait."""
    if self._draining:
      raise _Refused(503, "the service is shutting down", "draining", 1.0)
    if len(self._jobs) >= self._slots + self._max_queue:
      waiting = self.load()["queued"]
      raise _Refused(429, f"{waiting} requests wait already, as many as allowed", "busy", self._wait_s())
    task = asyncio.get_running_loop().create_task(self._execute(kind, execute, attempt))
    job = _Job(digest, task, attempt=attempt)
    self._jobs.add(task)
    task.add_done_callback(lambda _: self._ended(job))
    return job

  async def _execute(self, kind: str, execute: Callable[[], Coroutine[Any, Any, ExecResult]], attempt: int) -> bytes:
    result = await execute()
    if attempt > 1:
      result = dataclasses.replace(result, attempt=result.attempt + attempt - 1)
    self._metrics.executed(kind, result)
    self._ends.append(asyncio.get_running_loop().time())
    encode = wire.encode_fusion if kind == "run_code" else wire.encode_result
    texts = (result.stdout, result.stderr, result.value, result.error)
    if sum(map(len, (*texts, *result.files.values()))) > _LARGE_BYTES:
      return await asyncio.to_thread(lambda: wire.dump(encode(result)))
    return wire.dump(encode(result))

  def _ended(self, job: _Job) -> None:
    self._jobs.discard(job.task)
    job.ended = asyncio.get_running_loop().time()
    if not job.task.cancelled():
      job.task.exception()  # whoever waits gets it; there may be nobody left

  async def _join(self, job: _Job, linger: bool) -> web.Response:
    """Waits for an execution. It is cancelled when the last one who waits hangs up, with a delay if one may return."""
    job.waiters += 1
    if job.orphaned is not None:
      job.orphaned.cancel()
      job.orphaned = None
    try:
      await asyncio.wait([job.task])
    finally:
      job.waiters -= 1
      if not job.waiters and not job.task.done():
        if linger:
          job.orphaned = asyncio.get_running_loop().call_later(self._linger_s, job.task.cancel)
        else:
          job.task.cancel()
    if job.task.cancelled():
      raise _Refused(500, "the snippet was killed: the service shuts down, or its session was closed", "killed")
    return _answer(job.task.result())

  def _identified(self, name: str, digest: bytes, asked: wire.RunRequest) -> _Job:
    """The execution with a request's id: the one that runs or has ended, else a new one."""
    self._forget()
    job = self._running.get(name) or self._answered.get(name)
    if job is not None and job.digest != digest:
      raise _Refused(409, f"request_id {name!r} belongs to another request", "conflict")
    if job is not None and not job.failed:
      return job
    job = self._begin("run", digest, lambda: self._run(asked), attempt=job.attempt + 1 if job is not None else 1)
    self._running[name] = job
    job.task.add_done_callback(lambda _: self._keep(name, job))
    return job

  def _keep(self, name: str, job: _Job) -> None:
    """Remembers an answer, and that one was killed; one that was never run is forgotten."""
    del self._running[name]
    self._answered.pop(name, None)
    if not job.failed or job.task.cancelled():
      self._answered[name] = job
      self._kept_bytes += _size(job)
    self._forget()

  def _forget(self) -> None:
    """Drops the oldest answers beyond what is kept."""
    oldest = asyncio.get_running_loop().time() - self._remember_s
    while self._answered:
      name, job = next(iter(self._answered.items()))
      crowded = len(self._answered) > self._remember or self._kept_bytes > self._remember_bytes
      if not crowded and job.ended > oldest:
        break
      del self._answered[name]
      self._kept_bytes -= _size(job)

  # -- endpoints -----------------------------------------------------------------------------------------------------

  async def _on_root(self, _: web.Request) -> web.Response:
    return web.Response(text="agentic_rl sandbox: POST /run_code or /v1/run\n")

  async def _on_ping(self, _: web.Request) -> web.Response:
    return _answer(wire.dump("pong"))

  async def _on_health(self, _: web.Request) -> web.Response:
    state = "draining" if self._draining else "ok"
    said = {"status": state, "level": self.level, "slots": self._slots} | self.load()
    headers = {"Retry-After": "1"} if self._draining else {}
    return _answer(wire.dump(said), 503 if self._draining else 200, headers)

  async def _on_capabilities(self, _: web.Request) -> web.Response:
    own = {"queue": self._max_queue, "body_bytes": self._max_body, "session_idle_s": self._session_idle_s}
    return _answer(wire.dump(self._interpreter.capabilities() | {"service": own}))

  async def _on_metrics(self, _: web.Request) -> web.Response:
    return web.Response(body=self._metrics.text(), headers={"Content-Type": self._metrics.content_type})

  async def _on_run_code(self, request: web.Request) -> web.Response:
    _, asked = await self._read(request, wire.fusion_request)
    return await self._join(self._begin("run_code", b"", lambda: self._run(asked)), linger=False)

  async def _on_run(self, request: web.Request) -> web.Response:
    digest, asked = await self._read(request, wire.run_request)
    if not asked.request_id:
      return await self._join(self._begin("run", b"", lambda: self._run(asked)), linger=False)
    return await self._join(self._identified(asked.request_id, digest, asked), linger=True)

  async def _run(self, asked: wire.RunRequest) -> ExecResult:
    return await self._interpreter.run(
      asked.code,
      asked.limits,
      seed=asked.seed,
      stdin=asked.stdin,
      files=asked.files,
      fetch=asked.fetch,
      owner=asked.owner,
    )

  async def _on_open(self, request: web.Request) -> web.Response:
    _, options = await self._read(request, wire.session_request)
    if self._draining:
      raise _Refused(503, "the service is shutting down", "draining", 1.0)
    session = self._interpreter.session(**options)
    name = secrets.token_urlsafe(16)  # not to be guessed, as it is all that it takes to use the session
    self._sessions[name] = _Session(session, used=asyncio.get_running_loop().time())
    return _answer(wire.dump({"session": name}), 201)

  def _session(self, request: web.Request) -> _Session:
    name = request.match_info["id"]
    if name not in self._sessions:
      raise _Refused(404, f"there is no session {name[: wire.MAX_NAME]!r}; it was closed, or was idle", "session")
    return self._sessions[name]

  async def _on_turn(self, request: web.Request) -> web.Response:
    self._session(request)
    digest, (turn, asked) = await self._read(request, wire.turn_request)
    entry = self._session(request)
    now = asyncio.get_running_loop().time
    entry.used = now()
    entry.settle()
    job = entry.job
    if job is not None and turn == entry.turn:
      if job.digest != digest:
        raise _Refused(409, f"turn {turn} of the session was another request", "conflict")
    elif turn != entry.turn + 1:
      raise _Refused(409, f"the session's next turn is {entry.turn + 1}, not {turn}", "conflict")
    elif job is not None and not job.task.done():
      raise _Refused(409, f"turn {entry.turn} of the session is still running", "conflict")
    else:
      job = self._begin("turn", digest, lambda: entry.session.run(asked.code, asked.limits, stdin=asked.stdin))
      entry.before, entry.job, entry.turn = entry.job, job, turn
    try:
      return await self._join(job, linger=True)
    finally:
      entry.used = now()

  async def _on_close(self, request: web.Request) -> web.Response:
    self._session(request)
    await self._end_session(request.match_info["id"])
    return _answer(wire.dump({}))

  async def _end_session(self, name: str) -> None:
    entry = self._sessions.pop(name, None)
    if entry is None:
      return
    if entry.job is not None and not entry.job.task.done():
      entry.job.task.cancel()
      await asyncio.wait([entry.job.task])
    await entry.session.close()


def _size(job: _Job) -> int:
  return 0 if job.failed else len(job.task.result())


def _answer(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
  return web.Response(body=body, status=status, headers=headers, content_type="application/json")
