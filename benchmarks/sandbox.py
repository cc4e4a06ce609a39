"""Speed of the interpreter beside its peers, in one run.

  python -m benchmarks.sandbox [--quick] [--json=PATH]

Ours and the peers take turns, and figures are medians over the rounds, so that what else the machine does hits all
alike; ratios are what to compare. CPU time is user and system time of all processes of the interpreter, those that
have ended included; what the calling process spends is told apart. The last line is JSON.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the loop that stands for the trainer has two threads of its own

import argparse
import asyncio
import collections
import contextlib
import json
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np

from agentic_rl.sandbox import ExecResult, Interpreter, InterpreterConfig, Limits, Session
from benchmarks import sandbox_peers as peers

BARE = "print(sum(range(1000)))"
SCIENCE = """import numpy as np
import sympy as sp
x, y = sp.symbols("x y")
print(sp.solve([sp.Eq(2 * x + y, 5), sp.Eq(x - y, 1)], [x, y]))
print(round(float(np.linalg.det(np.eye(10) + 0.1)), 6))
print(sp.simplify((x**2 - 1) / (x - 1)))
"""
SYMBOLIC = """import sympy as sp
x, y = sp.symbols("x y")
print(sp.Matrix(10, 10, lambda i, j: (i * j + i + 1) % 7).det())
print(sp.factor(x**3 - 3 * x**2 * y + 3 * x * y**2 - y**3), sp.integrate(x * sp.exp(x), x))
"""
CELLS = {"bare": BARE, "science": SCIENCE, "symbolic": SYMBOLIC}
PRINTED = {BARE: "499500\n", SCIENCE: "{x: 2, y: 1}\n2.0\nx + 1\n", SYMBOLIC: "0\n(x - y)**3 (x - 1)*exp(x)\n"}
GROUPS = ((), ("numpy", "sympy"))
BARS = {
  "oneshot_science_vs_cold": (">=", 20.0),
  "oneshot_bare_vs_cold": (">=", 3.0),
  "isolation_overhead": ("<=", 0.10),
  "session_turn_cpu_ms": ("<", 1.0),
  "session_pss_mib": ("<", 10.0),
  "trainer_speed_beside_sandboxes": (">=", 0.65),
}
_LIMITS = Limits(wall_s=300.0, cpu_s=60.0)
_SLOTS = 4

Run = Callable[[int], Awaitable[object]]


async def start(level: str) -> Interpreter:
  """An interpreter at exactly this level and at our own priority, all parents warm."""
  config = InterpreterConfig(
    slots=_SLOTS, limits=_LIMITS, min_isolation=level, max_isolation=level, preload=GROUPS, nice=0
  )
  interpreter = await Interpreter.start(config)
  await interpreter.warm()
  return interpreter


def strongest(quietly: bool = False) -> str:
  """The strongest level that this host allows."""

  async def find() -> str:
    async with await Interpreter.start(InterpreterConfig(min_isolation="process")) as interpreter:
      return interpreter.level

  level = asyncio.run(find())
  if level != "namespace" and not quietly:
    print(f"note: this host allows level {level!r} only; that is what is measured")
  return level


def checked(code: str, result: object) -> None:
  """Raises unless the answer is right."""
  printed = result.stdout if isinstance(result, ExecResult) else result
  if printed != PRINTED[code] or (isinstance(result, ExecResult) and not result.ok):
    raise AssertionError(f"{code!r} gave {result}")


# -- CPU time ----------------------------------------------------------------------------------------------------------


class Costs:
  """CPU milliseconds of an execution, by name, one figure a round."""

  def __init__(self) -> None:
    self.samples: dict[str, list[float]] = collections.defaultdict(list)
    self.clients: dict[str, list[float]] = collections.defaultdict(list)

  async def measure(self, count: int, runs: dict[str, tuple[Interpreter, Run]]) -> None:
    """Runs all of them in turn, `count` times; each must have an interpreter for itself, which tells them apart."""
    before = {name: peers.tree_cpu_s(interpreter.capabilities()["pids"]) for name, (interpreter, _) in runs.items()}
    own = dict.fromkeys(runs, 0.0)
    for i in range(count):
      for name, (_, run) in runs.items():
        begin = peers.own_cpu_s()
        await run(i)
        own[name] += peers.own_cpu_s() - begin
    await asyncio.sleep(0.1)  # the last children are collected
    for name, (interpreter, _) in runs.items():
      spent = peers.tree_cpu_s(interpreter.capabilities()["pids"]) - before[name]
      self.samples[name].append(1e3 * spent / count)
      self.clients[name].append(1e3 * own[name] / count)

  def add(self, name: str, value: float) -> None:
    """Takes in the figure of a peer."""
    self.samples[name].append(value)

  def __getitem__(self, name: str) -> float:
    return statistics.median(self.samples[name])

  def ratio(self, above: str, below: str) -> float:
    """Median over the rounds of the ratio within a round."""
    pairs = zip(self.samples[above], self.samples[below], strict=True)
    return statistics.median(a / b for a, b in pairs)


def _once(where: Interpreter | Session, code: str) -> Run:
  async def run(_: int) -> None:
    checked(code, await where.run(code))

  return run


def _cell(name: str) -> str:
  return CELLS[name.rpartition(", ")[2]]


async def costs(level: str, rounds: int, count: int, kernel: peers.Kernel | None = None) -> Costs:
  """CPU of one-shot cells at `level` and at no isolation, of session turns, and of the peers."""
  found = Costs()
  async with contextlib.AsyncExitStack() as stack:
    strong, plain, turns = [await stack.enter_async_context(await start(name)) for name in (level, "process", level)]
    sessions = {"session turn, bare": turns.session(checkpoint="replay")}
    sessions["session turn, science"] = turns.session(checkpoint="replay")
    if turns.capabilities()["fork_checkpoint"]:
      sessions["session turn with checkpoint, bare"] = turns.session(checkpoint="fork")
      sessions["session turn with checkpoint, science"] = turns.session(checkpoint="fork")
    for name, session in sessions.items():
      await session.run(_cell(name))
    for code in CELLS.values():  # the first time fills caches
      await peers.cold(code)
      if kernel is not None:
        await kernel.run(code)
    for _ in range(rounds):
      for cell, code in CELLS.items():
        peer = f"cold python -I -c, {cell}"
        found.add(peer, await peers.cold_cpu_ms(code, count if cell == "bare" else max(2, count // 16)))
        runs = {f"one-shot, {cell}": (strong, _once(strong, code))}
        if cell != "symbolic":
          runs[f"one-shot, not isolated, {cell}"] = (plain, _once(plain, code))
        await found.measure(4 * count if cell == "bare" else count, runs)
      for name, session in sessions.items():
        times = 25 * count if name == "session turn, bare" else 2 * count
        await found.measure(times, {name: (turns, _once(session, _cell(name)))})
      if kernel is not None:
        found.add("jupyter kernel, bare", await kernel.cpu_ms(CELLS["bare"], 2 * count))
        found.add("jupyter kernel, science", await kernel.cpu_ms(CELLS["science"], count))
  return found


def _figures(cost: Costs) -> dict[str, float]:
  cold = "cold python -I -c"
  found = {
    "oneshot_science_vs_cold": cost.ratio(f"{cold}, science", "one-shot, science"),
    "oneshot_symbolic_vs_cold": cost.ratio(f"{cold}, symbolic", "one-shot, symbolic"),
    "oneshot_bare_vs_cold": cost.ratio(f"{cold}, bare", "one-shot, bare"),
    "isolation_overhead": cost.ratio("one-shot, science", "one-shot, not isolated, science") - 1,
    "isolation_overhead_bare": cost.ratio("one-shot, bare", "one-shot, not isolated, bare") - 1,
    "session_turn_cpu_ms": cost["session turn, bare"],
    "session_turn_science_cpu_ms": cost["session turn, science"],
    "bare_cpu_ms": cost["one-shot, bare"],
    "science_cpu_ms": cost["one-shot, science"],
    "cold_bare_cpu_ms": cost[f"{cold}, bare"],
    "cold_science_cpu_ms": cost[f"{cold}, science"],
    "client_cpu_ms": statistics.median(cost.clients["one-shot, bare"]),
    "client_session_turn_cpu_ms": statistics.median(cost.clients["session turn, bare"]),
  }
  if "session turn with checkpoint, bare" in cost.samples:
    found["session_turn_fork_cpu_ms"] = cost["session turn with checkpoint, bare"]
    found["session_turn_fork_science_cpu_ms"] = cost["session turn with checkpoint, science"]
  if "jupyter kernel, bare" in cost.samples:
    found["session_turn_vs_jupyter"] = cost.ratio("jupyter kernel, bare", "session turn, bare")
    found["session_turn_science_vs_jupyter"] = cost.ratio("jupyter kernel, science", "session turn, science")
  return found


def measure(rounds: int = 3, count: int = 16) -> dict[str, float]:
  """The CPU figures alone, in less than a minute: milliseconds of an execution, and ratios to a cold `python -I -c`."""
  level = strongest(quietly=True)
  return _figures(asyncio.run(costs(level, rounds, count)))


# -- throughput and latency --------------------------------------------------------------------------------------------


async def latencies(run: Run, count: int, concurrency: int) -> dict[str, float]:
  """Throughput, median and 99th percentile of `count` calls, so many at a time."""
  times: list[float] = []
  left = iter(range(count))

  async def client() -> None:
    for i in left:
      begin = time.perf_counter()
      await run(i)
      times.append(1e3 * (time.perf_counter() - begin))

  begin = time.perf_counter()
  await asyncio.gather(*(client() for _ in range(concurrency)))
  per_s = count / (time.perf_counter() - begin)
  return {"per_s": per_s, "p50_ms": float(np.percentile(times, 50)), "p99_ms": float(np.percentile(times, 99))}


def _printing(code: str, run: Callable[[str], Awaitable[object]]) -> Run:
  async def once(_: int) -> None:
    checked(code, await run(code))

  return once


async def throughput(
  level: str, concurrencies: Sequence[int], rounds: int, scale: float, bubblewrap: bool, kernels: peers.Kernels | None
) -> dict[str, dict[str, float]]:
  """Each kind of execution at each concurrency, the peers as far as the machine carries them."""
  bare, science = CELLS["bare"], CELLS["science"]
  samples: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
  async with await start(level) as interpreter:
    for concurrency in concurrencies:
      sessions = [interpreter.session(checkpoint="replay") for _ in range(concurrency)]
      waiting: asyncio.Queue[Any] = asyncio.Queue()
      for session in sessions:
        checked(bare, await session.run(bare))
        waiting.put_nowait(session)

      async def turn(_: int, waiting: asyncio.Queue[Any] = waiting) -> None:
        session = waiting.get_nowait()
        checked(bare, await session.run(bare))
        waiting.put_nowait(session)

      kinds: dict[str, tuple[Run, int]] = {
        "one-shot, bare": (_once(interpreter, bare), 400),
        "cold python -I -c, bare": (_printing(bare, peers.cold), 80),
        "one-shot, science": (_once(interpreter, science), 80),
        "session turn, bare": (turn, 3000),
      }
      if concurrency <= 8:
        kinds["cold python -I -c, science"] = (_printing(science, peers.cold), 4)
        if bubblewrap:
          kinds["bubblewrap, bare"] = (_printing(bare, peers.bubblewrap), 60)
          kinds["bubblewrap, science"] = (_printing(science, peers.bubblewrap), 4)
        if kernels is not None:
          kinds["jupyter kernel, bare"] = (_printing(bare, kernels.run), 200)
          kinds["jupyter kernel, science"] = (_printing(science, kernels.run), 60)
      for _ in range(rounds):
        for name, (run, count) in kinds.items():
          samples[f"{name} c={concurrency}"].append(
            await latencies(run, max(concurrency, round(count * scale)), concurrency)
          )
      for session in sessions:
        await session.close()
  return {
    name: {what: statistics.median(row[what] for row in rows) for what in rows[0]} for name, rows in samples.items()
  }


# -- memory, and the trainer beside it ---------------------------------------------------------------------------------


async def session_memory_mib(level: str, count: int, checkpoint: Any) -> float:
  """Memory that one idle session adds to a parent with numpy and sympy."""
  config = InterpreterConfig(
    preload=GROUPS, sessions=count + 1, limits=_LIMITS, min_isolation=level, max_isolation=level
  )
  async with await Interpreter.start(config) as interpreter:
    await interpreter.warm()
    async with interpreter.session() as session:  # whatever only the first one brings along
      await session.run("import sympy")
    await asyncio.sleep(0.3)
    before = peers.tree_pss_mib(interpreter.capabilities()["pids"])
    sessions = [interpreter.session(checkpoint=checkpoint) for _ in range(count)]
    for session in sessions:
      result = await session.run("import numpy, sympy\nx = sympy.Symbol('x')\nprint(x + 1)")
      if result.stdout != "x + 1\n":
        raise AssertionError(f"a session gave {result}")
    await asyncio.sleep(0.3)
    after = peers.tree_pss_mib(interpreter.capabilities()["pids"])
    return (after - before) / count


@contextlib.contextmanager
def _training() -> Iterator[list[float]]:
  """Two threads multiply matrices meanwhile; the list gets their products a second."""
  stop = threading.Event()
  counts = [0, 0]

  def work(index: int) -> None:
    a = np.random.default_rng(index).normal(size=(384, 384))
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


async def trainer_speed(level: str, seconds: float, rounds: int) -> float:
  """Speed of a loop on two threads beside four snippets that spin, relative to its speed alone; default priorities."""
  ratios = []
  config = InterpreterConfig(slots=4, limits=_LIMITS, min_isolation=level)
  async with await Interpreter.start(config) as interpreter:
    for _ in range(rounds):
      with _training() as alone:
        await asyncio.sleep(seconds)
      limits = Limits(wall_s=seconds + 60, cpu_s=seconds * 4 + 60)
      spinning = [asyncio.create_task(interpreter.run("while True: pass", limits)) for _ in range(4)]
      await asyncio.sleep(0.2)
      with _training() as beside:
        await asyncio.sleep(seconds)
      for task in spinning:
        task.cancel()
      await asyncio.gather(*spinning, return_exceptions=True)
      ratios.append(beside[0] / alone[0])
  return statistics.median(ratios)


# -- the whole ---------------------------------------------------------------------------------------------------------


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
  """Prints rows under a header, the first column to the left, the others to the right."""
  print(f"\n{title}")
  widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
  for row in [header, *rows]:
    cells = [
      cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    print("  " + "  ".join(cells).rstrip())
  sys.stdout.flush()


def _print_costs(cost: Costs) -> None:
  rows = []
  for cell in CELLS:
    base = cost[f"cold python -I -c, {cell}"]
    for name in (name for name in cost.samples if name.endswith(f", {cell}")):
      values = cost.samples[name]
      client = f"{statistics.median(cost.clients[name]):.2f}" if name in cost.clients else ""
      rows.append(
        (name, f"{cost[name]:.2f}", f"{min(values):.2f} - {max(values):.2f}", client, f"{base / cost[name]:.1f}")
      )
  table(
    "CPU time of one execution, all processes of the interpreter (that of bubblewrap cannot be seen)",
    ("", "ms", "over the rounds", "client ms", "cold / this"),
    rows,
  )


async def measure_all(level: str, quick: bool) -> dict[str, Any]:
  """Runs everything and prints the tables; returns the figures."""
  found: dict[str, Any] = {"level": level}
  no_bubblewrap, no_jupyter = await peers.why_no_bubblewrap(), peers.why_no_jupyter()
  for reason in filter(None, (no_bubblewrap, no_jupyter)):
    print(f"not measured: {reason}")
  async with contextlib.AsyncExitStack() as stack:
    kernels = None if no_jupyter else await stack.enter_async_context(peers.Kernels.start(8))
    kernel = None if kernels is None else kernels[0]
    cost = await costs(level, 2 if quick else 7, 8 if quick else 40, kernel)
    _print_costs(cost)
    found |= _figures(cost)
    if kernel is not None and kernels is not None:
      found["jupyter_start_s"] = statistics.median(kernels[i].start_s for i in range(8))
      await kernel.run(CELLS["science"])
      found["jupyter_pss_mib"] = peers.tree_pss_mib([kernel.pid])
      found["jupyter_pss_bare_mib"] = peers.tree_pss_mib([kernels[7].pid])
    rounds, scale = (1, 0.1) if quick else (3, 1.0)
    speeds = await throughput(level, (1, 8, 64, 256), rounds, scale, not no_bubblewrap, kernels)
  ordered = sorted(speeds, key=lambda name: (name.rpartition(" c=")[0], int(name.rpartition("=")[2])))
  table(
    f"Throughput and latency, c at a time ({_SLOTS} slots; waiting included)",
    ("", "1/s", "p50 ms", "p99 ms"),
    [(name, *(f"{speeds[name][what]:.1f}" for what in ("per_s", "p50_ms", "p99_ms"))) for name in ordered],
  )
  count = 16 if quick else 100
  found["session_pss_mib"] = await session_memory_mib(level, count, "replay")
  if "session_turn_fork_cpu_ms" in found:
    found["session_pss_fork_mib"] = await session_memory_mib(level, count, "fork")
  memory = [(name, f"{value:.1f}") for name, value in found.items() if "pss" in name]
  table(f"Memory in MiB: each of {count} idle sessions, or of a kernel; numpy and sympy imported", ("", "MiB"), memory)
  if "jupyter_start_s" in found:
    print(f"\na Jupyter kernel starts in {found['jupyter_start_s']:.2f} s")
  found["trainer_speed_beside_sandboxes"] = await trainer_speed(level, 0.5 if quick else 3.0, 2 if quick else 5)
  found["speeds"] = speeds
  return found


def print_bars(found: dict[str, Any]) -> None:
  """Says which bars are met."""
  rows = []
  for name, (sign, bar) in BARS.items():
    value = found[name]
    met = {">=": value >= bar, "<=": value <= bar, "<": value < bar}[sign]
    rows.append((name, f"{value:.3g}", f"{sign} {bar:g}", "met" if met else "MISSED"))
  table("Bars", ("", "measured", "bar", ""), rows)


def rounded(value: Any) -> Any:
  """The same with four digits after the point."""
  if isinstance(value, dict):
    return {name: rounded(item) for name, item in value.items()}
  return round(value, 4) if isinstance(value, float) else value


def main() -> None:
  """Parses the command line."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--quick", action="store_true", help="a tenth of the work, for a first impression")
  parser.add_argument("--json", type=pathlib.Path, help="also write the last line to this file")
  arguments = parser.parse_args()
  found = rounded(asyncio.run(measure_all(strongest(), arguments.quick)))
  print_bars(found)
  line = json.dumps(found)
  if arguments.json:
    arguments.json.write_text(line + "\n", encoding="utf-8")
  print(line)


if __name__ == "__main__":
  main()
