"""Training that starts from a Hugging Face directory."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from conftest import Launcher, command

from agentic_rl.policy import PolicyConfig, huggingface
from agentic_rl.train.publication import open_publication, read_params


@pytest.fixture
def model(base: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
  """The base model as a Hugging Face directory."""
  publication = open_publication(base / "publications" / "000000")
  policy = PolicyConfig.from_dict(publication.policy)
  return huggingface.save(tmp_path / "model", policy, read_params(publication), max_length=64)


def figures(workdir: pathlib.Path, count: int) -> list[dict[str, Any]]:
  """What the first iterations measured, but for what depends on the clock and the machine."""
  lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
  timed = ("eval/", "time", "throughput/", "memory/", "interpreter/", "tool/wall_s")
  trained = [line for line in lines if "loss/policy" in line][:count]
  return [{k: v for k, v in line.items() if not k.startswith(timed)} for line in trained]


def test_a_run_from_a_directory_is_the_run_from_the_publication(
  launcher: Launcher,
  recipe: pathlib.Path,
  base: pathlib.Path,
  whole: pathlib.Path,
  model: pathlib.Path,
  tmp_path: pathlib.Path,
) -> None:
  workdir = tmp_path / "run"
  options = (*command(recipe, base, workdir), "--config.train.iterations=2", f"--config.policy={model}")
  ended = launcher.run("train_rl.py", *options, f"--config.init_from={model}")
  assert ended.code == 0 and ended.left == 0, ended.output
  got, want = figures(workdir, 2), figures(whole, 2)
  assert len(got) == 2 and all(len(line) > 20 for line in got)
  assert got == want


def test_what_does_not_fit_is_refused(
  launcher: Launcher, recipe: pathlib.Path, base: pathlib.Path, model: pathlib.Path, tmp_path: pathlib.Path
) -> None:
  good = (*command(recipe, base, tmp_path / "run"), f"--config.init_from={model}")
  ended = launcher.run("train_rl.py", *good, "--config.policy.layers=3")
  assert ended.code == 2 and "policy.layers=2, the config says 3" in ended.output
  assert "set config.policy.name=" in ended.output
  ended = launcher.run("train_rl.py", *good, "--config.policy=qwen9")
  assert ended.code == 2 and "policy 'qwen9' is unknown; known: qwen2_5_0p5b" in ended.output
  (model / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
  ended = launcher.run("train_rl.py", *good, f"--config.policy={model}")
  assert ended.code == 2 and "model.safetensors is damaged" in ended.lines[-1]
