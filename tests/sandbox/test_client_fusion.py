"""The client against SandboxFusion's protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web
from service_runner import Answers, World, closed_port, fusion_answer, pretending, remote, reply, serving

from agentic_rl.sandbox import ExecResult, Limits, LimitsError


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
  world = World()
  yield world
  world.close()


def test_fusion_results(world: World):
  async def body() -> None:
    async with serving(world.interpreter) as http:
      async with remote(http.url + "/run_code", protocol="sandbox_fusion") as there:
        found = await there.run("print(open('a').read() + input())\n7", files={"a": b"x"}, stdin="y", fetch=["a", "b"])
        assert (found.status, found.stdout, found.value, found.files) == ("ok", "xy\n", "", {"a": b"x"})
        assert found.level == "unknown" and found.wall_s > 0
        found = await there.run("import sys\nprint('e', file=sys.stderr)\n1/0")
        assert found.status == "error" and found.stderr == "e\n" and found.error.startswith("Traceback")
        found = await there.run("a b")
        assert found.status == "error" and "SyntaxError" in found.error
        found = await there.run("raise MemoryError")
        assert (found.status, found.limit) == ("memory", "memory")
        found = await there.run("while True: pass", Limits(wall_s=0.3))
        assert (found.status, found.limit) == ("timeout", "wall")
        found = await there.run("import sys\nsys.exit('why')")
        assert (found.status, found.exit_code, found.stderr) == ("exit", 1, "why\n")
        found = await there.run("import os\nos.abort()")
        assert (found.status, found.signal) == ("crash", 6)
        found = await there.run("print('x' * 500)", Limits(output_bytes=100))
        assert found.stdout == "x" * 100 and found.stdout_dropped == 401
        assert (await there.run("'\udc80'")).status == "refused"
        with pytest.raises(LimitsError, match="relative path"):
          await there.run("1", files={"../a": b""})
        with pytest.raises(LimitsError, match="no sessions"):
          there.session()

  world.do(body())


@pytest.mark.parametrize(
  ("answer", "status", "what"),
  [
    (fusion_answer(), "ok", ""),
    (fusion_answer(stdout=None, execution_time=None), "ok", ""),
    (fusion_answer("SandboxError"), "infra_error", "m"),
    (fusion_answer("Failed", status="Error", stderr="no bash"), "infra_error", "no bash"),
    (fusion_answer("Failed", return_code=None), "infra_error", "'run_result.return_code'"),
    (fusion_answer("Great"), "infra_error", "'status' must be one of"),
    (fusion_answer() | {"run_result": None}, "infra_error", "'run_result' must be an object"),
    (fusion_answer(stdout=1), "infra_error", "'run_result.stdout' must be a string"),
    (fusion_answer() | {"files": {"a": 1}}, "infra_error", "'files.a' must be base64"),
    ([], "infra_error", "must be an object"),
  ],
)
def test_fusion_answers(answer: Any, status: str, what: str):
  async def body() -> None:
    server = Answers(answer)
    async with pretending(server) as url, remote(url, protocol="sandbox_fusion") as there:
      found = await there.run("1", Limits(wall_s=3, memory_mib=99))
      assert found.status == status and what in found.error
      asked = server.asked[0]
      assert asked["language"] == "python" and asked["run_timeout"] == 3 and asked["memory_limit_MB"] == 99

  asyncio.run(body())


def test_fusion_tries_again_only_what_has_not_started():
  async def body() -> None:
    async def ask(*answers: Any) -> tuple[ExecResult, int]:
      server = Answers(*answers, fusion_answer(stdout="done"))
      async with pretending(server) as url, remote(url, closed_port(), protocol="sandbox_fusion") as there:
        there._pool.hosts[1].up = False
        return await there.run("1"), len(server.asked)

    for status in (429, 503):
      found, count = await ask(lambda status=status: reply({"detail": "later"}, status, **{"Retry-After": "0"}))
      assert (found.stdout, count) == ("done", 2)
    for answer in ("cut", lambda: web.Response(status=502), lambda: web.Response(status=500)):
      found, count = await ask(answer)
      assert (found.status, count) == ("infra_error", 1) and "may have run" in found.error
    down = closed_port()
    async with pretending(Answers(fusion_answer(stdout="done"))) as url:
      async with remote(url, protocol="sandbox_fusion") as there:
        there._pool.hosts[0].url, back = down, url
        task = asyncio.create_task(there.run("1"))
        await asyncio.sleep(0.03)
        there._pool.hosts[0].url = back
        assert (await task).stdout == "done"

  asyncio.run(body())
