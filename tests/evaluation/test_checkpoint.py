"""Evaluation of a checkpoint, a very small policy of random weights: what is written, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import runpy
import threading

import jax
import pytest
from ml_collections import ConfigDict

from agentic_rl.episode import EndStatus
from agentic_rl.errors import UserError
from agentic_rl.evaluation import Evaluation, set_metrics
from agentic_rl.evaluation import checkpoint as module
from agentic_rl.evaluation.checkpoint import evaluate_checkpoint, find_publication
from agentic_rl.rollout.dump import read_episodes
from agentic_rl.sandbox import Interpreter
from agentic_rl.train import setup
from agentic_rl.train.publication import Publisher

ROOT = pathlib.Path(__file__).resolve().parents[2]
SAMPLES = 16


def tiny() -> ConfigDict:
  config = runpy.run_path(str(ROOT / "configs" / "zerotir_nano.py"))["get_config"]().unlock()
  config.policy.update(width=16, layers=1, heads=1, kv_heads=1, head_width=16, mlp_width=16)
  for section, count in (("easy", 2), ("hard", 3)):
    config.data.evaluation[section].options.count = count
  config.interpreter.slots = 1
  config.rollout.update(slots=8, max_tokens=48)
  config.rollout.native.update(prefill_widths=(16,), batch_sizes=(1.0,), attend_lengths=(1.0,))
  config.train.update(length_buckets=(48,))
  config.evaluation.samples = SAMPLES
  return config.lock()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A run directory with two publications."""
  config = tiny()
  tokenizer = setup.build_tokenizer(config)
  policy = setup.build_policy(config, tokenizer)
  directory = tmp_path_factory.mktemp("run")
  publisher = Publisher(directory / "publications", policy.config, tokenizer.fingerprint)
  for version in (0, 3):
    params = policy.init(jax.random.key(version))
    # Makes fences likely: about a third of the responses executes code.
    fences = [tokenizer.encode(text)[0] for text in ("```python\n", "```\n")]
    params["embed"]["table"] = params["embed"]["table"].at[jax.numpy.array(fences)].mul(3)
    publisher.publish(version, params)
  return directory


@pytest.fixture(scope="module")
def evaluated(
  run: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, tuple[pathlib.Path, Evaluation]]:
  """Directory and result of an evaluation with the interpreter (True) and of one without."""
  found = {}
  for tools in (True, False):
    workdir = tmp_path_factory.mktemp("out") / "deep"
    found[tools] = workdir, evaluate_checkpoint(tiny(), run, workdir, tools=tools)
  return found


def test_a_run_directory_its_publications_and_one_of_them_can_be_named(run: pathlib.Path) -> None:
  assert find_publication(run).version == find_publication(run / "publications").version == 3
  assert find_publication(run / "publications" / "000000").version == 0


def test_unknown_checkpoints_are_refused_before_anything_is_written(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
  for unknown in (tmp_path / "nowhere", run / "publications" / "000007", tmp_path):
    with pytest.raises(UserError, match="neither a publication nor a run directory"):
      evaluate_checkpoint(tiny(), unknown, tmp_path / "out")
  assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tools", [True, False])
def test_figures_and_episodes_are_written(
  run: pathlib.Path, evaluated: dict[bool, tuple[pathlib.Path, Evaluation]], tools: bool
) -> None:
  workdir, result = evaluated[tools]
  text = (workdir / "evaluation.json").read_text()
  record = json.loads(text)
  assert "NaN" not in text
  settings = record["settings"]
  assert (settings["version"], settings["seed"], settings["samples"], settings["tools"]) == (3, 0, SAMPLES, tools)
  assert settings["checkpoint"] == str(run / "publications" / "000003")
  assert record["sets"].keys() == {"easy", "hard"}
  for name, count in (("easy", 2), ("hard", 3)):
    episodes = read_episodes(workdir / f"{name}.jsonl")
    assert len(episodes) == SAMPLES * count and len({e.uid for e in episodes}) == count
    assert episodes == list(result.episodes[name])
    figures = record["sets"][name]
    assert 0 <= figures["accuracy"] <= 1 and figures["aborted"] == 0
    executed = [bool(e.calls) for e in episodes]
    assert figures["code_proportion"] == pytest.approx(sum(executed) / len(executed))
    # Without the interpreter no code ran, and the share of calls that failed is one of nothing.
    assert any(executed) == tools and (figures["error_frac"] is None) != tools
  table = (workdir / "evaluation.md").read_text().splitlines()
  assert table[0].startswith("| set") and table[0].rstrip(" |").endswith("aborted") and len(table) == 4
  assert result.table().splitlines()[0].split()[-1] == "aborted"


def test_the_seed_of_the_config_decides_the_samples(
  run: pathlib.Path, evaluated: dict[bool, tuple[pathlib.Path, Evaluation]], tmp_path: pathlib.Path
) -> None:
  def texts(result: Evaluation) -> list[str]:
    return [segment.text for e in result.episodes["hard"] for segment in e.segments]

  before = texts(evaluated[False][1])
  for seed in (0, 1):
    config = tiny()
    config.seed = seed
    assert (texts(evaluate_checkpoint(config, run, tmp_path, tools=False)) == before) == (seed == 0)


@pytest.mark.parametrize(("timeout", "passed"), [(0.0, None), (300.0, 300.0)])
def test_episodes_have_the_deadline_of_the_config(
  run: pathlib.Path, workdir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, timeout: float, passed: float | None
) -> None:
  class Seen(Exception):
    pass

  async def spy(*args, **options):
    raise Seen(options["episode_timeout_s"])

  monkeypatch.setattr(module, "evaluate", spy)
  config = tiny()
  config.rollout.episode_timeout_s = timeout
  with pytest.raises(Seen) as seen:
    evaluate_checkpoint(config, run, workdir, tools=False)
  assert seen.value.args == (passed,)


# Of 48 episodes of the set, of which a third called the tool: a single one may always be lost.
@pytest.mark.parametrize(
  ("lost", "of", "allowed", "message"),
  [
    (1, "all", 0.0, None),
    (2, "all", 0.0, "2 of 48 episodes of the set 'hard' were aborted, config.rollout.max_aborted_frac=0;"),
    (12, "all", 0.25, None),
    (13, "all", 0.25, "13 of 48 episodes of the set"),
    (2, "callers", 0.05, "2 of {callers} episodes that called the tool of the set"),
    (2, "callers", 1.0, None),
  ],
)
def test_aborted_episodes_show_and_too_many_raise(
  run: pathlib.Path,
  evaluated: dict[bool, tuple[pathlib.Path, Evaluation]],
  workdir: pathlib.Path,
  monkeypatch: pytest.MonkeyPatch,
  lost: int,
  of: str,
  allowed: float,
  message: str | None,
) -> None:
  whole = evaluated[True][1]
  hard = sorted(whole.episodes["hard"], key=lambda e: bool(e.calls) != (of == "callers"))
  callers = sum(bool(e.calls) for e in hard)
  assert 2 <= callers < 30
  hard = [dataclasses.replace(e, status=EndStatus.ABORTED, reward=None) for e in hard[:lost]] + hard[lost:]

  async def losing(*args, **options):
    return Evaluation(SAMPLES, {**whole.episodes, "hard": hard}, {**whole.sets, "hard": set_metrics(hard, SAMPLES)})

  monkeypatch.setattr(module, "evaluate", losing)
  config = tiny()
  config.rollout.max_aborted_frac = allowed
  if message:
    with pytest.raises(RuntimeError, match=re.escape(message.format(callers=callers))):
      evaluate_checkpoint(config, run, workdir, tools=False)
    assert not (workdir / "evaluation.json").exists()
  else:
    result = evaluate_checkpoint(config, run, workdir, tools=False)
    sets = json.loads((workdir / "evaluation.json").read_text())["sets"]
    assert (sets["hard"]["aborted"], sets["easy"]["aborted"]) == (lost, 0)
    assert result.table().splitlines()[3].split()[-1] == str(lost)
  assert sum(e.status is EndStatus.ABORTED for e in read_episodes(workdir / "hard.jsonl")) == lost


def test_weights_of_another_policy_are_refused(run: pathlib.Path, workdir: pathlib.Path) -> None:
  config = tiny()
  config.policy.mlp_width = 32
  with pytest.raises(UserError, match=r"policy\.mlp_width=16, the config says 32"):
    evaluate_checkpoint(config, run, workdir)


def test_weights_of_another_tokenizer_are_refused(run: pathlib.Path, tmp_path: pathlib.Path) -> None:
  config = tiny()
  tokenizer = setup.build_tokenizer(config)
  policy = setup.build_policy(config, tokenizer)
  Publisher(tmp_path / "publications", policy.config, "another").publish(0, policy.init(jax.random.key(0)))
  with pytest.raises(UserError, match="another tokenizer"):
    evaluate_checkpoint(config, tmp_path, tmp_path / "out")


def test_an_interpreter_that_does_not_start_leaves_no_engine_behind(
  run: pathlib.Path, workdir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  async def fail(config):
    raise OSError("no interpreter today")

  monkeypatch.setattr(Interpreter, "start", fail)
  before = threading.enumerate()
  with pytest.raises(OSError, match="no interpreter today"):
    evaluate_checkpoint(tiny(), run, workdir)
  assert [t for t in threading.enumerate() if t not in before and t.name == "native-engine"] == []
