"""The pool in front of the parents: fair, bounded, with as many parents as it takes, renewed when they have grown."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentic_rl.sandbox import (
  ExecResult,
  Interpreter,
  InterpreterConfig,
  Limits,
  SandboxBusyError,
  SandboxStartError,
  framing,
)


def with_interpreter(config: InterpreterConfig, body) -> None:
  async def main() -> None:
    async with await Interpreter.start(config) as interpreter:
      await body(interpreter)

  asyncio.run(main())


def config(**options) -> InterpreterConfig:
  return InterpreterConfig(min_isolation="process", **options)


def test_owners_are_served_in_turn():
  order: list[str] = []

  async def body(interpreter: Interpreter) -> None:
    async def one(owner: str) -> None:
      await interpreter.run("1", owner=owner)
      order.append(owner)

    await asyncio.gather(*(one("greedy") for _ in range(40)), *(one(f"modest {i}") for i in range(3)))

  with_interpreter(config(slots=2), body)
  assert max(order.index(f"modest {i}") for i in range(3)) < 12, order


def test_an_owners_own_order_is_kept():
  order: list[int] = []

  async def body(interpreter: Interpreter) -> None:
    async def one(i: int) -> None:
      await interpreter.run("1", owner="a")
      order.append(i)

    await asyncio.gather(*(one(i) for i in range(30)))

  with_interpreter(config(slots=1), body)
  assert order == list(range(30))


def test_the_queue_is_bounded_where_that_is_wanted():
  async def body(interpreter: Interpreter) -> None:
    slow = [asyncio.create_task(interpreter.run("import time\ntime.sleep(0.3)\n5")) for _ in range(3)]
    await asyncio.sleep(0.1)
    with pytest.raises(SandboxBusyError, match="2 snippets wait already"):
      await interpreter.run("1")
    assert [(await task).value for task in slow] == ["5"] * 3
    assert (await interpreter.run("1+1")).value == "2"

  with_interpreter(config(slots=1, queue=2), body)


def test_more_parents_where_many_snippets_run():
  async def body(interpreter: Interpreter) -> None:
    results = await asyncio.gather(*(interpreter.run("import time\ntime.sleep(0.6)\n5") for _ in range(80)))
    assert {r.value for r in results} == {"5"}
    assert interpreter.stats()["parents"] == 3

  with_interpreter(config(slots=40), body)


def test_snippets_run_in_the_smallest_group_that_has_their_modules():
  async def body(interpreter: Interpreter) -> None:
    async def runs(code: str, parents: int) -> ExecResult:
      result = await interpreter.run(code)
      assert result.status == "ok" and interpreter.stats()["parents"] == parents, result
      return result

    await runs("1", 1)
    await runs("import colorsys", 2)
    await runs("import wave # and colorsys", 3)
    await runs("import wave", 3)
    loaded = await runs("import sys\nprint('wave' in sys.modules, 'colorsys' in sys.modules)", 3)
    assert loaded.stdout == "True True\n"

  with_interpreter(config(preload=((), ("colorsys",), ("colorsys", "wave"))), body)


def test_a_parent_that_has_grown_is_renewed_and_its_sessions_live_on():
  async def body(interpreter: Interpreter) -> None:
    session = interpreter.session()
    await session.run("x = 5")
    (parent,) = interpreter._groups[0].parents
    old = parent.pid
    parent.data_received(framing.pack({"pong": 1, "anonymous_bytes": 1 << 40}))
    assert (await interpreter.run("1+1")).value == "2" and interpreter.stats()["parents"] == 2
    assert (await session.run("x")).value == "5" and interpreter.stats()["recycled"] == 0
    await session.close()
    deadline = time.monotonic() + 5
    while interpreter.stats()["recycled"] == 0 and time.monotonic() < deadline:
      await asyncio.sleep(0.02)
    assert interpreter.stats()["recycled"] == 1 and old not in interpreter.capabilities()["pids"]
    assert (await interpreter.run("1+1")).value == "2" and interpreter.stats()["infra_errors"] == 0

  with_interpreter(config(stall_s=0.4), body)


def test_a_parent_that_cannot_load_its_modules_fails_its_own_snippets_only():
  async def body(interpreter: Interpreter) -> None:
    bad, good = await asyncio.gather(interpreter.run("import no_such_module_here"), interpreter.run("1+1"))
    assert bad.status == "infra_error" and "No module named 'no_such_module_here'" in bad.error
    assert good.value == "2"

  with_interpreter(config(preload=(("no_such_module_here",),)), body)


def test_limits_of_each_call_are_its_own():
  async def body(interpreter: Interpreter) -> None:
    sizes = [Limits(disk_mib=d, memory_mib=m) for d in (1, 8) for m in (64, 256)]
    code = "import resource\nopen('f', 'wb').write(bytes(4 << 20))\n'wrote'"
    results = await asyncio.gather(*(interpreter.run(code, limits) for limits in sizes * 5))
    assert all((r.value == "'wrote'") == (limits.disk_mib == 8) for r, limits in zip(results, sizes * 5, strict=True))

  try:
    with_interpreter(InterpreterConfig(min_isolation="namespace"), body)
  except SandboxStartError as error:
    pytest.skip(f"only at level namespace does the file system limit the space: {error}")
