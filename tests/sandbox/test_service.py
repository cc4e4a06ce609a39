from __future__ import annotations

import asyncio
import base64
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from sandbox_runner import children
from service_runner import LIMITS, Script, World, serving, until

from agentic_rl.sandbox import ExecResult, LimitsError, SandboxBusyError, wire
from agentic_rl.sandbox.service import SandboxService

ROOT = pathlib.Path(__file__).parents[2]
DRAW = "import os\nos.urandom(8).hex()"  # another value each time that it is run


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
  world = World()
  yield world
  world.close()


def fusion(world: World, **fields: Any) -> tuple[int, Any]:
  async def body() -> Any:
    async with serving(world.interpreter) as http:
      return await http.post("/run_code", {"code": "pass", "language": "python"} | fields)

  return world.do(body())


# -- SandboxFusion -----------------------------------------------------------------------------------------------------


def test_fusion_success_as_verl_asks(world: World):
  status, said = fusion(
    world,
    code="print(input())\n1 + 1",
    stdin="hello",
    compile_timeout=10,
    run_timeout=10,
    memory_limit_MB=1024,
    files={},
    fetch_files=[],
  )
  took = said["run_result"].pop("execution_time")
  assert status == 200 and 0 < took < 10
  assert said == {
    "status": "Success",
    "message": "",
    "compile_result": None,
    "run_result": {"status": "Finished", "return_code": 0, "stdout": "hello\n", "stderr": ""},
    "executor_pod_name": None,
    "files": {},
  }


def test_fusion_failures(world: World):
  _, said = fusion(world, code="print(1)\n1/0")
  ran = said["run_result"]
  assert (said["status"], ran["status"], ran["return_code"], ran["stdout"]) == ("Failed", "Finished", 1, "1\n")
  assert ran["stderr"].startswith("Traceback") and ran["stderr"].rstrip().endswith("division by zero")
  _, said = fusion(world, code="while True: pass", run_timeout=0.3)
  assert (said["status"], said["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
  _, said = fusion(world, code="import sys\nsys.exit(3)")
  assert (said["status"], said["run_result"]["return_code"]) == ("Failed", 3)
  _, said = fusion(world, code="import sys\nsys.exit(0)")
  assert (said["status"], said["run_result"]["return_code"]) == ("Success", 0)
  _, said = fusion(world, code="import os\nos.abort()")
  assert (said["status"], said["run_result"]["return_code"]) == ("Failed", -signal.SIGABRT)


def test_fusion_files(world: World):
  files = {"in/a.txt": base64.b64encode(b"\xff\x00").decode(), "none": None}
  code = "data = open('in/a.txt', 'rb').read()\nopen('out', 'wb').write(data * 2)"
  status, said = fusion(world, code=code, files=files, fetch_files=["out", "missing"])
  assert status == 200 and said["files"] == {"out": base64.b64encode(b"\xff\x00\xff\x00").decode()}


@pytest.mark.parametrize(
  ("fields", "what"),
  [
    ({"language": "cpp"}, "'language' must be python"),
    ({"code": 3}, "'code' must be a string"),
    ({"run_timeout": "3"}, "'run_timeout' must be a number"),
    ({"run_timeout": 0}, "'run_timeout'"),
    ({"memory_limit_MB": 1}, "'memory_limit_MB'"),
    ({"files": {"a": "%"}}, "'files.a' is not base64"),
    ({"files": {"../a": ""}}, "relative path"),
    ({"fetch_files": "a"}, "'fetch_files' must be a list of strings"),
    ({"args": ["-v"]}, "'args' must be empty"),
    ({"timeout": 3}, "unknown field 'timeout'"),
  ],
)
def test_fusion_refuses(world: World, fields: dict[str, Any], what: str):
  status, said = fusion(world, **fields)
  assert status == 422 and what in said["detail"]


def test_fusion_cpu_limit_is_the_services():
  limits = wire.fusion_request({"code": "", "language": "python", "run_timeout": 60}, LIMITS).limits
  assert limits is not None and (limits.wall_s, limits.cpu_s) == (60, LIMITS.cpu_s)
  limits = wire.fusion_request({"code": "", "language": "python", "run_timeout": 1}, LIMITS).limits
  assert limits is not None and (limits.wall_s, limits.cpu_s) == (1, 1)


def test_fusion_infra_error_is_a_sandbox_error():
  said = wire.encode_fusion(ExecResult("infra_error", error="the parent died"))
  assert (said["status"], said["message"], said["run_result"]["status"]) == ("SandboxError", "the parent died", "Error")


# -- native ------------------------------------------------------------------------------------------------------------


def test_run_gives_the_whole_result(world: World):
  async def body() -> Any:
    async with serving(world.interpreter) as http:
      data = base64.b64encode(b"ab").decode()
      code = "print(open('f').read() + input())\n7"
      fields: dict[str, Any] = {"stdin": "c", "files": {"f": data}, "fetch": ["f"], "limits": {"cpu_s": 1}}
      return await http.post("/v1/run", code=code, seed=3, owner="me", **fields)

  status, said = world.do(body())
  result = wire.decode_result(said, ["f"])
  assert status == 200 and (result.status, result.stdout, result.value) == ("ok", "abc\n", "7")
  assert result.files == {"f": b"ab"} and result.level == world.interpreter.level


@pytest.mark.parametrize(
  ("path", "body", "status", "what"),
  [
    ("/v1/run", b"{", 400, "not JSON"),
    ("/v1/run", b"[" * 100_000, 400, "not JSON"),
    ("/v1/run", b"\xff", 400, "not JSON"),
    ("/v1/run", [], 400, "must be a JSON object"),
    ("/v1/run", {}, 400, "field 'code' is missing"),
    ("/v1/run", {"code": "", "limit": {}}, 400, "unknown field 'limit'"),
    ("/v1/run", {"code": "", "limits": {"cpu": 1}}, 400, "unknown field 'limits.cpu'"),
    ("/v1/run", {"code": "", "limits": {"cpu_s": -1}}, 400, "Limits.cpu_s"),
    ("/v1/run", {"code": "", "limits": {"cpu_s": [1]}}, 400, "Limits.cpu_s"),
    ("/v1/run", b'{"code": "", "limits": {"cpu_s": 1%s}}' % (b"0" * 400), 400, "401 digits"),
    ("/run_code", b'{"code": "", "language": "python", "run_timeout": 1%s}' % (b"0" * 400), 422, "401 digits"),
    ("/v1/run", {"code": "", "stdin": "\ud800"}, 400, "'stdin' has a lone surrogate"),
    ("/run_code", {"code": "", "language": "python", "stdin": "\ud800"}, 422, "'stdin' has a lone surrogate"),
    ("/v1/run", {"code": "", "seed": 1.5}, 400, "'seed' must be an integer"),
    ("/v1/run", {"code": "", "seed": True}, 400, "'seed' must be an integer"),
    ("/v1/run", {"code": "", "stdin": None}, 400, "'stdin' must be a string"),
    ("/v1/run", {"code": "", "owner": "a" * 201}, 400, "'owner'"),
    ("/v1/run", {"code": "", "files": {"/etc/x": ""}}, 400, "relative path"),
    ("/v1/sessions", {"checkpoint": "maybe"}, 400, "'checkpoint' must be one of"),
    ("/v1/sessions/nix/run", {"code": "", "turn": 1}, 404, "no session"),
    ("/nix", {}, 404, "Not Found"),
    ("/health", {}, 405, "Method Not Allowed"),
  ],
)
def test_bad_requests(world: World, path: str, body: Any, status: int, what: str):
  async def ask() -> Any:
    async with serving(world.interpreter) as http:
      return await http.post(path, body)

  got, said = world.do(ask())
  assert got == status and what in said["error"]


def test_a_body_that_cannot_be_unpacked():
  async def ask() -> None:
    async with serving(Script()) as http:
      options: Any = {"data": b"xx", "headers": {"Content-Encoding": "gzip"}}
      async with http.session.post("/v1/run", **options) as answer:
        assert answer.status == 400 and "cannot be read" in (await answer.json())["error"]
        assert answer.headers["Connection"] == "close"
      assert (await http.post("/v1/run", code="1"))[0] == 200

  asyncio.run(ask())


def test_a_fault_of_the_service_is_json_too():
  async def ask() -> None:
    script = Script()
    script.error = RuntimeError("a secret")
    async with serving(script) as http:
      for path, fields in (("/v1/run", {}), ("/v1/run", {"request_id": "a"}), ("/run_code", {"language": "python"})):
        status, said = await http.post(path, code="1", **fields)
        assert status == 500 and said == {"error": "a fault of the service: RuntimeError"}
      script.error = None
      assert (await http.post("/v1/run", code="1", request_id="a"))[0] == 200

  asyncio.run(ask())


def test_large_bodies(world: World):
  async def body() -> None:
    async with serving(world.interpreter, max_body_mib=0.01) as http:
      status, said = await http.post("/v1/run", code="#" * 20_000)
      assert status == 413 and "allowed 10485 bytes" in said["error"]

      async def chunks() -> Any:
        for _ in range(20):
          yield b" " * 1000

      async with http.session.post("/v1/run", data=chunks()) as answer:  # its length is not told
        assert answer.status == 413 and "allowed" in (await answer.json())["error"]
      status, said = await http.post("/v1/run", code="1")
      assert status == 200

  world.do(body())


def test_token(world: World):
  async def body() -> None:
    async with serving(world.interpreter, token="secret") as http:
      assert (await http.post("/v1/run", code="1"))[0] == 200
      for given in ("", "Bearer", "Bearer wrong", "secret", "Bearer secret ", "bearer secret", "Bearer sécret"):
        async with aiohttp.ClientSession(http.url, headers={"Authorization": given}) as other:
          async with other.post("/v1/run", json={"code": "1"}) as answer:
            accepted = given.strip() == "Bearer secret"  # blanks around a header's value do not belong to it
            assert answer.status == (200 if accepted else 401), given
            assert accepted or "Bearer TOKEN" in (await answer.json())["error"]
          for path, status in (("/health", 200), ("/metrics", 200), ("/capabilities", 401), ("/v1/ping", 401)):
            async with other.get(path) as answer:
              assert answer.status == status or accepted

  world.do(body())


def test_what_it_tells_of_itself(world: World):
  async def body() -> None:
    async with serving(world.interpreter, max_queue=7) as http:
      await http.post("/v1/run", code="1")
      await http.post("/v1/run", code="1/0")
      await http.post("/run_code", code="1", language="cpp")
      await http.post("/v1/sessions")
      status, text = await http.get("/health")
      assert status == 200 and f'"level":"{world.interpreter.level}"' in text
      assert '"queue":7' in (await http.get("/capabilities"))[1]
      assert await http.get("/v1/ping") == (200, '"pong"')
      assert (await http.get("/"))[0] == 200
      text = (await http.get("/metrics"))[1]
      for line in (
        'agentic_rl_sandbox_executions_total{kind="run",status="ok"} 1.0',
        'agentic_rl_sandbox_executions_total{kind="run",status="error"} 1.0',
        'agentic_rl_sandbox_rejected_total{reason="request"} 1.0',
        "agentic_rl_sandbox_in_flight 0.0",
        "agentic_rl_sandbox_queued 0.0",
        "agentic_rl_sandbox_sessions 1.0",
        "agentic_rl_sandbox_wall_seconds_count 2.0",
        "agentic_rl_sandbox_cpu_seconds_count 2.0",
        "agentic_rl_sandbox_queue_seconds_count 2.0",
        f'agentic_rl_sandbox_level{{level="{world.interpreter.level}"}} 1.0',
      ):
        assert line in text.splitlines(), line

  world.do(body())


def test_settings_are_checked():
  async def body() -> None:
    for options in ({"max_queue": -1}, {"max_queue": 1.5}, {"remember": True}, {"session_idle_s": 0}):
      with pytest.raises(LimitsError, match=next(iter(options))):
        SandboxService(Script(), **options)  # type: ignore[arg-type]

  asyncio.run(body())


# -- asked for twice ---------------------------------------------------------------------------------------------------


def test_request_id_runs_once(world: World):
  async def body() -> None:
    async with serving(world.interpreter) as http:
      before = world.interpreter.stats()["executions"]
      same = await asyncio.gather(*(http.post("/v1/run", code=DRAW, request_id="a") for _ in range(5)))
      same.append(await http.post("/v1/run", code=DRAW, request_id="a"))
      assert len({said["value"] for _, said in same}) == 1
      assert world.interpreter.stats()["executions"] == before + 1
      _, other = await http.post("/v1/run", code=DRAW, request_id="b")
      assert other["value"] != same[0][1]["value"]
      status, said = await http.post("/v1/run", code="1", request_id="a")
      assert status == 409 and "another request" in said["error"]

  world.do(body())


@pytest.mark.parametrize("options", [{"remember": 2}, {"remember_s": 0.03}, {"remember_mib": 700 / (1 << 20)}])
def test_answers_are_not_kept_for_ever(options: dict[str, Any]):
  async def body() -> None:
    script = Script()
    async with serving(script, **options) as http:
      for name in "abc":
        await http.post("/v1/run", code="x", request_id=name)
      await asyncio.sleep(0.05)
      assert (await http.post("/v1/run", code="x", request_id="a"))[1]["value"] == "4"
      assert len(http.service._answered) <= 2

  asyncio.run(body())


def test_turns_run_once_and_in_order(world: World):
  async def body() -> None:
    async with serving(world.interpreter) as http:
      _, said = await http.post("/v1/sessions", checkpoint="replay")
      path = f"/v1/sessions/{said['session']}"
      assert (await http.post(path + "/run", code="x = 1", turn=1))[1]["state"] == "kept"
      add = {"code": "x += 1\nx", "turn": 2}
      answers = await asyncio.gather(*(http.post(path + "/run", add) for _ in range(4)))
      answers.append(await http.post(path + "/run", add))
      assert {said["value"] for _, said in answers} == {"2"}
      assert (await http.post(path + "/run", code="x", turn=3))[1]["value"] == "2"
      for turn in (0, 2, 5, -1):
        status, said = await http.post(path + "/run", add | {"turn": turn})
        assert status == 409 and said["error"] == f"the session's next turn is 4, not {turn}"
      status, said = await http.post(path + "/run", code="y", turn=3)
      assert status == 409 and "another request" in said["error"]
      assert (await http.post(path + "/run", code="x", turn="4"))[0] == 400
      assert (await http.delete(path))[0] == 200
      assert (await http.delete(path))[0] == 404
      assert (await http.post(path + "/run", code="x", turn=4))[0] == 404

  world.do(body())


def test_the_next_turn_waits_for_the_last():
  async def body() -> None:
    script = Script()
    async with serving(script) as http:
      path = f"/v1/sessions/{(await http.post('/v1/sessions'))[1]['session']}/run"
      first = asyncio.create_task(http.post(path, code="wait", turn=1))
      await script.begun(1)
      status, said = await http.post(path, code="b", turn=2)
      assert status == 409 and "still running" in said["error"]
      script.gate.set()
      assert (await first)[0] == 200
      script.error = SandboxBusyError("full")
      assert (await http.post(path, code="b", turn=2))[0] == 429
      script.error = None
      assert (await http.post(path, code="b", turn=2))[1]["value"] == "2"  # the refusal was no turn

  asyncio.run(body())


def test_idle_sessions_are_closed():
  async def body() -> None:
    script = Script()
    async with serving(script, session_idle_s=0.08) as http:
      path = f"/v1/sessions/{(await http.post('/v1/sessions'))[1]['session']}/run"
      turn = asyncio.create_task(http.post(path, code="wait", turn=1))
      await script.begun(1)
      await asyncio.sleep(0.2)
      assert not script.closed  # a turn that runs is not idle
      script.gate.set()
      await turn
      await until(lambda: bool(script.closed))
      assert (await http.post(path, code="x", turn=2))[0] == 404

  asyncio.run(body())


# -- too much, and hanging up ------------------------------------------------------------------------------------------


def test_a_full_queue_says_when_to_come_again():
  async def body() -> None:
    script = Script(slots=1)
    async with serving(script, max_queue=2) as http:
      for _ in range(10):
        await http.post("/v1/run", code="x")
      running = [asyncio.create_task(http.post("/v1/run", code="wait")) for _ in range(3)]
      await script.begun(13)
      for path, fields in (("/v1/run", {}), ("/run_code", {"language": "python"})):
        async with http.session.post(path, json={"code": "x"} | fields) as answer:
          assert answer.status == 429 and 1 <= int(answer.headers["Retry-After"]) <= 60
          said = await answer.json()
          assert "2 requests wait" in said["error"] and 0 < said["retry_after_s"] <= 60
      assert '"queued":2' in (await http.get("/health"))[1]
      assert 'rejected_total{reason="busy"} 2.0' in (await http.get("/metrics"))[1]
      script.gate.set()
      assert [status for status, _ in await asyncio.gather(*running)] == [200] * 3
      script.error = SandboxBusyError("the interpreter is full")
      async with http.session.post("/v1/run", json={"code": "x"}) as answer:
        assert answer.status == 429 and "Retry-After" in answer.headers

  asyncio.run(body())


async def hang_up(http: Any, script: Script, path: str, count: int, **fields: Any) -> None:
  task = asyncio.create_task(http.post(path, fields))
  await script.begun(count)
  task.cancel()
  await asyncio.gather(task, return_exceptions=True)


def test_hanging_up_cancels():
  async def body() -> None:
    script = Script()
    async with serving(script, linger_s=0.15) as http:
      await hang_up(http, script, "/run_code", 1, code="wait a", language="python")
      await until(lambda: script.cancelled == ["wait a"])
      await hang_up(http, script, "/v1/run", 2, code="wait b")
      await until(lambda: script.cancelled[1:] == ["wait b"])
      await hang_up(http, script, "/v1/run", 3, code="wait c", request_id="c")
      await asyncio.sleep(0.03)
      assert len(script.cancelled) == 2  # it may be asked for again
      await until(lambda: script.cancelled[2:] == ["wait c"])
      script.gate.set()
      _, said = await http.post("/v1/run", code="wait c", request_id="c")
      assert (said["value"], said["attempt"]) == ("4", 2)  # it has begun twice, and says so

  asyncio.run(body())


def test_coming_back_in_time_joins():
  async def body() -> None:
    script = Script()
    async with serving(script, linger_s=5) as http:
      path = f"/v1/sessions/{(await http.post('/v1/sessions'))[1]['session']}/run"
      await hang_up(http, script, path, 1, code="wait", turn=1)
      await hang_up(http, script, "/v1/run", 2, code="wait", request_id="c")
      asyncio.get_running_loop().call_later(0.05, script.gate.set)
      assert (await http.post(path, code="wait", turn=1))[1]["value"] == "1"
      _, said = await http.post("/v1/run", code="wait", request_id="c")
      assert (said["value"], said["attempt"]) == ("2", 1)
      assert not script.cancelled

  asyncio.run(body())


def test_one_of_two_hangs_up():
  async def body() -> None:
    script = Script()
    async with serving(script, linger_s=0) as http:
      other = asyncio.create_task(http.post("/v1/run", code="wait", request_id="a"))
      await hang_up(http, script, "/v1/run", 1, code="wait", request_id="a")
      await asyncio.sleep(0.05)
      assert not script.cancelled
      script.gate.set()
      assert (await other)[0] == 200

  asyncio.run(body())


def test_closing_a_session_ends_its_turn():
  async def body() -> None:
    script = Script()
    async with serving(script) as http:
      path = f"/v1/sessions/{(await http.post('/v1/sessions'))[1]['session']}"
      turn = asyncio.create_task(http.post(path + "/run", code="wait", turn=1))
      await script.begun(1)
      await http.delete(path)
      status, said = await turn
      assert status == 500 and "killed" in said["error"]
      assert script.cancelled == ["wait"] and script.closed == ["session"]

  asyncio.run(body())


# -- the end -----------------------------------------------------------------------------------------------------------


def test_draining():
  async def body() -> None:
    script = Script()
    async with serving(script) as http:
      await http.post("/v1/sessions")
      running = asyncio.create_task(http.post("/v1/run", code="wait", request_id="a"))
      await script.begun(1)
      drain = asyncio.create_task(http.service.drain(5))
      await asyncio.sleep(0.02)
      for path in ("/v1/run", "/v1/sessions"):
        async with http.session.post(path, json={"code": "x"} if path == "/v1/run" else {}) as answer:
          assert answer.status == 503 and answer.headers["Retry-After"] == "1"
      status, text = await http.get("/health")
      assert status == 503 and "draining" in text
      again = asyncio.create_task(http.post("/v1/run", code="wait", request_id="a"))
      await asyncio.sleep(0.02)
      script.gate.set()
      assert (await running)[1]["value"] == (await again)[1]["value"] == "1"
      await drain
      assert script.closed == ["session"]

  asyncio.run(body())


def test_draining_does_not_wait_for_ever():
  async def body() -> None:
    script = Script()
    async with serving(script) as http:
      running = asyncio.create_task(http.post("/v1/run", code="wait"))
      await script.begun(1)
      await asyncio.wait_for(http.service.drain(0.05), 2)
      status, said = await running
      assert status == 500 and "shuts down" in said["error"]

  asyncio.run(body())


def launch(*flags: str, **environment: str) -> subprocess.Popen[str]:
  command = [sys.executable, "launch/serve_sandbox.py", "--port=0", "--nowarm", "--min_isolation=process", *flags]
  environment = {name: text for name, text in os.environ.items() if "TOKEN" not in name} | environment
  pipe = subprocess.PIPE
  return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def descendants(pid: int) -> list[int]:
  return [found for child in children(pid) for found in [child, *descendants(child)]]


def test_sigterm_lets_a_snippet_end(tmp_path: pathlib.Path):
  (tmp_path / "token").write_text("secret\n")
  with launch(f"--token_file={tmp_path / 'token'}", "--slots=2") as server:
    try:
      assert server.stdout is not None and server.stderr is not None
      line = server.stdout.readline()
      found = re.fullmatch(r"sandbox listens at (http://127\.0\.0\.1:\d+) \(isolation (\w+), 2 slots, .*\)\n", line)
      assert found, line + server.stderr.read()

      async def body() -> tuple[int, Any]:
        async with aiohttp.ClientSession(found[1], headers={"Authorization": "Bearer secret"}) as session:

          async def post() -> tuple[int, Any]:
            code = "print('begun')\nimport time\ntime.sleep(0.6)\nprint('done')"
            async with session.post("/run_code", json={"code": code, "language": "python"}) as answer:
              return answer.status, await answer.json()

          task = asyncio.create_task(post())
          while '"in_flight":1' not in await (await session.get("/health")).text():
            await asyncio.sleep(0.01)
          tree.extend(descendants(server.pid))
          server.send_signal(signal.SIGTERM)
          return await asyncio.wait_for(task, 10)

      tree: list[int] = []
      status, said = asyncio.run(body())
      assert status == 200 and said["run_result"]["stdout"] == "begun\ndone\n"
      assert server.wait(10) == 0
      assert len(tree) >= 3 and not any(os.path.exists(f"/proc/{pid}") for pid in tree)
    finally:
      server.kill()


@pytest.mark.parametrize(
  ("flags", "what"),
  [
    (["--host=0.0.0.0"], "give a token"),
    (["--host=::"], "give a token"),
    (["--host=some.name"], "give a token"),
    (["--token_file=/no/such"], "--token_file cannot be read"),
    (["--wall_s=0"], "Limits.wall_s"),
    (["--host=192.0.2.1", "--insecure"], "cannot listen at 192.0.2.1"),
  ],
)
def test_the_script_refuses(flags: list[str], what: str):
  with launch(*flags) as server:
    out, err = server.communicate(timeout=20)
  assert server.returncode == 2 and what in err and "Traceback" not in err and not out
