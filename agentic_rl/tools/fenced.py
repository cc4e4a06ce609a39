"""The fenced dialect of ZeroTIR: a base model calls Python by writing a Markdown fence, found by stop strings.

The policy writes text; at an open fence it writes code; at the closing fence the code runs and its output is appended
in an output fence. Three modes make the state machine of arXiv 2505.07773, section 3.2: `text`, `code` and, when the
budget of calls is spent, `final`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from agentic_rl.episode import EndStatus, Finish, Problem
from agentic_rl.tokenizer import Tokenizer
from agentic_rl.tools.dialect import Action, Call, DialectState, End, Generate, Rendered, RunCalls, ToolOutcome
from agentic_rl.tools.truncation import TRUNCATIONS, Truncation, truncate_characters, truncate_tokens

BudgetEnd = Literal["notice", "stop", "free"]
BUDGET_ENDS: tuple[BudgetEnd, ...] = ("notice", "stop", "free")


@dataclasses.dataclass(frozen=True)
class FencedDialect:
  """Options of the fenced dialect.

  Attributes:
    prompt_template: Prompt text with one `{problem}`; other braces stand for themselves.
    open_fence, close_fence: Stop strings that begin and end a call. A token that holds the stop and more is kept whole:
      what follows the open fence is code, what follows the closing fence is ignored.
    observation_template: Frame of a result, with one `{output}`.
    stop: Strings that end the answer.
    call_budget: N, the most calls that are run.
    budget_end: What happens when N calls are spent. `stop` ends the episode at the next complete call (the paper's
      Algorithm 1). `notice` appends `notice` to the last result and lets the policy write its answer, no fence being
      found any more (the paper's section 3.2). `free` does the same without the notice (the released code): fences may
      still be written and are not run. With N = 0 there is no result to append a notice to, so `notice` equals `free`:
      no tool at all, the ZeroRL control.
    notice: Text that says that no call is left.
    max_observation_tokens: Most tokens of a tool's output, its frame not counted; None for no limit.
    max_observation_characters: The same in characters, applied first; None for no limit.
    truncation: What becomes of a longer output: `replace`, `head`, `middle` or `tail`, see `truncate_tokens`.
    too_long: Text that replaces a longer output under `replace`.
  """

  prompt_template: str = "{problem}"
  open_fence: str = "```python"
  close_fence: str = "```"
  observation_template: str = "\n```output\n{output}\n```\n"
  stop: tuple[str, ...] = ("</answer>",)
  call_budget: int = 2
  budget_end: BudgetEnd = "notice"
  notice: str = "\nAll Python calls are used up. Give the final answer without running more code.\n"
  max_observation_tokens: int | None = 512
  max_observation_characters: int | None = None
  truncation: Truncation = "replace"
  too_long: str = "The output is too long to show. Print less."

  def __post_init__(self) -> None:
    for name, hole in (("prompt_template", "{problem}"), ("observation_template", "{output}")):
      if getattr(self, name).count(hole) != 1:
        raise ValueError(f"{name} must hold {hole} exactly once, got {getattr(self, name)!r}")
    if not self.open_fence or not self.close_fence or not all(self.stop):
      raise ValueError("open_fence, close_fence and every stop string must not be empty")
    if self.open_fence in self.stop:
      raise ValueError(f"{self.open_fence!r} cannot both open a call and end the answer; remove it from stop")
    if self.call_budget < 0:
      raise ValueError(f"call_budget must be at least 0, got {self.call_budget}")
    if self.budget_end not in BUDGET_ENDS:
      raise ValueError(f"budget_end must be one of {', '.join(BUDGET_ENDS)}, got {self.budget_end!r}")
    if self.truncation not in TRUNCATIONS:
      raise ValueError(f"truncation must be one of {', '.join(TRUNCATIONS)}, got {self.truncation!r}")
    for name in ("max_observation_tokens", "max_observation_characters"):
      limit = getattr(self, name)
      if limit is not None and limit < 1:
        raise ValueError(f"{name} must be at least 1 or None, got {limit}")

  def render_prompt(self, problem: Problem) -> str:
    if not isinstance(problem.prompt, str):
      raise ValueError(f"problem {problem.uid!r} has chat messages; the fenced dialect needs its prompt as text")
    return self.prompt_template.replace("{problem}", problem.prompt)

  def start(self) -> DialectState:
    return DialectState(self._next_mode(0))

  def stops(self, state: DialectState) -> tuple[str, ...]:
    if state.mode == "code":
      return (self.close_fence,)
    return self.stop if state.mode == "final" else (self.open_fence, *self.stop)

  def read(self, state: DialectState, text: str, finish: Finish) -> Action:
    if state.mode == "text" and finish.matched == self.open_fence:
      # The stop ended the completion, so its first occurrence is the one that matched.
      code = text.partition(self.open_fence)[2]
      if self.close_fence not in code:
        return Generate(DialectState("code", state.calls, code))
    elif state.mode == "code" and finish.matched == self.close_fence:
      code = state.pending + text
    else:
      return End(EndStatus.ANSWERED)
    call = Call(code.partition(self.close_fence)[0])
    if state.calls >= self.call_budget:
      return End(EndStatus.CALL_BUDGET, (call,))
    return RunCalls((call,), DialectState("text", state.calls + 1))

  def render_results(self, state: DialectState, outcomes: Sequence[ToolOutcome], tokenizer: Tokenizer) -> Rendered:
    observations = tuple(self._limited(outcome.text, tokenizer) for outcome in outcomes)
    text = "".join(self.observation_template.replace("{output}", observation) for observation in observations)
    mode = self._next_mode(state.calls)
    if mode == "final" and self.budget_end == "notice":
      text += self.notice
    return Rendered(text, observations, DialectState(mode, state.calls))

  def _next_mode(self, calls: int) -> str:
    return "final" if calls >= self.call_budget and self.budget_end != "stop" else "text"

  def _limited(self, output: str, tokenizer: Tokenizer) -> str:
    if self.max_observation_characters is not None:
      output = truncate_characters(output, self.max_observation_characters, self.truncation, self.too_long)
    if self.max_observation_tokens is None:
      return output
    return truncate_tokens(output, self.max_observation_tokens, self.truncation, self.too_long, tokenizer)
