"""Many episodes at once: G samples of every problem, scored as they finish, in whatever order that is."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import math
from collections.abc import Callable, Sequence

import numpy as np

from agentic_rl.episode import EndStatus, Episode, Problem, Segment, group_by_uid
from agentic_rl.errors import UserError
from agentic_rl.rewards import Reward, get_verifier
from agentic_rl.rollout.engine import Engine, Sampling
from agentic_rl.rollout.loop import encode_prompt, run_episode
from agentic_rl.tokenizer import Tokenizer
from agentic_rl.tools import INFRA_ERROR, NOT_EXECUTED, Dialect, Tool

log = logging.getLogger(__name__)

VerifierByName = Callable[[str], Callable[[Episode], Reward]]


async def collect(
  engine: Engine,
  tokenizer: Tokenizer,
  dialect: Dialect,
  tool: Tool | None,
  problems: Sequence[Problem],
  samples: int,
  *,
  sampling: Sampling,
  max_tokens: int,
  max_in_flight: int = 256,
  episode_timeout_s: float | None = None,
  progress: Callable[[Episode], None] | None = None,
  verifiers: VerifierByName = get_verifier,
) -> list[Episode]:
  """Runs and scores `samples` episodes of every problem.

  An episode whose engine, tool or verifier fails, or that passes its deadline, becomes `aborted`, without a reward; it
  is logged with its uid and sample, and the others go on.

  Args:
    engine, tokenizer, dialect, tool, sampling, max_tokens: As in `run_episode`.
    problems: Uids must differ.
    samples: G, episodes a problem.
    max_in_flight: Most episodes that run at once; the others wait, samples of one problem next to each other.
    episode_timeout_s: Deadline of one episode in seconds from its start, scoring included; None for none.
    progress: Called with each episode as it finishes, aborted ones included; whoever must lose nothing even when the
      process is stopped stores them here.
    verifiers: Finds a problem's verifier by name. Verifiers run in threads.

  Returns:
    All episodes, sorted by uid and sample.

  Raises:
    UserError: Two problems share a uid, a prompt does not fit, or a verifier is unknown (all before anything runs); or
      a call is made and there is no tool.
    RuntimeError: Every single episode was aborted; the first failure is the cause.
  """
  if samples < 1 or max_in_flight < 1:
    raise ValueError(f"samples and max_in_flight must be at least 1, got {samples} and {max_in_flight}")
  twice = [uid for uid, n in collections.Counter(p.uid for p in problems).items() if n > 1]
  if twice:
    raise UserError(f"two problems have the uid {twice[0]!r}, so their samples would form one group; make it unique")
  prompts = [encode_prompt(tokenizer, dialect, problem, max_tokens) for problem in problems]
  verify = {name: verifiers(name) for name in {problem.verifier for problem in problems}}
  slots = asyncio.Semaphore(max_in_flight)
  failures: list[BaseException] = []

  async def one(problem: Problem, sample: int, prompt: Segment) -> Episode:
    # What there is of the episode so far, kept if a later step fails.
    episode = Episode(problem.uid, sample, problem, (prompt,), (), EndStatus.ABORTED)
    async with slots:
      step = "rollout"
      try:
        async with asyncio.timeout(episode_timeout_s):
          episode = await run_episode(
            engine,
            tokenizer,
            dialect,
            tool,
            problem,
            sample,
            sampling=sampling,
            max_tokens=max_tokens,
            prompt=prompt,
          )
          if episode.status is not EndStatus.ABORTED:
            step = "verification"
            reward = await asyncio.to_thread(verify[problem.verifier], episode)
            episode = episode.with_reward(reward.value, reward.parts)
      except UserError:  # a contradiction in the settings, which every episode shares
        raise
      except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # it is this collection that is being cancelled, not the request
          raise
        # One lost episode must not cost the others; where all are lost, the first failure is raised below.
        log.exception("episode %s/%d was aborted: its %s failed", problem.uid, sample, step)
        failures.append(error)
        episode = dataclasses.replace(episode, status=EndStatus.ABORTED)
    if progress is not None:
      progress(episode)
    return episode

  tasks = [
    asyncio.create_task(one(problem, sample, prompt), name=f"{problem.uid}/{sample}")
    for problem, prompt in zip(problems, prompts, strict=True)
    for sample in range(samples)
  ]
  try:
    episodes = await asyncio.gather(*tasks)
  finally:
    # Only after a cancellation or a failing `progress` is there anything left; it must not run on unseen.
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
  aborted = sum(episode.status is EndStatus.ABORTED for episode in episodes)
  if episodes and aborted == len(episodes):
    cause = failures[0] if failures else RuntimeError("the engine or the tool aborted it, see the log")
    raise RuntimeError(
      f"all {aborted} episodes were aborted, so the fault is not one of a single episode; first: {cause!r}"
    ) from cause
  if aborted:
    log.warning("%d of %d episodes were aborted", aborted, len(episodes))
  return sorted(episodes, key=lambda episode: (episode.uid, episode.sample))


def executed_calls(episode: Episode) -> int:
  """Number of calls of an episode whose code ran."""
  return sum(call.status not in NOT_EXECUTED for call in episode.calls)


def is_correct(episode: Episode) -> bool:
  """Whether the verifier found the answer right."""
  return episode.reward_parts.get("correct", 0.0) == 1.0


def rollout_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
  """Metrics of a collection, by the names of docs/metrics.md. Aborted episodes are counted and enter nothing else.

  A share of nothing, e.g. of the correct responses where none is correct, is NaN.
  """
  done = [episode for episode in episodes if episode.status is not EndStatus.ABORTED]
  rewards = [e.reward for e in done if e.reward is not None]
  code = [executed_calls(e) > 0 for e in done]
  correct = [is_correct(e) for e in done]
  ran = [call for e in done for call in e.calls if call.status not in NOT_EXECUTED]
  groups = [[is_correct(e) for e in group] for group in group_by_uid(done).values()]
  all_correct = _share([all(group) for group in groups])
  all_wrong = _share([not any(group) for group in groups])
  return {
    "reward/mean": _mean(rewards),
    "reward/std": float(np.std(rewards)) if rewards else math.nan,
    "rollout/accuracy": _share(correct),
    "rollout/code_proportion": _share(code),
    "rollout/code_in_correct": _share([used for used, right in zip(code, correct, strict=True) if right]),
    "rollout/code_count": _mean([executed_calls(e) for e in done]),
    "rollout/response_length": _mean([e.length("policy") for e in done]),
    "rollout/tool_length": _mean([e.length("tool") for e in done]),
    "rollout/total_length": _mean([e.length("policy") + e.length("tool") for e in done]),
    "policy/entropy": -_mean([x for e in done for s in e.segments for x in s.logprobs]),
    "tool/calls": float(len(ran)),
    "tool/error_frac": _share([call.status != "ok" for call in ran]),
    "tool/timeout_frac": _share([call.status in ("timeout", "cpu") for call in ran]),
    "tool/wall_s": _mean([call.wall_s for call in ran]),
    "tool/infra_error_count": float(sum(call.status == INFRA_ERROR for e in episodes for call in e.calls)),
    "groups/all_correct_frac": all_correct,
    "groups/all_wrong_frac": all_wrong,
    "groups/mixed_frac": _share([any(group) and not all(group) for group in groups]),
    "episodes/answered_frac": _share([e.status is EndStatus.ANSWERED for e in done]),
    "episodes/length_frac": _share([e.status is EndStatus.LENGTH for e in done]),
    "episodes/call_budget_frac": _share([e.status is EndStatus.CALL_BUDGET for e in done]),
    "episodes/aborted_count": float(len(episodes) - len(done)),
  }


def _mean(values: Sequence[float]) -> float:
  return float(np.mean(values)) if values else math.nan


def _share(flags: Sequence[bool]) -> float:
  return _mean([float(flag) for flag in flags])
