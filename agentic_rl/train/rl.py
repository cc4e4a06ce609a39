"""The reinforcement-learning loop. Read `Run.iteration`: it is the project's one line of data.

    Problem - prompt -> Engine <-> Interpreter -> Episode - reward -> group - advantage -> Batch -> update -> Publication
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from agentic_rl.algorithms import ADVANTAGES, group_filter, group_ids_of, token_weights
from agentic_rl.data import Batch, ProblemOrder, pack
from agentic_rl.episode import EndStatus, Episode, Problem, Publication
from agentic_rl.errors import UserError
from agentic_rl.rollout.collector import collect, is_correct, rollout_metrics
from agentic_rl.rollout.dump import write_episodes
from agentic_rl.rollout.engine import Sampling
from agentic_rl.sandbox import Interpreter
from agentic_rl.tools import InterpreterTool
from agentic_rl.train import setup
from agentic_rl.train.checkpoints import Checkpoints, check_record
from agentic_rl.train.config_check import check_config
from agentic_rl.train.learner import Learner, LearnerConfig, LearnerState, policy_loss
from agentic_rl.train.metrics import MetricWriter
from agentic_rl.train.progress import Progress
from agentic_rl.train.publication import Publisher, read_params, write_text
from agentic_rl.train.signals import stop_on_signals

log = logging.getLogger(__name__)

DONE = "done.json"


def train(config: ConfigDict, workdir: str | os.PathLike[str]) -> dict[str, float]:
  """Trains to `config.train.iterations`, or goes on from the last checkpoint in `workdir`.

  Returns:
    The metrics of the last iteration.

  Raises:
    UserError: For a config, data or checkpoint that cannot work.
    KeyboardInterrupt: After SIGINT or SIGTERM, once the last checkpoint is complete.
  """
  return asyncio.run(_train(config, workdir))


async def _train(config: ConfigDict, workdir: str | os.PathLike[str]) -> dict[str, float]:
  async with contextlib.AsyncExitStack() as stack:
    stop = stack.enter_context(stop_on_signals())
    run = await Run.start(config, workdir, stack)
    with Progress(config.train.iterations, initial=run.step, label=run.workdir.name) as progress:
      if run.step == 0:
        await run.report(0, {}, await run.evaluate(0))
      while run.step < config.train.iterations:
        metrics = await run.iteration()
        progress.update(run.step, metrics)
        stop.raise_if_set()
    run.checkpoints.wait()
    return run.finish()


@dataclasses.dataclass
class Run:
  """The parts of a run and where it stands. Made by `start`."""

  config: ConfigDict
  workdir: Any
  tokenizer: Any
  dialect: Any
  tool: InterpreterTool | None
  engine: Any
  learner: Learner
  state: LearnerState
  order: ProblemOrder
  evaluation_sets: dict[str, list[Problem]]
  publisher: Publisher
  checkpoints: Checkpoints
  writer: MetricWriter
  record: dict[str, Any]
  step: int
  last_metrics: dict[str, float]

  @classmethod
  async def start(cls, config: ConfigDict, workdir: str | os.PathLike[str], stack: contextlib.AsyncExitStack) -> Run:
    """Builds all parts, restores the last checkpoint and loads its weights into the engine."""
    check_config(config, devices=jax.device_count())
    path = setup.prepare_workdir(config, workdir)
    tokenizer = setup.build_tokenizer(config)
    policy = setup.build_policy(config, tokenizer)
    mesh = setup.build_mesh(config)
    dialect = setup.build_dialect(config)
    order = ProblemOrder(setup.build_problems(config.data.train), config.seed)
    sets = {name: setup.build_problems(section) for name, section in config.data.evaluation.items()}
    _check_prompts(order.problems, dialect, tokenizer, config)

    algorithm = config.algorithm
    learner = Learner(
      policy,
      setup.build_optimizer(config.optimizer, config.train.iterations * config.train.minibatches),
      policy_loss(algorithm.loss, **algorithm.loss_options.to_dict()),
      LearnerConfig(
        microbatch_rows=config.train.microbatch_rows,
        logprob_chunk=config.train.logprob_chunk,
        temperature=config.rollout.temperature,
      ),
      mesh,
    )
    record = {"policy": policy.config.to_dict(), "data": order.fingerprint, "tokenizer": tokenizer.fingerprint}
    checkpoints = Checkpoints(path / "checkpoints")
    stack.callback(checkpoints.close)
    step = checkpoints.latest_step()
    if step is None:
      state = learner.from_params(read_params(setup.initial_publication(config, policy, tokenizer)))
    else:
      check_record(checkpoints.record(step), record, path)
      state = checkpoints.restore(step, learner.abstract_state())
      log.info("going on from the checkpoint of iteration %d in %s", step, path)
    writer = stack.enter_context(MetricWriter(path, resume_step=step))
    step = step or 0
    tool = None
    if dialect.call_budget > 0:
      interpreter = await Interpreter.start(setup.build_interpreter_config(config))
      stack.push_async_callback(interpreter.close)
      tool = InterpreterTool(interpreter)
    engine = setup.build_engine(config, policy, tokenizer, mesh)
    stack.push_async_callback(engine.close)
    publisher = Publisher(config.publication.directory or path / "publications", policy.config, tokenizer.fingerprint)
    run = cls(
      config=config,
      workdir=path,
      tokenizer=tokenizer,
      dialect=dialect,
      tool=tool,
      engine=engine,
      learner=learner,
      state=state,
      order=order,
      evaluation_sets=sets,
      publisher=publisher,
      checkpoints=checkpoints,
      writer=writer,
      record=record,
      step=step,
      last_metrics={},
    )
    await run.publish()
    return run

  # ---- one iteration ----

  async def iteration(self) -> dict[str, float]:
    """Rolls out, learns, publishes, evaluates, reports, saves."""
    clock = _Clock()
    problems = self.order.batch(self.step, self.config.rollout.problems)
    generated = self.engine.tokens_generated
    episodes = await self.rollout(problems)
    write_episodes(self.workdir / "episodes" / f"iteration_{self.step + 1:06d}.jsonl", episodes)
    generated = self.engine.tokens_generated - generated
    clock.lap("rollout")

    learned = self.learn(episodes)
    clock.lap("update")
    self.step += 1
    synced = await self.publish(probe=episodes)
    clock.lap("publish")
    evaluated = await self.evaluate(self.step)
    clock.lap("evaluate")

    times = clock.metrics()
    rates = {
      "throughput/rollout_tokens_per_s": generated / times["time/rollout_s"],
      "throughput/update_tokens_per_s": learned.pop("tokens") / times["time/update_s"],
    }
    metrics = {**rollout_metrics(episodes), **learned, **synced, **times, **rates}
    await self.report(self.step, metrics, evaluated)
    if self.step % self.config.train.checkpoint_every == 0 or self.step == self.config.train.iterations:
      self.checkpoints.save(self.step, self.state, self.record)
    return {**metrics, **evaluated}

  async def rollout(self, problems: Sequence[Problem]) -> list[Episode]:
    """G scored episodes of every problem, sampled by the current publication."""
    rollout = self.config.rollout
    return await collect(
      self.engine,
      self.tokenizer,
      self.dialect,
      self.tool,
      problems,
      rollout.samples,
      sampling=Sampling(
        max_new_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        seed=_mix(self.config.seed, self.step, 0),
      ),
      max_tokens=rollout.max_tokens,
      max_in_flight=rollout.max_in_flight,
      episode_timeout_s=rollout.episode_timeout_s or None,
    )

  def learn(self, episodes: Sequence[Episode]) -> dict[str, float]:
    """Advantages, group filter, and one optimizer step for each mini-batch. Groups with nothing to learn are left out."""
    algorithm, train = self.config.algorithm, self.config.train
    episodes = [e for e in episodes if e.status is not EndStatus.ABORTED and e.length("policy") > 0]
    groups = group_ids_of([e.uid for e in episodes])
    rewards = np.array([e.reward for e in episodes], np.float32)
    lengths = np.array([e.length("policy") for e in episodes])
    advantages = ADVANTAGES[algorithm.advantage](rewards, groups, lengths, **algorithm.advantage_options.to_dict())
    accuracy = np.array([is_correct(e) for e in episodes], np.float32)
    keep = group_filter(rewards, groups, algorithm.filter_low, algorithm.filter_high, accuracy=accuracy)
    kept = np.flatnonzero(keep)
    metrics: dict[str, list[float]] = {}
    tokens = 0
    for part in self._minibatches(kept):
      batch = pack(
        [episodes[i] for i in part],
        advantages[part],
        length_buckets=tuple(train.length_buckets),
        row_multiple=train.microbatch_rows,
      )
      weights = token_weights(batch.loss_mask, batch.sequence_ids, algorithm.aggregation)
      batch = dataclasses.replace(batch, loss_weights=weights)
      self.state, step_metrics = self.learner.update(self.state, batch, max_rows=self._max_rows())
      tokens += int((batch.segment_ids > 0).sum())
      for name, value in {**step_metrics, "padding": batch.padding_fraction}.items():
        metrics.setdefault(name, []).append(float(value))
    mean = {name: float(np.mean(values)) for name, values in metrics.items()}
    if any(not math.isfinite(v) for v in mean.values()):
      raise RuntimeError(f"the update of iteration {self.step + 1} is not finite: {mean}; the last checkpoint is intact")
    names = {
      "loss": "loss/policy",
      "entropy": "policy/entropy",
      "ratio": "policy/ratio_mean",
      "clip_low": "policy/clip_low_frac",
      "clip_high": "policy/clip_high_frac",
      "kl_behaviour": "policy/kl_behaviour",
      "grad_norm": "optimizer/grad_norm",
      "learning_rate": "optimizer/learning_rate",
      "padding": "packing/padding_frac",
    }
    return {"tokens": tokens} | {names[k]: v for k, v in mean.items() if k in names}

  def _minibatches(self, kept: np.ndarray) -> list[np.ndarray]:
    """Kept episodes in random order, in parts of nearly equal size; empty if no group has anything to teach."""
    rng = np.random.default_rng([self.config.seed, self.step])
    parts = np.array_split(rng.permutation(kept), self.config.train.minibatches)
    return [np.sort(p) for p in parts if len(p)]

  def _max_rows(self) -> int:
    """Most rows of a mini-batch: an episode fills at most one."""
    episodes = -(-self.config.rollout.problems * self.config.rollout.samples // self.config.train.minibatches)
    rows = self.config.train.microbatch_rows
    return -(-episodes // rows) * rows

  async def publish(self, probe: Sequence[Episode] = ()) -> dict[str, float]:
    """Publishes the weights, loads them into the engine, and compares log-probabilities of both sides.

    Raises:
      RuntimeError: If engine and learner disagree by more than `config.publication.max_logprob_diff` on average.
    """
    publication = self.publisher.publish(self.step, self.state.params)
    await self.engine.load(publication)
    return await self._probe(publication, probe[:: max(1, len(probe) // 8)][:8])

  async def _probe(self, publication: Publication, episodes: Sequence[Episode]) -> dict[str, float]:
    """Samples continuations of a few prompts and scores them with the learner's weights."""
    if not episodes:
      return {}
    rollout = self.config.rollout
    sampling = Sampling(
      max_new_tokens=min(self.config.publication.probe_tokens, rollout.max_tokens),
      temperature=rollout.temperature,
      seed=publication.version,
    )
    # Without a tool every episode is one completion: no time is spent on anything but the comparison.
    dialect = dataclasses.replace(self.dialect, call_budget=0, budget_end="free")
    probed = await collect(
      self.engine,
      self.tokenizer,
      dialect,
      None,
      list({e.uid: e.problem for e in episodes}.values()),
      1,
      sampling=sampling,
      max_tokens=rollout.max_tokens,
    )
    versions = {v for e in probed for v in e.versions if v >= 0}
    if versions != {publication.version}:
      raise RuntimeError(f"the engine sampled with version {versions} after version {publication.version} was loaded")
    batch = self._packed(probed)
    logp, _ = self.learner.score(self.state.params, batch, max_rows=self._max_rows())
    difference = np.abs(logp - batch.behaviour_logprobs)[batch.loss_mask]
    mean, largest = float(difference.mean()), float(difference.max())
    if not mean <= self.config.publication.max_logprob_diff:
      raise RuntimeError(
        f"engine and learner disagree after version {publication.version}: mean |log-probability difference| {mean:.2g} "
        f"over {difference.size} tokens, allowed {self.config.publication.max_logprob_diff:g}; the weights that were "
        f"loaded are not those that were trained"
      )
    return {"sync/logprob_diff_mean": mean, "sync/logprob_diff_max": largest}

  def _packed(self, episodes: Sequence[Episode]) -> Batch:
    train = self.config.train
    return pack(
      episodes,
      np.zeros(len(episodes), np.float32),
      length_buckets=tuple(train.length_buckets[-1:]),
      row_multiple=train.microbatch_rows,
    )

  async def evaluate(self, step: int) -> dict[str, float]:
    """Metrics of every held-out set, each `config.evaluation.every` iterations and at the end."""
    evaluation = self.config.evaluation
    if not self.evaluation_sets or not evaluation.every:
      return {}
    if step % evaluation.every and step != self.config.train.iterations:
      return {}
    metrics: dict[str, float] = {}
    for number, (name, problems) in enumerate(self.evaluation_sets.items()):
      episodes = await collect(
        self.engine,
        self.tokenizer,
        self.dialect,
        self.tool,
        problems,
        evaluation.samples,
        sampling=Sampling(
          max_new_tokens=self.config.rollout.max_tokens,
          temperature=evaluation.temperature,
          top_p=evaluation.top_p,
          seed=_mix(self.config.seed, step, number + 1),
        ),
        max_tokens=self.config.rollout.max_tokens,
        max_in_flight=self.config.rollout.max_in_flight,
      )
      write_episodes(self.workdir / "evaluations" / f"{name}_{step:06d}.jsonl", episodes)
      found = rollout_metrics(episodes)
      for metric in ("accuracy", "code_proportion", "code_in_correct", "code_count", "response_length"):
        metrics[f"eval/{name}/{metric}"] = found[f"rollout/{metric}"]
    return metrics

  def finish(self) -> dict[str, float]:
    """Leaves `done.json` with the last metrics, by which others see that the run is complete."""
    done = self.workdir / DONE
    if not self.last_metrics and done.is_file():  # nothing was left to do
      return dict(json.loads(done.read_text()))
    finite = {name: value for name, value in self.last_metrics.items() if math.isfinite(value)}
    write_text(done, json.dumps({"step": self.step, **finite}, indent=1))
    return finite

  async def report(self, step: int, metrics: Mapping[str, float], evaluated: Mapping[str, float]) -> None:
    """Writes the metrics of a step."""
    self.last_metrics = {**metrics, **evaluated}
    self.writer.write(step, self.last_metrics)


def _check_prompts(problems: Sequence[Problem], dialect: Any, tokenizer: Any, config: ConfigDict) -> None:
  longest = max(problems, key=lambda p: len(tokenizer.encode_prompt(dialect.render_prompt(p))))
  length = len(tokenizer.encode_prompt(dialect.render_prompt(longest)))
  if length >= config.rollout.max_tokens:
    raise UserError(
      f"config.rollout.max_tokens={config.rollout.max_tokens} leaves nothing for the policy: the prompt of "
      f"{longest.uid!r} alone has {length} tokens; raise it or drop the problem"
    )


def _mix(seed: int, step: int, stream: int) -> int:
  """A seed of its own for every use of randomness."""
  return int(np.random.SeedSequence([seed, step, stream]).generate_state(1, np.uint64)[0] >> 1)


class _Clock:
  """Seconds of the phases of an iteration."""

  def __init__(self) -> None:
    self._last = time.monotonic()
    self._laps: dict[str, float] = {}

  def lap(self, name: str) -> None:
    now = time.monotonic()
    self._laps[f"time/{name}_s"] = max(now - self._last, 1e-9)
    self._last = now

  def metrics(self) -> dict[str, float]:
    return dict(self._laps)

