"""Generated problems in words, for language models that can already write a little Python.

Two sources of families: arithmetic of this module, and tasks of the package `reasoning-gym` as `gym/<task>`. All
answers are whole numbers, so that the verifier `boxed_number` decides them exactly. Problems for training and held-out
ones are told apart by a hash of their text: no text is on both sides, whatever the seeds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from agentic_rl.episode import Problem
from agentic_rl.errors import UserError

_STREAM = 0x9C0D  # keeps these random numbers apart from those of other uses of the same seed

GYM_TASKS = (
  "basic_arithmetic",
  "chain_sum",
  "count_bits",
  "count_primes",
  "gcd",
  "gsm_symbolic",
  "lcm",
  "leg_counting",
  "letter_counting",
  "products",
  "simple_equations",
)
"""Tasks of `reasoning-gym` whose answer is one whole number, and the same one for the same seed."""

_HELD_OUT_SHARE = 5  # one text in so many is held out
_TRIES = 200  # per problem, before a family counts as exhausted
_WHOLE_NUMBER = re.compile(r"-?[0-9]+")
# The questions ask for the bare result, which contradicts a prompt that asks for a boxed one.
_INSTRUCTION = re.compile(
  r"\s*(?:Give (?:only )?the \w+ as your final answer\.|Do not include units\."
  r"|State the final answer to the following arithmetic problem:)\s*"
)


@dataclasses.dataclass(frozen=True)
class _Draw:
  """One question of a family and its answer."""

  text: str
  answer: int


def _product(rng: np.random.Generator, digits: int) -> _Draw:
  a, b = (int(x) for x in rng.integers(10 ** (digits - 1), 10**digits, 2))
  return _Draw(f"What is {a} * {b}?", a * b)


def _sum(rng: np.random.Generator) -> _Draw:
  numbers = [int(x) for x in rng.integers(10, 100, 5)]
  return _Draw(f"What is {' + '.join(map(str, numbers))}?", sum(numbers))


def _squares(rng: np.random.Generator) -> _Draw:
  n = int(rng.integers(10, 1000))
  return _Draw(f"What is the sum of the squares of the numbers from 1 to {n}?", sum(i * i for i in range(n + 1)))


def _digit_sum(rng: np.random.Generator) -> _Draw:
  base, power = int(rng.integers(2, 20)), int(rng.integers(10, 60))
  return _Draw(f"What is the sum of the digits of {base}**{power}?", sum(map(int, str(base**power))))


def _multiples(rng: np.random.Generator) -> _Draw:
  n, k = int(rng.integers(100, 2000)), int(rng.integers(3, 20))
  return _Draw(f"How many numbers from 1 to {n} are divisible by {k}?", n // k)


_FAMILIES: Mapping[str, Callable[[np.random.Generator], _Draw]] = {
  "product_2": lambda rng: _product(rng, 2),
  "product_4": lambda rng: _product(rng, 4),
  "sum": _sum,
  "squares": _squares,
  "digit_sum": _digit_sum,
  "multiples": _multiples,
}
FAMILIES = (*_FAMILIES, *(f"gym/{task}" for task in GYM_TASKS))
"""Names that `problems` knows."""


def problems(count: int, seed: int, *, families: Mapping[str, float], held_out: bool = False) -> list[Problem]:
  """`count` distinct problems, families drawn by weight.

  Args:
    count: How many.
    seed: The same arguments give the same problems (with the same version of `reasoning-gym`).
    families: Weight of each family, from `FAMILIES`.
    held_out: Whether from the texts that are held out of training.

  Raises:
    UserError: An unknown family, weights that are not positive, a family that runs out of distinct problems, or
      `reasoning-gym` is not installed.
  """
  if unknown := sorted(set(families) - set(FAMILIES)):
    raise UserError(f"unknown problem family {unknown[0]!r}; known: {', '.join(FAMILIES)}")
  if not families or not all(w > 0 for w in families.values()):
    raise UserError(f"the weights of problem families must be positive, got {dict(families)}")
  rng = np.random.default_rng([_STREAM, seed, int(held_out)])
  weights = np.array(list(families.values()), float)
  draws = {name: _drawer(name) for name in families}
  found: dict[str, Problem] = {}
  for name in rng.choice(list(families), size=count, p=weights / weights.sum()):
    problem = _new(str(name), draws[name], rng, held_out, found)
    found[problem.uid] = problem
  return list(found.values())


def _new(
  family: str, draw: Callable[[np.random.Generator], _Draw], rng: np.random.Generator, held_out: bool, found: Mapping
) -> Problem:
  for _ in range(_TRIES):
    drawn = draw(rng)
    uid = f"procedural/{family}/{hashlib.blake2b(drawn.text.encode(), digest_size=8).hexdigest()}"
    if uid not in found and _is_held_out(drawn.text) == held_out:
      return Problem(
        uid=uid,
        source=f"procedural/{family}",
        domain="math",
        prompt=drawn.text,
        answer=str(drawn.answer),
        verifier="boxed_number",
      )
  raise UserError(f"problem family {family!r} ran out of distinct problems; ask for fewer or lower its weight")


def _is_held_out(text: str) -> bool:
  return hashlib.blake2b(text.encode(), digest_size=8, person=b"held_out").digest()[0] % _HELD_OUT_SHARE == 0


def _drawer(family: str) -> Callable[[np.random.Generator], _Draw]:
  if family in _FAMILIES:
    return _FAMILIES[family]
  try:
    import reasoning_gym  # Takes seconds to import, and is an optional extra.
  except ModuleNotFoundError as error:
    raise UserError(f"problem family {family!r} needs the package reasoning-gym; pip install reasoning-gym") from error
  task = family.removeprefix("gym/")

  def draw(rng: np.random.Generator) -> _Draw:
    # One item of a data set of its own: an item depends on the data set's seed and its own number alone.
    item: dict[str, Any] = reasoning_gym.create_dataset(task, size=1, seed=int(rng.integers(2**31)))[0]
    if not _WHOLE_NUMBER.fullmatch(str(item["answer"])):
      raise UserError(f"reasoning-gym task {task!r} gave the answer {item['answer']!r}, which is no whole number")
    return _Draw(_INSTRUCTION.sub(" ", item["question"]).strip(), int(item["answer"]))

  return draw
