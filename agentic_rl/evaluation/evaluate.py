"""Evaluation: k samples of every problem of named sets, and the statistics of the papers over them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from agentic_rl.episode import EndStatus, Episode, Problem, group_by_uid
from agentic_rl.errors import UserError
from agentic_rl.evaluation.passk import average_at_k, majority_at_k, pass_at_k
from agentic_rl.evaluation.tables import Cell, markdown_table, text_table
from agentic_rl.rewards import Verifier, get_verifier
from agentic_rl.rollout.collector import collect, is_correct, rollout_metrics
from agentic_rl.rollout.engine import Engine, Sampling
from agentic_rl.tokenizer import Tokenizer
from agentic_rl.tools import Dialect, Tool

# Statistics of the responses that an evaluation shares with the training rollouts.
_SHARED = {
  "code_proportion": "rollout/code_proportion",
  "code_in_correct": "rollout/code_in_correct",
  "code_count": "rollout/code_count",
  "response_length": "rollout/response_length",
  "error_frac": "tool/error_frac",
}


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Result of an evaluation.

  Attributes:
    samples: k, samples a problem.
    episodes: Per set, its episodes, sorted by uid and sample.
    sets: Per set, the figures of `set_metrics`.
  """

  samples: int
  episodes: Mapping[str, Sequence[Episode]]
  sets: Mapping[str, Mapping[str, float]]

  def table(self, markdown: bool = False) -> str:
    """A line a set, for a terminal or as Markdown."""
    rows: list[dict[str, Cell]] = []
    for name, figures in self.sets.items():
      problems = len({episode.uid for episode in self.episodes[name]})
      rows.append({"set": name, "problems": problems, "k": self.samples, **figures})
    return markdown_table(rows) if markdown else text_table(rows)


async def evaluate(
  engine: Engine,
  tokenizer: Tokenizer,
  dialect: Dialect,
  tool: Tool | None,
  sets: Mapping[str, Sequence[Problem]],
  samples: int,
  *,
  sampling: Sampling,
  max_tokens: int,
  max_in_flight: int = 256,
  episode_timeout_s: float | None = None,
  progress: Callable[[Episode], None] | None = None,
  verifiers: Callable[[str], Verifier] = get_verifier,
) -> Evaluation:
  """Runs `samples` episodes of every problem, set by set.

  Args:
    sets: Problems by the name of their set.
    samples: k, samples a problem.
    engine, tokenizer, dialect, tool, sampling, max_tokens, max_in_flight, episode_timeout_s, progress, verifiers: As in
      `collect`. Truncated and greedy sampling are allowed here.

  Raises:
    UserError: A set is empty, and as in `collect`.
  """
  empty = [name for name, problems in sets.items() if not problems]
  if empty or not sets:
    raise UserError(f"the evaluation set {empty[0]!r} has no problem" if empty else "there is no evaluation set")
  episodes: dict[str, list[Episode]] = {}
  for name, problems in sets.items():
    episodes[name] = await collect(
      engine,
      tokenizer,
      dialect,
      tool,
      problems,
      samples,
      sampling=sampling,
      max_tokens=max_tokens,
      max_in_flight=max_in_flight,
      episode_timeout_s=episode_timeout_s,
      progress=progress,
      verifiers=verifiers,
    )
  figures = {name: set_metrics(group, samples, verifiers) for name, group in episodes.items()}
  return Evaluation(samples, episodes, figures)


def set_metrics(
  episodes: Sequence[Episode], k: int, verifiers: Callable[[str], Verifier] = get_verifier
) -> dict[str, float]:
  """Figures of one set.

  `accuracy` (avg@k), `pass_at_k` and `maj_at_k` are means over problems; the rest are means over responses, see
  docs/metrics.md. Aborted episodes (there are `aborted`) are left out; a problem that lost some is judged on those it
  has.

  Args:
    episodes: Scored episodes of the set.
    k: Samples of pass@k, at least 1.
    verifiers: Finds the verifier that reads an episode's answer.

  Returns:
    Figures by name; NaN for a mean of nothing.
  """
  done = [episode for episode in episodes if episode.status is not EndStatus.ABORTED]
  average, passed, majority = [], [], []
  for group in group_by_uid(done).values():
    correct = [is_correct(episode) for episode in group]
    answers = [verifiers(episode.problem.verifier).answer(episode) for episode in group]
    average.append(average_at_k(correct))
    passed.append(pass_at_k(len(group), sum(correct), min(k, len(group))))
    majority.append(majority_at_k(answers, correct))
  shared = rollout_metrics(episodes)
  return {
    "accuracy": _mean(average),
    "pass_at_k": _mean(passed),
    "maj_at_k": _mean(majority),
    **{name: shared[metric] for name, metric in _SHARED.items()},
    "aborted": len(episodes) - len(done),
  }


def _mean(values: Sequence[float]) -> float:
  return math.fsum(values) / len(values) if values else math.nan
