"""Evaluation of a policy: avg@k, pass@k, maj@k and tool-use statistics."""

from agentic_rl.evaluation.evaluate import Evaluation, evaluate, set_metrics
from agentic_rl.evaluation.passk import average_at_k, majority_at_k, pass_at_k
from agentic_rl.evaluation.tables import markdown_table, text_table

__all__ = [
  "Evaluation",
  "average_at_k",
  "evaluate",
  "majority_at_k",
  "markdown_table",
  "pass_at_k",
  "set_metrics",
  "text_table",
]
