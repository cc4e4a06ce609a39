"""The supervised stage: next-token prediction on documents, the same learner as reinforcement learning uses."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pathlib
import time
from typing import Any

import jax
from ml_collections import ConfigDict

from agentic_rl.data.arithmetic import CorpusMix
from agentic_rl.data.corpus import ArithmeticCorpus, Corpus, FileCorpus, corpus_batch
from agentic_rl.episode import Publication
from agentic_rl.errors import UserError
from agentic_rl.tokenizer import Tokenizer
from agentic_rl.train import setup
from agentic_rl.train.checkpoints import Checkpoints, check_record
from agentic_rl.train.config_check import check_config
from agentic_rl.train.learner import Learner, LearnerState, supervised_loss
from agentic_rl.train.metrics import MetricWriter
from agentic_rl.train.progress import Progress
from agentic_rl.train.publication import Publisher, holds, latest
from agentic_rl.train.signals import stop_on_signals

log = logging.getLogger(__name__)


def build_corpus(config: ConfigDict) -> Corpus:
  """The corpus that `config.sft.corpus` names: `arithmetic`, or the path of a JSONL file."""
  if config.sft.corpus == "arithmetic":
    try:
      return ArithmeticCorpus(CorpusMix(**config.sft.mix.to_dict()), config.dialect.prompt_template)
    except TypeError as error:
      raise UserError(f"config.sft.mix: {error}") from error
  return FileCorpus.load(config.sft.corpus)


def _fingerprint(corpus: Corpus) -> str:
  """Hash of all that decides the documents."""
  return hashlib.sha256(repr(corpus).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def train(config: ConfigDict, workdir: str | os.PathLike[str]) -> Publication:
  """Trains to `config.sft.steps`, or goes on from the last checkpoint in `workdir`.

  Starts from `config.init_from` where that is set, from random weights otherwise.

  Returns:
    The publication of the trained weights, version 0: the base model of `train.rl`.

  Raises:
    UserError: For a config, corpus or checkpoint that cannot work.
    KeyboardInterrupt: After SIGINT or SIGTERM, once a checkpoint of the last step is complete.
  """
  started = time.monotonic()
  check_config(config, devices=jax.device_count())
  path = setup.open_workdir(workdir)
  sft = config.sft
  tokenizer = setup.build_tokenizer(config)
  policy = setup.build_policy(config, tokenizer)
  publisher = Publisher(path / "publications", policy.config, tokenizer.fingerprint)
  done = latest(publisher.directory)
  corpus = build_corpus(config)
  learner = setup.build_learner(config, policy, setup.build_optimizer(sft.optimizer, sft.steps), supervised_loss)
  record = {
    "policy": policy.config.to_dict(),
    "tokenizer": tokenizer.fingerprint,
    "seed": config.seed,
    "corpus": _fingerprint(corpus),
  }
  with contextlib.closing(Checkpoints(path / "checkpoints", keep=1)) as checkpoints:
    step = checkpoints.latest_step()
    if step is not None:
      check_record(checkpoints.record(step), record, path)
      state = checkpoints.restore(step, learner.abstract_state())
      if done is not None and step >= sft.steps and holds(done, state.params):
        return done
      log.info("going on from the checkpoint of step %d in %s", step, path)
    elif config.init_from:
      state = learner.from_params(setup.initial_params(config, policy, tokenizer, learner.state_shardings.params))
    else:
      state = learner.init(jax.random.key(config.seed))
    setup.write_config(config, path)
    state = _steps(config, path, learner, state, step or 0, corpus, tokenizer, checkpoints, record, started)
  return publisher.publish(0, state.params)


def _steps(
  config: ConfigDict,
  path: pathlib.Path,
  learner: Learner,
  state: LearnerState,
  begin: int,
  corpus: Corpus,
  tokenizer: Tokenizer,
  checkpoints: Checkpoints,
  record: dict[str, Any],
  started: float,
) -> LearnerState:
  """Runs the steps after `begin`, with checkpoints and metrics."""
  sft = config.sft
  length = max(config.train.length_buckets)
  with (
    MetricWriter(path, resume_step=begin or None) as writer,
    stop_on_signals() as stop,
    Progress(sft.steps, initial=begin, label="sft") as progress,
  ):
    tokens, since, reported = 0, time.monotonic(), started
    for now in range(begin, sft.steps):
      batch = corpus_batch(
        corpus,
        tokenizer,
        config.seed,
        now,
        rows=sft.rows,
        length=length,
        row_multiple=config.train.microbatch_rows,
      )
      state, metrics = learner.update(state, batch, max_rows=sft.rows)
      tokens += int((batch.segment_ids > 0).sum())
      stopping = stop.signal is not None  # asked once: a signal after this ends the run after the next step, saved
      saving = (now + 1) % sft.checkpoint_every == 0 or now + 1 == sft.steps or stopping
      if saving or (now + 1) % 10 == 0:
        values = {
          "loss/supervised": float(metrics["loss"]),
          "policy/entropy_trained": float(metrics["entropy"]),
          "optimizer/grad_norm": float(metrics["grad_norm"]),
          "optimizer/learning_rate": float(metrics["learning_rate"]),
          "packing/padding_frac": batch.padding_fraction,
        }
        # Reading the loss waited for the steps before, so all their time is counted.
        now_s = time.monotonic()
        values["throughput/update_tokens_per_s"] = tokens / (now_s - since)
        values["time/iteration_s"] = now_s - reported
        tokens, since, reported = 0, now_s, now_s
        writer.write(now + 1, values)
        progress.update(now + 1, values)
      if saving:
        checkpoints.save(now + 1, state, record)
      if stopping:
        checkpoints.wait()
        stop.raise_if_set()
  return state
