"""Dialects that a policy speaks to call a tool, and the interpreter as a tool."""

from agentic_rl.tools.dialect import (
  INFRA_ERROR,
  MALFORMED,
  NOT_EXECUTED,
  OVER_BUDGET,
  REFUSED,
  Action,
  Call,
  Dialect,
  DialectState,
  End,
  Generate,
  Rendered,
  RunCalls,
  Tool,
  ToolOutcome,
)
from agentic_rl.tools.fenced import FencedDialect
from agentic_rl.tools.interpreter import InterpreterTool, render_observation
from agentic_rl.tools.truncation import truncate_characters, truncate_tokens

__all__ = [
  "INFRA_ERROR",
  "MALFORMED",
  "NOT_EXECUTED",
  "OVER_BUDGET",
  "REFUSED",
  "Action",
  "Call",
  "Dialect",
  "DialectState",
  "End",
  "FencedDialect",
  "Generate",
  "InterpreterTool",
  "Rendered",
  "RunCalls",
  "Tool",
  "ToolOutcome",
  "render_observation",
  "truncate_characters",
  "truncate_tokens",
]
