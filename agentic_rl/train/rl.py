"""The reinforcement-learning loop. Read `Run.iteration`: it is the project's one line of data.

Problem - prompt -> Engine <-> Interpreter -> Episode - reward -> group - advantage -> Batch -> update -> Publication
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import enum
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
from agentic_rl.tools import INFRA_ERROR, InterpreterTool
from agentic_rl.train import setup
from agentic_rl.train.checkpoints import Checkpoints, check_record
from agentic_rl.train.config_check import check_config
from agentic_rl.train.learner import Learner, LearnerState, policy_loss
from agentic_rl.train.metrics import MetricWriter, read_metrics
from agentic_rl.train.progress import Progress
from agentic_rl.train.publication import Publisher, write_text
from agentic_rl.train.signals import stop_on_signals

log = logging.getLogger(__name__)

DONE = "done.json"
PROBED = 8
"""Problems whose log-probabilities are compared after every publication."""


class _Stream(enum.IntEnum):
  """What a random number is for; each use has a stream of its own."""

  ROLLOUT = 0
  MINIBATCHES = 1
  PROBE = 2
  EVALUATION = 10  # one for every set, counting up


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
        run.report(0, {}, await run.evaluate(0))
      stopping = stop.signal is not None
      while run.step < config.train.iterations and not stopping:
        progress.update(run.step, await run.iteration())
        stopping = stop.signal is not None  # asked once: a signal after this ends the run after the next iteration
        if run.step % config.train.checkpoint_every == 0 or run.step == config.train.iterations or stopping:
          run.save()
    run.checkpoints.wait()
    if stopping and run.step < config.train.iterations:
      stop.raise_if_set()
    metrics = run.finish()
    stop.raise_if_set()
    return metrics


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
  reported: float

  @classmethod
  async def start(cls, config: ConfigDict, workdir: str | os.PathLike[str], stack: contextlib.AsyncExitStack) -> Run:
    """Builds all parts, restores the last checkpoint and loads its weights into the engine."""
    started = time.monotonic()
    check_config(config, devices=jax.device_count())
    path = setup.open_workdir(workdir)
    tokenizer = setup.build_tokenizer(config)
    policy = setup.build_policy(config, tokenizer)
    dialect = setup.build_dialect(config)
    order = ProblemOrder(setup.build_problems(config.data.train), config.seed)
    sets = {name: setup.build_problems(section) for name, section in config.data.evaluation.items()}
    order.batch(0, config.rollout.problems)  # raises if there are fewer problems
    _check_prompts([*order.problems, *(p for problems in sets.values() for p in problems)], dialect, tokenizer, config)

    algorithm = config.algorithm
    learner = setup.build_learner(
      config,
      policy,
      setup.build_optimizer(config.optimizer, config.train.iterations * config.train.minibatches),
      policy_loss(algorithm.loss, **algorithm.loss_options.to_dict()),
      temperature=config.rollout.temperature,
    )
    record = {
      "policy": policy.config.to_dict(),
      "data": order.fingerprint,
      "tokenizer": tokenizer.fingerprint,
      "config.seed": config.seed,
      **{
        f"config.rollout.{name}": config.rollout[name] for name in ("problems", "samples", "temperature", "max_tokens")
      },
      **_flat(config, ("dialect", "algorithm", "optimizer")),
    }
    # The base model may be gone by the time that a run goes on; where it is there, it must be the same.
    if config.init_from and os.path.exists(config.init_from):
      record["base weights"] = setup.initial_fingerprint(config, policy, tokenizer)
    checkpoints = Checkpoints(path / "checkpoints")
    stack.callback(checkpoints.close)
    step = checkpoints.latest_step()
    if step is None:
      state = learner.from_params(setup.initial_params(config, policy, tokenizer, learner.state_shardings.params))
    else:
      check_record(checkpoints.record(step), record, path)
      state = checkpoints.restore(step, learner.abstract_state())
      log.info("going on from the checkpoint of iteration %d in %s", step, path)
    setup.write_config(config, path)
    writer = stack.enter_context(MetricWriter(path, resume_step=step))
    step = step or 0
    if step < config.train.iterations:
      (path / DONE).unlink(missing_ok=True)  # of a shorter run
    engine = setup.build_engine(config, policy, tokenizer, learner.mesh)
    stack.push_async_callback(engine.close)
    publisher = Publisher(config.publication.directory or path / "publications", policy.config, tokenizer.fingerprint)
    tool = await setup.start_tool(config, stack) if dialect.call_budget > 0 else None
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
      reported=started,
    )
    await run.publish()
    return run

  # ---- one iteration ----

  async def iteration(self) -> dict[str, float]:
    """Rolls out, learns, publishes, evaluates, reports."""
    clock = _Clock()
    problems = self.order.batch(self.step, self.config.rollout.problems)
    generated = self.engine.tokens_generated
    episodes = await self.rollout(problems)
    write_episodes(self.workdir / "episodes" / f"iteration_{self.step + 1:06d}.jsonl", episodes)
    self._check_aborted(episodes)
    generated = self.engine.tokens_generated - generated
    clock.lap("rollout")

    learned = self.learn(episodes)
    clock.lap("update")
    self.step += 1
    synced = await self.publish()
    clock.lap("publish")
    evaluated = await self.evaluate(self.step)
    clock.lap("evaluate")

    times = clock.metrics()
    rates = {
      "throughput/rollout_tokens_per_s": generated / times["time/rollout_s"],
      "throughput/update_tokens_per_s": learned.pop("tokens") / times["time/update_s"],
    }
    metrics = {**rollout_metrics(episodes), **learned, **synced, **times, **rates}
    self.report(self.step, metrics, evaluated)
    return {**metrics, **evaluated}

  def save(self) -> None:
    """Starts to write a checkpoint of the iteration that has just ended."""
    self.checkpoints.save(self.step, self.state, self.record)

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
        seed=_mix(self.config.seed, self.step, _Stream.ROLLOUT),
      ),
      max_tokens=rollout.max_tokens,
      max_in_flight=rollout.max_in_flight,
      episode_timeout_s=rollout.episode_timeout_s or None,
    )

  def _check_aborted(self, episodes: Sequence[Episode]) -> None:
    """Raises `RuntimeError` if more than the allowed share of episodes was aborted, or of those that called the tool.

    Aborted episodes are left out of training. If the tool fails, those are the ones that call it, and the policy would
    learn not to. A single one is always allowed.
    """
    allowed = self.config.rollout.max_aborted_frac
    aborted = [e for e in episodes if e.status is EndStatus.ABORTED]
    # A tool that raises leaves no record of the call. Where no call came back at all, what was aborted may have called.
    callers = [e for e in episodes if e.calls] or (aborted if self.tool is not None else [])
    for lost, of, kind in (
      (aborted, episodes, "episodes"),
      ([e for e in callers if e.status is EndStatus.ABORTED], callers, "episodes that called the tool"),
    ):
      if len(lost) > max(1.0, allowed * len(of)):
        reason, count = collections.Counter(map(_reason_of_abort, lost)).most_common(1)[0]
        raise RuntimeError(
          f"{len(lost)} of {len(of)} {kind} were aborted, config.rollout.max_aborted_frac={allowed:g}; "
          f"{count} because {reason}; the last checkpoint is intact"
        )

  def learn(self, episodes: Sequence[Episode]) -> dict[str, float]:
    """Advantages, group filter (groups with nothing to learn are left out), an optimizer step for each mini-batch."""
    algorithm, train = self.config.algorithm, self.config.train
    episodes = [e for e in episodes if e.status is not EndStatus.ABORTED and e.length("policy") > 0]
    groups = group_ids_of([e.uid for e in episodes])
    rewards = np.array([e.reward for e in episodes], np.float32)
    accuracy = np.array([is_correct(e) for e in episodes], np.float32)
    keep = group_filter(rewards, groups, algorithm.filter_low, algorithm.filter_high, accuracy=accuracy)
    # Filter first: advantages that are whitened over tokens must be whitened over those that are trained.
    episodes, groups, rewards = [e for e, k in zip(episodes, keep, strict=True) if k], groups[keep], rewards[keep]
    lengths = np.array([e.length("policy") for e in episodes])
    options = algorithm.advantage_options.to_dict()
    advantages = ADVANTAGES[algorithm.advantage](rewards, groups, lengths, **options) if episodes else rewards
    fixed_norm = algorithm.fixed_norm or self.config.rollout.max_tokens
    metrics: dict[str, list[float]] = {}
    tokens = 0
    for part in self._minibatches(len(episodes)):
      batch = pack(
        [episodes[i] for i in part],
        advantages[part],
        length_buckets=tuple(train.length_buckets),
        row_multiple=train.microbatch_rows,
      )
      weights = token_weights(batch.loss_mask, batch.sequence_ids, algorithm.aggregation, fixed_norm=fixed_norm)
      batch = dataclasses.replace(batch, loss_weights=weights)
      self.state, step_metrics = self.learner.update(self.state, batch, max_rows=self._max_rows())
      tokens += int((batch.segment_ids > 0).sum())
      step_values: dict[str, Any] = {**step_metrics, "padding": batch.padding_fraction}
      for name, value in step_values.items():
        metrics.setdefault(name, []).append(float(value))
    mean = {name: float(np.mean(values)) for name, values in metrics.items()}
    if any(not math.isfinite(v) for v in mean.values()):
      raise RuntimeError(
        f"the update of iteration {self.step + 1} is not finite: {mean}; the last checkpoint is intact"
      )
    names = {
      "loss": "loss/policy",
      "entropy": "policy/entropy_trained",
      "ratio": "policy/ratio_mean",
      "clip_low": "policy/clip_low_frac",
      "clip_high": "policy/clip_high_frac",
      "kl_behaviour": "policy/kl_behaviour",
      "grad_norm": "optimizer/grad_norm",
      "learning_rate": "optimizer/learning_rate",
      "padding": "packing/padding_frac",
    }
    return {"tokens": tokens} | {names[k]: v for k, v in mean.items() if k in names}

  def _minibatches(self, count: int) -> list[np.ndarray]:
    """Indices of episodes in random order, in parts of nearly equal size; empty if no group has anything to teach."""
    rng = np.random.default_rng(_mix(self.config.seed, self.step, _Stream.MINIBATCHES))
    parts = np.array_split(rng.permutation(count), self.config.train.minibatches)
    return [np.sort(p) for p in parts if len(p)]

  def _max_rows(self) -> int:
    """Most rows of a mini-batch: an episode fills at most one."""
    episodes = -(-self.config.rollout.problems * self.config.rollout.samples // self.config.train.minibatches)
    rows = self.config.train.microbatch_rows
    return -(-episodes // rows) * rows

  async def publish(self) -> dict[str, float]:
    """Publishes the weights, loads them into the engine, and compares log-probabilities of both sides.

    Raises:
      RuntimeError: If engine and learner disagree by more than `config.publication.max_logprob_diff` on average.
    """
    publication = self.publisher.publish(self.step, self.state.params)
    await self.engine.load(publication)
    return await self._probe(publication)

  async def _probe(self, publication: Publication) -> dict[str, float]:
    """Runs short episodes of a few problems, tool and all, and scores their tokens with the learner's weights."""
    rollout = self.config.rollout
    sampling = Sampling(
      max_new_tokens=min(self.config.publication.probe_tokens, rollout.max_tokens),
      temperature=rollout.temperature,
      seed=_mix(self.config.seed, self.step, _Stream.PROBE),
    )
    probed = await collect(
      self.engine,
      self.tokenizer,
      self.dialect,
      self.tool,
      self.order.batch(self.step, rollout.problems)[:PROBED],
      1,
      sampling=sampling,
      max_tokens=rollout.max_tokens,
      episode_timeout_s=rollout.episode_timeout_s or None,
    )
    probed = [e for e in probed if e.status is not EndStatus.ABORTED]
    versions = {v for e in probed for v in e.versions if v >= 0}
    if versions != {publication.version}:
      raise RuntimeError(f"the engine sampled with version {versions} after version {publication.version} was loaded")
    batch = self._packed(probed)
    logp, _ = self.learner.score(self.state.params, batch, max_rows=self._max_rows())
    difference = np.abs(logp - batch.behaviour_logprobs)[batch.loss_mask]
    mean, largest = float(difference.mean()), float(difference.max())
    if not mean <= self.config.publication.max_logprob_diff:
      raise RuntimeError(
        f"engine and learner disagree after version {publication.version}: mean |log-probability difference| "
        f"{mean:.2g} over {difference.size} tokens, allowed {self.config.publication.max_logprob_diff:g}; the weights "
        f"that were loaded are not those that were trained"
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
    """Metrics of every evaluation set, each `config.evaluation.every` iterations and at the end."""
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
          seed=_mix(self.config.seed, step, _Stream.EVALUATION + number),
        ),
        max_tokens=self.config.rollout.max_tokens,
        episode_timeout_s=self.config.rollout.episode_timeout_s or None,
        max_in_flight=self.config.rollout.max_in_flight,
      )
      write_episodes(self.workdir / "evaluations" / f"{name}_{step:06d}.jsonl", episodes)
      self._check_aborted(episodes)
      found = rollout_metrics(episodes)
      for metric in ("accuracy", "code_proportion", "code_in_correct", "code_count", "response_length"):
        metrics[f"eval/{name}/{metric}"] = found[f"rollout/{metric}"]
    return metrics

  def finish(self) -> dict[str, float]:
    """Leaves `done.json` with the last metrics, by which others see that the run is complete."""
    metrics = self.last_metrics
    if not metrics:  # nothing was left to do
      columns = read_metrics(self.workdir)
      metrics = {name: float(values[-1]) for name, values in columns.items() if len(values) and name != "time"}
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)} | {"step": self.step}
    write_text(self.workdir / DONE, json.dumps(finite, indent=1))
    return finite

  def report(self, step: int, metrics: Mapping[str, float], evaluated: Mapping[str, float]) -> None:
    """Writes the metrics of a step, with the time since the last ones (at first: since the start of this process)."""
    now = time.monotonic()
    self.last_metrics = {**metrics, **evaluated, "time/iteration_s": now - self.reported}
    self.reported = now
    self.writer.write(step, self.last_metrics)


def _flat(config: ConfigDict, sections: Sequence[str], prefix: str = "config") -> dict[str, Any]:
  """Every field of some sections, by its path."""
  fields: dict[str, Any] = {}
  for section in sections:
    value, path = config[section], f"{prefix}.{section}"
    if isinstance(value, ConfigDict):
      fields |= _flat(value, tuple(value), path)
    else:
      fields[path] = list(value) if isinstance(value, tuple) else value
  return fields


def _check_prompts(problems: Sequence[Problem], dialect: Any, tokenizer: Any, config: ConfigDict) -> None:
  longest = max(problems, key=lambda p: len(tokenizer.encode_prompt(dialect.render_prompt(p))))
  length = len(tokenizer.encode_prompt(dialect.render_prompt(longest)))
  if length >= config.rollout.max_tokens:
    raise UserError(
      f"config.rollout.max_tokens={config.rollout.max_tokens} leaves nothing for the policy: the prompt of "
      f"{longest.uid!r} alone has {length} tokens; raise it or drop the problem"
    )


def _reason_of_abort(episode: Episode) -> str:
  failed = [call.observation for call in episode.calls if call.status == INFRA_ERROR]
  if failed:
    return f"the tool failed: {failed[0].strip() or 'it said nothing'}"
  return "the engine, the tool, the verifier or the deadline ended them (see the log)"


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
