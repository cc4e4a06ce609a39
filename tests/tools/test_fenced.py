from __future__ import annotations

import pytest

from agentic_rl.episode import EndStatus, Finish, FinishKind, Problem
from agentic_rl.tokenizer import PieceTokenizer
from agentic_rl.tools import (
  DialectState,
  End,
  FencedDialect,
  Generate,
  RunCalls,
  ToolOutcome,
  truncate_characters,
  truncate_tokens,
)

CHARACTERS = PieceTokenizer([*"abcdefghijklmnopqrstuvwxyz0123456789 .[]`\n"], unknown=" ")


class Utf8Tokenizer:
  """One token a byte, so that one CJK character is three tokens."""

  vocab_size, pad_id, eos_id, fingerprint = 256, 0, 0, "utf8"

  def encode(self, text):
    return list(text.encode())

  def decode(self, token_ids):
    return bytes(token_ids).decode(errors="replace")


def stop(matched):
  return Finish(FinishKind.STOP, matched)


def after_calls(dialect: FencedDialect, n: int) -> DialectState:
  """State after n calls and their results."""
  state = dialect.start()
  for _ in range(n):
    action = dialect.read(state, "```python", stop("```python"))
    action = dialect.read(action.state, "\n1\n```", stop("```"))
    state = dialect.render_results(action.state, [ToolOutcome("1")], CHARACTERS).state
  return state


def test_prompt_keeps_other_braces():
  dialect = FencedDialect(prompt_template=r"Put it in \boxed{}. {problem} {x}")
  assert (
    dialect.render_prompt(Problem("p", "s", "math", "What is {y}?", "1")) == r"Put it in \boxed{}. What is {y}? {x}"
  )


def test_chat_messages_are_refused():
  chat = Problem("p", "s", "math", ({"role": "user", "content": "hi"},), "1")
  with pytest.raises(ValueError, match="'p' has chat messages"):
    FencedDialect().render_prompt(chat)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"prompt_template": "no hole"}, "prompt_template"),
    ({"observation_template": "{output}{output}"}, "observation_template"),
    ({"call_budget": -1}, "call_budget"),
    ({"budget_end": "later"}, "notice, stop, free"),
    ({"truncation": "left"}, "truncation"),
    ({"max_observation_tokens": 0}, "max_observation_tokens"),
    ({"close_fence": ""}, "must not be empty"),
    ({"stop": ("```python",)}, "cannot both"),
  ],
)
def test_bad_options_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    FencedDialect(**options)


def test_one_call_through_the_state_machine():
  dialect = FencedDialect(stop=("</answer>", "User:"))
  state = dialect.start()
  assert dialect.stops(state) == ("```python", "</answer>", "User:")
  action = dialect.read(state, "I compute. ```python", stop("```python"))
  assert isinstance(action, Generate)
  # While the policy writes code, text in it cannot end the answer.
  assert dialect.stops(action.state) == ("```",)
  action = dialect.read(action.state, "\nprint('</answer>')\n```", stop("```"))
  assert isinstance(action, RunCalls)
  assert [call.code for call in action.calls] == ["\nprint('</answer>')\n"]
  rendered = dialect.render_results(action.state, [ToolOutcome("</answer>")], CHARACTERS)
  assert rendered.text == "\n```output\n</answer>\n```\n"
  assert dialect.read(rendered.state, "done</answer>", stop("</answer>")) == End(EndStatus.ANSWERED)


def test_token_that_holds_the_fence_and_more():
  dialect = FencedDialect()
  action = dialect.read(dialect.start(), "so ```python\nx", stop("```python"))
  assert action.state.pending == "\nx"
  action = dialect.read(action.state, " = 1\n```\n", stop("```"))
  assert action.calls[0].code == "\nx = 1\n"


def test_token_that_holds_the_whole_call():
  dialect = FencedDialect()
  action = dialect.read(dialect.start(), "```python\n1\n```\n", stop("```python"))
  assert isinstance(action, RunCalls)
  assert action.calls[0].code == "\n1\n"


def test_end_of_sequence_within_code_is_no_call():
  dialect = FencedDialect()
  action = dialect.read(DialectState("code", 0, "\n1"), "+1<eos>", stop(1))
  assert action == End(EndStatus.ANSWERED)


def test_budget_stop_returns_the_trajectory_at_the_call_over_the_budget():
  dialect = FencedDialect(call_budget=2, budget_end="stop")
  state = after_calls(dialect, 2)
  assert dialect.stops(state) == ("```python", "</answer>")  # the policy is not told, and may try
  action = dialect.read(state, "```python", stop("```python"))
  action = dialect.read(action.state, "3```", stop("```"))
  assert action.status is EndStatus.CALL_BUDGET
  assert [call.code for call in action.unrun] == ["3"]


def test_budget_notice_comes_with_the_last_result_only():
  dialect = FencedDialect(call_budget=2, budget_end="notice", notice="NO MORE\n", observation_template="<{output}>")
  first = dialect.render_results(DialectState("text", 1), [ToolOutcome("a")], CHARACTERS)
  second = dialect.render_results(DialectState("text", 2), [ToolOutcome("b")], CHARACTERS)
  assert (first.text, second.text) == ("<a>", "<b>NO MORE\n")
  assert dialect.stops(first.state) == ("```python", "</answer>")
  assert dialect.stops(second.state) == ("</answer>",)


def test_budget_free_drops_the_fences_silently():
  dialect = FencedDialect(call_budget=1, budget_end="free", observation_template="<{output}>")
  rendered = dialect.render_results(DialectState("text", 1), [ToolOutcome("a")], CHARACTERS)
  assert rendered.text == "<a>"
  assert dialect.stops(rendered.state) == ("</answer>",)
  assert dialect.read(rendered.state, "```python 1 ``` </answer>", stop("</answer>")) == End(EndStatus.ANSWERED)


@pytest.mark.parametrize("budget_end", ["free", "notice"])
def test_budget_of_zero_is_no_tool_at_all(budget_end):
  dialect = FencedDialect(call_budget=0, budget_end=budget_end)
  assert dialect.stops(dialect.start()) == ("</answer>",)


def test_budget_of_zero_with_stop_ends_at_the_first_call():
  dialect = FencedDialect(call_budget=0, budget_end="stop")
  action = dialect.read(dialect.start(), "```python\n", stop("```python"))
  action = dialect.read(action.state, "1\n```", stop("```"))
  assert action.status is EndStatus.CALL_BUDGET


@pytest.mark.parametrize(
  ("how", "want"),
  [
    ("replace", "too long"),
    ("head", "abcdefg[...]"),
    ("middle", "abcd[...]789"),
    ("tail", "[...]3456789"),
  ],
)
def test_truncation_by_tokens(how, want):
  text = "abcdefghij0123456789"
  assert truncate_tokens(text, 12, how, "too long", CHARACTERS) == want
  assert truncate_tokens(text, 20, how, "too long", CHARACTERS) == text  # exactly at the limit
  assert truncate_tokens(text, 19, how, "too long", CHARACTERS) != text


@pytest.mark.parametrize("how", ["head", "middle", "tail"])
@pytest.mark.parametrize("limit", [1, 5, 6, 7, 8, 9, 10, 20])
def test_truncation_counts_tokens_not_characters_and_keeps_characters_whole(how, limit):
  cut = truncate_tokens("数学問題を解く", limit, how, "", Utf8Tokenizer())  # 7 characters, 21 tokens
  assert len(cut.encode()) <= limit
  assert "\ufffd" not in cut
  assert all(c in "数学問題を解く[...]" for c in cut)


def test_long_output_is_replaced_in_the_observation():
  dialect = FencedDialect(max_observation_tokens=4, too_long="long", observation_template="<{output}>")
  rendered = dialect.render_results(DialectState("text", 1), [ToolOutcome("12345")], CHARACTERS)
  assert (rendered.text, rendered.observations) == ("<long>", ("long",))


def test_output_with_braces_is_not_a_template():
  rendered = FencedDialect().render_results(DialectState("text", 1), [ToolOutcome("{output} {0}")], CHARACTERS)
  assert rendered.text == "\n```output\n{output} {0}\n```\n"


@pytest.mark.parametrize(
  ("how", "want"),
  [("replace", "too long"), ("head", "0123[...]"), ("tail", "[...]6789"), ("middle", "01[...]89")],
)
def test_truncation_by_characters(how, want):
  assert truncate_characters("0123456789", 9, how, "too long") == want
  assert truncate_characters("0123456789", 10, how, "too long") == "0123456789"
  assert len(truncate_characters("数学" * 50, 3, how, "...")) == 3
