"""Speed of the interpreter, side by side with a cold `python -I -c`, in one run.

`python -m benchmarks.interpreter` prints a table; `measure` returns its figures.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

from agentic_rl.sandbox import Interpreter, InterpreterConfig


def _percentile(values: Sequence[float], share: float) -> float:
  ordered = sorted(values)
  return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _own_cpu_s() -> float:
  usage = resource.getrusage(resource.RUSAGE_SELF)
  return usage.ru_utime + usage.ru_stime


def _children_cpu_s() -> float:
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  return usage.ru_utime + usage.ru_stime


def _snippet(index: int) -> tuple[str, str]:
  return f"print({index}*29)", f"{index * 29}\n"


async def _forked(count: int, concurrency: int, config: InterpreterConfig) -> dict[str, float]:
  """CPU time includes the zygote's, which becomes ours when it is reaped; its start is measured apart and taken off."""
  before = _children_cpu_s()
  await (await Interpreter.start(config)).close()
  start_cpu = _children_cpu_s() - before
  before = _children_cpu_s()
  interpreter = await Interpreter.start(config)
  gate = asyncio.Semaphore(concurrency)
  latencies: list[float] = []

  async def one(index: int) -> None:
    code, expected = _snippet(index)
    async with gate:
      begin = time.perf_counter()
      result = await interpreter.run(code)
      latencies.append(time.perf_counter() - begin)
    if result.stdout != expected:
      raise AssertionError(f"snippet {index} gave {result}")

  own = _own_cpu_s()
  begin = time.perf_counter()
  await asyncio.gather(*(one(index) for index in range(count)))
  elapsed = time.perf_counter() - begin
  own = _own_cpu_s() - own
  await interpreter.close()
  return {
    "per_s": count / elapsed,
    "p50_ms": 1e3 * _percentile(latencies, 0.50),
    "p99_ms": 1e3 * _percentile(latencies, 0.99),
    "client_cpu_ms": 1e3 * own / count,
    "cpu_ms": 1e3 * (own + _children_cpu_s() - before - start_cpu) / count,
  }


def _cold(count: int, concurrency: int) -> dict[str, float]:
  latencies: list[float] = []

  def one(index: int) -> None:
    code, expected = _snippet(index)
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    latencies.append(time.perf_counter() - begin)
    if done.stdout != expected:
      raise AssertionError(f"snippet {index} gave {done}")

  before = _children_cpu_s() + _own_cpu_s()
  begin = time.perf_counter()
  with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
    list(pool.map(one, range(count)))
  elapsed = time.perf_counter() - begin
  return {
    "per_s": count / elapsed,
    "p50_ms": 1e3 * _percentile(latencies, 0.50),
    "p99_ms": 1e3 * _percentile(latencies, 0.99),
    "cpu_ms": 1e3 * (_children_cpu_s() + _own_cpu_s() - before) / count,
  }


def measure(count: int = 400, concurrency: int = 64, slots: int = 0) -> dict[str, float]:
  """Runs `count` import-free snippets both ways, `concurrency` in flight.

  Returns:
    Executions per second, p50 and p99 of the latency with its queueing, and CPU milliseconds per execution, of the
    interpreter and of `subprocess.run([python, "-I", "-c", code])` (`cold_*`); and cold over interpreter as
    `cpu_ratio` and `throughput_ratio`. Both run at the caller's priority.
  """
  forked = asyncio.run(_forked(count, concurrency, InterpreterConfig(slots=slots, nice=0)))
  cold = _cold(max(64, count // 4), concurrency)
  return {
    "concurrency": concurrency,
    **forked,
    **{f"cold_{name}": value for name, value in cold.items()},
    "cpu_ratio": cold["cpu_ms"] / forked["cpu_ms"],
    "throughput_ratio": forked["per_s"] / cold["per_s"],
  }


def main() -> None:
  """Prints a line per concurrency, then all figures as one line of JSON."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--count", type=int, default=400)
  parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
  parser.add_argument("--slots", type=int, default=0)
  options = parser.parse_args()
  results = {}
  for concurrency in options.concurrency:
    found = results[concurrency] = measure(options.count, concurrency, options.slots)
    print(
      f"concurrency {concurrency:4d}: {found['per_s']:7.1f}/s"
      f"  p50 {found['p50_ms']:7.1f} ms  p99 {found['p99_ms']:7.1f} ms"
      f"  CPU {found['cpu_ms']:5.2f} ms (client {found['client_cpu_ms']:.2f})"
    )
    print(
      f"   python -I -c : {found['cold_per_s']:7.1f}/s"
      f"  p50 {found['cold_p50_ms']:7.1f} ms  p99 {found['cold_p99_ms']:7.1f} ms  CPU {found['cold_cpu_ms']:5.2f} ms"
      f"   ratios: CPU {found['cpu_ratio']:.1f}, throughput {found['throughput_ratio']:.1f}"
    )
  print(json.dumps(results))


if __name__ == "__main__":
  main()
