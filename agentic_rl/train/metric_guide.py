"""The guide to the metrics: name, unit, meaning, healthy range, what to do when it leaves it.

`docs/metrics.md` is generated from this table (`python -m agentic_rl.train.metric_guide docs/metrics.md`), and
`MetricWriter` refuses a name that is not in it, so a curve can always be looked up.
"""

from __future__ import annotations

import difflib
import pathlib
import re
import sys
from collections.abc import Iterable
from typing import NamedTuple


class Metric(NamedTuple):
  """One row of the guide. `pattern` may hold `<set>` and `<k>`, which stand for a set's name and a number."""

  pattern: str
  unit: str
  description: str
  healthy: str
  action: str


_SHARE = "share, 0 to 1"

METRICS: tuple[Metric, ...] = (
  # Reward and behaviour of the training rollouts.
  Metric(
    "reward/mean",
    "reward",
    "Mean outcome reward of all episodes of the iteration.",
    "rises over tens of steps",
    "flat at 0: problems too hard or the verifier rejects good answers; read an episode with the viewer",
  ),
  Metric(
    "reward/std",
    "reward",
    "Standard deviation of the reward over all episodes.",
    "above 0",
    "0: every episode is right or every one is wrong; change the problem mix",
  ),
  Metric(
    "rollout/accuracy",
    _SHARE,
    "Share of training episodes with the right answer.",
    "0.1 to 0.9",
    "near 0 or 1: no learning signal; move the difficulty",
  ),
  Metric(
    "rollout/code_proportion",
    _SHARE,
    "Share of responses that executed code at least once.",
    "rises, may dip first",
    "falls to 0: calls fail or cost reward; look at tool/error_frac",
  ),
  Metric(
    "rollout/code_in_correct",
    _SHARE,
    "Share of correct responses that executed code; no value when nothing was correct.",
    "rises with the reward",
    "stays low while code_proportion rises: code is written but does not help",
  ),
  Metric(
    "rollout/code_count",
    "executions a response",
    "Mean number of executed calls a response.",
    "settles at 1 to 2",
    "grows without accuracy: loops of calls; lower the call budget",
  ),
  Metric(
    "rollout/response_length",
    "policy tokens",
    "Mean number of tokens that the policy sampled in a response.",
    "grows slowly",
    "jumps to the budget: repetition; look at episodes/length_frac and policy/entropy",
  ),
  Metric(
    "rollout/tool_length",
    "tool tokens",
    "Mean number of tool tokens (masked out of the loss) in a response.",
    "small beside response_length",
    "large: cap the printed output",
  ),
  Metric(
    "rollout/total_length",
    "tokens",
    "Mean of policy and tool tokens of a response.",
    "below the sequence budget",
    "at the budget: raise rollout.max_tokens",
  ),
  # The policy and its update.
  Metric(
    "policy/entropy",
    "nats a token",
    "Entropy of the policy, estimated without bias from rollouts: minus the mean log-probability of sampled tokens.",
    "falls slowly, stays above 0.02",
    "collapses early: raise clip_high or lower the learning rate",
  ),
  Metric(
    "policy/entropy_trained",
    "nats a token",
    "Exact entropy at the tokens that were trained: those of groups that passed the filter.",
    "falls slowly",
    "as policy/entropy",
  ),
  Metric(
    "policy/ratio_mean",
    "ratio",
    "Mean of new over behaviour probability of sampled tokens.",
    "0.98 to 1.02",
    "far from 1: too many minibatches or too high a learning rate",
  ),
  Metric(
    "policy/clip_low_frac",
    _SHARE,
    "Share of sampled tokens clipped at the lower bound.",
    "below 0.1",
    "higher: steps are too large",
  ),
  Metric(
    "policy/clip_high_frac",
    _SHARE,
    "Share of sampled tokens clipped at the upper bound.",
    "below 0.1",
    "higher: steps are too large, or clip_high too tight",
  ),
  Metric(
    "policy/kl_behaviour",
    "nats a token",
    "Estimated divergence of the updated policy from the one that sampled.",
    "below 0.05",
    "higher: lower the learning rate",
  ),
  Metric(
    "loss/policy",
    "loss",
    "Policy-gradient loss; its sign and size mean little.",
    "finite",
    "not finite: stop, look at optimizer/grad_norm and sync/logprob_diff_max",
  ),
  Metric(
    "loss/supervised",
    "nats a token",
    "Cross-entropy of the supervised stage.",
    "falls",
    "flat: learning rate; not finite: data",
  ),
  # Tool.
  Metric(
    "tool/calls",
    "executions",
    "Executed calls in the iteration.",
    "grows with code_proportion",
    "0: the dialect finds no call; read an episode",
  ),
  Metric(
    "tool/error_frac",
    _SHARE,
    "Share of calls that ended with a Python error, a timeout or a crash.",
    "falls below 0.1",
    "stays high: the base model writes broken code; train the supervised stage longer",
  ),
  Metric(
    "tool/timeout_frac",
    _SHARE,
    "Share of calls ended by a time limit.",
    "below 0.02",
    "higher: endless loops, or an overloaded machine",
  ),
  Metric(
    "tool/infra_error_count",
    "calls",
    "Calls that failed through no fault of the code.",
    "0",
    "above 0: the interpreter is broken; its episodes are aborted, look at the log",
  ),
  Metric(
    "tool/wall_s",
    "seconds",
    "Mean wall time of a call, queueing included.",
    "below 0.1",
    "higher: too few interpreter workers",
  ),
  # Groups and ends of episodes.
  Metric(
    "groups/all_correct_frac",
    _SHARE,
    "Share of groups with only right answers.",
    "below 0.6",
    "higher: problems too easy",
  ),
  Metric(
    "groups/all_wrong_frac",
    _SHARE,
    "Share of groups with only wrong answers.",
    "below 0.6",
    "higher: problems too hard",
  ),
  Metric(
    "groups/mixed_frac",
    _SHARE,
    "Share of groups with both; only these teach. The three sum to 1.",
    "above 0.2",
    "lower: move the difficulty or take more samples a problem",
  ),
  Metric(
    "episodes/answered_frac",
    _SHARE,
    "Share of episodes that the policy ended by itself.",
    "above 0.9",
    "lower: see length_frac and call_budget_frac",
  ),
  Metric(
    "episodes/length_frac",
    _SHARE,
    "Share of episodes cut by the token budget.",
    "below 0.1",
    "higher: raise rollout.max_tokens, or the policy repeats itself",
  ),
  Metric(
    "episodes/call_budget_frac",
    _SHARE,
    "Share of episodes ended by a call over the budget.",
    "below 0.1",
    "higher: raise dialect.call_budget",
  ),
  Metric(
    "episodes/aborted_count",
    "episodes",
    "Episodes that the engine or the interpreter failed; never trained on.",
    "0",
    "above 0: look at the log and at tool/infra_error_count",
  ),
  # Optimiser.
  Metric(
    "optimizer/grad_norm",
    "norm",
    "Global gradient norm before clipping.",
    "0.05 to 5, steady",
    "spikes: lower the learning rate; not finite: stop",
  ),
  Metric(
    "optimizer/learning_rate",
    "learning rate",
    "Learning rate of the update.",
    "as scheduled",
    "differs: warm-up or resume is wrong",
  ),
  # Agreement of engine and learner.
  Metric(
    "sync/logprob_diff_mean",
    "nats",
    "Mean absolute difference of engine's and learner's log-probabilities after a publication.",
    "below 0.001 (native), 0.02 (served)",
    "higher: weights did not arrive, or temperature differs",
  ),
  Metric(
    "sync/logprob_diff_max",
    "nats",
    "Largest such difference.",
    "below 0.01 (native), 0.5 (served)",
    "higher: see the mean; one token alone: precision",
  ),
  # Speed.
  Metric(
    "packing/padding_frac",
    _SHARE,
    "Share of padding in the learner's rows.",
    "below 0.3",
    "higher: add a length bucket",
  ),
  Metric(
    "time/iteration_s",
    "s",
    "Wall time since the line before; in the first line, since the start of the process. Their sum is what a run took.",
    "steady",
    "rises: see the parts below",
  ),
  Metric(
    "time/rollout_s",
    "seconds",
    "Wall time of the rollouts of an iteration.",
    "steady",
    "grows: longer episodes or slow tools",
  ),
  Metric(
    "time/update_s",
    "seconds",
    "Wall time of the updates of an iteration.",
    "steady",
    "single spikes: a compilation; many of them: a shape that changes, find it",
  ),
  Metric(
    "time/publish_s",
    "seconds",
    "Wall time of writing and loading a publication.",
    "small beside rollout_s",
    "large: slow disk",
  ),
  Metric(
    "time/evaluate_s",
    "seconds",
    "Wall time of an evaluation.",
    "small beside a stretch of training",
    "large: fewer samples or problems",
  ),
  Metric(
    "throughput/rollout_tokens_per_s",
    "tokens/s",
    "Sampled tokens a second of rollout.",
    "steady",
    "falls: few requests in flight, or slow tools",
  ),
  Metric(
    "throughput/update_tokens_per_s",
    "tokens/s",
    "Tokens a second of update.",
    "steady",
    "falls: padding or compilation",
  ),
  # Evaluation sets.
  Metric(
    "eval/<set>/accuracy",
    _SHARE,
    "Accuracy on an evaluation set: mean over samples, then over problems (avg@k).",
    "rises with the reward",
    "falls while the reward rises: overfitting or a leak in the reward",
  ),
  Metric(
    "eval/<set>/code_proportion",
    _SHARE,
    "Share of evaluation responses that executed code.",
    "as rollout/code_proportion",
    "differs: evaluation samples otherwise than training",
  ),
  Metric(
    "eval/<set>/code_in_correct",
    _SHARE,
    "Share of correct evaluation responses that executed code.",
    "rises",
    "see rollout/code_in_correct",
  ),
  Metric(
    "eval/<set>/code_count",
    "executions a response",
    "Mean number of executed calls in evaluation.",
    "settles at 1 to 2",
    "see rollout/code_count",
  ),
  Metric(
    "eval/<set>/response_length",
    "policy tokens",
    "Mean sampled tokens of evaluation responses.",
    "as rollout/response_length",
    "see rollout/response_length",
  ),
  Metric(
    "eval/<set>/error_frac",
    _SHARE,
    "Share of evaluation calls that ended with an error.",
    "falls",
    "see tool/error_frac",
  ),
  Metric(
    "eval/<set>/pass_at_k",
    _SHARE,
    "Share of problems that at least one of k samples solves; unbiased estimate.",
    "above accuracy, rises with it",
    "falls while accuracy rises: the policy loses variety; see policy/entropy",
  ),
  Metric(
    "eval/<set>/maj_at_k",
    _SHARE,
    "Accuracy of the majority answer of k samples.",
    "above accuracy",
    "below accuracy: answers scatter",
  ),
)


def _regex(pattern: str) -> re.Pattern[str]:
  parts = re.split(r"(<set>|<k>)", pattern)
  forms = {"<set>": r"[a-z0-9][a-z0-9_\-]*", "<k>": r"[0-9]+"}
  return re.compile("".join(forms.get(part, re.escape(part)) for part in parts))


_REGEXES = {metric.pattern: (_regex(metric.pattern), metric) for metric in METRICS}


def find_metric(name: str) -> Metric | None:
  """The row that documents `name`, or None."""
  for regex, metric in _REGEXES.values():
    if regex.fullmatch(name):
      return metric
  return None


def check_names(names: Iterable[str]) -> None:
  """Raises ValueError for the first name that the guide does not know, naming the nearest that it does."""
  for name in names:
    if find_metric(name) is None:
      parts = name.split("/")
      known = [m.pattern.replace("<set>", parts[1] if len(parts) == 3 and parts[1] else "<set>") for m in METRICS]
      near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
      advice = f"did you mean {near[0]!r}? Otherwise" if near else "please"
      raise ValueError(
        f"metric {name!r} is not in the metric guide; {advice} add it to agentic_rl/train/metric_guide.py"
      )


def to_markdown() -> str:
  """The page `docs/metrics.md`."""
  lines = [
    "# Metrics",
    "",
    "Every number that a run writes, with its one name. The names are the same in `metrics.jsonl` (one line a step:",
    '`{"step": …, "time": unix seconds, "<name>": number, …}`, `null` where there is no value) and in the TensorBoard',
    "event files under `tensorboard/`. `<set>` stands for the name of an evaluation set.",
    "",
    "This page is generated: `python -m agentic_rl.train.metric_guide docs/metrics.md`.",
  ]
  room = ""
  for metric in METRICS:
    head = metric.pattern.split("/")[0]
    if head != room:
      lines += ["", f"## {head}", "", "| name | unit | what it is | healthy | otherwise |", "|---|---|---|---|---|"]
      room = head
    name, *rest = metric
    lines.append(f"| `{name}` | " + " | ".join(rest) + " |")
  return "\n".join(lines) + "\n"


if __name__ == "__main__":
  if len(sys.argv) != 2:
    sys.exit("usage: python -m agentic_rl.train.metric_guide docs/metrics.md")
  pathlib.Path(sys.argv[1]).write_text(to_markdown(), encoding="utf-8")
