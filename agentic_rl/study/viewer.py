"""Prints episodes readably: `python -m agentic_rl.study.viewer runs/…/episodes/iteration_000012.jsonl --uid sum-7`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping, Sequence

from agentic_rl.episode import Episode
from agentic_rl.rollout.dump import read_episodes

# Dim prompt, plain policy, coloured tool: what the policy itself wrote stands out.
_COLORS = {"prompt": "2", "policy": "0", "tool": "36", "good": "32", "bad": "31", "head": "1"}


def format_episode(episode: Episode, color: bool) -> str:
  """An episode as text for a terminal: head line, each segment under its label, the calls, the reward's parts.

  Args:
    episode: What to show.
    color: Use terminal colours.
  """
  reward = "no reward" if episode.reward is None else f"reward {episode.reward:g}"
  mood = "bad" if episode.reward is None or episode.reward <= 0 else "good"
  lines = [
    _paint(f"━━ {episode.uid} · sample {episode.sample} · {episode.status} · ", "head", color)
    + _paint(reward, mood, color),
    f"   source {episode.problem.source}, wanted answer {episode.problem.answer!r}",
  ]
  for segment in episode.segments:
    versions = sorted(set(segment.versions))
    # One completion may straddle a publication, so a segment may have more than one version.
    version = f", version {', '.join(map(str, versions))}" if versions else ""
    confidence = (
      f", mean log-probability {sum(segment.logprobs) / len(segment.logprobs):.2f}" if segment.logprobs else ""
    )
    label = f"── {segment.origin}, {len(segment.token_ids)} tokens{version}{confidence}"
    lines += [_paint(label, "head", color), _paint(_printable(segment.text), segment.origin, color)]
  for number, call in enumerate(episode.calls, start=1):
    mood = "good" if call.status == "ok" else "bad"
    lines.append(f"call {number}: {_paint(call.status, mood, color)} in {call.wall_s * 1000:.1f} ms")
  if episode.reward_parts:
    lines.append("reward parts: " + _pairs(episode.reward_parts))
  return "\n".join(lines) + "\n"


def select(episodes: Iterable[Episode], uid: str | None, index: int | None) -> list[Episode]:
  """The episodes of one problem, or the one at a place (from 0, negative from the end); all when neither is given."""
  chosen = [episode for episode in episodes if uid is None or episode.uid == uid]
  if index is None:
    return chosen
  return [chosen[index]] if -len(chosen) <= index < len(chosen) else []


def _pairs(values: Mapping[str, float]) -> str:
  return ", ".join(f"{name} {value:g}" for name, value in values.items())


def _printable(text: str) -> str:
  """Keeps lines and tabs, shows other control characters: a policy must not steer the reader's terminal."""
  return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _paint(text: str, kind: str, color: bool) -> str:
  return f"\033[{_COLORS[kind]}m{text}\033[0m" if color else text


def main(argv: Sequence[str]) -> int:
  """Returns the exit code."""
  parser = argparse.ArgumentParser(prog="python -m agentic_rl.study.viewer", description="Prints episodes readably.")
  parser.add_argument("path", help="an episodes file (JSON lines)")
  parser.add_argument("--uid", help="only the samples of this problem")
  parser.add_argument("--index", type=int, help="only the one at this place, from 0 (after --uid)")
  args = parser.parse_args(argv)
  try:
    episodes = read_episodes(args.path)
  except (OSError, ValueError) as error:
    sys.stderr.write(f"error: cannot read episodes from {args.path}: {error}\n")
    return 2
  chosen = select(episodes, args.uid, args.index)
  if not chosen:
    sys.stderr.write(f"error: no such episode among the {len(episodes)} of {args.path}\n")
    return 2
  color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
  try:
    for episode in chosen:
      sys.stdout.write(format_episode(episode, color) + "\n")
    sys.stdout.flush()
  except BrokenPipeError:
    # `viewer … | head`: the reader has seen enough. Python would flush once more at exit, into the closed pipe.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
