from __future__ import annotations

import importlib.util
import re
import sys

import pytest

from agentic_rl.data import procedural
from agentic_rl.errors import UserError

OURS = [name for name in procedural.FAMILIES if not name.startswith("gym/")]
GYM = [name for name in procedural.FAMILIES if name.startswith("gym/")]
needs_gym = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs reasoning-gym")


def solve(text: str) -> int:
  """The answer by another way than the generator's."""
  numbers = [int(n) for n in re.findall(r"\d+", text)]
  if "squares" in text:
    n = numbers[-1]
    return n * (n + 1) * (2 * n + 1) // 6
  if "digits" in text:
    value, total = numbers[0] ** numbers[1], 0
    while value:
      value, digit = divmod(value, 10)
      total += digit
    return total
  if "divisible" in text:
    return sum(1 for i in range(1, numbers[1] + 1) if i % numbers[2] == 0)
  return eval(text.removeprefix("What is ").removesuffix("?"))


@pytest.mark.parametrize("family", OURS)
def test_answers_are_right(family: str):
  for problem in procedural.problems(40, 0, families={family: 1.0}):
    assert int(problem.answer) == solve(problem.prompt), problem.prompt
    assert problem.source == f"procedural/{family}"


def test_the_same_seed_gives_the_same_problems_and_uids_are_unique():
  families = dict.fromkeys(OURS, 1.0)
  first = procedural.problems(120, 5, families=families)
  assert first == procedural.problems(120, 5, families=families)
  assert first != procedural.problems(120, 6, families=families)
  assert len({p.uid for p in first}) == 120
  assert {p.source.split("/")[1] for p in first} == set(OURS)


def test_held_out_texts_never_occur_in_training():
  families = {"product_2": 1.0, "multiples": 1.0}
  train = {p.prompt for seed in range(3) for p in procedural.problems(300, seed, families=families)}
  held = {p.prompt for seed in range(3) for p in procedural.problems(100, seed, families=families, held_out=True)}
  assert len(held) > 150 and not train & held


def test_what_cannot_be_made_is_refused():
  with pytest.raises(UserError, match="unknown problem family 'gym/sudoku'"):
    procedural.problems(1, 0, families={"gym/sudoku": 1.0})
  with pytest.raises(UserError, match="must be positive"):
    procedural.problems(1, 0, families={"sum": 0.0})
  with pytest.raises(UserError, match="'squares' ran out"):
    procedural.problems(1200, 0, families={"squares": 1.0})


def test_an_absent_package_is_named(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setitem(sys.modules, "reasoning_gym", None)
  with pytest.raises(UserError, match="pip install reasoning-gym"):
    procedural.problems(1, 0, families={"gym/gcd": 1.0})


@needs_gym
def test_gym_problems_are_repeatable_and_do_not_contradict_a_boxed_answer():
  families = dict.fromkeys(GYM, 1.0)
  first = procedural.problems(60, 1, families=families)
  assert first == procedural.problems(60, 1, families=families)
  assert {p.source.removeprefix("procedural/") for p in first} == set(GYM)
  for problem in first:
    assert "final answer" not in problem.prompt and "include units" not in problem.prompt, problem.prompt
    assert problem.prompt == problem.prompt.strip() and re.fullmatch(r"-?\d+", problem.answer)


@needs_gym
def test_gym_answers_agree_with_arithmetic():
  for problem in procedural.problems(20, 2, families={"gym/chain_sum": 1.0}):
    assert eval(problem.prompt.rstrip("= ")) == int(problem.answer)
