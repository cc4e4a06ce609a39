from __future__ import annotations

import concurrent.futures
import time
from fractions import Fraction

import pytest

from agentic_rl.episode import EndStatus, Episode, Problem, Segment, ToolCall
from agentic_rl.errors import UserError
from agentic_rl.rewards import Reward, get_verifier, last_boxed, parse_number, register_verifier


def episode(*texts: str, answer: str = "4", verifier: str = "boxed") -> Episode:
  """Episode of alternating policy and tool texts, policy first."""
  segments = [Segment("prompt", (0,), "prompt")]
  for i, text in enumerate(texts):
    segments.append(Segment("tool", (2,), text) if i % 2 else Segment("policy", (1,), text, (-1.0,), (0,)))
  problem = Problem("p", "s", "math", "q", answer, verifier)
  return Episode("p", 0, problem, tuple(segments), (ToolCall("c", "o", "ok"),), EndStatus.ANSWERED)


def score(*texts: str, answer: str = "4", verifier: str = "boxed") -> Reward:
  return get_verifier(verifier)(episode(*texts, answer=answer, verifier=verifier))


@pytest.mark.parametrize(
  ("text", "want"),
  [
    (r"so \boxed{4}.", "4"),
    (r"\boxed{1} no, \boxed{2}", "2"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\left\{ x}", r"\left\{ x"),  # an escaped brace is text
    (r"\boxed{\boxed{5}}", "5"),
    (r"\boxed{1} and \boxed{2", "1"),  # the second one is not complete
    (r"a } b { \boxed{3}", "3"),
    (r"x \\\boxed{3}", "3"),
    (r"x \\boxed{3}", "3"),
    (r"\boxed{}", ""),
    (r"\boxed{4", None),
    (r"boxed{4}", None),
    ("", None),
  ],
)
def test_last_boxed(text, want):
  assert last_boxed(text) == want


def test_last_boxed_is_fast_on_hostile_text():
  start = time.monotonic()
  assert last_boxed(r"\boxed{" * 50_000) is None
  assert last_boxed("{" * 300_000 + r"\boxed{1}") == "1"
  assert time.monotonic() - start < 2


@pytest.mark.parametrize(
  ("text", "want"),
  [
    ("007", 7),
    ("1,234", 1234),
    ("1,234.50", Fraction(2469, 2)),
    (" -3 ", -3),
    ("+.5", Fraction(1, 2)),
    ("5.", 5),
    ("-1/2", Fraction(-1, 2)),
    (r"-\frac{3}{6}", Fraction(-1, 2)),
    (r"\dfrac{10}{5}", 2),
    ("-0", 0),
    ("1,23", None),
    ("12,345,6", None),
    ("1/0", None),
    (r"\frac{1}{0}", None),
    ("1e999999999", None),
    ("10**10", None),
    ("__import__('os')", None),
    (".", None),
    ("-", None),
    ("", None),
    ("٣", None),
    ("1" * 257, None),
  ],
)
def test_parse_number(text, want):
  assert parse_number(text) == want


def test_parse_number_is_fast_on_hostile_text():
  start = time.monotonic()
  for text in ("1," * 5_000_000, "9" * 5_000_000, "1" * 120 + "," * 120, "1/" * 100):
    assert parse_number(text) is None
  assert time.monotonic() - start < 1


def test_boxed_is_a_strict_match():
  assert score(r"\boxed{ 4 }") == Reward(1.0, {"correct": 1.0, "answered": 1.0})
  assert score(r"\boxed{4.0}") == Reward(0.0, {"correct": 0.0, "answered": 1.0})
  assert score("4") == Reward(0.0, {"correct": 0.0, "answered": 0.0})


def test_boxed_number_compares_values():
  assert score(r"\boxed{007}", answer="7", verifier="boxed_number").value == 1
  assert score(r"\boxed{1,234}", answer="1234", verifier="boxed_number").value == 1
  assert score(r"\boxed{0.5}", answer=r"\frac{1}{2}", verifier="boxed_number").value == 1
  assert score(r"\boxed{0.33}", answer="1/3", verifier="boxed_number").value == 0
  assert score(r"\boxed{}", answer="0", verifier="boxed_number").value == 0
  assert score(r"\boxed{x+1}", answer="x+1", verifier="boxed_number").value == 1  # no number: as text


def test_choice():
  for text in ("B", "b", "(B)", r"\text{B}", "B."):
    assert score(rf"\boxed{{{text}}}", answer="B", verifier="choice").value == 1
  for text in ("A", "AB", "", "B or C"):
    assert score(rf"\boxed{{{text}}}", answer="B", verifier="choice").value == 0


@pytest.mark.parametrize("verifier", ["boxed", "boxed_number", "choice"])
def test_answers_of_the_tool_never_count(verifier):
  # The right answer printed by the interpreter, given before the last result, or split between policy and tool.
  for texts in (
    ("print", r"\boxed{4}"),
    ("print", r"\boxed{4}", "done"),
    (r"\boxed{4} print", "4", "no answer"),
    (r"print \boxed{", "4}", "}"),
    (r"\boxed{5} print", r"\boxed{4}", r"\boxed{5}"),
  ):
    assert score(*texts, verifier=verifier).value == 0, texts


def test_right_answer_in_the_third_turn_counts():
  assert score("a", "1", r"\boxed{9} b", "2", r"\boxed{4}").value == 1


def test_verifiers_work_in_threads():
  pairs = [(rf"\boxed{{{i % 7}}}", float(i % 7 == 4)) for i in range(20)]
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    rewards = list(pool.map(lambda pair: score(pair[0], verifier="boxed_number").value, pairs))
  assert rewards == [want for _, want in pairs]


def test_answer_is_a_normal_form():
  assert get_verifier("boxed_number").answer(episode(r"\boxed{0.50}")) == "1/2"
  assert get_verifier("boxed").answer(episode(r"\boxed{ 0.50 }")) == "0.50"
  assert get_verifier("boxed").answer(episode("none")) is None


def test_unknown_verifier_names_the_nearest():
  with pytest.raises(UserError, match="did you mean 'boxed_number'"):
    get_verifier("boxed_numbers")


def test_a_name_is_registered_once():
  with pytest.raises(ValueError, match="'boxed' is registered"):
    register_verifier("boxed", get_verifier("choice"))


def test_reward_checks_itself():
  with pytest.raises(ValueError, match="finite"):
    Reward(float("nan"), {"correct": 0, "answered": 0})
  with pytest.raises(ValueError, match="answered"):
    Reward(0.0, {"correct": 0})
