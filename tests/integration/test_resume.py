"""A run that is killed at any time goes on as if it had not been."""

from __future__ import annotations

import json
import pathlib
import shutil
import signal
import time
from typing import Any

import jax
import pytest
from conftest import DOCUMENTS, ITERATIONS, PROBLEMS, Launcher, command, write_lines

from agentic_rl.policy import PolicyConfig
from agentic_rl.train.publication import Publisher, latest, read_params


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
  return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Metrics without what a clock says."""
  return [{k: v for k, v in row.items() if not k.startswith(("time", "throughput", "tool/wall"))} for row in metrics]


def checksums(workdir: pathlib.Path) -> dict[str, int]:
  """Checksum of every leaf of the latest publication, after it has been read."""
  found = latest(workdir / "publications")
  assert found is not None
  read_params(found)
  return json.loads((pathlib.Path(found.path) / "manifest.json").read_text())["checksums"]


def trained_on(workdir: pathlib.Path) -> list[list[tuple[str, int, list[str]]]]:
  """Of every iteration the episodes: uid, sample, and all text."""
  files = sorted((workdir / "episodes").iterdir())
  assert [f.name for f in files] == [f"iteration_{i:06d}.jsonl" for i in range(1, ITERATIONS + 1)]
  return [[(e["uid"], e["sample"], [s["text"] for s in e["segments"]]) for e in lines(f)] for f in files]


def test_the_run_learns_something(base: pathlib.Path, whole: pathlib.Path) -> None:
  # Or else the comparisons below would say nothing.
  metrics = lines(whole / "metrics.jsonl")
  assert [row["step"] for row in metrics] == list(range(ITERATIONS + 1))
  assert sum(row.get("optimizer/grad_norm", 0) > 0 for row in metrics) >= ITERATIONS // 2
  assert any(0 < row["rollout/code_proportion"] < 1 and row["tool/calls"] > 0 for row in metrics[1:])
  assert checksums(whole) != checksums(base)
  uids = [{uid for uid, *_ in iteration} for iteration in trained_on(whole)]
  assert all(len(found) == 4 for found in uids)
  assert set.union(*uids) == {row["id"] for row in PROBLEMS}


def test_killed_and_stopped_and_started_again_it_ends_the_same(
  launcher: Launcher, recipe: pathlib.Path, base: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
  workdir = tmp_path / "broken"
  arguments = command(recipe, base, workdir)
  episodes, checkpoints = workdir / "episodes", workdir / "checkpoints"

  running = launcher.start("train_rl.py", *arguments)
  # After the checkpoint of iteration 3, in or after iteration 5.
  running.until(lambda: (checkpoints / "3").is_dir() and (episodes / "iteration_000005.jsonl").exists())
  running.signal(signal.SIGKILL)
  ended = running.end()
  assert ended.code == -signal.SIGKILL and ended.left == 0
  assert not (workdir / "done.json").exists()
  assert not (checkpoints / str(ITERATIONS)).exists(), "the run was over before it could be killed"
  for file in episodes.iterdir():
    lines(file)  # whole, or not there

  running = launcher.start("train_rl.py", *arguments)
  running.until((episodes / "iteration_000008.jsonl").exists)
  sent = time.monotonic()
  running.signal(signal.SIGTERM)
  ended = running.end()
  assert time.monotonic() - sent < 10
  assert ended.code == 128 + signal.SIGTERM and ended.left == 0
  assert ended.lines[-1] == "stopped by SIGTERM; the same command goes on from here"
  assert "Traceback" not in ended.output
  # What had been done when the signal came is saved, though it is no multiple of checkpoint_every.
  saved = max(int(p.name) for p in checkpoints.iterdir())
  assert saved == lines(workdir / "metrics.jsonl")[-1]["step"] >= 8

  ended = launcher.run("train_rl.py", *arguments)
  assert ended.code == 0 and ended.left == 0, ended.output
  assert trained_on(workdir) == trained_on(whole)
  assert timeless(lines(workdir / "metrics.jsonl")) == timeless(lines(whole / "metrics.jsonl"))
  assert checksums(workdir) == checksums(whole)
  step = json.loads((workdir / "done.json").read_text())["step"]
  assert step == json.loads((whole / "done.json").read_text())["step"] == ITERATIONS


def test_a_finished_run_is_left_as_it_is(
  launcher: Launcher, recipe: pathlib.Path, base: pathlib.Path, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
  workdir = tmp_path / "finished"
  shutil.copytree(whole, workdir)
  (workdir / "done.json").unlink()  # As if it had been killed at the very end.
  ended = launcher.run("train_rl.py", *command(recipe, base, workdir))
  assert ended.code == 0, ended.output
  assert "in the last iteration" in ended.output
  assert (workdir / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
  assert json.loads((workdir / "done.json").read_text()) == json.loads((whole / "done.json").read_text())
  assert checksums(workdir) == checksums(whole)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ("--config.seed=1", "was written with config.seed 0, now it is 1"),
    # Without the base model, whose shape would be refused first.
    ("--config.policy.layers=3 --config.init_from=gone", "was written with policy.layers=2, the config says 3"),
    ("--config.optimizer.learning_rate=0.5", "was written with config.optimizer.learning_rate 0.001, now it is 0.5"),
    ("--config.init_from={whole}/publications/000010", "was written with base weights '"),
    ("--config.rollout.problems=2", "was written with config.rollout.problems 4, now it is 2"),
    ("--config.data.train.options.path={changed}", "was written with data '"),
  ],
)
def test_a_run_does_not_go_on_under_other_terms(
  launcher: Launcher,
  recipe: pathlib.Path,
  base: pathlib.Path,
  whole: pathlib.Path,
  tmp_path: pathlib.Path,
  options: str,
  message: str,
) -> None:
  before = {name: (whole / name).read_bytes() for name in ("config.json", "metrics.jsonl", "done.json")}
  changed = write_lines(tmp_path / "changed.jsonl", [*PROBLEMS[:-1], PROBLEMS[-1] | {"answer": "7"}])
  ended = launcher.run(
    "train_rl.py", *command(recipe, base, whole), *options.format(changed=changed, whole=whole).split()
  )
  assert ended.code == 2 and len(ended.lines) == 1, ended.output
  assert message in ended.output and str(whole) in ended.output and "--workdir" in ended.output
  assert {name: (whole / name).read_bytes() for name in before} == before


# ---- the supervised stage ----


def test_the_supervised_stage_goes_on_where_it_was_stopped(
  launcher: Launcher, recipe: pathlib.Path, base: pathlib.Path, tmp_path: pathlib.Path
) -> None:
  arguments = (f"--config={recipe}", f"--workdir={tmp_path}")
  running = launcher.start("train_sft.py", *arguments)
  metrics = tmp_path / "metrics.jsonl"
  running.until(lambda: metrics.exists() and metrics.stat().st_size > 0)
  running.signal(signal.SIGTERM)
  ended = running.end()
  assert ended.code == 128 + signal.SIGTERM and ended.left == 0, ended.output
  assert ended.lines[-1] == "stopped by SIGTERM; the same command goes on from here"
  assert latest(tmp_path / "publications") is None
  # Wherever in a step the signal came, the step that was reported last is saved.
  assert [int(p.name) for p in (tmp_path / "checkpoints").iterdir()] == [lines(metrics)[-1]["step"]]
  ended = launcher.run("train_sft.py", *arguments)
  assert ended.code == 0, ended.output
  assert checksums(tmp_path) == checksums(base)
  # A signal adds a line at the step where it came.
  steps = {row["step"]: row for row in timeless(lines(base / "metrics.jsonl"))}
  assert {row["step"]: row for row in timeless(lines(metrics)) if row["step"] in steps} == steps

  finished = (tmp_path / "publications" / "000000" / "manifest.json").stat().st_mtime_ns
  ended = launcher.run("train_sft.py", *arguments)
  assert ended.code == 0 and f"base model: {tmp_path}/publications/000000" in ended.output
  assert (tmp_path / "publications" / "000000" / "manifest.json").stat().st_mtime_ns == finished


def test_weights_of_another_step_are_not_taken_for_the_trained_ones(
  launcher: Launcher, recipe: pathlib.Path, base: pathlib.Path, tmp_path: pathlib.Path
) -> None:
  # What a run leaves that was prolonged, and killed after its last checkpoint but before it published.
  workdir = tmp_path / "base"
  shutil.copytree(base, workdir)
  older = latest(workdir / "publications")
  assert older is not None
  publisher = Publisher(workdir / "publications", PolicyConfig.from_dict(older.policy), "")
  publisher.publish(0, jax.tree.map(lambda x: 2 * x, read_params(older)))
  assert checksums(workdir) != checksums(base)
  ended = launcher.run("train_sft.py", f"--config={recipe}", f"--workdir={workdir}")
  assert ended.code == 0 and checksums(workdir) == checksums(base), ended.output


def test_the_supervised_stage_does_not_go_on_with_another_corpus(
  launcher: Launcher, recipe: pathlib.Path, base: pathlib.Path, tmp_path: pathlib.Path
) -> None:
  other = write_lines(tmp_path / "corpus.jsonl", DOCUMENTS[:-1])
  ended = launcher.run("train_sft.py", f"--config={recipe}", f"--workdir={base}", f"--config.sft.corpus={other}")
  assert ended.code == 2 and len(ended.lines) == 1 and "was written with corpus '" in ended.output, ended.output


# ---- a fault of the program ----


def test_a_run_that_fails_ends_at_once_and_leaves_no_process(
  launcher: Launcher, recipe: pathlib.Path, base: pathlib.Path, tmp_path: pathlib.Path
) -> None:
  # The engine is there and the interpreter has been started when the first publication is compared.
  ended = launcher.run("train_rl.py", *command(recipe, base, tmp_path), "--config.publication.max_logprob_diff=1e-12")
  assert ended.code == 1 and ended.left == 0 and ended.seconds < 60, ended.output
  assert ended.lines[-1].startswith("RuntimeError: engine and learner disagree after version 0")
