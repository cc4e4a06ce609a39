"""Servers in the test's own process, and an interpreter that does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

from agentic_rl.sandbox import ExecResult, Interpreter, InterpreterConfig, Limits, wire
from agentic_rl.sandbox.client import RemoteConfig, RemoteInterpreter
from agentic_rl.sandbox.service import SandboxService

LIMITS = Limits(wall_s=8, cpu_s=2, memory_mib=256)
FACTS = {"level": "seccomp", "slots": 3, "limits": LIMITS.__dict__}
RAN = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "1", "stderr": ""}


class World:
  """The real interpreter and the loop that it is bound to."""

  def __init__(self) -> None:
    self.loop = asyncio.new_event_loop()
    config = InterpreterConfig(slots=4, limits=LIMITS, min_isolation="process", preload=())
    self.interpreter = self.loop.run_until_complete(Interpreter.start(config))

  def do(self, body: Awaitable[Any]) -> Any:
    return self.loop.run_until_complete(asyncio.wait_for(body, 30))

  def close(self) -> None:
    self.loop.run_until_complete(self.interpreter.close())
    self.loop.close()


class Script:
  """An interpreter whose snippets end when the test says so: `await script.begun(1)`, `script.end()`."""

  def __init__(self, slots: int = 2) -> None:
    self.slots = slots
    self.codes: list[str] = []
    self.cancelled: list[str] = []
    self.closed: list[str] = []
    self.gate = asyncio.Event()
    self.error: Exception | None = None
    self._begun = asyncio.Condition()

  async def run(self, code: str, limits: Limits | None = None, **_: Any) -> ExecResult:
    if self.error is not None:
      raise self.error
    self.codes.append(code)
    number = len(self.codes)
    async with self._begun:
      self._begun.notify_all()
    try:
      if code.startswith("wait"):
        await self.gate.wait()
    except asyncio.CancelledError:
      self.cancelled.append(code)
      raise
    return ExecResult("ok", value=str(number), level="landlock")

  async def begun(self, count: int) -> None:
    async with self._begun:
      await asyncio.wait_for(self._begun.wait_for(lambda: len(self.codes) >= count), 5)

  def session(self, *_: Any, **__: Any) -> Any:
    return ScriptSession(self)

  def stats(self) -> dict[str, int]:
    return {}

  def capabilities(self) -> dict[str, Any]:
    return {"level": "landlock", "slots": self.slots, "limits": LIMITS.__dict__, "gaps": []}

  async def close(self) -> None:
    self.closed.append("interpreter")


class ScriptSession:
  def __init__(self, script: Script) -> None:
    self._script = script

  async def run(self, code: str, limits: Limits | None = None, *, stdin: str = "") -> ExecResult:
    return dataclasses.replace(await self._script.run(code), state="kept")

  async def close(self) -> None:
    self._script.closed.append("session")


class Http:
  """A client without opinions."""

  def __init__(self, session: aiohttp.ClientSession, service: SandboxService, port: int) -> None:
    self.session, self.service, self.port = session, service, port
    self.url = f"http://127.0.0.1:{port}"

  async def post(self, path: str, body: Any = None, **fields: Any) -> tuple[int, Any]:
    options = {"data": body} if isinstance(body, bytes) else {"json": fields if body is None else body}
    async with self.session.post(path, **options) as answer:
      return answer.status, await answer.json()

  async def get(self, path: str) -> tuple[int, str]:
    async with self.session.get(path) as answer:
      return answer.status, await answer.text()

  async def delete(self, path: str) -> tuple[int, Any]:
    async with self.session.delete(path) as answer:
      return answer.status, await answer.json()


@contextlib.asynccontextmanager
async def serving(interpreter: Any, **options: Any) -> AsyncIterator[Http]:
  """A service on a port of its own, and a client for it."""
  service = SandboxService(interpreter, **options)
  port = await service.start()
  headers = {"Authorization": "Bearer " + options["token"]} if "token" in options else {}
  try:
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers=headers) as session:
      yield Http(session, service, port)
  finally:
    await service.drain(0.0)


@contextlib.asynccontextmanager
async def pretending(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
  """A server that answers everything as the test wants it; gives its address."""

  async def handle(request: web.Request) -> web.StreamResponse:
    return await answer(request)

  app = web.Application()
  app.router.add_route("*", "/{path:.*}", handle)
  runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
  await runner.setup()
  await web.TCPSite(runner, "127.0.0.1", 0).start()
  try:
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
  finally:
    await runner.cleanup()


@contextlib.asynccontextmanager
async def remote(*urls: str, **options: Any) -> AsyncIterator[RemoteInterpreter]:
  """A client that does not wait long."""
  quick = {"backoff_s": 0.02, "max_backoff_s": 0.1, "retries": 4, "wait_s": 10.0, "limits": LIMITS}
  async with await RemoteInterpreter.start(RemoteConfig(urls, **(quick | options))) as interpreter:
    yield interpreter


async def until(condition: Callable[[], bool]) -> None:
  """Waits for something that no event tells."""
  async with asyncio.timeout(5):
    while not condition():
      await asyncio.sleep(0.005)


def reply(value: Any, status: int = 200, **headers: str) -> web.Response:
  return web.json_response(value, status=status, headers=headers)


class Answers:
  """A server that gives one prepared answer after the other to each snippet; the last one stays."""

  def __init__(self, *answers: Any, healthy: bool = True) -> None:
    self.answers = list(answers)
    self.healthy = healthy
    self.asked: list[dict[str, Any]] = []
    self.times: list[float] = []

  async def __call__(self, request: web.Request) -> web.StreamResponse:
    if request.method == "GET":
      return reply(FACTS, 200 if self.healthy else 500)
    if request.method == "DELETE":
      return reply({})
    self.asked.append(await request.json())
    self.times.append(time.monotonic())
    answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
    if answer == "cut":
      assert request.transport is not None
      request.transport.close()
      return reply({})
    if answer == "hang":
      await asyncio.sleep(60)
    return answer() if callable(answer) else reply(answer)


def result(value: str = "", **fields: Any) -> dict[str, Any]:
  return wire.encode_result(ExecResult("ok", value=value, level="seccomp", **fields))


def closed_port() -> str:
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    return f"http://127.0.0.1:{taken.getsockname()[1]}"


def fusion_answer(status: str = "Success", /, **ran: Any) -> dict[str, Any]:
  return {"status": status, "message": "m", "compile_result": None, "run_result": RAN | ran, "files": {}}
