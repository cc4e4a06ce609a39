"""The viewer shows every part of an episode and cannot be steered by one."""

from __future__ import annotations

import pathlib

import pytest

from agentic_rl.episode import EndStatus, Episode, Problem, Segment, ToolCall
from agentic_rl.rollout.dump import write_episodes
from agentic_rl.study import viewer


def episode(uid: str = "sum-7", sample: int = 0, tool_text: str = "42\n") -> Episode:
  return Episode(
    uid,
    sample,
    Problem(uid, "arithmetic", "math", "6*7=", "42"),
    (
      Segment("prompt", (1, 2), "6*7="),
      Segment("policy", (3, 4), "print(6*7)", (-0.5, -1.5), (3, 4)),
      Segment("tool", (5,), tool_text),
      Segment("policy", (6,), "\\boxed{42}", (-0.1,), (4,)),
    ),
    (ToolCall("print(6*7)", tool_text, "ok", wall_s=0.0123),),
    EndStatus.ANSWERED,
    1.0,
    {"correct": 1.0},
  )


def test_every_part_is_shown() -> None:
  text = viewer.format_episode(episode(), color=False)
  for part in (
    "sum-7 · sample 0 · answered · reward 1",
    "source arithmetic, wanted answer '42'",
    "prompt, 2 tokens\n6*7=",
    "policy, 2 tokens, version 3, 4, mean log-probability -1.00\nprint(6*7)",
    "tool, 1 tokens\n42\n",
    "\\boxed{42}",
    "call 1: ok in 12.3 ms",
    "reward parts: correct 1",
  ):
    assert part in text
  assert "\033[" not in text and "\033[36m42" in viewer.format_episode(episode(), color=True)


def test_control_characters_of_an_episode_do_not_reach_the_terminal() -> None:
  text = viewer.format_episode(episode(tool_text="\x1b[2J\x07é\tok\n"), color=False)
  assert "\x1b" not in text and "\\x1b[2J\\x07é\tok\n" in text


def test_choosing_by_uid_and_index(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  path = tmp_path / "episodes.jsonl"
  write_episodes(path, [episode("a", 0), episode("b", 0), episode("b", 1)])
  assert viewer.main([str(path), "--uid", "b", "--index", "-1"]) == 0
  shown = capsys.readouterr().out
  assert "b · sample 1" in shown and shown.count("━━") == 1
  assert viewer.main([str(path)]) == 0
  assert capsys.readouterr().out.count("━━") == 3
  assert viewer.main([str(path), "--uid", "c"]) == 2
  assert "no such episode among the 3" in capsys.readouterr().err
  assert viewer.main([str(tmp_path / "none.jsonl")]) == 2
  assert capsys.readouterr().err.startswith("error: cannot read episodes")
