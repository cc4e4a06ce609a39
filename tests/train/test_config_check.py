"""A bad flag or a contradiction ends with one clear line and exit code 2 before anything is computed."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from typing import Any

import pytest
from ml_collections import ConfigDict

from agentic_rl.errors import UserError
from agentic_rl.train.config_check import RANGES, check_config, check_key, load_config

ROOT = pathlib.Path(__file__).resolve().parents[2]


def good() -> ConfigDict:
  return ConfigDict(
    {
      "seed": 0,
      "dialect": {"name": "fenced", "call_budget": 2, "budget_end": "stop"},
      "rollout": {
        "engine": "native",
        "slots": 8,
        "max_tokens": 64,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "problems": 6,
        "samples": 4,
      },
      "algorithm": {"advantage": "grpo", "aggregation": "token_mean"},
      "optimizer": {"learning_rate": 1e-4, "b1": 0.9, "clip_norm": 1.0},
      "train": {"iterations": 10, "minibatches": 2, "length_buckets": (32, 64)},
      "mesh": {"data": 1, "fsdp": -1, "tensor": 1},
      "init_from": "",
    }
  )


def changed(path: str, value: Any) -> ConfigDict:
  config = good()
  section, _, field = path.rpartition(".")
  with config.ignore_type():
    (config[section] if section else config)[field] = value
  return config


def test_a_good_config_passes() -> None:
  check_config(good(), devices=4, longest_prompt=20)
  check_config(changed("dialect.call_budget", 0))
  check_config(ConfigDict({"seed": 1}))  # A supervised recipe has no rollout section.


@pytest.mark.parametrize(
  ("path", "value", "message"),
  [
    ("rollout.top_p", 0.9, "rollout.top_p=0.9: training rollouts must sample the whole distribution"),
    ("rollout.top_k", 50, "rollout.top_k=50: training rollouts must sample the whole distribution"),
    ("rollout.temperature", 0.0, "temperature=0: greedy training rollouts"),
    ("rollout.samples", 1, "rollout.samples=1 with config.algorithm.advantage='grpo': a group of one"),
    ("dialect.call_budget", -1, "dialect.call_budget must be a whole number at least 0, got -1"),
    ("algorithm.advantage", "grop", "algorithm.advantage='grop' is unknown, did you mean 'grpo'?"),
    ("algorithm.aggregation", "tokenmean", "did you mean 'token_mean'?"),
    ("rollout.engine", "navite", "did you mean 'native'?"),
    ("dialect.name", "fence", "did you mean 'fenced'?"),
    ("dialect.budget_end", "stopp", "did you mean 'stop'?"),
    ("train.length_buckets", (16, 32), "max_tokens=64 is above the largest of config.train.length_buckets"),
    ("train.length_buckets", (64, 32), "length_buckets must rise"),
    ("train.length_buckets", (), "must be a tuple of whole numbers"),
    ("optimizer.learning_rate", "1e-4", "optimizer.learning_rate must be a number at least 0, got '1e-4'"),
    ("optimizer.b1", 1.5, "optimizer.b1 must be a number at least 0 and at most 0.99999, got 1.5"),
    ("optimizer.clip_norm", 0.0, "optimizer.clip_norm must be a number above 0, got 0.0"),
    ("train.iterations", True, "train.iterations must be a whole number at least 1, got True"),
    ("train.iterations", 10.0, "train.iterations must be a whole number at least 1, got 10.0"),
    ("optimizer.learning_rate", float("nan"), "optimizer.learning_rate must be a number at least 0, got nan"),
  ],
)
def test_contradictions_are_refused_with_the_field_and_what_to_do(path: str, value: Any, message: str) -> None:
  with pytest.raises(UserError) as caught:
    check_config(changed(path, value))
  assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce_baseline"])
def test_a_group_of_one_is_refused(advantage: str) -> None:
  config = changed("rollout.samples", 1)
  config.algorithm.advantage = advantage
  with pytest.raises(UserError, match="a group of one"):
    check_config(config)


def test_the_sequence_budget_must_leave_room_for_a_response() -> None:
  check_config(good(), longest_prompt=63)
  with pytest.raises(UserError, match="max_tokens=64 leaves no room for a response: the longest prompt has 64 tokens"):
    check_config(good(), longest_prompt=64)


def test_the_mesh_must_fit_the_devices() -> None:
  config = changed("mesh.tensor", 3)
  with pytest.raises(UserError, match=r"config\.mesh: .*4 devices"):
    check_config(config, devices=4)
  check_config(config, devices=6)


def test_keys_are_found_or_answered_with_the_nearest() -> None:
  config = good()
  for path in ("seed", "rollout.temperature", "init_from"):
    check_key(config, path)
  for path, message in {
    "rollout.tempature": "unknown config key config.rollout.tempature; did you mean config.rollout.temperature?",
    "rolout.temperature": "did you mean config.rollout.temperature?",
    "temperature": "did you mean config.rollout.temperature?",
    "rollout.learning_rate": "did you mean config.optimizer.learning_rate?",
    "seed.x": "did you mean config.seed?",
    "rollout.zzz": "known: engine, max_tokens,",
    "rollout": "config.rollout is a section; set one of its fields",
  }.items():
    with pytest.raises(UserError) as caught:
      check_key(config, path)
    assert message in str(caught.value)


def test_every_checked_field_is_one_that_recipes_have_and_recipes_pass() -> None:
  config = load_config(str(ROOT / "configs" / "zerotir_nano.py"))
  for path in (*RANGES, "rollout.engine", "dialect.name", "dialect.budget_end", "algorithm.loss"):
    check_key(config, path)
  for recipe in sorted((ROOT / "configs").glob("*.py")):
    check_config(load_config(str(recipe)), devices=1)


SCRIPT = """
import errno, logging
from absl import flags
from agentic_rl.errors import UserError
from agentic_rl.train.config_check import define_config, run_app
CONFIG = define_config("recipe.py")
WORKDIR = flags.DEFINE_string("workdir", None, "", required=True)
def main(argv):
  if WORKDIR.value == "bad":
    raise UserError("the problem file 'x' is empty; name another")
  if WORKDIR.value == "full":
    raise OSError(errno.ENOSPC, "No space left on device", "/runs/x")
  if WORKDIR.value == "stop":
    raise KeyboardInterrupt("stopped by SIGTERM")
  if WORKDIR.value == "bug":
    raise RuntimeError("a fault")
  if WORKDIR.value == "log":
    logging.getLogger("orbax.checkpoint").info("noise")
    logging.getLogger("agentic_rl.train.rl").info("going on from step 3")
  print(CONFIG.value.seed, CONFIG.value.rollout.temperature, CONFIG.value.rollout.greedy)
run_app(main)
"""
RECIPE = """
from ml_collections import ConfigDict
def get_config(size="small"):
  return ConfigDict({"seed": 1 if size == "small" else 2, "rollout": {"temperature": 1.0, "greedy": False}})
"""


def launch(directory: pathlib.Path, *arguments: str) -> tuple[int, str, str]:
  (directory / "recipe.py").write_text(RECIPE)
  command = [sys.executable, "-c", SCRIPT, *arguments]
  done = subprocess.run(
    command, cwd=directory, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=False
  )
  return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
  ("arguments", "output"),
  [
    ((), "1 1.0 False"),
    (("--config.seed=5", "--config.rollout.temperature=0.5", "--config.rollout.greedy"), "5 0.5 True"),
    (("--config=recipe.py:large", "--config.rollout.temperature", "2"), "2 2.0 False"),
  ],
)
def test_overrides_work_with_and_without_naming_the_config(
  tmp_path: pathlib.Path, arguments: tuple[str, ...], output: str
) -> None:
  code, out, err = launch(tmp_path, "--workdir=w", *arguments)
  assert (code, out.strip()) == (0, output), err


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (("--config.rollout.tempature=2",), "unknown config key config.rollout.tempature; did you mean"),
    (("--config=recipe.py", "--config.rolout.temperature=2"), "did you mean config.rollout.temperature?"),
    (("--config.seed=abc",), "--config.seed=abc: invalid literal for int()"),
    (("--config=recpe.py",), "config file 'recpe.py' does not exist, did you mean 'recipe.py'?"),
    (("--confg.seed=2",), "unknown flag --confg.seed, did you mean 'config'?"),
    (("stray",), "unexpected argument 'stray'"),
    (("--workdir=bad",), "the problem file 'x' is empty; name another"),
    (("--workdir=full",), "the disk of /runs/x is full; make room"),
  ],
)
def test_a_bad_command_line_is_one_line_and_code_2(
  tmp_path: pathlib.Path, arguments: tuple[str, ...], message: str
) -> None:
  code, out, err = launch(tmp_path, "--workdir=w", *arguments)
  assert code == 2 and out == ""
  assert err.startswith("error: ") and message in err and len(err.splitlines()) == 1


def test_a_fault_of_the_program_keeps_its_traceback(tmp_path: pathlib.Path) -> None:
  code, _, err = launch(tmp_path, "--workdir=bug")
  assert code == 1 and "Traceback" in err and "a fault" in err


def test_a_stopped_run_says_how_to_go_on(tmp_path: pathlib.Path) -> None:
  code, _, err = launch(tmp_path, "--workdir=stop")
  assert code == 143 and err == "stopped by SIGTERM; the same command goes on from here\n"


def test_the_log_is_the_project_s_own_unless_asked_for_more(tmp_path: pathlib.Path) -> None:
  _, _, quiet = launch(tmp_path, "--workdir=log")
  assert "going on from step 3" in quiet and "noise" not in quiet
  assert "noise" in launch(tmp_path, "--workdir=log", "--verbosity=0")[2]
