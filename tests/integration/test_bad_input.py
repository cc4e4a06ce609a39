"""Bad input of the launch scripts: one clear line, exit code 2, nothing earlier lost."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from conftest import PROBLEMS, ROOT, Ended, Launcher, command, write_lines


def refused(ended: Ended, *phrases: str) -> None:
  assert ended.code == 2 and ended.left == 0, ended.output
  assert len(ended.lines) == 1 and ended.output.startswith("error: "), ended.output
  for phrase in phrases:
    assert phrase in ended.output


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  directory = tmp_path_factory.mktemp("files")
  (directory / "empty.jsonl").write_text("")
  (directory / "not_json.jsonl").write_text("prompt,answer\n1+1,2\n")
  unanswered = [*PROBLEMS[:5], {**PROBLEMS[5], "answer": ""}, *PROBLEMS[6:]]
  write_lines(directory / "unanswered.jsonl", unanswered)
  write_lines(directory / "twice.jsonl", [*PROBLEMS, PROBLEMS[2]])
  write_lines(directory / "long.jsonl", [*PROBLEMS, {"id": "long", "prompt": "1+" * 40 + "1", "answer": "41"}])
  return directory


@pytest.mark.parametrize(
  ("options", "phrases"),
  [
    (["--config.rollout.top_p=0.9"], ["config.rollout.top_p=0.9", "set it to 1"]),
    (["--config.rollout.samples=1"], ["config.rollout.samples=1", "'grpo'", "2 or more"]),
    (
      ["--config.rollout.max_tokens=3"],
      ["config.rollout.max_tokens=3", "the prompt of 'problem 1' alone has 4 tokens"],
    ),
    (["--config.rollout.tempature=1"], ["config.rollout.tempature", "did you mean config.rollout.temperature?"]),
    (["--config.rollout.max_aborted_frac=1.5"], ["config.rollout.max_aborted_frac must be a number", "at most 1"]),
    (["--config.rollout.problems=10"], ["a batch of 10 distinct problems cannot be drawn from 9"]),
    (["--config.rollout.native.decode_steps=0"], ["config.rollout", "decode_steps must be at least 1, got 0"]),
    (["--config.mesh.data=3"], ["config.mesh", "needs 3 devices"]),
    (["--config.data.train.options.path={files}/empty.jsonl"], ["empty.jsonl", "holds no problems"]),
    (["--config.data.train.options.path={files}/unanswered.jsonl"], ["unanswered.jsonl, line 6", "holds no answer"]),
    (["--config.data.train.options.path={files}/not_json.jsonl"], ["not_json.jsonl, line 1", "not JSON"]),
    (["--config.data.train.options.path={files}/twice.jsonl"], ["twice.jsonl", "'problem 3' occurs twice"]),
    (["--config.data.train.options.path={files}/missing.jsonl"], ["missing.jsonl"]),
    (["--config.data.evaluation.easy.options.path={files}/long.jsonl"], ["the prompt of 'long' alone has 82 tokens"]),
    (["--config.policy.layers=3"], ["policy.layers=2, the config says 3", "000000"]),
    (
      ["--config.policy.heads=3", "--config.policy.kv_heads=2"],
      ["config.policy", "kv_heads (2) must divide heads (3)"],
    ),
    (["--config.init_from="], ["config.init_from is empty", "train_sft prints one"]),
    (["--config.init_from={files}"], ["is not a complete publication", "manifest.json"]),
    (["--config.publication.directory={files}/empty.jsonl/x"], ["publication directory", "cannot be made"]),
    (["--workdir={files}/empty.jsonl/run"], ["the run directory", "cannot be written"]),
    (["--wrokdir=x"], ["unknown flag --wrokdir", "did you mean 'workdir'?"]),
  ],
  ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_train_rl_refuses(
  launcher: Launcher,
  recipe: pathlib.Path,
  base: pathlib.Path,
  files: pathlib.Path,
  tmp_path: pathlib.Path,
  options: list[str],
  phrases: list[str],
) -> None:
  good = [f"--config={recipe}", f"--workdir={tmp_path}/run", f"--config.init_from={base}/publications/000000"]
  refused(launcher.run("train_rl.py", *good, *(option.format(files=files) for option in options)), *phrases)


@pytest.mark.parametrize(
  ("options", "phrases"),
  [
    (["--config.sft.corpus={files}/missing.jsonl"], ["the corpus", "missing.jsonl", "No such file"]),
    (["--config.sft.corpus={files}/empty.jsonl"], ["empty.jsonl has no documents"]),
    (["--config.sft.optimizer.learning_rate=-1.0"], ["config.sft.optimizer.learning_rate must be"]),
    (["--config.sft.step=3"], ["config.sft.step", "did you mean config.sft.steps?"]),
    (["--config.train.microbatch_rows=0"], ["config.train.microbatch_rows must be a whole number at least 1"]),
  ],
  ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_train_sft_refuses(
  launcher: Launcher,
  recipe: pathlib.Path,
  files: pathlib.Path,
  tmp_path: pathlib.Path,
  options: list[str],
  phrases: list[str],
) -> None:
  good = [f"--config={recipe}", f"--workdir={tmp_path}/run"]
  refused(launcher.run("train_sft.py", *good, *(option.format(files=files) for option in options)), *phrases)


def test_a_missing_flag_is_named(launcher: Launcher, recipe: pathlib.Path) -> None:
  refused(launcher.run("train_rl.py", f"--config={recipe}"), "--workdir", "must have a value")


# ---- a full disk ----


@pytest.fixture
def disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
  directory = tmp_path / "disk"
  directory.mkdir()
  command = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(directory)]
  if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
    pytest.skip("needs the right to mount a file system")
  yield directory
  subprocess.run(["umount", "-l", str(directory)], check=True)


def test_a_full_disk_ends_the_run_and_loses_nothing(
  launcher: Launcher, recipe: pathlib.Path, base: pathlib.Path, whole: pathlib.Path, disk: pathlib.Path
) -> None:
  workdir = disk / "run"
  shutil.copytree(whole, workdir)
  metrics = (workdir / "metrics.jsonl").read_text()
  last = max(int(p.name) for p in (workdir / "checkpoints").iterdir())
  longer = (*command(recipe, base, workdir), f"--config.train.iterations={last + 2}", "--config.evaluation.every=0")

  room = 120 * 1024  # for a publication perhaps, not for a checkpoint
  (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - room))
  ended = launcher.run("train_rl.py", *longer)
  assert ended.code == 2 and ended.left == 0, ended.output
  assert ended.lines[-1].startswith("error: ") and "make room" in ended.lines[-1], ended.output
  # TensorStore's own threads may complain as well; there is no traceback of ours.
  assert str(ROOT / "agentic_rl") not in ended.output
  assert (workdir / "checkpoints" / str(last)).is_dir() and (workdir / "metrics.jsonl").read_text().startswith(metrics)

  (disk / "ballast").unlink()
  ended = launcher.run("train_rl.py", *longer)
  assert ended.code == 0, ended.output
  assert (workdir / "checkpoints" / str(last + 2)).is_dir()
  assert (workdir / "metrics.jsonl").read_text().startswith(metrics)
