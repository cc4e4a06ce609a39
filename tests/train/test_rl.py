"""The reinforcement-learning loop piece by piece; whole runs are in tests/integration."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from agentic_rl.data import Batch
from agentic_rl.data.arithmetic import tokenizer as arithmetic_tokenizer
from agentic_rl.episode import (
  Completion,
  EndStatus,
  Episode,
  Finish,
  FinishKind,
  Problem,
  Publication,
  Segment,
  ToolCall,
)
from agentic_rl.parallel import MeshShape, make_mesh
from agentic_rl.policy import Policy, PolicyConfig
from agentic_rl.rollout.dump import read_episodes
from agentic_rl.rollout.engine import Sampling
from agentic_rl.tools import ToolOutcome
from agentic_rl.train import rl
from agentic_rl.train.config_check import load_config
from agentic_rl.train.publication import Publisher

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOKENIZER = arithmetic_tokenizer()
POLICY = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_width": 16, "mlp_width": 64}


@pytest.fixture
def config(tmp_path: pathlib.Path) -> ConfigDict:
  """The nano study's recipe, tiny, with random weights to start from."""
  config = load_config(str(ROOT / "configs" / "zerotir_nano.py")).unlock()
  config.policy.update(POLICY)
  config.data.train.options.update(count=20, families={"table": 1.0})
  config.data.evaluation = ConfigDict()
  config.rollout.update(slots=8, max_tokens=64, problems=4, samples=4)
  config.rollout.native.update(batch_sizes=(), attend_lengths=(), prefill_widths=(16,))
  config.train.update(iterations=2, minibatches=2, microbatch_rows=8, length_buckets=(64,))
  policy = PolicyConfig(vocab_size=TOKENIZER.vocab_size, qk_norm=True, **POLICY)
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: 0.2 * rng.standard_normal(x.shape, np.float32), Policy(policy).abstract_params())
  config.init_from = Publisher(tmp_path / "base", policy, TOKENIZER.fingerprint).publish(0, params).path
  return config.lock()


def with_run(config: ConfigDict, workdir: pathlib.Path, work: Callable[[rl.Run], Coroutine[Any, Any, None]]) -> None:
  async def started() -> None:
    async with contextlib.AsyncExitStack() as stack:
      await work(await rl.Run.start(config, workdir, stack))

  asyncio.run(started())


def episode(
  uid: str = "a",
  sample: int = 0,
  correct: bool = True,
  *,
  tokens: int = 3,
  status: EndStatus = EndStatus.ANSWERED,
  calls: Sequence[ToolCall] = (),
) -> Episode:
  segments = [Segment("prompt", (20, 21), "..")]
  if tokens:
    segments.append(Segment("policy", (22,) * tokens, "." * tokens, (-0.5,) * tokens, (0,) * tokens))
  reward = float(correct)
  aborted = status is EndStatus.ABORTED
  return Episode(
    uid,
    sample,
    Problem(uid, "test", "math", "1+1", "2"),
    tuple(segments),
    tuple(calls),
    status,
    None if aborted else reward,
    {} if aborted else {"correct": reward},
  )


# ---- episodes that were lost ----

OK, BROKEN = ToolCall("print(1)", "1", "ok"), ToolCall("print(1)", "no sandbox", "infra_error")
LOST = EndStatus.ABORTED


@pytest.mark.parametrize(
  ("aborted", "failed_calls", "callers", "episodes", "allowed", "message"),
  [
    (0, 0, 0, 16, 0.0, None),
    (1, 0, 0, 16, 0.0, None),  # a single one is always allowed
    (2, 0, 0, 16, 0.1, "2 of 16 episodes were aborted, config.rollout.max_aborted_frac=0.1; 2 because the engine"),
    (2, 0, 0, 20, 0.1, None),
    (3, 0, 0, 20, 0.1, "3 of 20 episodes were aborted"),
    (0, 1, 1, 200, 0.1, None),
    # A base model that rarely calls: few of all, all of those that matter.
    (0, 8, 8, 200, 0.1, "8 of 8 episodes that called the tool were aborted.*8 because the tool failed: no sandbox"),
    (0, 3, 20, 200, 0.1, "3 of 20 episodes that called the tool were aborted"),
    (0, 2, 20, 200, 0.1, None),
    (2, 2, 60, 60, 1.0, None),
  ],
)
def test_too_many_lost_episodes_stop_the_run(
  config: ConfigDict,
  aborted: int,
  failed_calls: int,
  callers: int,
  episodes: int,
  allowed: float,
  message: str | None,
) -> None:
  with config.unlocked():
    config.rollout.max_aborted_frac = allowed
  run = run_of(config, RecordingLearner())
  kinds = [(LOST, ())] * aborted + [(LOST, (OK, BROKEN))] * failed_calls
  kinds += [(EndStatus.ANSWERED, (OK,))] * (callers - failed_calls)
  kinds += [(EndStatus.ANSWERED, ())] * (episodes - len(kinds))
  collected = [episode("a", i, status=status, calls=calls) for i, (status, calls) in enumerate(kinds)]
  if message is None:
    run._check_aborted(collected)
  else:
    with pytest.raises(RuntimeError, match=message):
      run._check_aborted(collected)


class ScriptedEngine:
  """Writes the same text in every episode; sample 1 of each group calls the tool, the others answer at once."""

  tokens_generated = 0
  version = 0

  async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
    answer = "\\boxed{2}"
    text = f"```python\nprint(2)\n```\n{answer}" if session.endswith("/1") else answer
    text = text.removeprefix(TOKENIZER.decode(token_ids).partition("\n")[2])
    ids: list[int] = []
    finish = Finish(FinishKind.STOP, TOKENIZER.eos_id)
    for token in [*TOKENIZER.encode(text), TOKENIZER.eos_id]:
      ids.append(token)
      if found := [s for s in sampling.stop if s in TOKENIZER.decode(ids)]:
        finish = Finish(FinishKind.STOP, found[0])
        break
    return Completion(tuple(ids), (-0.1,) * len(ids), finish, (self.version,) * len(ids))

  async def load(self, publication: Publication) -> None:
    self.version = publication.version

  async def end_session(self, session: str) -> None: ...

  async def close(self) -> None: ...


def test_a_tool_that_raises_is_counted_where_no_call_came_back(config: ConfigDict) -> None:
  collected = [episode("a", i, status=LOST if i < 3 else EndStatus.ANSWERED) for i in range(100)]
  run = run_of(config, RecordingLearner())
  run._check_aborted(collected)  # without a tool these are three of a hundred
  run.tool = object()  # type: ignore[assignment]
  with pytest.raises(RuntimeError, match=r"3 of 3 episodes that called the tool were aborted.*see the log"):
    run._check_aborted(collected)
  run._check_aborted([*collected, episode("b", calls=[OK])])


def test_a_tool_that_always_fails_stops_the_run_before_anything_is_learned(
  config: ConfigDict, workdir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  async def publishes_nothing(_: rl.Run) -> dict[str, float]:
    return {}

  class BrokenTool:
    async def end(self, session: str) -> None:
      pass

    async def run(self, code: str, *, session: str) -> ToolOutcome:
      assert "print(2)" in code
      return ToolOutcome("no sandbox", "infra_error")

  async def start_tool(*_: Any) -> BrokenTool:
    return BrokenTool()

  monkeypatch.setattr(rl.setup, "start_tool", start_tool)
  monkeypatch.setattr(rl.setup, "build_engine", lambda *_: ScriptedEngine())
  monkeypatch.setattr(rl.Run, "publish", publishes_nothing)
  with config.unlocked():
    config.evaluation.every = 0
    config.rollout.update(samples=16, max_aborted_frac=0.2)
  with pytest.raises(
    RuntimeError, match=r"4 of 4 episodes that called the tool were aborted.*4 because the tool failed"
  ):
    rl.train(config, workdir)
  # What happened can be read, and nothing was saved on top of it.
  episodes = read_episodes(workdir / "episodes" / "iteration_000001.jsonl")
  assert sum(e.status is EndStatus.ABORTED for e in episodes) == 4 and len(episodes) == 64
  assert not [p for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()]
  assert not (workdir / "done.json").exists()


# ---- what is learned from ----


@dataclasses.dataclass
class RecordingLearner:
  """Remembers its batches."""

  loss: float = 0.0
  batches: list[tuple[Batch, int | None]] = dataclasses.field(default_factory=list)

  def update(self, state: int, batch: Batch, *, max_rows: int | None = None) -> tuple[int, dict[str, float]]:
    self.batches.append((batch, max_rows))
    return state + 1, {"loss": self.loss, "entropy": 1.0, "grad_norm": 0.1, "learning_rate": 1e-3}


def run_of(config: ConfigDict, learner: RecordingLearner, step: int = 0) -> rl.Run:
  """A run with nothing but what `learn` needs."""
  parts = {field.name: None for field in dataclasses.fields(rl.Run)}
  return rl.Run(**{**parts, "config": config, "learner": learner, "state": 0, "step": step, "last_metrics": {}})  # type: ignore[arg-type]


def group(uid: str, rewards: Sequence[bool], tokens: int = 3) -> list[Episode]:
  return [episode(uid, i, correct, tokens=tokens + i) for i, correct in enumerate(rewards)]


def trained_lengths(learner: RecordingLearner) -> list[int]:
  return sorted(
    int((batch.loss_mask & (batch.sequence_ids == i)).sum())
    for batch, _ in learner.batches
    for i in range(batch.sequence_ids.max() + 1)
  )


def test_groups_with_nothing_to_learn_and_lost_episodes_are_left_out(config: ConfigDict) -> None:
  episodes = [
    *group("all right", [True] * 4, tokens=40),
    *group("all wrong", [False] * 4, tokens=44),
    *group("mixed", [True, False, False, True], tokens=3),
    *group("half lost", [True, False], tokens=10),
    episode("half lost", 2, status=LOST, tokens=20),
    episode("half lost", 3, True, tokens=0),
  ]
  learner = RecordingLearner()
  run = run_of(config, learner)
  metrics = run.learn(episodes)
  assert trained_lengths(learner) == [3, 4, 5, 6, 10, 11]
  assert run.state == len(learner.batches) == 2  # one optimizer step for each mini-batch
  assert metrics["tokens"] == 3 + 4 + 5 + 6 + 10 + 11 + 6 * 2
  assert metrics["policy/entropy_trained"] == 1.0 and metrics["optimizer/grad_norm"] == pytest.approx(0.1)
  # Every row length and number of rows is one that was compiled before.
  assert {(batch.shape[1], rows) for batch, rows in learner.batches} == {(64, 8)}
  for batch, _ in learner.batches:
    assert batch.shape[0] == 8 and batch.loss_weights.sum() == pytest.approx(1.0)
    assert np.all(batch.advantages[~batch.loss_mask] == 0) and np.any(batch.advantages)


def test_nothing_to_learn_at_all_leaves_the_weights(config: ConfigDict) -> None:
  learner = RecordingLearner()
  run = run_of(config, learner)
  assert run.learn(group("a", [True] * 4) + group("b", [False] * 4)) == {"tokens": 0}
  assert run.state == 0 and not learner.batches


def test_mini_batches_are_a_function_of_seed_and_iteration(config: ConfigDict) -> None:
  def parts(step: int, seed: int = 0) -> list[list[int]]:
    with config.unlocked():
      config.seed = seed
    return [p.tolist() for p in run_of(config, RecordingLearner(), step)._minibatches(13)]

  first = parts(5)
  assert sorted(sum(first, [])) == list(range(13)) and [len(p) for p in first] == [7, 6]
  assert first == parts(5) != parts(6) and first != parts(5, seed=1)
  assert [p.tolist() for p in run_of(config, RecordingLearner())._minibatches(1)] == [[0]]
  assert run_of(config, RecordingLearner())._minibatches(0) == []


def test_an_update_that_is_not_finite_ends_the_run(config: ConfigDict) -> None:
  run = run_of(config, RecordingLearner(loss=math.nan), step=6)
  with pytest.raises(RuntimeError, match=r"the update of iteration 7 is not finite.*last checkpoint is intact"):
    run.learn(group("a", [True, False]))


# ---- publication and alarm ----


def test_the_alarm_rings_when_the_engine_serves_other_weights(
  config: ConfigDict, workdir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.setattr(rl.setup, "build_mesh", lambda _: make_mesh(MeshShape(), jax.devices()[:1]))
  with config.unlocked():
    config.dialect.update(call_budget=0, budget_end="free")  # no interpreter is started

  async def work(run: rl.Run) -> None:
    assert run.tool is None
    run.step = 1
    found = await run.publish()
    assert 0 <= found["sync/logprob_diff_mean"] <= found["sync/logprob_diff_max"] < 1e-4

    load = run.engine.load
    run.state = run.state._replace(params=jax.tree.map(lambda x: 1.05 * x, run.state.params))

    async def forgets_to_load(publication: Publication) -> None:
      run.engine._version = publication.version  # claims to have it

    run.engine.load, run.step = forgets_to_load, 2
    with pytest.raises(RuntimeError, match=r"engine and learner disagree after version 2.*not those that were trained"):
      await run.publish()

    async def lags(publication: Publication) -> None:
      del publication

    run.engine.load, run.step = lags, 3
    with pytest.raises(RuntimeError, match=r"sampled with version \{2\} after version 3 was loaded"):
      await run.publish()
    run.engine.load, run.step = load, 4
    assert (await run.publish())["sync/logprob_diff_max"] < 1e-4
    assert run.engine.compile_count() <= run.engine._config.compile_bound()

  with_run(config, workdir, work)


# ---- the end ----


def test_the_last_metrics_are_found_again_when_nothing_is_left_to_do(
  config: ConfigDict, tmp_path: pathlib.Path
) -> None:
  rows = [
    {"step": 1, "time": 5.0, "reward/mean": 0.25},
    {"step": 2, "time": 9.0, "reward/mean": 0.5, "rollout/code_in_correct": None},
  ]
  (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  run = run_of(config, RecordingLearner(), step=2)
  run.workdir = tmp_path
  assert run.finish() == {"step": 2, "reward/mean": 0.5}
  assert json.loads((tmp_path / "done.json").read_text()) == {"step": 2, "reward/mean": 0.5}


def test_seeds_of_different_uses_differ() -> None:
  seeds = {rl._mix(seed, step, stream) for seed in range(5) for step in range(20) for stream in range(4)}
  assert len(seeds) == 5 * 20 * 4 and all(0 <= s < 2**63 for s in seeds)
