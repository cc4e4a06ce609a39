"""Evaluation of a published checkpoint on the evaluation sets of a config."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import pathlib
from collections.abc import Sequence

from ml_collections import ConfigDict
from tqdm import tqdm

from agentic_rl.episode import EndStatus, Episode, Publication
from agentic_rl.errors import UserError
from agentic_rl.evaluation.evaluate import Evaluation, evaluate
from agentic_rl.rollout.dump import write_episodes
from agentic_rl.rollout.engine import Sampling
from agentic_rl.train import setup
from agentic_rl.train.config_check import check_config
from agentic_rl.train.publication import latest, open_publication, write_text


def find_publication(path: str | os.PathLike[str]) -> Publication:
  """The publication at `path`, which may be one itself, or a run directory or its `publications` (the latest is taken).

  Raises:
    UserError: If there is none.
  """
  where = pathlib.Path(path)
  for directory in (where, where / "publications"):
    if (directory / "LATEST").is_file() and (publication := latest(directory)) is not None:
      return publication
  if not (where / "manifest.json").is_file():
    raise UserError(f"{where} is neither a publication nor a run directory with publications")
  return open_publication(where)


def evaluate_checkpoint(
  config: ConfigDict, checkpoint: str | os.PathLike[str], workdir: str | os.PathLike[str], *, tools: bool = True
) -> Evaluation:
  """Evaluates with `config.evaluation` and writes `evaluation.json`, `evaluation.md` and all episodes to `workdir`.

  Args:
    config: The recipe whose `data.evaluation` sets and `seed` are used.
    checkpoint: A publication or a run directory.
    workdir: Where results go.
    tools: Whether code is executed; without, fences are text like any other (`call_budget` 0).

  Raises:
    UserError: For a config or a checkpoint that cannot work.
    RuntimeError: If more episodes of a set were aborted than `config.rollout.max_aborted_frac` allows; their files are
      written, the figures are not.
  """
  return asyncio.run(_evaluate(config, find_publication(checkpoint), setup.open_workdir(workdir), tools))


async def _evaluate(config: ConfigDict, publication: Publication, workdir: pathlib.Path, tools: bool) -> Evaluation:
  check_config(config)
  config = config.copy_and_resolve_references()
  config.init_from = publication.path
  if not tools:
    config.dialect.call_budget, config.dialect.budget_end = 0, "free"
  tokenizer = setup.build_tokenizer(config)
  policy = setup.build_policy(config, tokenizer)
  setup.initial_publication(config, policy, tokenizer)  # raises if the weights do not fit
  dialect = setup.build_dialect(config)
  sets = {name: setup.build_problems(section) for name, section in config.data.evaluation.items()}
  settings, rollout = config.evaluation, config.rollout
  total = settings.samples * sum(map(len, sets.values()))
  async with contextlib.AsyncExitStack() as stack:
    engine = setup.build_engine(config, policy, tokenizer, setup.build_mesh(config))
    stack.push_async_callback(engine.close)
    await engine.load(publication)
    tool = None
    if dialect.call_budget > 0:
      tool = await setup.start_tool(config, stack)
    bar = stack.enter_context(tqdm(total=total, desc="evaluate", unit="episode", dynamic_ncols=True))
    evaluation = await evaluate(
      engine,
      tokenizer,
      dialect,
      tool,
      sets,
      settings.samples,
      sampling=Sampling(
        max_new_tokens=rollout.max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        seed=config.seed,
      ),
      max_tokens=rollout.max_tokens,
      max_in_flight=rollout.max_in_flight,
      episode_timeout_s=rollout.episode_timeout_s or None,
      progress=lambda _: bar.update(),
    )
  for name, episodes in evaluation.episodes.items():
    write_episodes(workdir / f"{name}.jsonl", episodes)
  for name, episodes in evaluation.episodes.items():
    _check_aborted(name, episodes, rollout.max_aborted_frac)
  settings_used = {
    "checkpoint": publication.path,
    "version": publication.version,
    "tools": dialect.call_budget > 0,
    "seed": config.seed,
    **settings.to_dict(),
  }
  figures = {name: {k: _number(v) for k, v in values.items()} for name, values in evaluation.sets.items()}
  record = {"settings": settings_used, "sets": figures}
  write_text(workdir / "evaluation.json", json.dumps(record, indent=1, allow_nan=False) + "\n")
  write_text(workdir / "evaluation.md", evaluation.table(markdown=True) + "\n")
  return evaluation


def _check_aborted(name: str, episodes: Sequence[Episode], allowed: float) -> None:
  """Raises `RuntimeError` if more than a share of a set was aborted, or of the episodes that called the tool.

  The figures are those of the others. Where the tool fails, they would be those of the responses without code. A single
  one is always allowed.
  """
  for group, kind in ((episodes, "episodes"), ([e for e in episodes if e.calls], "episodes that called the tool")):
    aborted = sum(e.status is EndStatus.ABORTED for e in group)
    if aborted > max(1.0, allowed * len(group)):
      raise RuntimeError(
        f"{aborted} of {len(group)} {kind} of the set {name!r} were aborted, config.rollout.max_aborted_frac="
        f"{allowed:g}; the log and the episodes in the work directory say why"
      )


def _number(value: float) -> float | None:
  """A figure as JSON can say it: None for NaN."""
  return value if math.isfinite(value) else None
