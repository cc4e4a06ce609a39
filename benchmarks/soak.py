"""Many mixed snippets, every tenth of them hostile, through one interpreter; checks every single answer.

  python -m benchmarks.soak --count=20000 --concurrency=64

It also watches what memory the interpreter's processes hold, and what is left when it has been closed: processes,
mounts, files, descriptors. The last line is JSON; the exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from agentic_rl.sandbox import ExecResult, Interpreter, InterpreterConfig, Limits
from benchmarks import sandbox_peers as peers

LEVELS = ("seccomp", "landlock", "namespace")
USUAL = Limits(wall_s=120.0, cpu_s=20.0, memory_mib=256, flood_mib=2)
BRIEF = dataclasses.replace(USUAL, wall_s=0.3)
BRIEF_CPU = dataclasses.replace(USUAL, cpu_s=0.2)
_ANONYMOUS = "Pss_Anon"  # pages of files are shared with whatever else runs on the machine
TURNS = 6  # of a session
_SESSION_SHARE = 0.03
_SHOWN = 20
_GROWTH = 0.25  # of the memory without work, that is no fault yet: parents are recycled later

Checkpoint = Literal["fork", "replay"]


@dataclasses.dataclass(frozen=True)
class Case:
  """A snippet and the answer that it must get.

  Attributes:
    kind: Row of the table.
    code: Source.
    expect: Fields of the result and their values; of `error`, one line. The status is `ok` unless told.
    arguments: Further arguments of `run`.
  """

  kind: str
  code: str
  expect: dict[str, Any]
  arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

  def problem(self, result: ExecResult) -> str:
    """What is wrong with the result, or an empty string."""
    for name, value in ({"status": "ok"} | self.expect).items():
      got = getattr(result, name)
      if value not in got.splitlines() if name == "error" else value != got:
        return f"{self.kind}: {name} is {got!r}, not {value!r}: {self.code!r} gave {result}"[:1500]
    return ""


# -- well-behaved ------------------------------------------------------------------------------------------------------


def _arithmetic(rng: random.Random) -> Case:
  a, b = rng.randrange(10**6), rng.randrange(10**6)
  return Case("plain", f"x = {a} * {b}\nprint(x)\nx + 1", {"stdout": f"{a * b}\n", "value": str(a * b + 1)})


def _text(rng: random.Random) -> Case:
  words = ["".join(rng.choices("abcdeé漢", k=5)) for _ in range(20)]
  code = f"words = {words!r}\nfor word in sorted(set(words)): print(word.upper())"
  return Case("plain", code, {"stdout": "".join(f"{word.upper()}\n" for word in sorted(set(words)))})


def _seeded(rng: random.Random) -> Case:
  seed = rng.randrange(2**31)
  own = random.Random(seed)
  code = "import random\nprint(random.random(), random.randint(1, 6))"
  return Case("plain", code, {"stdout": f"{own.random()} {own.randint(1, 6)}\n"}, {"seed": seed})


def _stdin(rng: random.Random) -> Case:
  numbers = [rng.randrange(1000) for _ in range(rng.randrange(1, 200))]
  code = "print(sum(int(word) for word in input().split()))\nprint(input())"
  stdin = " ".join(map(str, numbers)) + "\nsecond line"
  return Case("stdin", code, {"stdout": f"{sum(numbers)}\nsecond line\n"}, {"stdin": stdin})


def _files(rng: random.Random) -> Case:
  data = rng.randbytes(rng.randrange(1, 50_000))
  code = "import os\ndata = open('in/data', 'rb').read()\nos.mkdir('out')\nopen('out/data', 'wb').write(data[::-1])"
  arguments = {"files": {"in/data": data}, "fetch": ["out/data", "absent"]}
  return Case("files", code, {"files": {"out/data": data[::-1]}, "value": str(len(data))}, arguments)


def _numpy(rng: random.Random) -> Case:
  values = [rng.randrange(100) for _ in range(9)]
  code = f"import numpy as np\na = np.array({values}).reshape(3, 3)\nprint(a @ a.T)\nprint(int(a.sum()))"
  a = np.array(values).reshape(3, 3)
  return Case("numpy", code, {"stdout": f"{a @ a.T}\n{sum(values)}\n"})


def _sympy(rng: random.Random) -> Case:
  a, b = rng.randrange(2, 90), rng.randrange(2, 90)
  code = f"from sympy import *\nx = Symbol('x')\nprint(expand((x + {a}) * (x + {b})), factorint({2**a * 3**b}))"
  return Case("sympy", code, {"stdout": f"x**2 + {a + b}*x + {a * b} {{2: {a}, 3: {b}}}\n"})


# -- hostile -----------------------------------------------------------------------------------------------------------


def _crash(signal: int) -> dict[str, Any]:
  return {"status": "crash", "signal": signal}


def _leaves(code: int) -> dict[str, Any]:
  return {"status": "exit", "exit_code": code}


def _raises(error: str) -> dict[str, Any]:
  return {"status": "error", "error": error}


_DENIED = "PermissionError: [Errno 1] Operation not permitted"
HOSTILE = tuple(
  Case(f"hostile: {kind}", code, {"status": "error"} | expect, arguments)
  for kind, code, expect, arguments in (
    ("segmentation fault", "import ctypes\nctypes.string_at(0)", _crash(11), {}),
    ("abort", "import os\nos.abort()", _crash(6), {}),
    ("kill -9 of itself", "import os\nos.kill(os.getpid(), 9)", _crash(9), {}),
    ("os._exit", "import os\nos._exit(7)", _leaves(7), {}),
    ("sys.exit", "import sys\nprint(5)\nsys.exit(3)", _leaves(3) | {"stdout": "5\n"}, {}),
    ("fork", "import os\nos.fork()", {}, {}),
    ("subprocess", "import subprocess\nsubprocess.run(['/bin/true'])", {}, {}),
    ("exec", "import os\nos.execv('/bin/true', ['true'])", {}, {}),
    ("socket", "import socket\nsocket.create_connection(('127.0.0.1', 9))", {}, {}),
    ("kill the parent", "import os\nos.kill(os.getppid() or 1, 9)", _raises(_DENIED), {}),
    ("kill all", "import os\nos.kill(-1, 9)", _raises(_DENIED), {}),
    ("memory at once", "x = [0] * 10**10", {"status": "memory", "limit": "memory"}, {}),
    ("memory in steps", "x = []\nwhile True: x.append(bytearray(10 << 20))", {"status": "memory"}, {}),
    ("raised limit", "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))", {}, {}),
    ("threads", "import threading, time\nfor _ in range(1000): threading.Thread(target=time.sleep, args=(9,)).start()",
     _raises("RuntimeError: can't start new thread"), {}),
    ("large file", "open('x', 'wb').write(bytes(40 << 20))", _raises("OSError: [Errno 27] File too large"), {}),
    ("descriptors", "x = [open('/dev/null') for _ in range(999)]",
     _raises("OSError: [Errno 24] Too many open files: '/dev/null'"), {}),
    ("forged frame", "import os\nos.write(3, b'AGS2' + bytes(17))", _leaves(0), {}),
    ("forged failure", "import os\nos.write(3, b'Fbroken')\nos._exit(97)", _leaves(97), {}),
    ("closed descriptors", "import os\nos.closerange(0, 64)", {"status": "exit"}, {}),
    ("flood", "while True: print('x' * 65536)", {"status": "output", "limit": "output"}, {}),
    ("long value", "[0] * 10**6", {"status": "ok", "truncated": ("value",)}, {}),
    ("exception", "x = {}\nx['absent']", _raises("KeyError: 'absent'"), {}),
    ("recursion", "def f(): return f()\nf()", _raises("RecursionError: maximum recursion depth exceeded"), {}),
    ("syntax error", "x = = 1", _raises("SyntaxError: invalid syntax"), {}),
    ("NUL", "x = '\0'", {"status": "refused"}, {}),
    ("sleep", "import time\nprint(5, flush=True)\ntime.sleep(99)", {"status": "timeout", "stdout": "5\n"},
     {"limits": BRIEF}),
    ("busy", "while True: pass", {"status": "cpu", "limit": "cpu"}, {"limits": BRIEF_CPU}),
    ("busy in C", "sum(range(10**13))", {"status": "cpu", "limit": "cpu"}, {"limits": BRIEF_CPU}),
  )
)  # fmt: skip

_KILLED_TURNS: tuple[tuple[str, dict[str, Any], Limits], ...] = (
  ("import os\nos._exit(7)", _leaves(7), USUAL),
  ("import ctypes\nctypes.string_at(0)", _crash(11), USUAL),
  ("while True: pass", {"status": "cpu"}, BRIEF_CPU),
  ("print('x' * (4 << 20))", {"status": "output"}, USUAL),
)


# -- the run -----------------------------------------------------------------------------------------------------------


class Soak:
  """Sends the snippets and keeps the score.

  Attributes:
    counts: Answers, by kind.
    times: Milliseconds of each well-behaved answer, by kind, queueing included.
    runs: The same without the time in the queue.
    wrong: What was wrong, in words.
    infra_errors: Answers that blame the infrastructure.
  """

  def __init__(self, interpreter: Interpreter, count: int, hostile: float, seed: int, bar: tqdm) -> None:
    self.counts: collections.Counter[str] = collections.Counter()
    self.times: dict[str, list[float]] = collections.defaultdict(list)
    self.runs: dict[str, list[float]] = collections.defaultdict(list)
    self.wrong: list[str] = []
    self.infra_errors = 0
    self._interpreter = interpreter
    self._left = count
    self._share = hostile
    self._rng = random.Random(seed)
    self._bar = bar
    self._hostile = self._hostile_cases()
    installed = {name for group in interpreter.capabilities()["groups"] for name in group}
    self._kinds = [_arithmetic, _arithmetic, _text, _seeded, _stdin, _files]
    self._kinds += [_numpy] * 3 * ("numpy" in installed) + [_sympy] * 3 * ("sympy" in installed)

  def _hostile_cases(self) -> Iterator[Case]:
    while True:  # all of them before any comes again
      yield from self._rng.sample(HOSTILE, len(HOSTILE))

  async def work(self, name: str) -> None:
    """One of the clients: sends one snippet or session after the other."""
    while self._left > 0:
      if self._left >= TURNS and self._rng.random() < _SESSION_SHARE:
        self._left -= TURNS
        await self._session()
        continue
      self._left -= 1
      hostile = self._rng.random() < self._share
      case = next(self._hostile) if hostile else self._rng.choice(self._kinds)(self._rng)
      arguments = {"limits": USUAL} | case.arguments
      await self._ask(case, self._interpreter.run(case.code, owner=name, **arguments))

  async def _session(self) -> None:
    """Turns of which one is killed: what was there before must be there after."""
    possible = self._interpreter.capabilities()["fork_checkpoint"]
    checkpoint: Checkpoint = "fork" if possible and self._rng.random() < 0.5 else "replay"
    a, b = self._rng.randrange(10**6), self._rng.randrange(10**6)
    kind = f"session, {checkpoint}"
    code, expect, limits = self._rng.choice(_KILLED_TURNS)
    after = "rolled_back" if checkpoint == "fork" else "replayed"
    kept = {"state": "kept"}
    turns = (
      (Case(kind, f"x = {a}", kept), USUAL),
      (Case(kind, f"x += {b}\nprint(x)", kept | {"stdout": f"{a + b}\n"}), USUAL),
      (Case(kind, "y = 1\n1 / 0", kept | _raises("ZeroDivisionError: division by zero")), USUAL),
      (Case(f"hostile: {kind}", f"x = 0\n{code}", expect | {"state": after}), limits),
      (Case(kind, "x, y", kept | {"value": f"({a + b}, 1)"}), USUAL),
      (Case(kind, "print(input() * 2)", kept | {"stdout": "abab\n"}), USUAL),
    )
    async with self._interpreter.session(USUAL, checkpoint=checkpoint) as session:
      for case, limits in turns:
        await self._ask(case, session.run(case.code, limits, stdin="ab"))

  async def _ask(self, case: Case, answer: Awaitable[ExecResult]) -> None:
    begin = time.perf_counter()
    result = await answer
    took = time.perf_counter() - begin
    self._bar.update()
    self.counts[case.kind] += 1
    self.infra_errors += result.status == "infra_error"
    if not case.kind.startswith("hostile"):
      self.times[case.kind].append(1e3 * took)
      self.runs[case.kind].append(1e3 * (took - result.queue_s))
    if problem := case.problem(result):
      self.wrong.append(problem)


async def _settled(interpreter: Interpreter) -> tuple[float, int]:
  """Memory of the interpreter's processes without work, and how many there are beyond a launcher and its zygote."""
  extra = 0
  for _ in range(40):
    pids = interpreter.capabilities()["pids"]
    extra = len(peers.tree(pids)) - 2 * len(pids)
    if extra <= 0:
      break
    await asyncio.sleep(0.1)  # the last ones are being collected
  return peers.tree_pss_mib(interpreter.capabilities()["pids"], _ANONYMOUS), max(0, extra)


async def _sample_memory(interpreter: Interpreter, samples: list[float], own: list[float]) -> None:
  while True:
    samples.append(peers.tree_pss_mib(interpreter.capabilities()["pids"], _ANONYMOUS))
    own.append(peers.pss_mib(os.getpid(), _ANONYMOUS))
    await asyncio.sleep(0.5)


def _quarters(samples: list[float]) -> tuple[float, float]:
  """Medians of the first and of the last quarter, so that single snippets in flight do not matter."""
  size = max(1, len(samples) // 4)
  return statistics.median(samples[:size]), statistics.median(samples[-size:])


def leftovers(directory: str, descriptors: int) -> list[str]:
  """What a closed interpreter with this scratch directory has left behind, of descriptors beyond so many."""
  found = [f"file {name}" for name in os.listdir(directory)]
  for pid in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
      if directory.encode() in file.read():
        found.append(f"process {pid}")
  with open("/proc/self/mountinfo", encoding="utf-8") as file:
    found += [f"mount {line.split()[4]}" for line in file if directory in line]
  more = len(os.listdir("/proc/self/fd")) - descriptors
  return found + [f"{more} descriptors"] * (more > 0)


async def soak(count: int, concurrency: int, level: str, slots: int, hostile: float, seed: int) -> dict[str, Any]:
  """Runs it and prints the table; returns the figures."""
  memory: list[float] = []
  own: list[float] = []
  await asyncio.to_thread(int)  # the loop's thread exists before descriptors are counted
  descriptors = len(os.listdir("/proc/self/fd"))
  with tempfile.TemporaryDirectory(prefix="soak-") as directory:
    os.chmod(directory, 0o755)  # a spare uid passes through
    config = InterpreterConfig(
      slots=slots, limits=USUAL, min_isolation="seccomp", max_isolation=level, scratch_dir=directory
    )
    async with await Interpreter.start(config) as interpreter:
      await interpreter.warm()
      idle_first, _ = await _settled(interpreter)
      watcher = asyncio.create_task(_sample_memory(interpreter, memory, own))
      begin = time.perf_counter()
      with tqdm(total=count, unit="snippet", mininterval=0.5, disable=None) as bar:
        run = Soak(interpreter, count, hostile, seed, bar)
        await asyncio.gather(*(run.work(f"client {i}") for i in range(concurrency)))
      elapsed = time.perf_counter() - begin
      watcher.cancel()
      await asyncio.wait([watcher])
      idle_last, extra = await _settled(interpreter)
      stats, reached = interpreter.stats(), interpreter.level
    left = leftovers(directory, descriptors) + [f"{extra} processes without work"] * bool(extra)
  _print_kinds(run)
  answered = run.counts.total()
  first, last = _quarters(memory)
  own_first, own_last = _quarters(own)
  print(f"\n{answered} answers at level {reached}, {answered / elapsed:.0f}/s; restarts: {stats['restarts']}")
  rows = (
    ("the interpreter's processes, median of the first and of the last quarter", first, last),
    ("the same without work, before and after", idle_first, idle_last),
    ("this client, median of the first and of the last quarter", own_first, own_last),
  )
  for what, before, after in rows:
    print(f"memory of {what:76}{before:8.0f}{after:8.0f} MiB")
  for text in run.wrong[:_SHOWN] + [f"left behind: {text}" for text in left]:
    print("WRONG", text)
  if len(run.wrong) > _SHOWN:
    print(f"WRONG and {len(run.wrong) - _SHOWN} more")
  every = [value for values in run.times.values() for value in values] or [0.0]
  return {
    "answered": answered,
    "wrong": len(run.wrong),
    "infra_errors": run.infra_errors,
    "p50_ms": round(float(np.percentile(every, 50)), 2),
    "p99_ms": round(float(np.percentile(every, 99)), 2),
    "per_s": round(answered / elapsed, 1),
    "memory_first_mib": round(first, 1),
    "memory_last_mib": round(last, 1),
    "memory_idle_first_mib": round(idle_first, 1),
    "memory_idle_last_mib": round(idle_last, 1),
    "client_first_mib": round(own_first, 1),
    "client_last_mib": round(own_last, 1),
    "restarts": stats["restarts"],
    "recycled": stats["recycled"],
    "leftovers": len(left),
    "level": reached,
  }


def _print_kinds(run: Soak) -> None:
  print(f"\n{'':32}{'answers':>9}{'p50 ms':>10}{'p99 ms':>10}{'p50 without the queue':>24}")
  for kind in sorted(run.counts, key=lambda name: (name.startswith("hostile"), name)):
    row = f"{kind:32}{run.counts[kind]:9}"
    if kind in run.times:
      p50, p99 = np.percentile(run.times[kind], (50, 99))
      row += f"{p50:10.1f}{p99:10.1f}{statistics.median(run.runs[kind]):24.1f}"
    print(row)


def main() -> None:
  """Parses the command line."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--count", type=int, default=20_000, help="snippets and turns")
  parser.add_argument("--concurrency", type=int, default=64, help="clients, each with one in flight")
  parser.add_argument("--hostile", type=float, default=0.1, help="share of hostile snippets")
  parser.add_argument("--max_isolation", choices=LEVELS, default=LEVELS[-1], help="the strongest level to use")
  parser.add_argument("--slots", type=int, default=0, help="how many run at the same time; 0 for one a CPU, at least 4")
  parser.add_argument("--seed", type=int, default=0)
  o = parser.parse_args()
  found = asyncio.run(soak(o.count, o.concurrency, o.max_isolation, o.slots, o.hostile, o.seed))
  before, after = found["memory_idle_first_mib"], found["memory_idle_last_mib"]
  grown = after - before > max(32.0, _GROWTH * before)
  if grown:
    print("WRONG memory without work has grown")
  print(json.dumps(found))
  sys.exit(bool(found["wrong"] or found["infra_errors"] or found["restarts"] or found["leftovers"] or grown))


if __name__ == "__main__":
  main()
