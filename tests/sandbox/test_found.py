"""What attempts to break the interpreter have found, at every level of isolation."""

from __future__ import annotations

import asyncio
import pathlib
import time
from collections.abc import Callable

import numpy as np
import pytest
from sandbox_runner import Runner, children

from agentic_rl.sandbox import Checkpoint, ExecResult, Interpreter, InterpreterConfig, Limits, LimitsError, Session

Run = Callable[..., ExecResult]


# -- what callers give -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", ["abc", 1.5, None, 1 << 5000])
def test_a_seed_that_is_none_is_refused_and_costs_no_slot(runner: Runner, seed: object):
  for _ in range(2 * runner.interpreter.config.slots):
    with pytest.raises(LimitsError, match="seed must"):
      runner.run("1", seed=seed)
  assert runner.run("import numpy as np\nint(np.random.rand() * 0) + 1", seed=np.int64(-3)).value == "1"


@pytest.mark.parametrize(
  ("files", "fetch", "what"),
  [
    ({"a/" * 600 + "f": b""}, (), "at most 1024 characters"),
    ({f"f{i}": b"" for i in range(1001)}, (), "at most 1000 each"),
    ({}, ["a"] * 1001, "at most 1000 each"),
  ],
)
def test_too_many_or_too_long_names_are_refused(run: Run, files: dict[str, bytes], fetch: list[str], what: str):
  with pytest.raises(LimitsError, match=what):
    run("1", files=files, fetch=fetch)


def test_deep_directories_are_made(run: Run):
  name = "a/" * 500 + "f"
  assert run(f"open({name!r}).read()", files={name: b"deep"}).value == "'deep'"


def test_a_start_that_fails_is_an_answer(tmp_path: pathlib.Path):
  async def body() -> None:
    directory = tmp_path / "scratch"
    directory.mkdir(mode=0o755)
    config = InterpreterConfig(scratch_dir=str(directory), slots=2, min_isolation="process", preload=((), ("numpy",)))
    async with await Interpreter.start(config) as interpreter:
      directory.rename(tmp_path / "gone")
      result = await asyncio.wait_for(interpreter.run("import numpy\n1"), 20)
      assert result.status == "infra_error" and "cannot be" in result.error
      (tmp_path / "gone").rename(directory)
      assert (await asyncio.wait_for(interpreter.run("import numpy\n1"), 60)).value == "1"

  asyncio.run(body())


def test_cancelled_snippets_hold_their_slots_until_they_have_ended(runner: Runner):
  """Else those that are cancelled at once would pile up in the parent, where nobody counts them."""

  async def body() -> float:
    async def impatient() -> None:
      for _ in range(60):
        task = asyncio.create_task(runner.interpreter.run("while True: pass"))
        await asyncio.sleep(0.002)
        task.cancel()

    await asyncio.gather(impatient(), impatient())
    assert runner.interpreter.stats()["running"] <= runner.interpreter.config.slots
    begin = time.monotonic()
    assert (await runner.interpreter.run("1")).value == "1"
    return time.monotonic() - begin

  assert runner.loop.run_until_complete(body()) < 2.0
  assert runner.leftovers() == []


def test_a_closed_session_leaves_no_process(runner: Runner):
  async def body() -> None:
    before = len(children(runner.interpreter))
    for _ in range(3):
      async with runner.interpreter.session() as session:
        await session.run("x = 1")
        turn = asyncio.create_task(session.run("import time\ntime.sleep(30)"))
        await asyncio.sleep(0.1)
      await asyncio.wait_for(turn, 5)
    for _ in range(100):
      if len(children(runner.interpreter)) <= before:
        break
      await asyncio.sleep(0.05)
    assert len(children(runner.interpreter)) <= before

  runner.loop.run_until_complete(body())


# -- programs that are right -------------------------------------------------------------------------------------------


def test_the_end_is_that_of_a_program(run: Run):
  code = """
import atexit, threading, time
atexit.register(print, "at exit")
def main():
  time.sleep(0.1)
  print("from a thread")
threading.Thread(target=main).start()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
file = open("o.txt", "w")
print(file.write("hello"))
"""
  result = run(code, fetch=["o.txt"])
  assert (result.status, result.stdout) == ("ok", "5\nfrom a thread\nat exit\n"), result
  assert result.files == {"o.txt": b"hello"}


def test_a_thread_that_goes_on_is_ended_by_the_limit(run: Run):
  code = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nprint('x')"
  assert run(code, Limits(wall_s=0.5)).status == "timeout"
  assert run(code + "\nimport sys\nsys.exit(3)", Limits(wall_s=0.5)).status == "timeout"


@pytest.mark.parametrize(
  ("code", "value"),
  [
    ("x = " + "+".join(["1"] * 1500) + "\nprint(x)", "1500\n"),
    ("if 0: pass\n" + "".join(f"elif {i} == 1399: print({i})\n" for i in range(1, 1400)), "1399\n"),
    ("x: int = 3\nprint(__annotations__)", "{'x': <class 'int'>}\n"),
  ],
)
def test_what_plain_python_runs(run: Run, code: str, value: str):
  result = run(code)
  assert (result.status, result.stdout) == ("ok", value), result.error[:500]


def test_a_large_file_is_fetched_where_memory_is_scarce(run: Run):
  code = "kept = bytearray(30 << 20)\nwith open('f', 'wb') as f:\n  for _ in range(15): f.write(bytes(1 << 20))"
  result = run(code, Limits(memory_mib=64, wall_s=8), fetch=["f"])
  assert result.status == "ok" and len(result.files["f"]) == 15 << 20


def test_generators_that_are_imported_late_are_seeded(runner: Runner):
  code = (
    "import importlib\nm = importlib.import_module('num' + 'py')\nprint(m.random.rand(), type(m.random.__loader__))"
  )
  assert len({runner.run(code, seed=3).stdout for _ in range(2)}) == 1
  assert runner.run(code, seed=3).stdout != runner.run(code, seed=4).stdout
  plain = "import numpy as np\nprint(np.random.rand())"
  assert runner.run(code, seed=3).stdout.split()[0] == runner.run(plain, seed=3).stdout.split()[0]


# -- sessions ----------------------------------------------------------------------------------------------------------


def in_turns(runner: Runner, session: Session, *turns: tuple[str, str]) -> list[ExecResult]:
  async def body() -> list[ExecResult]:
    async with session:
      return [await session.run(code, stdin=stdin) for code, stdin in turns]

  return runner.loop.run_until_complete(asyncio.wait_for(body(), 30))


@pytest.mark.parametrize("kind", ["fork", "replay"])
def test_input_may_be_closed_and_its_number_be_another_files(runner: Runner, kind: Checkpoint):
  results = in_turns(
    runner,
    runner.interpreter.session(checkpoint=kind),
    ("data = open(0).read()\nlog = open('log', 'w')\nlog.write('one')\nlog.flush()\ndata", "first"),
    ("log.write(' two')\nlog.flush()\nprint(open('log').read(), input())", "second"),
    ("import os\nlog.close()\nNone", ""),
    ("input()", "fourth"),
  )
  assert [r.status for r in results] == ["ok"] * 4, results
  assert (results[0].value, results[1].stdout, results[3].value) == ("'first'", "one two second\n", "'fourth'")


def test_a_first_turn_cannot_fail_the_second(runner: Runner):
  """It shuts its channel and leaves, so that the process that waits for it ends as well."""
  if runner.level == "process":
    pytest.skip("sockets are open here")
  code = "import os, socket\nsocket.socket(fileno=3).shutdown(socket.SHUT_RD)\nos._exit(0)"
  for _ in range(12):
    _, second = in_turns(runner, runner.interpreter.session(), (code, ""), ("1", ""))
    assert second.status != "infra_error", second


def test_a_turn_that_ends_with_its_time_does_not_spoil_the_next(runner: Runner):
  limits = Limits(wall_s=0.12, cpu_s=1.0)
  for i in range(24):
    code = f"import os, time\ntime.sleep({0.1195 + 0.00005 * i})\nos._exit(0)"
    session = runner.interpreter.session(limits)
    _, second = in_turns(runner, session, (code, ""), ("40 + 2", ""))
    assert (second.status, second.value) == ("ok", "42"), second
  assert runner.interpreter.stats()["restarts"] == 0


def test_a_large_value_does_not_hold_others_up(runner: Runner):
  limits = Limits(output_bytes=8 << 20, wall_s=8, cpu_s=4)
  begin = time.monotonic()
  (result,) = in_turns(runner, runner.interpreter.session(limits), ("'a' * 8_000_000", ""))
  assert result.status == "ok" and len(result.value) == 8_000_002
  assert time.monotonic() - begin < 3.0


def test_input_beyond_the_limits_of_the_session_is_refused(runner: Runner):
  session = runner.interpreter.session(Limits(file_mib=1))
  with pytest.raises(LimitsError, match="of the session"):
    runner.loop.run_until_complete(session.run("1", Limits(file_mib=16), stdin="x" * (2 << 20)))
  runner.loop.run_until_complete(session.close())


# -- what is left ------------------------------------------------------------------------------------------------------


def test_mounts_do_not_grow_with_the_sizes_that_are_asked_for(runner: Runner):
  if runner.level != "namespace":
    pytest.skip("no mounts at this level")

  def mounts() -> int:
    pid = runner.interpreter.capabilities()["pid"]
    child = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
    return len(pathlib.Path(f"/proc/{child}/mounts").read_text().splitlines())

  for size in range(1, 330):
    assert runner.run("1", Limits(disk_mib=size)).value == "1"
  assert mounts() < 320


def test_names_of_files_do_not_stay_in_memory(runner: Runner):
  if runner.level not in ("process", "seccomp"):
    pytest.skip("cannot look at its own memory at this level; the parent is the same")
  for i in range(40):
    names = [f"SECRET-{i}-{j}-OF-ANOTHER.txt" for j in range(8)]
    assert runner.run("1", files=dict.fromkeys(names, b""), fetch=names).ok
  code = """
wanted = b"-".join([b"OF", b"ANOTHER.txt"])
places = []
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
  for line in list(maps):
    words = line.split()
    if words[1].startswith("rw") and (len(words) < 6 or words[5] == "[heap]"):
      first, last = (int(word, 16) for word in words[0].split("-"))
      for start in range(first, last, 1 << 20):
        memory.seek(start)
        data = bytearray(memory.read(min(1 << 20, last - start)))
        at = data.find(wanted)
        while at >= 0:
          places.append(start + at)
          at = data.find(wanted, at + 1)
        data[:] = bytes(len(data))
known = id(wanted)
print(len([p for p in places if not known <= p < known + 64]))
"""
  result = runner.run(code)
  assert result.stdout == "0\n", result
