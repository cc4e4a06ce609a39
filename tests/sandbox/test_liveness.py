"""Many at once, cancellation, and the deaths of the zygote and of the trainer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from sandbox_runner import children

from agentic_rl.sandbox import Interpreter, InterpreterConfig, Limits, SandboxClosedError

ROOT = Path(__file__).parents[2]
DAEMON = "import subprocess\nsubprocess.Popen(['sleep', '50'], start_new_session=True)\n"
DAEMONS = Limits(processes=4)
IDLE = 2  # the launcher and the zygote
BOTH = pytest.mark.parametrize("level", ["process", "namespace"])


def marked(marker: str) -> list[int]:
  """Processes that have the marker in their environment."""
  found = []
  for name in os.listdir("/proc"):
    if name.isdigit():
      try:
        with open(f"/proc/{name}/environ", "rb") as file:
          if marker.encode() in file.read():
            found.append(int(name))
      except OSError:
        continue
  return found


def wait_for(condition: Callable[[], bool], seconds: float = 6.0) -> bool:
  deadline = time.monotonic() + seconds
  while not condition():
    if time.monotonic() > deadline:
      return False
    time.sleep(0.01)
  return True


async def until(condition: Callable[[], bool], seconds: float = 6.0) -> None:
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "the condition was not met in time"
    await asyncio.sleep(0.005)


def with_interpreter(body: Callable[[Interpreter, str], Awaitable[None]], **config: object) -> None:
  """Runs the body with a fresh interpreter; afterwards none of its processes may be left."""
  marker = uuid.uuid4().hex

  level = config.pop("level", "namespace")

  async def main() -> None:
    settings = InterpreterConfig(
      environment={"MARKER": marker},
      max_isolation=level,
      min_isolation="process",
      **config,  # type: ignore[arg-type]
    )
    async with await Interpreter.start(settings) as interpreter:
      if interpreter.level != level:
        pytest.skip(f"this host does not allow level {level}")
      assert len(marked(marker)) == IDLE
      await body(interpreter, marker)

  asyncio.run(main())
  assert marked(marker) == []


def test_200_at_once_are_all_right():
  async def body(interpreter: Interpreter, marker: str) -> None:
    results = await asyncio.gather(*(interpreter.run(f"print({i}*29)\n{i}+1") for i in range(200)))
    assert [(r.status, r.stdout, r.value) for r in results] == [("ok", f"{i * 29}\n", f"{i + 1}") for i in range(200)]
    assert max(r.queue_s for r in results) > min(r.queue_s for r in results)
    stats = interpreter.stats()
    assert stats["executions"] == 201  # with the interpreter's own test
    assert [stats[n] for n in ("infra_errors", "restarts", "running", "queued", "parents")] == [0, 0, 0, 0, 1]

  with_interpreter(body)


def test_no_more_run_at_once_than_there_are_slots():
  async def body(interpreter: Interpreter, marker: str) -> None:
    tasks = [asyncio.create_task(interpreter.run("import time\ntime.sleep(0.1)")) for _ in range(7)]
    most = 0
    while not all(t.done() for t in tasks):
      most = max(most, len(marked(marker)) - IDLE)
      await asyncio.sleep(0.002)
    assert most == 2

  with_interpreter(body, slots=2)


def test_the_event_loop_is_never_blocked():
  async def body(interpreter: Interpreter, marker: str) -> None:
    gaps = []

    async def tick() -> None:
      last = time.monotonic()
      while True:
        await asyncio.sleep(0.005)
        now = time.monotonic()
        gaps.append(now - last)
        last = now

    ticker = asyncio.create_task(tick())
    codes = ["while True: pass", "import time\ntime.sleep(60)", "while True: print('x' * 9999)", "print(1)"] * 4
    results = await asyncio.gather(*(interpreter.run(c, Limits(wall_s=0.5, cpu_s=5, flood_mib=1)) for c in codes))
    ticker.cancel()
    assert {r.status for r in results} == {"timeout", "output", "ok"}
    assert len(gaps) > 30 and sorted(gaps)[-2] < 0.4

  with_interpreter(body, slots=8)


@BOTH
def test_cancelling_the_task_kills_the_snippet(level: str):
  async def body(interpreter: Interpreter, marker: str) -> None:
    running = asyncio.create_task(interpreter.run(DAEMON + "import time\ntime.sleep(50)", DAEMONS))
    await until(lambda: len(marked(marker)) == IDLE + 2)
    waiting = asyncio.create_task(interpreter.run("1"))
    await asyncio.sleep(0.05)
    for task in (waiting, running):
      task.cancel()
      with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: len(marked(marker)) == IDLE)
    assert (await interpreter.run("1+1")).value == "2"
    assert interpreter.stats()["running"] == 0

  with_interpreter(body, slots=1, level=level)


@BOTH
@pytest.mark.parametrize("who", ["launcher", "zygote"])
def test_a_killed_parent_is_replaced(level: str, who: str):
  async def body(interpreter: Interpreter, marker: str) -> None:
    running = asyncio.create_task(interpreter.run(DAEMON + "import time\ntime.sleep(50)", DAEMONS))
    await until(lambda: len(marked(marker)) == IDLE + 2)
    waiting = [asyncio.create_task(interpreter.run(f"{i}+1")) for i in range(5)]
    await asyncio.sleep(0.05)
    stats = interpreter.stats()
    assert [stats[n] for n in ("infra_errors", "restarts", "running", "queued")] == [0, 0, 1, 5]
    old = interpreter.capabilities()["pid"]
    os.kill(old if who == "launcher" else children(old)[0], signal.SIGKILL)
    lost = await running
    assert lost.status == "infra_error" and "died while the snippet ran" in lost.error
    results = await asyncio.gather(*waiting)
    assert [(r.status, r.value, r.attempt) for r in results] == [("ok", f"{i + 1}", 1) for i in range(5)]
    assert interpreter.capabilities()["pid"] != old and interpreter.stats()["restarts"] == 1
    await until(lambda: len(marked(marker)) == IDLE)  # not even the daemon is left

  with_interpreter(body, slots=1, level=level)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_snippet_that_hurts_the_zygote_does_not_stop_the_rest(number: signal.Signals):
  async def body(interpreter: Interpreter, marker: str) -> None:
    hurt = f"import os, time\nos.kill(os.getppid(), {int(number)})\ntime.sleep(50)"
    assert (await asyncio.wait_for(interpreter.run(hurt), 10)).status == "infra_error"
    assert (await asyncio.wait_for(interpreter.run("1+1"), 10)).value == "2"

  with_interpreter(body, stall_s=0.6, level="process")


def test_a_zygote_that_cannot_come_back_fails_clearly(tmp_path: Path):
  python = tmp_path / "python"
  python.symlink_to(sys.executable)

  async def body(interpreter: Interpreter, marker: str) -> None:
    python.rename(tmp_path / "moved")
    os.kill(interpreter.capabilities()["pid"], signal.SIGKILL)
    await until(lambda: interpreter.stats()["restarts"] == 1)
    for _ in range(2):
      result = await asyncio.wait_for(interpreter.run("1"), 10)
      assert result.status == "infra_error" and str(python) in result.error
    (tmp_path / "moved").rename(python)
    assert (await asyncio.wait_for(interpreter.run("1+1"), 10)).value == "2"

  with_interpreter(body, python=str(python))


@BOTH
def test_close_ends_what_runs_and_refuses_what_comes(level: str):
  async def body(interpreter: Interpreter, marker: str) -> None:
    running = asyncio.create_task(interpreter.run(DAEMON + "import time\ntime.sleep(50)", DAEMONS))
    await until(lambda: len(marked(marker)) == IDLE + 2)
    session = interpreter.session()
    assert (await session.run("1+1")).value == "2"
    await interpreter.close()
    await interpreter.close()
    assert (await running).status == "infra_error"
    assert marked(marker) == []
    with pytest.raises(SandboxClosedError):
      await interpreter.run("1")
    with pytest.raises(SandboxClosedError):
      await session.run("1")

  with_interpreter(body, level=level)


@BOTH
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_death_of_the_trainer_kills_all(number: signal.Signals, level: str, tmp_path: Path):
  marker = uuid.uuid4().hex
  snippet = DAEMON + "open('f', 'w')\nwhile True: pass"
  code = f"""
import asyncio, signal
from agentic_rl.sandbox import Interpreter, InterpreterConfig, Limits
signal.signal(signal.SIGINT, signal.SIG_DFL)
async def main():
  config = InterpreterConfig(slots=3, environment={{"MARKER": "{marker}"}}, scratch_dir={str(tmp_path)!r},
    min_isolation="process", max_isolation={level!r})
  interpreter = await Interpreter.start(config)
  await asyncio.gather(*(interpreter.run({snippet!r}, Limits(processes=4)) for _ in range(6)))
asyncio.run(main())
"""
  trainer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
  try:
    assert wait_for(lambda: len(marked(marker)) == IDLE + 6)
  finally:
    trainer.send_signal(number)
    trainer.wait()
  assert wait_for(lambda: not marked(marker))
  assert wait_for(lambda: not list(tmp_path.iterdir()))


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become someone else")
@pytest.mark.parametrize("level", ["process", "landlock", "namespace"])
def test_as_an_unprivileged_user(level: str):
  python = "/usr/bin/python3"
  version = subprocess.run(
    [python, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True, text=True
  )
  if version.stdout.strip() != "True":
    pytest.skip("no other interpreter that everybody may run")
  marker = uuid.uuid4().hex
  bomb = "import os, time\nn = 0\nwhile n < 5000:\n  if os.fork() == 0: time.sleep(50)\n  n += 1"
  code = f"""
import asyncio
from agentic_rl.sandbox import Interpreter, InterpreterConfig, Limits
async def main():
  config = InterpreterConfig(environment={{"MARKER": "{marker}"}}, min_isolation="process", max_isolation={level!r})
  async with await Interpreter.start(config) as interpreter:
    print(interpreter.level)
    result = await interpreter.run({bomb!r}, Limits(processes=8, threads=0))
    print(result.status, result.error.splitlines()[-1])
    print((await interpreter.run({bomb!r})).status)
    print((await interpreter.run("1+1")).value)
    async with interpreter.session() as session:
      await session.run("x = 1")
      print((await session.run("import os\\nos._exit(0)")).state, (await session.run("x")).value)
asyncio.run(main())
"""
  done = subprocess.run(
    [python, "-c", code], cwd=ROOT, env={"PYTHONDONTWRITEBYTECODE": "1"}, user=65534, group=65534, extra_groups=[],
    capture_output=True, text=True, timeout=20,
  )  # fmt: skip
  lines = done.stdout.splitlines()
  if lines and lines[0] != level:
    pytest.skip(f"an unprivileged user does not get level {level} here")
  bomb_ended = "error BlockingIOError: [Errno 11] Resource temporarily unavailable"
  refused = "refused Limits.processes is not 0, but level 'landlock' cannot keep processes apart"
  expected = refused if level == "landlock" else bomb_ended
  assert lines == [level, expected, "error", "2", "rolled_back 1"], done
  assert marked(marker) == []
