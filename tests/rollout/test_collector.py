from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import time

import pytest
from scripted_engine import EOS, TOKENIZER, ScriptedEngine, ScriptedTool, call, encode, problem

from agentic_rl.episode import EndStatus, Episode, Segment, ToolCall
from agentic_rl.errors import UserError
from agentic_rl.rewards import Reward, get_verifier
from agentic_rl.rollout.collector import collect, rollout_metrics
from agentic_rl.rollout.engine import Sampling
from agentic_rl.tools import FencedDialect, ToolOutcome

RIGHT, WRONG = encode("\\boxed{4}") + EOS, encode("\\boxed{5}") + EOS
DIALECT = FencedDialect()


def run(engine, problems, samples=1, tool=None, **options) -> list[Episode]:
  options = {"sampling": Sampling(max_new_tokens=100), "max_tokens": 200, **options}
  return asyncio.run(collect(engine, TOKENIZER, DIALECT, tool, problems, samples, **options))


def test_groups_come_back_sorted_and_scored_whatever_order_they_finish_in():
  rng = random.Random(0)

  class Shuffled(ScriptedEngine):
    async def generate(self, *args, **kwargs):
      await asyncio.sleep(rng.random() / 50)
      return await super().generate(*args, **kwargs)

  engine = Shuffled(lambda session: RIGHT if session.endswith(("0", "3")) else WRONG)
  finished = []
  episodes = run(engine, [problem("b"), problem("a"), problem("c")], 4, progress=finished.append)
  assert [(e.uid, e.sample) for e in episodes] == [(u, s) for u in "abc" for s in range(4)]
  assert [(e.uid, e.sample) for e in finished] != [(e.uid, e.sample) for e in episodes]
  assert sorted(finished, key=lambda e: (e.uid, e.sample)) == episodes
  assert [e.reward for e in episodes] == [1, 0, 0, 1] * 3
  assert episodes[0].reward_parts == {"correct": 1.0, "answered": 1.0}
  assert sorted(engine.ended) == [f"{u}/{s}" for u in "abc" for s in range(4)]


def test_hundreds_in_flight_and_the_tool_blocks_nobody():
  stream = call("1") + RIGHT
  engine = ScriptedEngine(lambda session: stream, delay_s=0.01)
  start = time.monotonic()
  episodes = run(engine, [problem(f"p{i}") for i in range(32)], 8, ScriptedTool(delay_s=0.2))
  assert time.monotonic() - start < 3  # one after another it would be a minute
  assert len(episodes) == 256 == engine.most_running
  assert all(e.reward == 1 for e in episodes)


def test_in_flight_is_bounded():
  engine = ScriptedEngine(lambda session: RIGHT, delay_s=0.002)
  run(engine, [problem(f"p{i}") for i in range(8)], 4, max_in_flight=5)
  assert engine.most_running == 5


def test_one_lost_episode_costs_no_other(caplog):
  def stream(session):
    return [ConnectionError("server gone")] if session == "p3/1" else RIGHT

  finished = []
  episodes = run(ScriptedEngine(stream), [problem(f"p{i}") for i in range(16)], 4, progress=finished.append)
  lost = [e for e in episodes if e.status is EndStatus.ABORTED]
  assert [(e.uid, e.sample, e.reward) for e in lost] == [("p3", 1, None)]
  assert len(finished) == 64
  assert "p3/1" in caplog.text
  assert "server gone" in caplog.text
  metrics = rollout_metrics(episodes)
  assert (metrics["episodes/aborted_count"], metrics["reward/mean"]) == (1, 1)


def test_lost_request_meets_its_deadline(caplog):
  class Hanging(ScriptedEngine):
    async def generate(self, token_ids, sampling, *, session):
      if session == "p3/1":
        await asyncio.Event().wait()
      return await super().generate(token_ids, sampling, session=session)

  engine = Hanging(lambda session: RIGHT)
  start = time.monotonic()
  episodes = run(engine, [problem(f"p{i}") for i in range(16)], 4, episode_timeout_s=0.3)
  assert time.monotonic() - start < 5
  assert sum(e.reward == 1 for e in episodes) == 63
  assert [e.uid for e in episodes if e.status is EndStatus.ABORTED] == ["p3"]
  assert "p3/1" in caplog.text
  assert "p3/1" in engine.ended


def test_request_that_the_engine_drops_is_a_lost_episode_and_no_cancellation():
  class Dropping(ScriptedEngine):
    async def generate(self, token_ids, sampling, *, session):
      if session == "p0/0":
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future
      return await super().generate(token_ids, sampling, session=session)

  episodes = run(Dropping(lambda session: RIGHT), [problem("p0"), problem("p1")])
  assert [e.status for e in episodes] == [EndStatus.ABORTED, EndStatus.ANSWERED]


def test_failing_tool_aborts_and_is_counted_without_a_reward():
  tool = ScriptedTool(ToolOutcome("lost", "infra_error"), *[ToolOutcome("4")] * 3)
  episodes = run(ScriptedEngine(lambda session: call("1") + RIGHT), [problem("a"), problem("b")], 2, tool)
  metrics = rollout_metrics(episodes)
  assert metrics["tool/infra_error_count"] == metrics["episodes/aborted_count"] == 1
  assert metrics["tool/error_frac"] == 0
  assert [e.reward for e in episodes if e.status is EndStatus.ABORTED] == [None]


def test_tool_that_raises_aborts_its_episode_only():
  tool = ScriptedTool(OSError("no worker"), ToolOutcome("4"), ToolOutcome("4"))
  episodes = run(ScriptedEngine(lambda session: call("1") + RIGHT), [problem("a")], 3, tool)
  assert sorted(e.status for e in episodes) == ["aborted", "answered", "answered"]


def test_failing_verifier_is_no_zero(caplog):
  def verifier(episode):
    if episode.sample == 1:
      raise RuntimeError("cannot tell")
    return Reward(0.0, {"correct": 0.0, "answered": 1.0})

  episodes = run(ScriptedEngine(lambda session: WRONG), [problem("a")], 3, verifiers=lambda name: verifier)
  assert [e.reward for e in episodes] == [0, None, 0]
  assert episodes[1].status is EndStatus.ABORTED
  assert episodes[1].text("policy") == "\\boxed{5}<eos>"  # what was rolled out is kept
  assert "a/1 was aborted: its verification failed" in caplog.text


def test_systematic_failure_raises_with_its_cause():
  engine = ScriptedEngine(lambda session: [ConnectionError("server gone")])
  finished = []
  with pytest.raises(RuntimeError, match=r"all 6 episodes were aborted.*server gone") as failure:
    run(engine, [problem("a"), problem("b")], 3, progress=finished.append)
  assert isinstance(failure.value.__cause__, ConnectionError)
  assert len(finished) == 6


def test_cancellation_leaves_nothing_running_and_what_finished_is_known():
  class Slow(ScriptedEngine):
    async def generate(self, token_ids, sampling, *, session):
      if not session.startswith("a/"):
        await asyncio.sleep(60)
      return await super().generate(token_ids, sampling, session=session)

  engine, finished = Slow(lambda session: RIGHT), []

  async def main():
    options = {"sampling": Sampling(max_new_tokens=100), "max_tokens": 200, "progress": finished.append}
    task = asyncio.create_task(collect(engine, TOKENIZER, DIALECT, None, [problem("a"), problem("b")], 2, **options))
    while len(finished) < 2:
      await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    return len(asyncio.all_tasks())

  assert asyncio.run(main()) == 1
  assert {(e.uid, e.reward) for e in finished} == {("a", 1.0)}
  assert sorted(engine.ended) == ["a/0", "a/1", "b/0", "b/1"]


def test_contradictions_are_refused_before_anything_runs():
  engine = ScriptedEngine(lambda session: RIGHT)
  with pytest.raises(UserError, match="uid 'a'"):
    run(engine, [problem("a"), problem("a")])
  with pytest.raises(UserError, match="'long' has 300 tokens"):
    run(engine, [problem("a"), problem("long", "x" * 300)])
  with pytest.raises(UserError, match="'boxd'"):
    run(engine, [dataclasses.replace(problem("a"), verifier="boxd")])
  assert engine.requests == []


def test_no_tool_for_a_dialect_with_calls_stops_the_collection():
  with pytest.raises(UserError, match="has none"):
    run(ScriptedEngine(lambda session: call("1") + RIGHT), [problem("a"), problem("b")], 2)


def test_every_problem_has_its_own_verifier():
  engine = ScriptedEngine(lambda session: encode("\\boxed{04}") + EOS)
  episodes = run(engine, [problem("a"), problem("b", verifier="boxed_number")])
  assert [e.reward for e in episodes] == [0, 1]


def made(uid, sample, pattern, correct, status=EndStatus.ANSWERED, calls=()) -> Episode:
  """Episode whose policy (1) and tool (0) tokens follow `pattern` after a prompt of two tokens."""
  segments = [Segment("prompt", (0, 0), "?")]
  for mask in pattern:
    segments.append(Segment("policy", (1,), "x", (-0.5,), (0,)) if mask else Segment("tool", (2,), "y"))
  episode = Episode(uid, sample, problem(uid), tuple(segments), tuple(calls), status)
  if status is EndStatus.ABORTED:
    return episode
  return episode.with_reward(float(correct), {"correct": float(correct), "answered": 1.0})


def test_metrics_by_hand():
  def tool_call(status, wall_s=0.5):
    return ToolCall("c", "o", status, wall_s)

  episodes = [
    made("a", 0, [1, 1, 0, 0, 0, 1], True, calls=[tool_call("ok"), tool_call("timeout", 1.5)]),
    made("a", 1, [1], False),
    made("b", 0, [1, 1], True),
    made("b", 1, [1], True),
    made("c", 0, [1], False, EndStatus.CALL_BUDGET, [tool_call("error", 1.0), tool_call("over_budget")]),
    made("c", 1, [1, 1, 1, 1], False, EndStatus.LENGTH, [tool_call("refused")]),
    made("d", 0, [1] * 100, False, EndStatus.ABORTED, [tool_call("infra_error")]),
  ]
  metrics = rollout_metrics(episodes)
  assert metrics == pytest.approx(
    {
      "reward/mean": 1 / 2,
      "reward/std": 1 / 2,
      "rollout/accuracy": 1 / 2,
      "rollout/code_proportion": 2 / 6,  # a call that was refused or over the budget executed nothing
      "rollout/code_in_correct": 1 / 3,
      "rollout/code_count": 3 / 6,
      "rollout/response_length": (3 + 1 + 2 + 1 + 1 + 4) / 6,
      "rollout/tool_length": 3 / 6,
      "rollout/total_length": (6 + 1 + 2 + 1 + 1 + 4) / 6,
      "policy/entropy": 0.5,
      "tool/calls": 3,
      "tool/error_frac": 2 / 3,
      "tool/timeout_frac": 1 / 3,
      "tool/wall_s": 1.0,
      "tool/infra_error_count": 1,
      "groups/all_correct_frac": 1 / 3,
      "groups/all_wrong_frac": 1 / 3,
      "groups/mixed_frac": 1 / 3,
      "episodes/answered_frac": 4 / 6,
      "episodes/length_frac": 1 / 6,
      "episodes/call_budget_frac": 1 / 6,
      "episodes/aborted_count": 1,
    }
  )


def test_a_share_of_nothing_is_nan():
  metrics = rollout_metrics([made("a", 0, [1], False)])
  assert metrics["rollout/code_proportion"] == 0
  assert math.isnan(metrics["rollout/code_in_correct"])
  assert math.isnan(metrics["tool/error_frac"])
  assert math.isnan(rollout_metrics([])["reward/mean"])


def test_metric_names_are_in_the_guide():
  from agentic_rl.train.metric_guide import METRICS

  assert set(rollout_metrics([])) <= {metric.pattern for metric in METRICS}


def test_verifier_of_the_registry_is_the_default():
  assert get_verifier("boxed")(made("a", 0, [1], False)).value == 0
