"""Sessions: what persists, what a killed turn leaves behind, and that nobody can feign or escape it."""

from __future__ import annotations

import asyncio

import pytest
from sandbox_runner import Runner, children

from agentic_rl.sandbox import (
  Checkpoint,
  Interpreter,
  InterpreterConfig,
  Limits,
  LimitsError,
  SandboxBusyError,
  SandboxClosedError,
)
from agentic_rl.sandbox.lowlevel import cpu_seconds

KINDS: list[Checkpoint] = ["fork", "replay", "none"]
SHORT = Limits(wall_s=0.4, cpu_s=0.3)
AFTER = {"fork": "rolled_back", "replay": "replayed", "none": "lost"}


@pytest.mark.parametrize("kind", KINDS)
def test_variables_modules_and_files_persist(runner: Runner, kind: Checkpoint):
  results = runner.turns(
    "import math\nx = [1]\ndef f(a): return a + len(x)",
    "x.append(2)\nopen('note', 'w').write('kept')\nf(10)",
    "print(open('note').read(), math.floor(2.5), f(1))\nx",
    checkpoint=kind,
  )
  assert [(r.status, r.state) for r in results] == [("ok", "kept")] * 3
  assert (results[1].value, results[2].stdout, results[2].value) == ("12", "kept 2 3\n", "[1, 2]")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
  ("code", "status"),
  [
    ("x = 2\nwhile True: pass", "timeout cpu"),
    ("x = 2\nimport time\ntime.sleep(60)", "timeout"),
    ("x = 2\nimport os\nos._exit(0)", "exit"),
    ("x = 2\nimport ctypes\nctypes.string_at(0)", "crash"),
    ("x = 2\nwhile True: print('y' * 10000)", "output"),
  ],
)
def test_a_killed_turn_leaves_the_state_before_it(runner: Runner, kind: Checkpoint, code: str, status: str):
  limits = Limits(wall_s=0.4, cpu_s=0.3, flood_mib=1)
  with_session = runner.interpreter.session(checkpoint=kind)
  runner.in_session(with_session, "x = 1\nprint('once')")
  killed = runner.in_session(with_session, code, limits)
  assert killed.status in status.split() and killed.state == AFTER[kind], killed
  after = runner.in_session(with_session, "x")
  assert after.status == ("error" if kind == "none" else "ok") and after.stdout == ""
  if kind != "none":
    assert after.value == "1"
  runner.loop.run_until_complete(with_session.close())
  assert runner.leftovers() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_turn_that_ends_by_itself_is_kept(runner: Runner, kind: Checkpoint):
  results = runner.turns("x = 1\n1/0", "x += 1\nimport sys\nsys.exit(3)", "y = bytearray(10**12)", "x", checkpoint=kind)
  assert [r.status for r in results] == ["error", "exit", "memory", "ok"]
  assert {r.state for r in results} == {"kept"} and results[3].value == "2" and results[1].exit_code == 3


def test_tracebacks_show_the_turn_and_its_line(runner: Runner):
  results = runner.turns("def f():\n  return 1 / 0", "f()")
  assert 'File "<turn 1>", line 2, in f\n    return 1 / 0' in results[1].error
  assert 'File "<turn 2>", line 1, in <module>' in results[1].error


def test_input_belongs_to_its_turn(runner: Runner):
  async def body() -> list[str]:
    async with runner.interpreter.session() as session:
      return [
        (await session.run("input()", stdin="one\ntwo\n")).value,
        (await session.run("print(input(), input())", stdin="three\nfour")).stdout,
        (await session.run("input()")).error.splitlines()[-1],
      ]

  assert runner.loop.run_until_complete(body()) == ["'one'", "three four\n", "EOFError: EOF when reading a line"]


def test_poisoned_builtins_and_streams_last_one_turn(runner: Runner):
  results = runner.turns(
    "import builtins\nfor name in dir(builtins): delattr(builtins, name)",
    "import sys\nsys.stdout = sys.stderr = None\nsys.settrace(lambda *a: 1 / 0)",
    "print(len('ab'))",
  )
  assert results[2].stdout == "2\n" and results[2].state == "kept", results


def test_random_goes_on_and_is_rolled_back(runner: Runner):
  seven = runner.turns("import random", "random.random()", "random.random()", seed=7)
  again = runner.turns(
    "import random", "random.random()", "random.random()\nimport os\nos._exit(0)", "random.random()", seed=7
  )
  assert seven[1].value == again[1].value and seven[2].value == again[3].value != seven[1].value


def test_sessions_do_not_see_each_other(runner: Runner):
  async def body() -> list[str]:
    async with runner.interpreter.session() as one, runner.interpreter.session() as two:
      await one.run("x = 'mine'\nopen('f', 'w').close()")
      return [
        (await two.run("import os\nprint(os.path.exists('f'), 'x' in globals())")).stdout,
        (await one.run("x")).value,
      ]

  assert runner.loop.run_until_complete(body()) == ["False False\n", "'mine'"]


def test_a_session_cannot_fork(runner: Runner):
  if runner.level == "process":
    pytest.skip("nothing forbids it at this level")
  for kind in KINDS:
    results = runner.turns("import os\nx = 5", "os.fork()", "x", checkpoint=kind)
    assert results[1].status == "error" and "PermissionError" in results[1].error and results[2].value == "5"


def test_what_a_turn_leaves_running_cannot_feign_an_infra_error(runner: Runner):
  bomb = "import os, threading, time\nthreading.Thread(target=lambda: (time.sleep({}), os._exit(0))).start()\nx = 1"
  for kind in ("fork", "replay"):
    for delay in (0.0, 0.001, 0.002, 0.004):
      results = runner.turns(bomb.format(delay), "x", "x", "x", checkpoint=kind)
      assert all(r.status != "infra_error" for r in results), results


@pytest.mark.parametrize(
  "forgery",
  [
    "os.write(3, b'R')",
    "os.write(3, b'D' + bytes(21))",
    "os.write(3, b'AGS2' + b'\\0' * 17)",
    "os.write(3, b'AGS2\\0' + b'\\xff' * 16)",
    "os.write(3, b'garbage' * 9999)",
    "os.close(3)",
    "os.close(1); os.close(2)",
    "os.dup2(1, 3)",
    "import socket; s = socket.socket(fileno=3); socket.send_fds(s, [b'R'], [1, 2])",
    "import socket; s = socket.socket(fileno=3); s.shutdown(2)",
  ],
)
@pytest.mark.parametrize("kind", ["fork", "replay"])
def test_forged_messages_harm_nobody_else(runner: Runner, kind: Checkpoint, forgery: str):
  results = runner.turns("x = 1", "import os\n" + forgery, "x", checkpoint=kind)
  assert all(r.status != "infra_error" for r in results), results
  assert runner.run("1+1").value == "2" and runner.interpreter.stats()["restarts"] == 0
  assert runner.leftovers() == []


def test_cancelling_a_turn_keeps_the_session(runner: Runner):
  async def body() -> str:
    async with runner.interpreter.session() as session:
      await session.run("x = 1")
      turn = asyncio.create_task(session.run("x = 2\nimport time\ntime.sleep(50)"))
      await asyncio.sleep(0.1)
      turn.cancel()
      await asyncio.gather(turn, return_exceptions=True)
      result = await session.run("x")
      assert result.state == "replayed"
      return result.value

  assert runner.loop.run_until_complete(body()) == "1"
  assert runner.leftovers() == []


def test_many_sessions_at_once(runner: Runner):
  async def one(i: int) -> bool:
    async with runner.interpreter.session() as session:
      await session.run(f"x = {i}")
      for _ in range(3):
        await session.run("x += 1")
      return (await session.run("x")).value == str(i + 3)

  async def body() -> bool:
    return all(await asyncio.gather(*(one(i) for i in range(100))))

  assert runner.loop.run_until_complete(body())
  assert runner.interpreter.stats()["sessions"] == 0 and runner.leftovers() == []


def test_wrong_use_is_refused():
  async def body() -> None:
    async with await Interpreter.start(InterpreterConfig(sessions=1)) as interpreter:
      with pytest.raises(LimitsError, match="checkpoint"):
        interpreter.session(checkpoint="sometimes")  # type: ignore[arg-type]
      with pytest.raises(LimitsError, match="processes"):
        interpreter.session(Limits(processes=1))
      session = interpreter.session()
      with pytest.raises(SandboxBusyError, match="1 sessions are open"):
        interpreter.session()
      refused = await session.run("a\0b")
      assert (refused.status, refused.state) == ("refused", "kept")
      await session.close()
      with pytest.raises(SandboxClosedError):
        await session.run("1")
      async with interpreter.session() as another:
        assert (await another.run("1")).value == "1"

  asyncio.run(body())


def test_what_a_turn_leaves_running_uses_no_time_between_turns(runner: Runner):
  async def body() -> float:
    async with runner.interpreter.session() as session:
      await session.run(
        "import threading\ndef spin():\n  while True: pass\nthreading.Thread(target=spin, daemon=True).start()"
      )
      zygote = runner.zygotes()[0]
      pid = children(zygote)[0]
      before = cpu_seconds(pid)
      await asyncio.sleep(0.5)
      return cpu_seconds(pid) - before

  assert runner.loop.run_until_complete(body()) < 0.05
