"""Arithmetic problems and the pre-training corpus of the nano study.

The study needs a task where (a) a model of half a million parameters can be pre-trained in two CPU-minutes, (b) some
problems can be answered directly and others practically cannot, and (c) a call helps only if the policy writes right
code, reads the result and copies it. So there are six families of problems over small and large numbers:

| family | problem | code that solves it |
|---|---|---|
| `sum` (easy) | `27+8` | `print(27+8)` |
| `table` (easy) | `7*8` | `print(7*8)` |
| `product` (hard) | `347*62` | `print(347*62)` |
| `mixed` (hard) | `34*87-25*61` | `print(34*87-25*61)` |
| `loop` (hard) | `sum(i*i) 12..35` | a loop over `range(12,35)` |
| `digits` (hard) | `digits 347*62` | two calls: the product, then the sum of the digits that the first call returned |

Every large number belongs either to training (corpus and reinforcement learning) or to the held-out problems, by a
fixed random split: held-out hard problems share no operand with the questions of training. (A miscopied number in the
corpus's flawed code may be any number.) Easy problems are common knowledge, as small sums and the table are to people:
there are 334 of them, the corpus holds them all, and none is held out.

The corpus is text of four kinds: worked answers without code (most), worked answers with code (few; some of that code
is wrong, incomplete or ignored), notebook pages without a question, and copied expressions. It makes a base model that
answers easy problems directly, guesses at hard ones, and uses code rarely and badly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from agentic_rl.episode import Problem
from agentic_rl.tokenizer import PieceTokenizer

EASY = ("sum", "table")
HARD = ("product", "mixed", "loop", "digits")

_WORDS = (
  "```python\n",
  "```\n",
  "```output\n",
  "\\boxed{",
  "print(",
  "for i in range(",
  "sum(i*i)",
  "digits ",
  "Error",
  "..",
)
_CHARACTERS = "0123456789+-*=();:,.' \n}_" + "abcdefghijklmnopqrstuvwxyz" + "ENSTV"

_STREAM = 0xA517  # keeps these random numbers apart from those of other uses of the same seed

OPEN, CLOSE, OUTPUT = "```python\n", "\n```\n", "```output\n"


def tokenizer() -> PieceTokenizer:
  """The study's tokenizer: characters, the dialect's fences and a few words of Python. `?` stands for the rest."""
  return PieceTokenizer([*_WORDS, *dict.fromkeys(_CHARACTERS), "?"], unknown="?")


_LARGEST_EASY = 30
"""Easy problems use numbers up to this one, which therefore none of the held-out problems may use."""


def _split() -> tuple[np.ndarray, np.ndarray]:
  """Numbers 11..999 as (training, held-out): one in five of those above `_LARGEST_EASY` is held out."""
  numbers = np.arange(11, 1000)
  drawn = np.random.default_rng(20250507).permutation(len(numbers)) < len(numbers) // 5
  held = drawn & (numbers > _LARGEST_EASY)
  return numbers[~held], numbers[held]


_TRAIN, _HELD_OUT = _split()


@dataclasses.dataclass(frozen=True)
class Question:
  """A problem before it becomes a `Problem`: its text, its answer, and the snippets that solve it one after another.

  A snippet is a function of the output of the one before, because the second call of `digits` needs the first result.
  """

  family: str
  text: str
  answer: int
  snippets: tuple[Callable[[str], str], ...]


def _large(rng: np.random.Generator, held_out: bool, low: int, high: int) -> int:
  numbers = _HELD_OUT if held_out else _TRAIN
  begin, end = np.searchsorted(numbers, [low, high + 1])
  return int(numbers[rng.integers(begin, end)])


def question(family: str, rng: np.random.Generator, *, held_out: bool) -> Question:
  """Draws a question of one family.

  Raises:
    ValueError: For an unknown family.
  """
  if family in EASY:
    (a_low, a_high), (b_low, b_high) = ((1, 30), (1, 9)) if family == "sum" else ((2, 9), (2, 9))
    a, b = int(rng.integers(a_low, a_high + 1)), int(rng.integers(b_low, b_high + 1))
    text, answer = (f"{a}+{b}", a + b) if family == "sum" else (f"{a}*{b}", a * b)
    return Question(family, text, answer, (lambda _: f"print({text})",))
  if family == "product":
    a, b = _large(rng, held_out, 100, 999), _large(rng, held_out, 11, 99)
    return Question(family, f"{a}*{b}", a * b, (lambda _: f"print({a}*{b})",))
  if family == "mixed":
    a, b, c, d = (_large(rng, held_out, 11, 99) for _ in range(4))
    return Question(family, f"{a}*{b}-{c}*{d}", a * b - c * d, (lambda _: f"print({a}*{b}-{c}*{d})",))
  if family == "loop":
    a, b = sorted((_large(rng, held_out, 11, 60), _large(rng, held_out, 61, 99)))
    code = f"s=0\nfor i in range({a},{b}):\n s+=i*i\nprint(s)"
    return Question(family, f"sum(i*i) {a}..{b}", sum(i * i for i in range(a, b)), (lambda _: code,))
  if family == "digits":
    a, b = _large(rng, held_out, 100, 999), _large(rng, held_out, 11, 99)
    snippets: tuple[Callable[[str], str], ...] = (
      lambda _: f"print({a}*{b})",
      lambda output: "print(" + "+".join(output.strip()) + ")",
    )
    return Question(family, f"digits {a}*{b}", sum(map(int, str(a * b))), snippets)
  raise ValueError(f"unknown family {family!r}; known: {', '.join(EASY + HARD)}")


def problems(count: int, seed: int, *, families: Mapping[str, float], held_out: bool) -> list[Problem]:
  """`count` distinct problems, in random order, each family with its share.

  Args:
    count: How many.
    seed: Seed; the same arguments give the same problems.
    families: Weight of each family; shares of `count` are exact up to rounding.
    held_out: Whether hard problems use the held-out operands or those of training.

  Raises:
    ValueError: If a family does not hold as many distinct problems as its share asks for.
  """
  rng = np.random.default_rng([_STREAM, seed, int(held_out)])
  ends = np.round(np.cumsum([count * w / sum(families.values()) for w in families.values()])).astype(int)
  found: dict[str, Problem] = {}
  for family, end in zip(families, ends, strict=True):
    # Enough draws to meet the last of a few hundred problems, should the share be all of them.
    for _ in range(200 * count + 10_000):
      if len(found) == end:
        break
      q = question(family, rng, held_out=held_out)
      uid = f"arithmetic/{q.family}/{q.text}"
      found[uid] = Problem(
        uid=uid,
        source=f"arithmetic/{q.family}",
        domain="math",
        prompt=q.text,
        answer=str(q.answer),
        verifier="boxed",
        metadata={"difficulty": "easy" if q.family in EASY else "hard"},
      )
    if len(found) < end:
      raise ValueError(
        f"family {family!r} holds fewer distinct problems than its share of {count} asks for; lower count or its weight"
      )
  return [list(found.values())[i] for i in rng.permutation(count)]


@dataclasses.dataclass(frozen=True)
class CorpusMix:
  """Shares of the corpus; the rest are worked answers without code.

  Attributes:
    code: Worked answers with code.
    notebook: Code with its output, and the result stated, without a question.
    copy: Copied expressions.
    flaw: Share of code that is wrong, incomplete, or whose result is ignored.
    easy: Share of easy questions among questions.
  """

  code: float = 0.08
  notebook: float = 0.2
  copy: float = 0.15
  flaw: float = 0.35
  easy: float = 0.4


Document = list[tuple[str, bool]]
"""Runs of text with a flag: whether the model learns to write them (tool output and questions are only read)."""


def document(rng: np.random.Generator, mix: CorpusMix, *, template: str) -> Document:
  """One document of the corpus.

  Args:
    rng: Source of randomness.
    mix: Shares.
    template: Prompt template of the dialect, with `{problem}`; other braces stand for themselves.
  """
  family = str(rng.choice(EASY if rng.random() < mix.easy else HARD))
  q = question(family, rng, held_out=False)
  kind = rng.random()
  if kind < mix.copy:
    return [(f"{q.text}\n", False), (f"{q.text}", True)]
  prompt: Document = [(template.replace("{problem}", q.text), False)]
  answer: Document = [(f"\\boxed{{{q.answer}}}", True)]
  if kind < mix.copy + mix.notebook:
    return [*_calls(q, rng, flaw=0.0), *answer]
  if kind < mix.copy + mix.notebook + mix.code:
    if rng.random() >= mix.flaw:
      return prompt + _calls(q, rng, flaw=0.0) + answer
    return prompt + _flawed(q, rng)
  return prompt + answer


def _run(code: str) -> str:
  """What the interpreter prints for corpus code. The corpus is our own text, so `exec` is safe here."""
  printed: list[str] = []
  try:
    exec(code, {"print": lambda *x: printed.append(" ".join(map(str, x))), "__builtins__": {"range": range}})
  except NameError as error:
    return f"NameError: {error}"
  return "\n".join(printed)


def _call(code: str) -> tuple[Document, str]:
  output = _run(code)
  return [(OPEN + code + CLOSE, True), (OUTPUT + output + CLOSE, False)], output


def _calls(q: Question, rng: np.random.Generator, *, flaw: float) -> Document:
  """The calls that solve a question; with probability `flaw` each miscopies a digit of its code."""
  text: Document = []
  output = ""
  for snippet in q.snippets:
    code = snippet(output)
    if rng.random() < flaw:
      code = _miscopy(code, rng)
    call, output = _call(code)
    text += call
  return text


def _miscopy(code: str, rng: np.random.Generator) -> str:
  places = [i for i, c in enumerate(code) if c.isdigit() and (i == 0 or code[i - 1] not in "=+")] or [
    i for i, c in enumerate(code) if c.isdigit()
  ]
  i = int(rng.choice(places))
  return code[:i] + str((int(code[i]) + int(rng.integers(1, 9))) % 10 or 1) + code[i + 1 :]


def _flawed(q: Question, rng: np.random.Generator) -> Document:
  """A bad use of code: a miscopied number, a result that is never shown, an unknown name, or an ignored result."""
  kind = int(rng.integers(4))
  guess = str(max(0, q.answer + int(rng.integers(-50, 51))))
  if kind == 0:
    text = _calls(q, rng, flaw=1.0)
    shown = text[-1][0].removeprefix(OUTPUT).removesuffix(CLOSE)
    return [*text, (f"\\boxed{{{shown}}}", True)]
  code = q.snippets[0]("")
  if kind == 1:
    call, _ = _call(code.removesuffix("\nprint(s)") if "\n" in code else f"s={code[6:-1]}")
    return [*call, (f"\\boxed{{{guess}}}", True)]
  if kind == 2:
    name = str(rng.choice(list("abcxyz")))
    call, _ = _call(f"print({name})")
    if rng.random() < 0.5:
      return [*call, *_calls(q, rng, flaw=0.0), (f"\\boxed{{{q.answer}}}", True)]
    return [*call, (f"\\boxed{{{guess}}}", True)]
  return [*_calls(q, rng, flaw=0.0), (f"\\boxed{{{guess}}}", True)]
