"""The benchmark of the interpreter and its soak test run and judge; what they measure is not looked at."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile

import pytest

from agentic_rl.sandbox import ExecResult, Interpreter, InterpreterConfig, SandboxStartError
from benchmarks import sandbox, sandbox_peers, soak


@pytest.fixture
def small(monkeypatch):
  """Cells that need no modules, so that none has to be imported."""
  monkeypatch.setattr(sandbox, "CELLS", dict.fromkeys(sandbox.CELLS, sandbox.BARE))
  monkeypatch.setattr(sandbox, "GROUPS", ((),))


def test_costs_of_one_round(small):
  cost = asyncio.run(sandbox.costs("process", 1, 1))
  assert {f"one-shot, {cell}" for cell in sandbox.CELLS} < set(cost.samples)
  assert cost["cold python -I -c, bare"] > 0
  # A cell of ours takes less than a tick of the kernel's clock, so that its figure may be 0.


def test_figures():
  cost = sandbox.Costs()
  for cell in sandbox.CELLS:
    for name, value in (("cold python -I -c", 60.0), ("one-shot", 3.0), ("one-shot, not isolated", 2.0)):
      cost.add(f"{name}, {cell}", value)
    cost.add(f"session turn, {cell}", 0.5)
  cost.clients |= {"one-shot, bare": [0.2], "session turn, bare": [0.1]}
  figures = sandbox._figures(cost)
  assert (figures["oneshot_science_vs_cold"], figures["isolation_overhead_bare"]) == (20.0, 0.5)
  assert "session_turn_fork_cpu_ms" not in figures


def test_throughput_memory_and_the_trainer_beside_it(small):
  async def measure() -> None:
    speeds = await sandbox.throughput("process", (2,), 1, 0.01, bubblewrap=False, kernels=None)
    assert {"one-shot, bare c=2", "session turn, bare c=2"} < set(speeds)
    assert all(row["per_s"] > 0 and row["p50_ms"] <= row["p99_ms"] for row in speeds.values())
    assert 0 < await sandbox.trainer_speed("process", 0.1, 1) < 100
    assert await sandbox.session_memory_mib("process", 2, "replay") > 0

  asyncio.run(measure())


def test_bars_are_judged(capsys):
  values = {"oneshot_science_vs_cold": 25.0, "oneshot_bare_vs_cold": 3.0, "isolation_overhead": 0.2}
  values |= {"session_turn_cpu_ms": 1.0, "session_pss_mib": 5.0, "trainer_speed_beside_sandboxes": 0.7}
  sandbox.print_bars(values)
  verdicts = {line.split()[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines()[3:]}
  assert [name for name, verdict in verdicts.items() if verdict == "MISSED"] == [
    "isolation_overhead",
    "session_turn_cpu_ms",
  ]


def test_wrong_answer_is_told():
  with pytest.raises(AssertionError, match="gave"):
    sandbox.checked(sandbox.BARE, ExecResult("ok", stdout="499501\n"))
  with pytest.raises(AssertionError, match="gave"):
    sandbox.checked(sandbox.BARE, ExecResult("error", stdout="499500\n"))
  case = soak.Case("plain", "1", {"status": "ok", "value": "1", "error": "x"})
  assert case.problem(ExecResult("ok", value="1", error="a\nx\n")) == ""
  assert "value is '2'" in case.problem(ExecResult("ok", value="2", error="x"))


def test_cpu_time_of_a_tree_counts_children_that_have_ended():
  before = sandbox_peers.tree_cpu_s([os.getpid()])
  subprocess.run([sys.executable, "-c", "while __import__('time').process_time() < 0.2: pass"], check=True)
  assert sandbox_peers.tree_cpu_s([os.getpid()]) - before >= 0.15


def test_soak_passes_every_hostile_snippet_and_leaves_nothing(capsys):
  try:
    found = asyncio.run(soak.soak(60, 4, "namespace", slots=4, hostile=0.6, seed=1))
  except SandboxStartError as error:
    pytest.skip(str(error))
  assert found["answered"] == 60
  assert (found["wrong"], found["infra_errors"], found["leftovers"], found["restarts"]) == (0, 0, 0, 0), (
    capsys.readouterr().out
  )


def test_leftovers_are_found():
  async def measure() -> None:
    with tempfile.TemporaryDirectory() as directory:
      os.chmod(directory, 0o755)
      config = InterpreterConfig(max_isolation="process", min_isolation="process", scratch_dir=directory)
      async with await Interpreter.start(config):
        assert any(text.startswith("process") for text in soak.leftovers(directory, 10**6))
      assert soak.leftovers(directory, 10**6) == []

  asyncio.run(measure())
