from __future__ import annotations

import asyncio
import dataclasses
import math

import pytest

from agentic_rl.episode import Completion, EndStatus, Finish, FinishKind, Problem
from agentic_rl.errors import UserError
from agentic_rl.evaluation import evaluate, markdown_table, set_metrics, text_table
from agentic_rl.rollout.engine import Sampling
from agentic_rl.tokenizer import PieceTokenizer
from agentic_rl.tools import FencedDialect, ToolOutcome

TOKENIZER = PieceTokenizer([*"0123456789+=?\n", "```python", "```", "```output\n", "\\boxed{", "}"], unknown="?")
DIALECT = FencedDialect(call_budget=1, budget_end="free", stop=("\n=",))


class AnsweringEngine:
  """Writes what is scripted for a session: an answer, or a call and an answer once the result is there."""

  def __init__(self, answers: dict[str, str]):
    self.answers = answers

  async def generate(self, token_ids, sampling, *, session):
    await asyncio.sleep(0)
    script, text = self.answers[session], TOKENIZER.decode(token_ids)
    if script == "lost":
      raise ConnectionError(session)
    if script.startswith("call ") and "```output" not in text:
      new = "1+1```" if text.endswith("```python") else "```python"
      finish = Finish(FinishKind.STOP, "```" if new != "```python" else new)
    else:
      new, finish = f"\\boxed{{{script.removeprefix('call ')}}}", Finish(FinishKind.STOP, 1)
    ids = (*TOKENIZER.encode(new), *([1] if finish.matched == 1 else []))
    return Completion(ids, (-1.0,) * len(ids), finish, (0,) * len(ids))

  async def end_session(self, session):
    pass


class Two:
  async def end(self, session):
    pass

  async def run(self, code, *, session):
    return ToolOutcome("2", "ok" if session != "y/0" else "error")


def problem(uid: str, answer: str = "2") -> Problem:
  return Problem(uid, "test", "math", "1+1=", answer, "boxed_number")


def run(answers, sets, samples, **options):
  options = {"sampling": Sampling(max_new_tokens=50), "max_tokens": 100, **options}
  return asyncio.run(evaluate(AnsweringEngine(answers), TOKENIZER, DIALECT, Two(), sets, samples, **options))


# Of the samples of x 3 in 4 are right, and the majority is; of y 1 in 4, and the majority is wrong.
SAMPLES = {"x": ["2", "call 02", "3", "2"], "y": ["call 5", "5", "call 2", "7"], "z": ["2"] * 4}
ANSWERS = {f"{uid}/{i}": answer for uid, answers in SAMPLES.items() for i, answer in enumerate(answers)}


def test_figures_by_hand():
  seen = []
  result = run(ANSWERS, {"hard": [problem("x"), problem("y")], "easy": [problem("z")]}, 4, progress=seen.append)
  hard = result.sets["hard"]
  assert hard == pytest.approx(
    {
      "accuracy": (3 / 4 + 1 / 4) / 2,
      "pass_at_k": 1.0,
      "maj_at_k": 0.5,  # 02 votes with 2
      "code_proportion": 3 / 8,
      "code_in_correct": 2 / 4,
      "code_count": 3 / 8,
      # A direct answer is a box of three tokens (four for 02) and the end; a call is the open fence and 1+1```.
      "response_length": (5 * 4 + (5 + 5) + (5 + 4) * 2) / 8,
      "error_frac": 1 / 3,
      "aborted": 0,
    }
  )
  assert result.sets["easy"]["accuracy"] == 1
  assert math.isnan(result.sets["easy"]["error_frac"])
  assert len(seen) == 12


def test_lost_episodes_enter_no_figure():
  answers = {"x/0": "2", "x/1": "lost", "x/2": "3", "z/0": "lost", "z/1": "lost", "z/2": "lost"}
  result = run(answers, {"s": [problem("x"), problem("z")]}, 3)
  assert result.sets["s"]["aborted"] == 4 and "  4" in result.table().splitlines()[2]
  assert (result.sets["s"]["accuracy"], result.sets["s"]["pass_at_k"]) == (0.5, 1.0)  # of problem x alone, 2 samples


def test_pass_at_fewer_than_all_samples():
  result = run(ANSWERS, {"s": [problem("y")]}, 4)
  assert set_metrics(result.episodes["s"], 1)["pass_at_k"] == 1 / 4
  assert set_metrics(result.episodes["s"], 2)["pass_at_k"] == 1 / 2


def test_set_of_aborted_episodes_alone_has_no_value():
  episodes = run(ANSWERS, {"s": [problem("z")]}, 1).episodes["s"]
  lost = [dataclasses.replace(e, status=EndStatus.ABORTED) for e in episodes]
  assert math.isnan(set_metrics(lost, 1)["accuracy"])


def test_sets_without_problems_are_refused():
  with pytest.raises(UserError, match="'empty' has no problem"):
    run(ANSWERS, {"easy": [problem("z")], "empty": []}, 1)
  with pytest.raises(UserError, match="no evaluation set"):
    run(ANSWERS, {}, 1)


def test_tables_of_an_evaluation():
  result = run(ANSWERS, {"hard": [problem("x"), problem("y")], "easy": [problem("z")]}, 4)
  lines = result.table().splitlines()
  assert lines[0].split()[:5] == ["set", "problems", "k", "accuracy", "pass_at_k"]
  assert lines[2].split()[:4] == ["hard", "2", "4", "0.500"]
  assert lines[0].split()[-2:] == ["error_frac", "aborted"]
  assert lines[3].split()[-2:] == ["-", "0"]  # no call, no share of errors
  assert result.table(markdown=True).startswith("| set  | problems |")


def test_text_table():
  rows = [{"name": "a", "x": 1.0, "n": 10}, {"name": "long", "y": None, "x": -0.25}]
  assert text_table(rows, digits=2) == (
    "name      x   n  y\n"  # columns in order of first appearance
    "----  -----  --  -\n"
    "a      1.00  10  -\n"
    "long  -0.25   -  -"
  )


def test_markdown_table():
  rows = [{"name": "a|b", "x": 1.5}]
  assert markdown_table(rows, digits=1) == ("| name |   x |\n| ---- | --: |\n| a\\|b | 1.5 |")
  with pytest.raises(ValueError, match="no row"):
    markdown_table([])
