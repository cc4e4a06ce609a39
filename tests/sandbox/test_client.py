from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web
from service_runner import (
  Answers,
  Script,
  World,
  closed_port,
  fusion_answer,
  pretending,
  remote,
  reply,
  result,
  serving,
  until,
)

from agentic_rl.sandbox import (
  Limits,
  LimitsError,
  SandboxClosedError,
  SandboxStartError,
  SourceTypeError,
  wire,
)
from agentic_rl.sandbox.client import RemoteConfig, RemoteInterpreter
from agentic_rl.sandbox.service import SandboxService


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
  world = World()
  yield world
  world.close()


# -- the interface -----------------------------------------------------------------------------------------------------


def test_runs_as_the_interpreter_does(world: World):
  async def body() -> None:
    async with serving(world.interpreter, token="t") as http, remote(http.url, token="t") as there:
      snippets: list[tuple[str, dict[str, Any]]] = [
        ("print(1)\n[2]", {}),
        ("1/0", {}),
        ("while True: pass", {"limits": Limits(wall_s=5, cpu_s=0.2)}),
        ("import sys\nsys.exit(4)", {}),
        ("import os\nos.abort()", {}),
        ("print('x' * 1000)", {"limits": Limits(output_bytes=100)}),
        ("print(input())", {"stdin": "é\udcff"}),
        ("import random\nrandom.random()", {"seed": 5}),
        ("open('b', 'wb').write(open('a', 'rb').read())", {"files": {"a": b"\x00\xff"}, "fetch": ["b", "c"]}),
        ("'\udc80'", {}),
        ("a\0b", {}),
      ]
      for code, options in snippets:
        here, far = await world.interpreter.run(code, **options), await there.run(code, **options)
        for name in (
          "status",
          "stdout",
          "stderr",
          "value",
          "error",
          "exit_code",
          "signal",
          "files",
          "truncated",
          "level",
        ):
          assert getattr(far, name) == getattr(here, name), (code, name)
        assert far.attempt == 1
      for code, options, error in (
        (b"1", {}, SourceTypeError),
        ("1", {"stdin": 3}, SourceTypeError),
        ("1", {"files": {"../a": b""}}, LimitsError),
        ("1", {"files": {"a": "text"}}, LimitsError),
        ("1", {"files": {1: b""}}, LimitsError),
        ("1", {"stdin": "\ud800"}, LimitsError),
        ("1", {"fetch": "name"}, LimitsError),
        ("#" * 10, {"files": {"a": b"x" * (33 << 20)}}, LimitsError),
      ):
        with pytest.raises(error):
          await there.run(code, **options)  # type: ignore[arg-type]
      stats = there.stats()
      assert stats["executions"] == len(snippets) and not stats["infra_errors"] and stats["hosts_up"] == 1
      facts = there.capabilities()
      assert facts["level"] == world.interpreter.level and facts["slots"] == 4 and list(facts["hosts"]) == [http.url]
    with pytest.raises(SandboxClosedError):
      await there.run("1")
    await there.close()

  world.do(body())


def test_sessions(world: World):
  async def body() -> None:
    async with serving(world.interpreter) as http, remote(http.url) as there:
      async with there.session(checkpoint="replay") as session:
        assert (await session.run("x = 1")).state == "kept"
        values = await asyncio.gather(*(session.run("x += 1\nx") for _ in range(5)))
        assert [found.value for found in values] == list("23456")  # one after the other
        assert (await session.run("1/0")).status == "error"
        killed = await session.run("x = 0\nimport os\nos._exit(1)")
        assert (killed.status, killed.state) == ("exit", "replayed")
        assert (await session.run("print(x, input())", stdin="in")).stdout == "6 in\n"
        assert http.service.load()["sessions"] == there.stats()["sessions"] == 1
        with pytest.raises(SourceTypeError):
          await session.run(None)  # type: ignore[arg-type]
      assert http.service.load()["sessions"] == there.stats()["sessions"] == 0
      with pytest.raises(SandboxClosedError):
        await session.run("1")
      with pytest.raises(LimitsError, match="processes"):
        async with there.session(Limits(processes=1)) as refused:
          await refused.run("1")
      assert (await there.session().run("7")).value == "7"
    assert http.service.load()["sessions"] == 0  # closing the client has closed it

  world.do(body())


def test_cancelling(world: World):
  async def body() -> None:
    script = Script()
    async with serving(script, linger_s=0.02) as http, remote(http.url) as there:
      async with there.session() as session:
        await session.run("x")
        for count, call in ((2, there.run("wait")), (3, session.run("wait"))):
          task = asyncio.create_task(call)
          await script.begun(count)
          task.cancel()
          with pytest.raises(asyncio.CancelledError):
            await task
          await until(lambda count=count: len(script.cancelled) == count - 1)  # type: ignore[misc]
        found = await session.run("y")
        assert (found.status, found.state) == ("ok", "lost")  # it began empty, and says so

  asyncio.run(body())


def test_closing_gives_up_what_runs():
  async def body() -> None:
    script = Script()
    async with serving(script, linger_s=0.02) as http, remote(http.url, max_in_flight_per_host=1) as there:
      tasks = [asyncio.create_task(there.run("wait")) for _ in range(3)]
      await script.begun(1)
      await asyncio.wait_for(there.close(), 2)
      for found in await asyncio.wait_for(asyncio.gather(*tasks), 2):
        assert found.status == "infra_error"

  asyncio.run(body())


# -- settings and the start --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("options", "what"),
  [
    ({"urls": ()}, "urls is empty"),
    ({"urls": "http://a"}, "a sequence"),
    ({"urls": ("a:80",)}, "scheme"),
    ({"urls": ("ftp://a",)}, "scheme"),
    ({"urls": ("http://",)}, "needs a host"),
    ({"urls": ("http://a:x",)}, "urls"),
    ({"urls": ("http://u:p@a",)}, "no user"),
    ({"urls": ("http://a", "http://a/")}, "twice"),
    ({"urls": (3,)}, "urls"),
    ({"protocol": "http"}, "protocol"),
    ({"token": "a\nb"}, "token"),
    ({"retries": -1}, "retries"),
    ({"retries": 1.5}, "retries"),
    ({"wait_s": 0}, "wait_s"),
    ({"wait_s": float("inf")}, "wait_s"),
  ],
)
def test_bad_settings(options: dict[str, Any], what: str):
  with pytest.raises(LimitsError, match=what):
    RemoteConfig(**({"urls": ("http://a",)} | options))


def test_the_token_is_not_shown():
  assert "secret" not in repr(RemoteConfig(("http://a",), token="secret"))


def test_start_says_what_is_wrong(world: World):
  async def body() -> None:
    async def page(_: web.Request) -> web.StreamResponse:
      return web.Response(text="<html>hello</html>", content_type="text/html")

    async def hang(_: web.Request) -> web.StreamResponse:
      await asyncio.sleep(60)
      return reply({})

    quick = {"start_timeout_s": 0.1}
    async with serving(world.interpreter, token="t") as http, pretending(page) as wrong, pretending(hang) as mute:
      for urls, options, what in (
        ((http.url,), {}, "a token is needed"),
        ((http.url,), {"token": "x"}, "token is not accepted"),
        ((http.url,), {"token": "x", "protocol": "sandbox_fusion"}, "token is not accepted"),
        ((wrong,), {}, "not JSON"),
        ((http.url + "/nix",), {"token": "t"}, "404"),
        ((closed_port(), mute), {}, "no server of the sandbox answers: .*no connection.*no answer in time"),
      ):
        with pytest.raises(SandboxStartError, match=what):
          await RemoteInterpreter.start(RemoteConfig(urls, **(quick | options)))  # type: ignore[arg-type]

  world.do(body())


# -- faults of the servers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("answer", "what"),
  [
    (lambda: web.Response(text="{"), "not JSON"),
    (lambda: web.Response(text="[" * 50_000), "not JSON"),
    (result() | {"value": [[[[[]]]]]}, "'value' must be a string, got [[[...]]]"),
    ([], "must be a JSON object"),
    ({}, "field 'status' is missing"),
    (result() | {"status": "fine"}, "'status' must be one of"),
    (result() | {"stdout": None}, "'stdout' must be a string"),
    (result() | {"wall_s": "1"}, "'wall_s' must be a number"),
    (lambda: web.Response(text=json.dumps(result() | {"cpu_s": float("nan")})), "'cpu_s' must be a number"),
    (result() | {"attempt": True}, "'attempt' must be an integer"),
    (result() | {"attempt": 0}, "'attempt' must be an integer from 1 on"),
    (lambda: web.Response(text='{"wall_s": 1%s}' % ("0" * 400)), "401 digits"),
    (result() | {"files": {"../a": ""}}, "'../a', which was not asked for"),
    (result() | {"files": {"a": "*"}}, "'files.a' is not base64"),
    (result() | {"level": "superb"}, "'level' must be one of"),
    (result() | {"more": 1}, "unknown field 'more'"),
    (lambda: web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}), "HTTP 302"),
    (lambda: web.Response(status=204), "HTTP 204"),
  ],
)
def test_malformed_answers(answer: Any, what: str):
  async def body() -> None:
    server = Answers(answer)
    async with pretending(server) as url, remote(url, max_response_mib=0.2) as there:
      found = await there.run("1")
      assert found.status == "infra_error" and what in found.error and url in found.error
      assert len(server.asked) == 1

  asyncio.run(body())


def test_an_answer_that_is_too_large_is_the_doing_of_the_snippet():
  async def body() -> None:
    for protocol, large in (("native", result("x" * 300_000)), ("sandbox_fusion", fusion_answer(stdout="x" * 300_000))):
      server = Answers(large)
      async with pretending(server) as url, remote(url, max_response_mib=0.2, protocol=protocol) as there:
        found = await there.run("1")
        assert (found.status, found.limit) == ("output", "output") and "max_response_mib" in found.error
        assert len(server.asked) == 1 and there.stats()["hosts_up"] == 1 and there.stats()["infra_errors"] == 0
    server = Answers(
      {"session": "s"}, large := result("x" * 300_000, state="kept"), {"session": "t"}, result("2", state="kept")
    )
    async with pretending(server) as url, remote(url, max_response_mib=0.2) as there:
      session = there.session()
      found = await session.run("1")
      assert (found.status, found.state) == ("output", "lost") and len(large["value"]) == 300_000
      assert (await session.run("2")).value == "2"  # in another: nobody knows what has become of the first
      assert [asked.get("turn") for asked in server.asked] == [None, 1, None, 1]

  asyncio.run(body())


@pytest.mark.parametrize(("later", "attempt"), [("first", 1), ("second", 2)])
def test_a_server_that_was_started_anew_at_once_is_told_from_the_one_before(later: str, attempt: int):
  async def body() -> None:
    def by(instance: str) -> Callable[[], web.Response]:
      return lambda: reply(result("1"), **{wire.INSTANCE_HEADER: instance})

    server = Answers(by("first"), "cut", by(later))
    async with pretending(server) as url, remote(url) as there:
      assert (await there.run("1")).attempt == 1
      found = await there.run("2")
      assert found.ok and found.attempt == attempt and len(server.asked) == 3

  asyncio.run(body())


def test_deep_answers():
  def further_down(said: Any, frames: int) -> Any:
    return further_down(said, frames - 1) if frames else wire.decode_result(said)

  text = json.dumps(result()).replace('"value": ""', '"value": %s')
  for depth in range(1, 1100):  # somewhere among them the parser can still read what `repr` cannot write
    with pytest.raises(wire.WireError):
      further_down(wire.parse((text % ("[" * depth + "]" * depth)).encode()), 10)


def test_a_busy_server_is_asked_later():
  async def body() -> None:
    def busy() -> web.Response:
      return reply({"error": "full"}, 429, **{"Retry-After": "1"})

    exact = {"error": "full", "retry_after_s": 0.15}
    server = Answers(*[lambda: reply(exact, 429)] * 6, busy, result("9"))
    async with pretending(server) as url, remote(url, retries=0) as there:
      found = await there.run("1")
      assert found.value == "9" and found.attempt == 1  # being busy is no failure, however often
      gaps = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
      assert min(gaps) >= 0.15 and gaps[-1] >= 1.0
      assert len({asked["request_id"] for asked in server.asked}) == 1
      assert there.stats()["busy"] == 7

      server.answers = [lambda: web.Response(status=429, text='{"retry_after_s": 1%s}' % ("0" * 400)), result("9")]
      assert (await there.run("1")).value == "9"  # it does not say when, in a way that can be read

      server.answers = [lambda: reply(exact, 429)]
      begun = time.monotonic()
      there.config.__dict__["wait_s"] = 0.4
      found = await there.run("1", Limits(wall_s=0.1))
      assert (
        found.status == "infra_error"
        and ("429" in found.error or "in time" in found.error)
        and time.monotonic() - begun < 1
      )

  asyncio.run(body())


def test_a_broken_connection_does_not_run_it_twice(world: World):
  async def body() -> None:
    script = Script()
    async with serving(script, linger_s=5) as http:
      cut = True

      async def proxy(request: web.Request) -> web.StreamResponse:
        nonlocal cut
        task = asyncio.create_task(http.session.request(request.method, request.path, data=await request.read()))
        if "run" in request.path and cut:
          cut = False
          await script.begun(len(script.codes) + 1)
          assert request.transport is not None
          request.transport.close()
          asyncio.get_running_loop().call_later(0.1, script.gate.set)
        answer = await task
        return web.Response(body=await answer.read(), status=answer.status)

      async with pretending(proxy) as url, remote(url) as there:
        found = await there.run("wait")
        assert (found.value, found.attempt, script.codes) == ("1", 1, ["wait"])
        script.gate.clear()
        cut = True
        async with there.session() as session:
          found = await session.run("wait turn")
          assert (found.value, found.attempt, script.codes) == ("2", 1, ["wait", "wait turn"])
        assert there.stats()["retries"] == 2

  asyncio.run(body())


def test_a_host_that_dies_while_it_runs():
  async def body() -> None:
    script, other = Script(), Script()
    async with serving(script) as first, serving(other) as second, remote(first.url, second.url) as there:
      sessions = [there.session(), there.session()]
      for session in sessions:  # the first host is asked first
        await session.run("x")
      task = asyncio.create_task(there.run("wait"))
      await script.begun(len(sessions) + 1)
      other.gate.set()
      await first.service.drain(0.0)
      found = await asyncio.wait_for(task, 5)
      assert found.ok and found.attempt == 2 and other.codes == ["wait"]  # it may have run at both
      assert (await there.run("y")).attempt == 1
      lost = await sessions[0].run("x")
      assert (lost.status, lost.state) == ("infra_error", "lost") and first.url in lost.error
      assert (await sessions[0].run("z")).ok and other.codes[-1] == "z"
      assert there.stats()["hosts_up"] == 1 and there.stats()["lost"] == 1

  asyncio.run(body())


def test_a_host_that_is_started_again_while_it_runs():
  async def body() -> None:
    before, after = Script(), Script()
    after.gate.set()
    old, new = SandboxService(before), SandboxService(after)
    port = await old.start()
    async with remote(f"http://127.0.0.1:{port}", retries=40) as there:
      task = asyncio.create_task(there.run("wait"))
      await before.begun(1)
      await old.drain(0.0)
      await until(lambda: there.stats()["retries"] >= 2)  # the second finds that nobody listens
      await new.start(port=port)
      found = await asyncio.wait_for(task, 5)
      assert before.codes == after.codes == ["wait"]
      assert found.ok and found.attempt == 2  # it is another server, though the address is the same
      assert (await there.run("y")).attempt == 1
    await new.drain(0.0)

  asyncio.run(body())


def test_a_host_that_comes_back():
  async def body() -> None:
    good, bad = Answers(result("good")), Answers("cut", healthy=True)
    async with pretending(bad) as first, pretending(good) as second, remote(first, second) as there:
      bad.healthy = False
      assert (await there.run("1")).value == "good"
      for _ in range(5):
        assert (await there.run("1")).value == "good"
      assert len(bad.asked) == 2 and there.stats()["hosts_up"] == 1
      bad.healthy, bad.answers = True, [result("back")]
      await until(lambda: there.stats()["hosts_up"] == 2)
      assert {found.value for found in await asyncio.gather(*(there.run("1") for _ in range(8)))} == {"good", "back"}

  asyncio.run(body())


def test_a_host_that_is_down_at_the_start():
  async def body() -> None:
    down = closed_port()
    async with pretending(Answers(result("1"))) as url, remote(down, url) as there:
      assert there.stats()["hosts_up"] == 1 and there.capabilities()["hosts"][down] == {}
      assert (await there.run("1")).value == "1"
      late = SandboxService(Script())
      await late.start(port=int(down.rpartition(":")[2]))
      await until(lambda: there.stats()["hosts_up"] == 2)
      assert there.capabilities()["hosts"][down]["level"] == late.level
      await late.drain(0.0)

  asyncio.run(body())


def test_all_hosts_down():
  async def body() -> None:
    async with pretending(Answers(result())) as url:
      async with remote(url) as there:
        await there.run("1")
        session = there.session()
        there._pool.hosts[0].url = closed_port()
        begun = time.monotonic()
        for found in await asyncio.gather(*(there.run("1") for _ in range(20)), session.run("1")):
          assert found.status == "infra_error" and there._pool.hosts[0].url in found.error
        assert time.monotonic() - begun < 3 and there.stats()["hosts_up"] == 0

  asyncio.run(body())


def test_a_server_that_never_answers():
  async def body() -> None:
    async with pretending(Answers("hang")) as url, remote(url, wait_s=0.3) as there:
      begun = time.monotonic()
      found = await there.run("1", Limits(wall_s=0.1))
      assert found.status == "infra_error" and "no answer in time" in found.error
      assert 0.3 < time.monotonic() - begun < 2

  asyncio.run(body())


def test_hosts_share_the_work():
  async def body() -> None:
    scripts = [Script(slots=8), Script(slots=8)]
    async with serving(scripts[0]) as a, serving(scripts[1]) as b:
      async with remote(a.url, b.url, max_in_flight_per_host=3) as there:
        tasks = [asyncio.create_task(there.run("wait")) for _ in range(10)]
        for script in scripts:
          await script.begun(3)
        await asyncio.sleep(0.05)
        assert [len(script.codes) for script in scripts] == [3, 3]
        assert there.stats()["running"] == 6 and there.stats()["queued"] == 4
        tasks.pop().cancel()
        for script in scripts:
          script.gate.set()
        assert all(found.ok for found in await asyncio.wait_for(asyncio.gather(*tasks), 5))
        assert sum(len(script.codes) for script in scripts) == 9 and there.stats()["queued"] == 0

  asyncio.run(body())


def test_faults_in_sessions():
  async def body() -> None:
    opened = {"session": "s1"}
    for answer, what in (
      ({"status": "ok"}, "malformed"),
      (lambda: reply({"error": "there is no session"}, 404), "no session"),
      (lambda: reply({"error": "draining"}, 503), "draining"),
      ("cut", "connection broke"),
    ):
      server = Answers(opened, result("1"), answer)
      async with pretending(server) as url, remote(url, retries=2) as there:
        session = there.session()
        assert (await session.run("x")).value == "1"
        found = await session.run("y")
        assert (found.status, found.state) == ("infra_error", "lost") and what in found.error and url in found.error
        server.answers = [opened, result("2")]
        await until(lambda there=there: there.stats()["hosts_up"] == 1)  # type: ignore[misc]
        assert (await session.run("z")).value == "2" and server.asked[-1]["turn"] == 1
    server = Answers({"session": "../../x"})
    async with pretending(server) as url, remote(url) as there:
      assert "'session' must be a name" in (await there.session().run("x")).error

  asyncio.run(body())


# -- SandboxFusion -----------------------------------------------------------------------------------------------------
