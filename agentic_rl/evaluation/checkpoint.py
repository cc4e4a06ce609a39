"""Evaluation of a published checkpoint on the held-out sets of a config."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib

from ml_collections import ConfigDict
from tqdm import tqdm

from agentic_rl.episode import Publication
from agentic_rl.errors import UserError
from agentic_rl.evaluation.evaluate import Evaluation, evaluate
from agentic_rl.rollout.dump import write_episodes
from agentic_rl.rollout.engine import Sampling
from agentic_rl.sandbox import Interpreter
from agentic_rl.tools import InterpreterTool
from agentic_rl.train import setup
from agentic_rl.train.config_check import check_config
from agentic_rl.train.publication import check_fits, latest, open_publication


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
    config: The recipe whose `data.evaluation` sets are used.
    checkpoint: A publication or a run directory.
    workdir: Where results go.
    tools: Whether code is executed; without, fences are text like any other (`call_budget` 0).

  Raises:
    UserError: For a config or a checkpoint that cannot work.
  """
  return asyncio.run(_evaluate(config, find_publication(checkpoint), pathlib.Path(workdir), tools))


async def _evaluate(config: ConfigDict, publication: Publication, workdir: pathlib.Path, tools: bool) -> Evaluation:
  check_config(config)
  tokenizer = setup.build_tokenizer(config)
  policy = setup.build_policy(config, tokenizer)
  check_fits(publication, policy.config)
  config = config.copy_and_resolve_references()
  if not tools:
    config.dialect.call_budget, config.dialect.budget_end = 0, "free"
  sets = {name: setup.build_problems(section) for name, section in config.data.evaluation.items()}
  engine = setup.build_engine(config, policy, tokenizer, setup.build_mesh(config))
  interpreter = await Interpreter.start(setup.build_interpreter_config(config)) if tools else None
  settings, rollout = config.evaluation, config.rollout
  total = settings.samples * sum(map(len, sets.values()))
  try:
    await engine.load(publication)
    with tqdm(total=total, desc="evaluate", unit="episode", dynamic_ncols=True) as bar:
      evaluation = await evaluate(
        engine,
        tokenizer,
        setup.build_dialect(config),
        InterpreterTool(interpreter) if interpreter is not None else None,
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
        progress=lambda _: bar.update(),
      )
  finally:
    await engine.close()
    if interpreter is not None:
      await interpreter.close()
  workdir.mkdir(parents=True, exist_ok=True)
  for name, episodes in evaluation.episodes.items():
    write_episodes(workdir / f"{name}.jsonl", episodes)
  settings_used = {"checkpoint": publication.path, "version": publication.version, "tools": tools, **settings.to_dict()}
  record = {"settings": settings_used, "sets": {k: dict(v) for k, v in evaluation.sets.items()}}
  (workdir / "evaluation.json").write_text(json.dumps(record, indent=1).replace("NaN", "null") + "\n")
  (workdir / "evaluation.md").write_text(evaluation.table(markdown=True) + "\n")
  return evaluation
