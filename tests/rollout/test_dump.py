from __future__ import annotations

import asyncio
import dataclasses
import json
import random

import numpy as np
import pytest
from scripted_engine import EOS, TOKENIZER, ScriptedEngine, ScriptedTool, call, encode, ids, problem

from agentic_rl.episode import EndStatus, Episode, Problem, Segment, ToolCall
from agentic_rl.errors import UserError
from agentic_rl.rollout.collector import collect
from agentic_rl.rollout.dump import read_episodes, write_episodes
from agentic_rl.rollout.engine import Sampling
from agentic_rl.rollout.replay import ReplayEngine, ReplayMismatch, ReplayTool
from agentic_rl.tools import FencedDialect, ToolOutcome

DIALECT = FencedDialect(call_budget=2, budget_end="stop")
OPTIONS = {"sampling": Sampling(max_new_tokens=100), "max_tokens": 120}


def recorded() -> list[Episode]:
  """Episodes that end in every way there is."""
  streams = {
    "p/0": ids("he", "llo") + call("1+1") + call("2") + encode("\\boxed{4}") + EOS,
    "p/1": call("1") + call("2") + call("3"),
    "p/2": encode("x" * 200),
    "p/3": encode("no more"),
    "p/4": encode("\\boxed{4}</answer>"),
    "p/5": call("1") + ids("```python\n") + encode("x" * 200),
  }
  tool = ScriptedTool(ToolOutcome("4", "ok", 0.1, 0.05))
  episodes = asyncio.run(collect(ScriptedEngine(streams), TOKENIZER, DIALECT, tool, [problem()], 6, **OPTIONS))
  assert [e.status for e in episodes] == ["answered", "call_budget", "length", "aborted", "answered", "length"]
  return episodes


def test_round_trip_is_exact(tmp_path):
  episodes = recorded()
  path = tmp_path / "episodes" / "iteration_000012.jsonl"
  write_episodes(path, episodes)
  assert read_episodes(path) == episodes
  assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_round_trip_of_everything_odd(tmp_path):
  rng = random.Random(1)
  logprobs = tuple(float(np.float32(-rng.expovariate(1))) for _ in range(50)) + (-1e-30, 0.0)
  chat = Problem(
    "ü/\u2028x", "s", "math", ({"role": "user", "content": "数"},), "4", metadata={"level": [1, {"a": None}]}
  )
  segments = (
    Segment("prompt", (), ""),
    Segment("policy", tuple(range(52)), "line\u2028\n\r\x85\x00\ud800\ufffd", logprobs, (7,) * 52),
    Segment("tool", (1,), '"{}"\\'),
  )
  episode = Episode(chat.uid, 3, chat, segments, (ToolCall("c\n", "o", "ok", 0.1, 1 / 3),), EndStatus.LENGTH)
  episode = episode.with_reward(0.1 + 0.2, {"correct": 0.0})
  path = tmp_path / "a.jsonl"
  write_episodes(path, [episode, episode])
  assert read_episodes(path) == [episode, episode]
  assert path.read_bytes().count(b"\n") == 2


def test_numpy_values_of_an_engine_are_written(tmp_path):
  segments = (Segment("prompt", (np.int32(3),), "a"), Segment("policy", (np.int64(4),), "b", (np.float32(-0.1),), (0,)))
  write_episodes(tmp_path / "a", [Episode("p", 0, problem(), segments, (), EndStatus.LENGTH)])
  (back,) = read_episodes(tmp_path / "a")
  assert back.token_ids == (3, 4)
  assert np.float32(back.logprobs[1]) == np.float32(-0.1)


def test_lines_are_readable(tmp_path):
  write_episodes(tmp_path / "a", recorded()[:1])
  line = json.loads((tmp_path / "a").read_text())
  assert (line["schema"], line["uid"], line["sample"], line["status"], line["reward"]) == (1, "p", 0, "answered", 1.0)
  assert [s["origin"] for s in line["segments"][:4]] == ["prompt", "policy", "policy", "tool"]
  assert line["segments"][-1]["text"] == "\\boxed{4}<eos>"


def test_failed_write_leaves_the_old_file(tmp_path):
  path = tmp_path / "a.jsonl"
  episodes = recorded()
  write_episodes(path, episodes[:2])

  def broken():
    yield from episodes
    raise RuntimeError("interrupted")

  with pytest.raises(RuntimeError):
    write_episodes(path, broken())
  assert read_episodes(path) == episodes[:2]
  assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_full_disk_is_one_clear_message(tmp_path, monkeypatch):
  path = tmp_path / "a.jsonl"
  write_episodes(path, recorded()[:1])

  def full(descriptor):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr("os.fsync", full)
  with pytest.raises(UserError, match=r"a\.jsonl: No space left"):
    write_episodes(path, recorded())
  assert len(read_episodes(path)) == 1
  assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]
  with pytest.raises(UserError, match="cannot write"):
    write_episodes(path / "below_a_file", [])


@pytest.mark.parametrize("line", ["not json", "[]", "{}", '{"schema": 99}', ""])
def test_broken_line_is_named(tmp_path, line):
  path = tmp_path / "a.jsonl"
  write_episodes(path, recorded()[:1])
  path.write_text(path.read_text() + line + "\n")
  with pytest.raises(ValueError, match=r"a\.jsonl, line 2 is not an episode"):
    read_episodes(path)


def replay(engine, tool, episodes, dialect=DIALECT, a_problem=None) -> list[Episode]:
  a_problem = a_problem or problem()
  return asyncio.run(collect(engine, TOKENIZER, dialect, tool, [a_problem], len(episodes), **OPTIONS))


def test_replay_gives_the_same_episodes(tmp_path):
  episodes = recorded()
  write_episodes(tmp_path / "a", episodes)
  engine, tool = ReplayEngine(read_episodes(tmp_path / "a")), ReplayTool(episodes)
  assert replay(engine, tool, episodes) == episodes
  assert replay(engine, tool, episodes) == episodes  # and again


def ask(engine, token_ids, session="p/0", **sampling):
  sampling = {"max_new_tokens": 100, "stop": DIALECT.stops(DIALECT.start()), "stop_token_ids": (1,), **sampling}
  return asyncio.run(engine.generate(token_ids, Sampling(**sampling), session=session))


def test_replay_names_a_mismatch():
  episodes = recorded()
  engine = ReplayEngine(episodes)
  prompt = episodes[0].segments[0].token_ids
  assert ask(engine, prompt).token_ids == episodes[0].segments[1].token_ids
  with pytest.raises(ReplayMismatch, match="no episode q/0"):
    ask(engine, prompt, "q/0")
  with pytest.raises(ReplayMismatch, match=r"p/0: token 1 is 0"):
    ask(engine, (prompt[0], 0, *prompt[2:]))
  with pytest.raises(ReplayMismatch, match="no completion was recorded after 3 tokens"):
    ask(engine, prompt[:3])
  with pytest.raises(ReplayMismatch, match=r"token \d+ is 9, recorded was the end"):
    ask(engine, (*episodes[0].token_ids, 9))
  with pytest.raises(ReplayMismatch, match="1 tokens were asked for"):
    ask(engine, prompt, max_new_tokens=1)
  with pytest.raises(ReplayMismatch, match="ends at none of the stops"):
    ask(engine, prompt, stop=("never",))


def test_replay_with_another_dialect_is_a_mismatch():
  episodes = recorded()[:1]
  other = dataclasses.replace(DIALECT, observation_template="<{output}>")
  with pytest.raises(RuntimeError, match="ReplayMismatch"):
    replay(ReplayEngine(episodes), ReplayTool(episodes), episodes, other)


def test_replay_tool_refuses_another_call():
  tool = ReplayTool(recorded()[:1])
  with pytest.raises(ReplayMismatch, match="call 0 was not recorded"):
    asyncio.run(tool.run("other", session="p/0"))


def test_replay_of_two_episodes_of_one_name_is_refused():
  with pytest.raises(ValueError, match="same uid and sample"):
    ReplayEngine(recorded()[:1] * 2)
