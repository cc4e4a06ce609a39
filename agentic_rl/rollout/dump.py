"""Episodes to JSONL and back: a line an episode, readable, exact to the last bit of every log-probability."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

from agentic_rl.episode import EndStatus, Episode, Problem, Segment, ToolCall
from agentic_rl.errors import UserError

SCHEMA = 1


def episode_to_json(episode: Episode) -> dict[str, Any]:
  """Plain JSON values of an episode."""
  return {
    "schema": SCHEMA,
    "uid": episode.uid,
    "sample": episode.sample,
    "status": str(episode.status),
    "reward": episode.reward,
    "reward_parts": dict(episode.reward_parts),
    "problem": dataclasses.asdict(episode.problem),
    "segments": [
      {
        "origin": s.origin,
        "text": s.text,
        "token_ids": [int(x) for x in s.token_ids],
        "logprobs": [float(x) for x in s.logprobs],
        "versions": [int(x) for x in s.versions],
      }
      for s in episode.segments
    ],
    "calls": [dataclasses.asdict(call) for call in episode.calls],
  }


def episode_from_json(record: dict[str, Any]) -> Episode:
  """The episode of `episode_to_json`. Raises `ValueError`, `KeyError` or `TypeError` for anything else."""
  if record["schema"] != SCHEMA:
    raise ValueError(f"it has schema {record['schema']}, this version reads {SCHEMA}")
  problem = dict(record["problem"])
  if not isinstance(problem["prompt"], str):
    problem["prompt"] = tuple(problem["prompt"])
  return Episode(
    uid=record["uid"],
    sample=record["sample"],
    problem=Problem(**problem),
    segments=tuple(
      Segment(s["origin"], tuple(s["token_ids"]), s["text"], tuple(s["logprobs"]), tuple(s["versions"]))
      for s in record["segments"]
    ),
    calls=tuple(ToolCall(**call) for call in record["calls"]),
    status=EndStatus(record["status"]),
    reward=record["reward"],
    reward_parts=record["reward_parts"],
  )


def write_episodes(path: str | os.PathLike[str], episodes: Iterable[Episode]) -> None:
  """Writes episodes to `path`, whole or not at all: a file of that name stays as it was until all is on disk.

  Raises:
    UserError: The disk is full, or the folder cannot be written; what was written so far is removed.
  """
  path = pathlib.Path(path)
  part = path.with_name(f".{path.name}.{os.getpid()}.part")
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
      # A policy may sample half of a surrogate pair; the dump must take it all the same.
      with open(part, "w", encoding="utf-8", errors="surrogatepass", newline="\n") as file:
        for episode in episodes:
          file.write(json.dumps(episode_to_json(episode), ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
      os.replace(part, path)
    finally:
      part.unlink(missing_ok=True)
  except OSError as error:
    raise UserError(f"cannot write the episodes to {path}: {error.strerror}; free or choose another disk") from error


def read_episodes(path: str | os.PathLike[str]) -> list[Episode]:
  """Episodes of a file by `write_episodes`, equal to those written. Raises `ValueError` with the line at fault."""
  episodes = []
  with open(path, encoding="utf-8", errors="surrogatepass", newline="\n") as file:
    for number, line in enumerate(file, 1):
      try:
        episodes.append(episode_from_json(json.loads(line)))
      except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{os.fspath(path)}, line {number} is not an episode: {error!r}") from error
  return episodes
