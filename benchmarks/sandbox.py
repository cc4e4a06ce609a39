"""Speed of the interpreter beside its peers, in one run: `python -m benchmarks.sandbox [--quick]`.

Ours and the peers take turns, so that what else the machine does hits all alike; CPU time is that of the whole process
tree, the client's own apart. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np

from agentic_rl.sandbox import ExecResult, Interpreter, InterpreterConfig, Limits
from benchmarks import sandbox_peers as peers

BARE = "print(sum(range(1000)))"
SCIENCE = """import numpy as np
import sympy as sp
x, y = sp.symbols("x y")
print(sp.solve([sp.Eq(2 * x + y, 5), sp.Eq(x - y, 1)], [x, y]))
print(sp.Matrix(10, 10, lambda i, j: (i * j + i + 1) % 7).det(), round(np.linalg.det(np.eye(10)), 3))
print(sp.simplify((x**2 - 1) / (x - 1)))
"""
EXPECTED = {BARE: "499500\n", SCIENCE: "{x: 2, y: 1}\n0 1.0\nx + 1\n"}
BARS = {
  "oneshot_science_vs_cold": (">=", 20.0),
  "oneshot_bare_vs_cold": (">=", 3.0),
  "isolation_overhead": ("<=", 0.10),
  "session_turn_cpu_ms": ("<", 1.0),
  "session_pss_mib": ("<", 10.0),
  "trainer_speed_beside_sandboxes": (">=", 0.65),
}
_LIMITS = Limits(wall_s=120.0, cpu_s=30.0)


def tree_cpu_s(interpreter: Interpreter) -> float:
  """User and system seconds of all launchers, parents and their children that have ended."""
  total = 0.0
  for pid in interpreter.capabilities()["pids"]:
    for process in (pid, *peers.children(pid)):
      total += peers.cpu_s(process)
  return total


async def start(level: str, slots: int = 4) -> Interpreter:
  """An interpreter at one level, all parents warm."""
  config = InterpreterConfig(
    slots=slots, limits=_LIMITS, min_isolation=level, max_isolation=level, preload=((), ("numpy", "sympy")), nice=0
  )
  interpreter = await Interpreter.start(config)
  await interpreter.warm()
  return interpreter


def checked(result: ExecResult, code: str) -> ExecResult:
  """The result, if it is right."""
  if result.status != "ok" or (code in EXPECTED and result.stdout != EXPECTED[code]):
    raise AssertionError(f"{code!r} gave {result}")
  return result


async def cpu_ms(interpreter: Interpreter, run: Callable[[], Awaitable[Any]], count: int) -> float:
  """CPU milliseconds of the interpreter's processes for each execution."""
  before = tree_cpu_s(interpreter)
  for _ in range(count):
    await run()
  await asyncio.sleep(0.05)  # the last child is collected
  return 1e3 * (tree_cpu_s(interpreter) - before) / count


async def costs(rounds: int, count: int) -> dict[str, float]:
  """CPU of one-shot cells and session turns at the strongest level and at none, and of the peers."""
  strong, plain = await start("namespace"), await start("process")
  samples: dict[str, list[float]] = {}

  async def sample(name: str, value: Awaitable[float]) -> None:
    samples.setdefault(name, []).append(await value)

  async with strong, plain, peers.Kernel.start() as kernel:
    replay, fork = strong.session(checkpoint="replay"), strong.session(checkpoint="fork")
    for session in (replay, fork):
      checked(await session.run("x = 1"), "")

    def once(interpreter: Interpreter, code: str) -> Callable[[], Awaitable[ExecResult]]:
      async def run() -> ExecResult:
        return checked(await interpreter.run(code), code)

      return run

    for _ in range(rounds):
      await sample("cold, bare", peers.cold_cpu_ms(BARE, count))
      await sample("cold, science", peers.cold_cpu_ms(SCIENCE, max(2, count // 20)))
      for name, code, times in (("bare", BARE, 4 * count), ("science", SCIENCE, count)):
        await sample(f"namespace, {name}", cpu_ms(strong, once(strong, code), times))
        await sample(f"process, {name}", cpu_ms(plain, once(plain, code), times))
      await sample("session turn", cpu_ms(strong, lambda: replay.run(BARE), 8 * count))
      await sample("session turn with checkpoint", cpu_ms(strong, lambda: fork.run(BARE), 4 * count))
      if kernel is not None:
        await sample("jupyter kernel, bare", kernel.cpu_ms(BARE, count))
        await sample("jupyter kernel, science", kernel.cpu_ms(SCIENCE, count))
  return {name: statistics.median(values) for name, values in samples.items()}


async def latencies(run: Callable[[int], Awaitable[Any]], count: int, concurrency: int) -> dict[str, float]:
  """Throughput, median and 99th percentile of `count` calls, so many at a time."""
  gate = asyncio.Semaphore(concurrency)
  times: list[float] = []

  async def one(i: int) -> None:
    async with gate:
      begin = time.perf_counter()
      await run(i)
      times.append(1e3 * (time.perf_counter() - begin))

  begin = time.perf_counter()
  await asyncio.gather(*(one(i) for i in range(count)))
  per_s = count / (time.perf_counter() - begin)
  return {"per_s": per_s, "p50_ms": float(np.percentile(times, 50)), "p99_ms": float(np.percentile(times, 99))}


async def throughput(scale: float) -> dict[str, dict[str, float]]:
  """Each kind of execution at each concurrency, with the peers that can be run so."""
  found: dict[str, dict[str, float]] = {}
  async with await start("namespace") as interpreter:
    for concurrency in (1, 8, 64, 256):
      sessions = [interpreter.session(checkpoint="replay") for _ in range(concurrency)]
      kinds: dict[str, tuple[Callable[[int], Awaitable[Any]], int]] = {
        "bare": (lambda i: interpreter.run(BARE, owner=str(i)), 1000),
        "science": (lambda i: interpreter.run(SCIENCE, owner=str(i)), 200),
        "session turn": (lambda i, s=sessions: s[i % len(s)].run(BARE), 4000),  # type: ignore[misc]
        "cold, bare": (lambda _: peers.cold(BARE), 300),
      }
      if peers.has_bubblewrap():
        kinds["bubblewrap, bare"] = (lambda _: peers.bubblewrap(BARE), 200)
      for name, (run, count) in kinds.items():
        found[f"{name} c={concurrency}"] = await latencies(run, max(concurrency, int(count * scale)), concurrency)
      for session in sessions:
        await session.close()
  return found


async def session_memory_mib(count: int) -> float:
  """PSS that one idle session adds to a parent with numpy and sympy."""
  config = InterpreterConfig(preload=((), ("numpy", "sympy")), sessions=count + 1, limits=_LIMITS)
  async with await Interpreter.start(config) as interpreter:
    await interpreter.warm()
    before = peers.tree_pss_mib(interpreter.capabilities()["pids"])
    sessions = [interpreter.session(checkpoint="replay") for _ in range(count)]
    for session in sessions:
      checked(await session.run("import sympy\nx = sympy.Symbol('x')"), "")
    after = peers.tree_pss_mib(interpreter.capabilities()["pids"])
    return (after - before) / count


@contextlib.contextmanager
def _training(seconds: float) -> Iterator[list[float]]:
  """Two threads multiply matrices meanwhile; the list gets their products a second."""
  stop = threading.Event()
  counts = [0, 0]

  def work(index: int) -> None:
    a = np.random.default_rng(index).normal(size=(256, 256))
    while not stop.is_set():
      a = a @ a
      a /= np.abs(a).max()
      counts[index] += 1

  threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
  begin = time.perf_counter()
  for thread in threads:
    thread.start()
  speed: list[float] = []
  try:
    yield speed
  finally:
    stop.set()
    for thread in threads:
      thread.join()
    speed.append(sum(counts) / (time.perf_counter() - begin))


async def trainer_speed(seconds: float, rounds: int) -> float:
  """Speed of a loop on two threads beside four snippets that spin, relative to its speed alone."""
  ratios = []
  async with await Interpreter.start(InterpreterConfig(slots=4, limits=_LIMITS)) as interpreter:
    for _ in range(rounds):
      with _training(seconds) as alone:
        await asyncio.sleep(seconds)
      limits = Limits(wall_s=seconds + 60, cpu_s=seconds * 4 + 60)
      spinning = [asyncio.create_task(interpreter.run("while True: pass", limits)) for _ in range(4)]
      await asyncio.sleep(0.2)
      with _training(seconds) as beside:
        await asyncio.sleep(seconds)
      for task in spinning:
        task.cancel()
      await asyncio.gather(*spinning, return_exceptions=True)
      ratios.append(beside[0] / alone[0])
  return statistics.median(ratios)


def _table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
  print(f"\n{title}")
  widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
  for row in [header, *rows]:
    print(
      "  " + "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
    )
  sys.stdout.flush()


async def measure(quick: bool) -> dict[str, Any]:
  """Runs everything and prints the tables; returns the figures."""
  single = os.environ.get("OPENBLAS_NUM_THREADS")
  if single != "1":
    print("note: set OPENBLAS_NUM_THREADS=1, else the loop beside the sandboxes uses more threads than two")
  cost = await costs(2 if quick else 7, 10 if quick else 40)
  rows = [(name, f"{value:.2f}") for name, value in cost.items()]
  _table("CPU time of one execution, all its processes (median of rounds that take turns)", ("", "ms"), rows)
  found: dict[str, Any] = {
    "oneshot_science_vs_cold": cost["cold, science"] / cost["namespace, science"],
    "oneshot_bare_vs_cold": cost["cold, bare"] / cost["namespace, bare"],
    "isolation_overhead": cost["namespace, science"] / cost["process, science"] - 1,
    "isolation_overhead_bare": cost["namespace, bare"] / cost["process, bare"] - 1,
    "session_turn_cpu_ms": cost["session turn"],
    "session_turn_fork_cpu_ms": cost["session turn with checkpoint"],
  }
  if "jupyter kernel, bare" in cost:
    found["session_turn_vs_jupyter"] = cost["jupyter kernel, bare"] / cost["session turn"]
  for reason in peers.missing():
    print(f"  not measured: {reason}")
  found["session_pss_mib"] = await session_memory_mib(16 if quick else 64)
  found["trainer_speed_beside_sandboxes"] = await trainer_speed(1.0 if quick else 4.0, 1 if quick else 3)
  speeds = await throughput(0.1 if quick else 1.0)
  found |= {f"{name} {what}": value for name, row in speeds.items() for what, value in row.items()}
  rows = [(n, f"{r['per_s']:.0f}", f"{r['p50_ms']:.1f}", f"{r['p99_ms']:.1f}") for n, r in speeds.items()]
  _table("Throughput and latency (c: how many at a time; four slots)", ("", "1/s", "p50 ms", "p99 ms"), rows)
  verdicts = []
  for name, (sign, bar) in BARS.items():
    value = found[name]
    met = value >= bar if sign == ">=" else value <= bar
    verdicts.append((name, f"{value:.3g}", f"{sign} {bar:g}", "met" if met else "MISSED"))
  _table("Bars", ("", "measured", "bar", ""), verdicts)
  return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
  """Parses the command line."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--quick", action="store_true", help="a tenth of the work, for a first impression")
  arguments = parser.parse_args()
  print(json.dumps(asyncio.run(measure(arguments.quick))))


if __name__ == "__main__":
  main()
