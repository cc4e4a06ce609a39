"""The trainer's side of the sandbox: asyncio in front of a zygote process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import Any, cast

from agentic_rl.sandbox import zygote as zygote_module
from agentic_rl.sandbox.limits import (
  MAX_SOURCE_BYTES,
  ExecResult,
  InterpreterConfig,
  Limits,
  SandboxClosedError,
  SandboxStartError,
  SourceTypeError,
)

LEVEL = "process"
LEVEL_TEXT = "rlimits, process-group kill, clean environment; no namespace isolation"

_LENGTH = struct.Struct(">I")
_MARKER = "AGENTIC_RL_SANDBOX"
_MOST_ATTEMPTS = 2
_BACKOFF_S = (0.0, 0.1, 0.5, 2.0, 5.0)
_PACKAGE_DIR = os.path.dirname(os.path.abspath(__file__))

# Imports the zygote without running the packages' own __init__ modules: it stays small and free of jax.
_BOOT = """
import sys, types
directory = sys.argv.pop(1)
for name in ("agentic_rl", "agentic_rl.sandbox"):
  sys.modules[name] = types.ModuleType(name)
  sys.modules[name].__path__ = [directory] if "." in name else []
from agentic_rl.sandbox import zygote
zygote.main(sys.argv[1:])
"""

_ENVIRONMENT = {
  "PATH": "/usr/local/bin:/usr/bin:/bin",
  "LANG": "C.UTF-8",
  "LC_ALL": "C.UTF-8",
  "TZ": "UTC",
  "PYTHONHASHSEED": "0",
  "PYTHONDONTWRITEBYTECODE": "1",
  "MALLOC_ARENA_MAX": "1",  # else a few threads reserve the whole address space
  "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1",
  "MKL_NUM_THREADS": "1",
  "MPLBACKEND": "Agg",
  "JAX_PLATFORMS": "cpu",
}


@dataclasses.dataclass(eq=False)
class _Request:
  """One snippet that has not been answered yet."""

  code: str
  seed: int
  limits: dict[str, Any]
  future: asyncio.Future[ExecResult]
  queued: float
  started: bool = False
  attempt: int = 1


class Interpreter:
  """Runs snippets of untrusted Python, each in a fresh process. Many may be in flight; the event loop is never blocked.

  ```python
  interpreter = await Interpreter.start(InterpreterConfig(slots=8))
  result = await interpreter.run("print(347 * 29)")
  await interpreter.close()
  ```

  It is bound to the event loop that started it. Cancelling the task that awaits `run` kills the snippet. Make it with
  `start`, or use `async with await Interpreter.start(...)`.
  """

  def __init__(self, config: InterpreterConfig) -> None:
    self.config = config
    self._requests: dict[int, _Request] = {}
    self._next_id = 0
    self._connection: _Connection | None = None
    self._recovery: asyncio.Task[None] | None = None
    self._watchdog: asyncio.Task[None] | None = None
    self._default_limits = dataclasses.asdict(config.limits)
    self._failures = 0
    self._closed = False
    self._counts: dict[str, int] = {"executions": 0, "infra_errors": 0, "restarts": 0}

  @classmethod
  async def start(cls, config: InterpreterConfig | None = None) -> Interpreter:
    """Starts the zygote and waits until it can fork.

    Raises:
      SandboxStartError: It did not come up; the message says why.
    """
    self = cls(config or InterpreterConfig())
    self._connection = await _Connection.open(self)
    self._watchdog = asyncio.get_running_loop().create_task(self._watch())
    return self

  async def __aenter__(self) -> Interpreter:
    return self

  async def __aexit__(self, *_: object) -> None:
    await self.close()

  async def run(self, code: str, limits: Limits | None = None, *, seed: int = 0) -> ExecResult:
    """Runs one snippet and returns what it did; whatever the snippet does is a result, never an exception.

    Args:
      code: Python source. One with a NUL, a lone surrogate or more than `MAX_SOURCE_BYTES` bytes is `refused`.
      limits: Limits of this snippet; default are those of the config.
      seed: Seeds `random` (and `numpy.random` if preloaded), so that the same snippet gives the same result.

    Raises:
      SourceTypeError: `code` is not a `str`.
      SandboxClosedError: The interpreter is closed.
    """
    if not isinstance(code, str):
      raise SourceTypeError(f"the source of a snippet must be a str, got {type(code).__name__}")
    if self._closed or self._watchdog is None:
      raise SandboxClosedError("the interpreter is closed; start a new one with Interpreter.start")
    refusal = _refusal(code)
    if refusal:
      return ExecResult("refused", error=refusal, level=LEVEL)
    self._next_id += 1
    request_id = self._next_id
    request = _Request(
      code,
      seed,
      dataclasses.asdict(limits) if limits else self._default_limits,
      asyncio.get_running_loop().create_future(),
      time.monotonic(),
    )
    self._requests[request_id] = request
    if self._connection is not None:
      self._connection.submit(request_id, request)
    elif self._recovery is None or self._recovery.done():  # the last restart failed: try again
      self._recovery = asyncio.get_running_loop().create_task(self._restart())
    try:
      return await request.future
    except asyncio.CancelledError:
      if self._requests.pop(request_id, None) and self._connection is not None:
        self._connection.send({"cancel": request_id})
      raise

  async def close(self) -> None:
    """Kills everything that runs and waits until it is gone. Unanswered snippets get `infra_error`. Idempotent."""
    if self._closed:
      return
    self._closed = True
    for task in (self._watchdog, self._recovery):
      if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
          await task
    connection, self._connection = self._connection, None
    if connection is not None:
      await connection.shut()
    for request_id in list(self._requests):
      self._fail(request_id, "the interpreter was closed")

  def stats(self) -> dict[str, int]:
    """Counters since the start (`executions`, `infra_errors`, `restarts`) and how many are `running` and `queued`."""
    running = sum(r.started for r in self._requests.values())
    return self._counts | {"running": running, "queued": len(self._requests) - running}

  def capabilities(self) -> dict[str, Any]:
    """What is in force: level, slots, limits, and what the zygote found that the host allows."""
    facts = self._connection.facts if self._connection else {}
    return {
      "level": LEVEL,
      "text": LEVEL_TEXT,
      "slots": self.config.resolved_slots(),
      "limits": dict(self._default_limits),
      **facts,
    }

  # -- called by the connection --------------------------------------------------------------------------------------

  def on_message(self, message: Mapping[str, Any]) -> None:
    """Takes in one message of the zygote."""
    for request_id in message.get("started", ()):
      request = self._requests.get(request_id)
      if request is not None:
        request.started = True
    for done in message.get("done", ()):
      request = self._requests.pop(done.pop("id"), None)
      if request is None or request.future.done():  # cancelled meanwhile
        continue
      self._failures = 0
      self._counts["executions"] += 1
      self._counts["infra_errors"] += done["status"] == "infra_error"
      done["attempt"] = max(done["attempt"], request.attempt)
      request.future.set_result(ExecResult(level=LEVEL, **done))

  def on_lost(self) -> None:
    """Starts a new zygote after the last one has gone."""
    connection, self._connection = self._connection, None
    if connection is not None and not self._closed:
      self._recovery = asyncio.get_running_loop().create_task(self._recover(connection))

  async def _recover(self, connection: _Connection) -> None:
    logging.warning("the sandbox's zygote died with %d snippets in flight; it is replaced", len(self._requests))
    await connection.shut()
    for request_id, request in list(self._requests.items()):
      if request.started:
        self._fail(request_id, "the zygote died while the snippet ran")
      elif request.attempt >= _MOST_ATTEMPTS:
        self._fail(request_id, "the zygote died twice while the snippet waited")
      else:
        request.attempt += 1
    await self._restart()

  async def _restart(self) -> None:
    await asyncio.sleep(_BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)])
    self._failures += 1
    self._counts["restarts"] += 1
    try:
      connection = await _Connection.open(self)
    except SandboxStartError as error:
      logging.error("the sandbox cannot be restarted: %s", error)
      for request_id in list(self._requests):
        self._fail(request_id, str(error))
      return
    self._connection = connection
    for request_id, request in self._requests.items():
      connection.submit(request_id, request)

  def _fail(self, request_id: int, why: str) -> None:
    request = self._requests.pop(request_id)
    if not request.future.done():
      self._counts["infra_errors"] += 1
      waited = time.monotonic() - request.queued
      request.future.set_result(
        ExecResult("infra_error", error=why, queue_s=waited, attempt=request.attempt, level=LEVEL)
      )

  async def _watch(self) -> None:
    """Replaces a zygote that has work but does not answer, e.g. because a snippet stopped it."""
    ticks = 4
    missed = 0
    while True:
      await asyncio.sleep(self.config.stall_s / ticks)
      connection = self._connection
      if connection is None or not self._requests:
        missed = 0
        continue
      missed = 0 if connection.answered else missed + 1
      if missed >= ticks:
        missed = 0
        logging.warning("the sandbox's zygote has not answered for %g s; it is killed", self.config.stall_s)
        connection.kill()
      elif connection.answered:
        connection.ping()


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


class _Connection(asyncio.Protocol):
  """One zygote process and the socket to it."""

  def __init__(self, owner: Interpreter, process: subprocess.Popen[bytes], directory: str, marker: str) -> None:
    self.facts: dict[str, Any] = {}
    self.answered = True
    self._owner = owner
    self._process = process
    self._directory = directory
    self._marker = marker
    self._inbox = bytearray()
    self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    self._transport: asyncio.Transport | None = None

  @classmethod
  async def open(cls, owner: Interpreter) -> _Connection:
    """Starts a zygote; raises SandboxStartError if it does not say hello in time."""
    ours, theirs = socket.socketpair()
    marker = os.urandom(12).hex()
    with theirs:
      try:
        process, directory = _spawn(owner.config, theirs, marker)
      except OSError as error:
        ours.close()
        raise SandboxStartError(f"the sandbox's interpreter {owner.config.python!r} cannot be run: {error}") from error
    self = cls(owner, process, directory, marker)
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: self, sock=ours)
    try:
      await asyncio.wait_for(self._hello, owner.config.start_timeout_s)
    except (TimeoutError, ConnectionError) as error:
      text = await asyncio.to_thread(_tail, os.path.join(directory, "stderr"))
      await self.shut()
      raise SandboxStartError(f"the sandbox's zygote did not start ({type(error).__name__}): {text}") from error
    except asyncio.CancelledError:
      await self.shut()
      raise
    return self

  def connection_made(self, transport: asyncio.BaseTransport) -> None:
    self._transport = cast(asyncio.Transport, transport)

  def data_received(self, data: bytes) -> None:
    inbox = self._inbox
    inbox += data
    while len(inbox) >= _LENGTH.size:
      end = _LENGTH.size + _LENGTH.unpack_from(inbox)[0]
      if len(inbox) < end:
        return
      message = json.loads(inbox[_LENGTH.size : end])
      del inbox[:end]
      if "hello" in message:
        self.facts = message["hello"]
        self._hello.set_result(None)
      else:
        self.answered = self.answered or "pong" in message
        self._owner.on_message(message)

  def connection_lost(self, _: Exception | None) -> None:
    if not self._hello.done():
      self._hello.set_exception(ConnectionResetError("it ended early"))
    elif self.facts:
      self._owner.on_lost()

  def send(self, message: Mapping[str, Any]) -> None:
    """Sends one frame; silently dropped if the zygote is gone, as `connection_lost` follows."""
    data = json.dumps(message).encode()
    if self._transport is not None and not self._transport.is_closing():
      self._transport.write(_LENGTH.pack(len(data)) + data)

  def submit(self, request_id: int, request: _Request) -> None:
    self.send({"run": request_id, "code": request.code, "seed": request.seed, "limits": request.limits, "attempt": 1})

  def ping(self) -> None:
    self.answered = False
    self.send({"ping": 1})

  def kill(self) -> None:
    self._process.kill()

  async def shut(self) -> None:
    """Closes the socket, at which the zygote kills all its descendants; returns when nothing is left."""
    self.facts = {}
    if self._transport is not None:
      self._transport.abort()
    await asyncio.to_thread(self._bury)

  def _bury(self) -> None:
    try:
      self._process.wait(8.0)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    if self._process.returncode != 0:  # it could not clean up itself
      _kill_marked(self._marker)
      zygote_module.remove_tree(self._directory)


def _spawn(config: InterpreterConfig, control: socket.socket, marker: str) -> tuple[subprocess.Popen[bytes], str]:
  """Starts the zygote without running any Python between fork and exec, so that it is safe beside threads."""
  directory = tempfile.mkdtemp(prefix="agentic_rl-sandbox-", dir=config.scratch_dir or None)
  fd = control.fileno()
  settings = {"slots": config.resolved_slots(), "nice": config.nice, "preload": list(config.preload)}
  environment = _ENVIRONMENT | dict(config.environment) | {"HOME": directory, "TMPDIR": directory, _MARKER: marker}
  try:
    with open(os.path.join(directory, "stderr"), "wb") as stderr:
      process = subprocess.Popen(
        [config.python, "-s", "-P", "-c", _BOOT, _PACKAGE_DIR, str(fd), directory, json.dumps(settings)],
        pass_fds=[fd],
        env=environment,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,
      )
  except OSError:
    zygote_module.remove_tree(directory)
    raise
  return process, directory


def _tail(path: str) -> str:
  try:
    with open(path, "rb") as file:
      return file.read()[-2000:].decode("utf-8", "replace").strip() or "it said nothing"
  except OSError as error:
    return f"its stderr cannot be read: {error}"


def _kill_marked(marker: str) -> None:
  """Kills every process that was born with the marker in its environment: what a killed zygote left behind."""
  word = f"{_MARKER}={marker}".encode()
  for _ in range(100):  # more may be forked while we look
    found = False
    for name in os.listdir("/proc"):
      if not name.isdigit():
        continue
      try:
        with open(f"/proc/{name}/environ", "rb") as file:
          marked = word in file.read()
        if marked:
          found = True
          os.kill(int(name), signal.SIGKILL)
      except OSError:  # gone, or not ours
        continue
    if not found:
      return
    time.sleep(0.01)
