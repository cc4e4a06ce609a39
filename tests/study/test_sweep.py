"""A sweep resumes, goes on past a failed cell, shares base models, and ends in a table and a figure."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from agentic_rl.errors import UserError
from agentic_rl.study import settings, sweep
from agentic_rl.study.sweep import Runner, Sweep, load_sweep

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Stands in for the trainers: notes its command line, writes what a trainer writes, obeys `behave`.
TRAINER = """
import json, pathlib, signal, sys, time
arguments = dict(a.removeprefix("--").split("=", 1) for a in sys.argv[1:])
workdir = pathlib.Path(arguments["workdir"])
with open(pathlib.Path(__file__).parents[1] / "started.jsonl", "a") as file:
  file.write(json.dumps({"script": pathlib.Path(__file__).name, **arguments}) + "\\n")
budget, seed = int(arguments.get("config.dialect.call_budget", 0)), int(arguments["config.seed"])
behave = pathlib.Path(__file__).parents[1] / "behave"
behave = json.loads(behave.read_text()) if behave.exists() else {}
key = f"{pathlib.Path(__file__).stem} {budget} {seed}"
if behave.get(key) == "fail":
  sys.exit("the disk is on fire")
if behave.get(key) in ("hang", "slow to end"):
  def end(*_):
    with open(workdir / "told", "a") as file:
      file.write("told\\n")
    if behave[key] == "slow to end":
      time.sleep(3)
      (workdir / "saved").write_text("")
    sys.exit(0)
  signal.signal(signal.SIGTERM, end)
  signal.signal(signal.SIGINT, end)
  (workdir / "hanging").write_text("")
  time.sleep(60)
if behave.get(key) != "forget":
  rows = [{"step": s, "time": s, "eval/hard/accuracy": 0.1 * budget + 0.01 * seed, "rollout/code_count": budget,
           "rollout/code_proportion": 0.5} for s in range(4)]
  if "sft" in __file__:
    (workdir / "publications" / "000000").mkdir(parents=True)
    (workdir / "publications" / "000000" / "manifest.json").write_text(
      json.dumps({"version": 0, "fingerprint": "", "policy": {}}))
    (workdir / "publications" / "LATEST").write_text("000000")
    sys.exit()
  (workdir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in rows))
  (workdir / "done.json").write_text("{}")
"""
RECIPE = """
from ml_collections import ConfigDict
def get_config():
  return ConfigDict(dict(
    seed=0, init_from="", dialect=dict(call_budget=4), train=dict(iterations=60, length_buckets=(64,)),
    optimizer=dict(learning_rate=0.001), flag=True))
"""
SWEEP = Sweep("recipe.py", {"dialect.call_budget": (0, 2), "seed": (0, 1)}, "interaction budget")


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
  (tmp_path / "launch").mkdir()
  for script in ("train_rl.py", "train_sft.py"):
    (tmp_path / "launch" / script).write_text(TRAINER)
  (tmp_path / "recipe.py").write_text(RECIPE)
  return tmp_path


def started(root: pathlib.Path) -> list[dict[str, str]]:
  path = root / "started.jsonl"
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_all_cells_run_once_from_a_base_a_seed(root: pathlib.Path) -> None:
  runner = Runner(SWEEP, root / "out", root, ["train.iterations=3"])
  assert runner.run() == []
  runs = started(root)
  assert [r["script"] for r in runs].count("train_sft.py") == 2
  cells = [r for r in runs if r["script"] == "train_rl.py"]
  assert [(r["config.dialect.call_budget"], r["config.seed"]) for r in cells] == [
    ("0", "0"),
    ("0", "1"),
    ("2", "0"),
    ("2", "1"),
  ]
  assert all(r["config"] == str(root / "recipe.py") and r["config.train.iterations"] == "3" for r in runs)
  bases = {(r["config.seed"], r["config.init_from"]) for r in cells}
  assert bases == {(s, str(root / "out" / "base" / f"seed={s}" / "publications" / "000000")) for s in "01"}
  assert len({r["workdir"] for r in runs}) == 6

  # Finished: nothing is started again. An override counts for what it says, not for how it is written.
  assert Runner(SWEEP, root / "out", root, ["train.iterations=0x3"]).run() == []
  assert started(root) == runs

  table = runner.collect()
  lines = table.splitlines()
  assert lines[0].split() == ["call_budget", "seed", "state", "accuracy", "hard", "accuracy", "easy", "code",
                              "executions", "length"]  # fmt: skip
  assert lines[5].split()[:4] == ["2", "1", "done", "0.210"]
  assert lines[-1].split()[:3] == ["2", "2", "0.205"]  # Budget 2, two runs, their mean.
  written = json.loads((root / "out" / "sweep.json").read_text())
  assert len(written["cells"]) == 4 and written["cells"][3]["overrides"] == {"dialect.call_budget": 2, "seed": 1}
  assert (root / "out" / "sweep.png").stat().st_size > 10_000


def test_a_failed_cell_is_reported_and_the_rest_goes_on(root: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  (root / "behave").write_text(json.dumps({"train_rl 0 1": "fail", "train_rl 2 0": "forget"}))
  failed = Runner(SWEEP, root / "out", root).run()
  assert [cell.name for cell in failed] == ["call_budget=0,seed=1", "call_budget=2,seed=0"]
  output = capsys.readouterr().out
  assert "| the disk is on fire" in output and "without done.json" in output
  assert "missing" in Runner(SWEEP, root / "out", root).collect()

  (root / "behave").unlink()
  before = len(started(root))
  assert Runner(SWEEP, root / "out", root).run() == []
  assert len(started(root)) == before + 2  # Only the two that had failed.


def test_a_failed_base_fails_its_cells_once(root: pathlib.Path) -> None:
  (root / "behave").write_text(json.dumps({"train_sft 0 1": "fail"}))
  failed = Runner(SWEEP, root / "out", root).run()
  assert [cell.overrides["seed"] for cell in failed] == [1, 1]
  assert [r["script"] for r in started(root)].count("train_sft.py") == 2


def test_finished_under_other_settings_is_not_finished(root: pathlib.Path) -> None:
  assert Runner(SWEEP, root / "out", root, ["train.iterations=2"]).run() == []
  before = started(root)
  cell = root / "out" / "cells" / "call_budget=0,seed=0"
  with pytest.raises(UserError) as caught:
    Runner(SWEEP, root / "out", root).run()
  message = str(caught.value)
  assert f"{cell} was run with train.iterations=2, now it would be train.iterations=60;" in message
  with pytest.raises(UserError, match=r"with optimizer\.learning_rate=0\.001, now it would be .*=0\.002;"):
    Runner(SWEEP, root / "out", root, ["train.iterations=2", "optimizer.learning_rate=2e-3"]).run()
  # A cell alone as well, and an edited recipe like an override.
  (root / "recipe.py").write_text(RECIPE.replace("flag=True", "flag=True, new=1"))
  with pytest.raises(UserError, match="was run with new=absent, now it would be new=1;"):
    Runner(SWEEP, root / "out", root, ["train.iterations=2"]).run(3)
  assert started(root) == before
  Runner(SWEEP, root / "out", root).collect()  # What is there can be looked at all the same.

  # A base that another trial made is not shared either.
  (root / "recipe.py").write_text(RECIPE)
  shutil.rmtree(root / "out" / "cells")
  with pytest.raises(UserError, match=r"base/seed=0 was run with train\.iterations=2, now"):
    Runner(SWEEP, root / "out", root).run()


def test_an_unfinished_cell_goes_on_with_its_own_settings_alone(root: pathlib.Path) -> None:
  (root / "behave").write_text(json.dumps({"train_rl 2 1": "fail"}))
  assert len(Runner(SWEEP, root / "out", root).run()) == 1
  (root / "behave").unlink()
  cell = root / "out" / "cells" / "call_budget=2,seed=1"
  one = Sweep("recipe.py", SWEEP.grid, "budget", train_base=False)
  # Nothing came of it: other settings may be tried.
  with_checkpoint = cell / "checkpoints" / "3"
  with_checkpoint.mkdir(parents=True)
  with pytest.raises(UserError, match=r"seed=1 was run with train\.iterations=60, now it would be train\.iterations=5"):
    Runner(one, root / "out", root, ["train.iterations=5"]).run(3)
  with_checkpoint.rmdir()
  assert Runner(one, root / "out", root, ["train.iterations=5"]).run(3) == []
  assert json.loads((cell / "launched.json").read_text())["train.iterations"] == 5


def test_results_that_do_not_say_how_they_came_about_are_refused(root: pathlib.Path) -> None:
  assert Runner(SWEEP, root / "out", root).run() == []
  (root / "out" / "cells" / "call_budget=0,seed=1" / "launched.json").unlink()
  with pytest.raises(UserError, match=r"call_budget=0,seed=1 does not say .* launched\.json is missing"):
    Runner(SWEEP, root / "out", root).run()


def test_overrides_that_cannot_be_meant_are_refused_before_anything_runs(root: pathlib.Path) -> None:
  with pytest.raises(UserError, match="seed is a field of the sweep's grid"):
    Runner(SWEEP, root / "out", root, ["seed=3"])
  with pytest.raises(UserError, match=r"'train\.iterations' has no value"):
    Runner(SWEEP, root / "out", root, ["train.iterations"])
  with pytest.raises(UserError, match=r"unknown config key config\.train\.iteration; did you mean"):
    Runner(SWEEP, root / "out", root, ["train.iteration=3"]).run()
  assert started(root) == []


def test_settings_are_all_fields_of_the_recipe_with_the_overrides(root: pathlib.Path) -> None:
  found = settings.resolve(root / "recipe.py", {"seed": 7, "train.length_buckets": "(32, 64)", "flag": "false"})
  assert found == {
    "seed": 7,
    "init_from": "",
    "dialect.call_budget": 4,
    "train.iterations": 60,
    "train.length_buckets": [32, 64],
    "optimizer.learning_rate": 0.001,
    "flag": False,
  }


def test_one_cell_by_its_index(root: pathlib.Path) -> None:
  runner = Runner(SWEEP, root / "out", root)
  assert runner.run(2) == []
  cells = [r for r in started(root) if r["script"] == "train_rl.py"]
  assert [(r["config.dialect.call_budget"], r["config.seed"]) for r in cells] == [("2", "0")]
  with pytest.raises(UserError, match="cells 0 to 3, got index 4"):
    runner.run(4)


def test_nothing_to_collect_and_bad_sweep_files(root: pathlib.Path) -> None:
  with pytest.raises(UserError, match="run the sweep first"):
    Runner(SWEEP, root / "out", root).collect()
  with pytest.raises(UserError, match="does not exist"):
    load_sweep(root / "none.py")
  (root / "wrong.py").write_text("def get_sweep(): return 3\n")
  with pytest.raises(UserError, match="must define get_sweep"):
    load_sweep(root / "wrong.py")
  with pytest.raises(UserError, match="at least one value"):
    Sweep("c.py", {"seed": ()}, "x")


def test_a_base_is_shared_whatever_the_order_of_fields() -> None:
  sweep = Sweep("c.py", {"seed": (0,), "a.b": (1,)}, "x", base_fields=("seed",))
  assert [cell.name for cell in sweep.cells()] == ["seed=0,b=1"]


def test_fields_of_one_last_name_in_two_sections_stay_apart() -> None:
  sweep = Sweep("c.py", {"rollout.temperature": (1, 2), "evaluation.temperature": (1, 2)}, "x")
  names = [cell.name for cell in sweep.cells()]
  assert len(set(names)) == 4 and names[1] == "rollout.temperature=1,evaluation.temperature=2"


def test_the_interaction_budget_sweep_is_the_grid_that_it_says() -> None:
  sweep = load_sweep(ROOT / "configs" / "sweeps" / "interaction_budget.py")
  assert sweep.grid["dialect.call_budget"] == (0, 1, 2, 4) and len(sweep.cells()) == 12


def launch(root: pathlib.Path, *arguments: str) -> subprocess.Popen[str]:
  """The real launch script, beside the stand-in trainers."""
  shutil.copy(ROOT / "launch" / "sweep.py", root / "launch")
  (root / "grid.py").write_text(
    "from agentic_rl.study.sweep import Sweep\n"
    'def get_sweep(): return Sweep("recipe.py", {"dialect.call_budget": (0, 2), "seed": (0,)}, "budget")\n'
  )
  command = [sys.executable, "launch/sweep.py", "--sweep=grid.py", "--workdir=out", *arguments]
  return subprocess.Popen(
    command,
    cwd=root,
    env={"PYTHONPATH": str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    start_new_session=True,  # as from a terminal: a group of its own, to which Ctrl-C is sent
  )


def until(condition: Callable[[], bool]) -> None:
  deadline = time.monotonic() + 60
  while not condition():
    assert time.monotonic() < deadline, "what the test waits for did not happen"
    time.sleep(0.05)


def test_launch_script_ends_with_the_table_and_a_code_that_tells_of_failures(root: pathlib.Path) -> None:
  (root / "behave").write_text(json.dumps({"train_rl 2 0": "fail"}))
  process = launch(root)
  out, err = process.communicate(timeout=60)
  assert process.returncode == 1, err
  assert "failed: call_budget=2,seed=0" in out and "sweep.png" in out and "executions" in out


def test_a_sweep_that_is_told_to_end_tells_its_child_once_and_waits_for_it(root: pathlib.Path) -> None:
  (root / "behave").write_text(json.dumps({"train_rl 0 0": "slow to end"}))
  process = launch(root)
  cell = root / "out" / "cells" / "call_budget=0,seed=0"
  until((cell / "hanging").exists)
  os.killpg(process.pid, signal.SIGINT)  # to the whole group, as a terminal does
  process.communicate(timeout=30)
  assert process.returncode == 128 + signal.SIGINT
  assert (cell / "told").read_text() == "told\n" and (cell / "saved").exists()
  assert not (cell / "done.json").exists()


def test_a_child_that_does_not_end_is_killed_after_its_grace(
  root: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(sweep, "_GRACE_S", 1.5)
  program = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(os.getppid(), signal.SIGHUP); "
    "time.sleep(60)"
  )
  began = time.monotonic()
  with open(root / "log", "wb") as log, pytest.raises(SystemExit) as ended:
    sweep._run_child([sys.executable, "-c", program], log.fileno(), root)
  assert ended.value.code == 128 + signal.SIGHUP and 1.5 < time.monotonic() - began < 10
  assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
