"""Runs hostile snippets through an interpreter and looks after each at what must not have changed.

`python tests/hostile/battery.py --environment=user --max_isolation=landlock` prints a line for each misbehaviour and a
table; `--json` adds one line of JSON at the end. `--only=TEXT` selects by name.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import importlib.util
import json
import math
import os
import platform
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import snippets_allowed as allowed
import snippets_files as files
import snippets_gates as gates
import snippets_kernel as kernel
import snippets_numeric as numeric
import snippets_output as output
import snippets_processes as processes
import snippets_python as python
import snippets_sessions as sessions
import snippets_time as times
from confine import ENVIRONMENTS
from snippet import LEVELS, NORMAL, Snippet, Turns
from watch import Canaries, Watch

from agentic_rl.sandbox import ExecResult, Interpreter, InterpreterConfig

_T = TypeVar("_T")
_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]

THEMES: dict[str, tuple[Snippet, ...]] = {
  "time": times.TIME,
  "memory": times.MEMORY,
  "starting processes": processes.STARTING,
  "signals": processes.SIGNALS,
  "other processes": processes.OTHERS,
  "processes allowed": allowed.ALLOWED,
  "content of files": files.CONTENT,
  "writing files": files.WRITING,
  "disk space": files.SPACE,
  "metadata": files.METADATA,
  "network": kernel.NETWORK,
  "kernel": kernel.KERNEL,
  "around the filter and the parent": gates.PASSING,
  "floods": output.FLOODS,
  "forgeries": output.FORGERIES,
  "ends": python.ENDS,
  "exceptions and hooks": python.HOOKS,
  "harness": python.HARNESS,
  "sources": python.SOURCES,
  "numerical libraries": numeric.NUMERIC,
}
_SLACK_S = 3.0
_GROWTH_BYTES = 4 << 20
_NEEDLE = "needle-"
_PROMPT_S = 0.8  # a pause of the parent lasts a second; a busy host alone takes less
_LEAST_CPU_S = -1e-3  # two clocks of a process that did nothing need not agree
_NASTIEST = (
  "print flood", "garbage in large amounts", "its own result, forged, and the true one", "segmentation fault",
  "list bomb", "many small files", "twenty thousand threads", "swallow everything", "descriptors over a pair",
  "closes all", "directories nobody may open", "state after a flood", "state after os._exit",
)  # fmt: skip
_ROUNDS = 5
_WORLD = """
import os, resource, signal, threading
open('x', 'w').write('x')
found = sorted(os.listdir('.'))
os.unlink('x')
limits = [resource.getrlimit(getattr(resource, k)) for k in sorted(dir(resource))
          if k.startswith('RLIMIT_') and k not in ('RLIMIT_NPROC', 'RLIMIT_AS')]
masks = signal.pthread_sigmask(signal.SIG_BLOCK, ()), [str(signal.getsignal(n)) for n in (2, 14, 15, 17, 24)]
free = os.statvfs('.').f_ffree if os.getcwd().startswith('/tmp/') and os.getcwd().count('/') == 2 else 0
(1 + 1, found, oct(os.stat('.').st_mode), free, os.umask(0), os.getpriority(0, 0), limits, masks,
 threading.active_count(), sorted(set(os.environ) - {'HOME', 'TMPDIR'}), os.stat(0).st_size)
"""
"""What a snippet finds when it begins; the same after whatever another has done."""
_MOST_FAULTS = 40


def all_snippets() -> Iterator[tuple[str, Snippet]]:
  """Theme and snippet."""
  for theme, snippets in THEMES.items():
    for snippet in snippets:
      yield theme, snippet


def applies(snippet: Snippet | Turns, level: str) -> bool:
  """Whether it is to be run at a level."""
  if snippet.machine and snippet.machine != platform.machine():
    return False
  if isinstance(snippet, Turns):
    return LEVELS.index(level) >= LEVELS.index(snippet.level)
  return bool(snippet.statuses(level)) and all(importlib.util.find_spec(name) for name in snippet.needs)


def applicable(level: str) -> list[tuple[str, Snippet | Turns, str]]:
  """Everything to run at a level: theme, snippet or turns, and the kind of checkpoint."""
  found: list[tuple[str, Snippet | Turns, str]] = []
  for theme, snippet in all_snippets():
    if applies(snippet, level):
      found.append((theme, snippet, ""))
  for turns in (*sessions.SESSIONS, *gates.GATES):
    if applies(turns, level):
      found += [("sessions", turns, checkpoint) for checkpoint in turns.checkpoints]
  return found


class Battery:
  """An interpreter amid canaries."""

  def __init__(self, max_isolation: str) -> None:
    self.finished = False
    self.canaries = Canaries()
    self.watch = Watch(self.canaries.scratch)
    self.loop = asyncio.new_event_loop()
    config = InterpreterConfig(
      slots=2, limits=NORMAL, min_isolation="process", max_isolation=max_isolation, stall_s=10,
      scratch_dir=str(self.canaries.scratch),
    )  # fmt: skip
    self.interpreter = self.loop.run_until_complete(Interpreter.start(config))
    self.level = self.interpreter.level
    self.loop.run_until_complete(self.interpreter.warm())
    self._restarts = 0
    self._world = ""
    self._worst_s = 0.0
    self._launchers: list[int] = self.interpreter.capabilities()["pids"]
    for code in ("1+1", "import numpy\n1+1", "import sympy\n1+1", "import scipy.optimize\n1+1"):
      self._run(Snippet("first", code))
      self._run_turns(Turns("first", ((code, "ok error", ""),)), "auto")
    first = self._ask_world()
    self._world = first.value
    if first.status != "ok":
      raise RuntimeError(f"the first look around gave {_short(first)}")
    # What a large result leaves is kept for the next one, once.
    self._run(next(snippet for _, snippet in all_snippets() if snippet.name == "large results"))
    self.watch.leftovers(self._launchers)
    self.watch.measure(self._launchers, _GROWTH_BYTES)

  def _ask_world(self) -> ExecResult:
    return self.loop.run_until_complete(self.interpreter.run(_WORLD, dataclasses.replace(NORMAL, wall_s=20)))

  def _run(self, snippet: Snippet) -> tuple[ExecResult, str, list[ExecResult]]:
    needle = _NEEDLE + secrets.token_hex(8)

    others: list[ExecResult] = []

    async def body() -> ExecResult:
      companions = []
      if snippet.companion:
        code = f"import time\nx = '{needle}'\nopen('needle', 'w').write(x)\nprint(x)\ntime.sleep(1.0)"
        await self.interpreter.run(code.replace("1.0", "0"), stdin=needle)
        companions = [asyncio.create_task(self.interpreter.run(code, stdin=needle, files={"file": needle.encode()}))]
        companions += [asyncio.create_task(self.interpreter.session().run(code, stdin=needle))]
        await asyncio.sleep(0.3)
        self.interpreter._slots += 2  # both go on while the snippet runs
        self.interpreter._pump()
      try:
        return await self.interpreter.run(self.canaries.fill_in(snippet.code), snippet.limits, fetch=snippet.fetch)
      finally:
        if companions:
          others.extend(await asyncio.gather(*companions))
          self.interpreter._slots -= 2
          for session in list(self.interpreter._open_sessions.values()):
            await session.close()

    return self._beside(body(), snippet.disturbs), needle, others

  def _run_turns(self, turns: Turns, checkpoint: str) -> list[ExecResult]:
    async def body() -> list[ExecResult]:
      results = []
      async with self.interpreter.session(NORMAL, checkpoint=checkpoint) as session:  # type: ignore[arg-type]
        for number, (code, _, _) in enumerate(turns.turns):
          await asyncio.sleep(turns.pause_s if number else 0.0)
          results.append(await session.run(self.canaries.fill_in(code), turns.limits))
      return results

    return self._beside(body(), turns.disturbs)

  def _beside(self, body: Coroutine[Any, Any, _T], disturbs: bool) -> _T:
    """Runs it; if wanted, asks a neighbour all the while how long the answer to 1+1 takes."""

    async def both() -> _T:
      task = asyncio.ensure_future(body)
      while disturbs and not task.done():
        begin = time.monotonic()
        await self.interpreter.run("1+1")
        self._worst_s = max(self._worst_s, time.monotonic() - begin)
        await asyncio.sleep(0.01)
      return await task

    self._worst_s = 0.0
    return self.loop.run_until_complete(both())

  def try_snippet(self, snippet: Snippet | Turns, checkpoint: str = "") -> list[str]:
    """Runs one; returns everything that was not as it should be."""
    wrong = self._try_once(snippet, checkpoint)
    if snippet.disturbs and self._worst_s > _PROMPT_S:  # unless the host was slow just then
      wrong += self._try_once(snippet, checkpoint)
      if self._worst_s > _PROMPT_S:
        wrong.append(f"its neighbour waited {self._worst_s:.2f} s")
    return wrong

  def _try_once(self, snippet: Snippet | Turns, checkpoint: str) -> list[str]:
    begin = time.monotonic()
    if isinstance(snippet, Snippet):
      result, needle, others = self._run(snippet)
      wrong = self._judge(snippet, result, needle)
      wrong += [f"its neighbour ended as {_short(other)}" for other in others if other.status != "ok"]
      allowed = snippet.limits.wall_s + (8.0 if snippet.companion else 0.0)
    else:
      results = self._run_turns(snippet, checkpoint)
      wrong = []
      for number, (result, (_, statuses, check)) in enumerate(zip(results, snippet.turns, strict=True), 1):
        if result.status not in statuses.split() or not re.search(check, result.value):
          wrong.append(f"turn {number}: {_short(result)}, not {statuses} {check}")
        wrong += self._told(result, "")
      allowed = (len(results) + 1) * snippet.limits.wall_s * 2
    if time.monotonic() - begin > allowed + _SLACK_S:
      wrong.append(f"took {time.monotonic() - begin:.1f} s")
    after = self._ask_world()
    if (after.status, after.value) != ("ok", self._world):
      wrong.append(f"then the next one gave {_short(after)} {_difference(self._world, after.value)}")
    restarts = self.interpreter.stats()["restarts"]
    if restarts != self._restarts:
      wrong.append("a parent process died and was replaced")
      self._restarts = restarts
    self._launchers = self.interpreter.capabilities()["pids"]  # one that has grown is replaced without harm
    wrong += self.watch.leftovers(self._launchers)
    return wrong + self.canaries.harmed()

  def _judge(self, snippet: Snippet, result: ExecResult, needle: str) -> list[str]:
    statuses = snippet.statuses(self.level)
    wrong = []
    if result.status not in statuses:
      wrong.append(f"{_short(result)}, not {' '.join(statuses)}")
    elif snippet.holds(self.level):
      for name, pattern, text in (("value", snippet.check, result.value), ("stdout", snippet.printed, result.stdout)):
        if pattern and (name == "stdout" or result.status == "ok") and not re.search(pattern, text):
          wrong.append(f"{name} is {text[:200]!r}, which has no {pattern!r}")
    if result.level != self.level or result.attempt != 1:
      wrong.append(f"level {result.level}, attempt {result.attempt}")
    return wrong + (self._told(result, needle) if snippet.holds(self.level) else [])

  def _told(self, result: ExecResult, needle: str) -> list[str]:
    claimed = (result.cpu_s, result.wall_s, float(result.max_rss_bytes))
    told = [result.stdout, result.stderr, result.value, result.error]
    told += [data.decode("latin-1") for data in result.files.values()]
    found = [f"it tells {name}" for name, secret in (("a secret", self.canaries.token), ("another's secret", needle))
             if secret and any(secret in text for text in told)]  # fmt: skip
    if any(len(text) > 8 * NORMAL.output_bytes for text in told[:4]):
      found.append("an output is longer than it may be")
    if not all(math.isfinite(number) and number >= _LEAST_CPU_S for number in claimed) or result.cpu_s > 120:
      found.append(f"it claims {result.cpu_s} s of CPU time in {result.wall_s} s")
    if result.max_rss_bytes > 1 << 42:
      found.append(f"it claims {result.max_rss_bytes} bytes of memory")
    return found

  def repeat_the_nastiest(self) -> list[str]:
    """Runs some again and again, so that what each leaves behind in the parent adds up."""
    wrong = []
    for _ in range(_ROUNDS):
      for _, snippet, checkpoint in applicable(self.level):
        if snippet.name in _NASTIEST and checkpoint in ("", "auto"):
          wrong += [f"{snippet.name}, again: {fault}" for fault in self.try_snippet(snippet, checkpoint)]
    return wrong

  def finish(self) -> list[str]:
    """Closes the interpreter; returns what has grown or is left."""
    self.finished = True
    wrong = self.watch.measure(self._launchers, _GROWTH_BYTES)
    self.loop.run_until_complete(self.interpreter.close())
    self.loop.close()
    wrong += self.watch.after_close(self._launchers)
    wrong += self.canaries.harmed()
    self.canaries.close()
    return wrong


def _difference(before: str, after: str) -> str:
  """The place where two texts part."""
  start = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
  return f"...{after[max(0, start - 20) : start + 60]!r} instead of {before[max(0, start - 20) : start + 60]!r}"


def _short(result: ExecResult) -> str:
  last = (result.error.strip().splitlines() or [""])[-1]
  return f"{result.status} (value {result.value[:80]!r}, error {last[:160]!r}, state {result.state})"


@dataclasses.dataclass
class Report:
  """How a run of the battery went."""

  environment: str
  level: str
  ran: int = 0
  behaved: int = 0
  seconds: float = 0.0
  faults: dict[str, list[str]] = dataclasses.field(default_factory=dict)

  def line(self) -> str:
    """The summary in one line."""
    return f"level {self.level} ({self.environment}): {self.behaved} of {self.ran} behaved, {self.seconds:.0f} s"


def run(environment: str, max_isolation: str, only: str = "", say: bool = True) -> Report:
  """Runs all that applies in this process."""
  begin = time.monotonic()
  battery = Battery(max_isolation)
  report = Report(environment, battery.level)
  counts: dict[str, list[int]] = {}
  for theme, snippet, checkpoint in applicable(battery.level):
    name = f"{snippet.name} [{checkpoint}]" if checkpoint else snippet.name
    if only not in name:
      continue
    wrong = battery.try_snippet(snippet, checkpoint)
    row = counts.setdefault(theme, [0, 0])
    row[0] += 1
    row[1] += not wrong
    if wrong:
      report.faults[name] = wrong
      if say:
        print(f"{name}: {'; '.join(wrong)}", flush=True)
    if len(report.faults) >= _MOST_FAULTS:
      report.faults["given up"] = [f"after {_MOST_FAULTS} that misbehaved"]
      break
  wrong = ([] if only or report.faults.get("given up") else battery.repeat_the_nastiest()) + battery.finish()
  if wrong:
    report.faults["at the end"] = wrong
    if say:
      print(f"at the end: {'; '.join(wrong)}")
  report.ran = sum(ran for ran, _ in counts.values())
  report.behaved = sum(behaved for _, behaved in counts.values())
  report.seconds = time.monotonic() - begin
  if say:
    for theme, (ran, behaved) in counts.items():
      print(f"  {theme:24s} {behaved:4d} of {ran:4d}")
    print(report.line())
  return report


def _command(environment: str) -> list[str]:
  confined = [sys.executable, str(_HERE / "confine.py"), environment]
  return [*confined, sys.executable, "-B", str(_HERE / "battery.py")]


def run_elsewhere(environment: str, max_isolation: str, only: str = "") -> Report:
  """Runs all that applies in a process of that environment."""
  options = [
    f"--environment={environment}",
    f"--max_isolation={max_isolation}",
    f"--only={only}",
    "--json",
    "--confined",
  ]
  command = [*_command(environment), *options]
  environ = os.environ | {"PYTHONPATH": str(_ROOT)}
  done = subprocess.run(command, cwd=_ROOT, env=environ, capture_output=True, text=True, timeout=900)
  if done.returncode not in (0, 1) or not done.stdout.strip():
    raise RuntimeError(f"the battery ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
  return Report(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--environment", choices=ENVIRONMENTS, default="native")
  parser.add_argument("--max_isolation", choices=LEVELS, default="namespace")
  parser.add_argument("--only", default="", help="run those whose name has this in it")
  parser.add_argument("--json", action="store_true", help="end with one line of JSON")
  parser.add_argument("--confined", action="store_true", help="the environment is entered already")
  options = parser.parse_args()
  if options.environment != "native" and not options.confined:
    os.environ["PYTHONPATH"] = str(_ROOT)
    os.execv(sys.executable, [*_command(options.environment), *sys.argv[1:], "--confined"])
  report = run(options.environment, options.max_isolation, options.only)
  if options.json:
    print(json.dumps(dataclasses.asdict(report)))
  sys.exit(1 if report.faults else 0)


if __name__ == "__main__":
  main()
