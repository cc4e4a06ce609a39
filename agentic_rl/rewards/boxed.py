r"""Verifiers of a final answer in `\boxed{...}`.

The answer is read from the policy's own tokens of the last turn alone. Text that the interpreter printed never counts,
nor does an answer given before the last tool result.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from fractions import Fraction

from agentic_rl.episode import Episode
from agentic_rl.rewards.reward import Reward, register_verifier

_BOX = r"\boxed{"
_LONGEST_NUMBER = 256  # Characters; keeps a hostile answer from costing time.
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = re.compile(rf"([+-]?)({_DIGITS})?(?:\.([0-9]*))?")
_RATIO = re.compile(rf"([+-]?)(?:\\[dt]?frac\{{({_DIGITS})\}}\{{({_DIGITS})\}}|({_DIGITS})\s*/\s*({_DIGITS}))")
_LETTER = re.compile(r"(?:\\text(?:bf)?\{)?\(?([A-Za-z])[.)]?\}?")


def last_boxed(text: str) -> str | None:
  r"""Content of the last complete `\boxed{...}`, braces balanced, or None. `\{` and `\}` are text, not braces.

  One pass, so that a text of nothing but open boxes costs no more than any other.
  """
  opened: list[int | None] = []  # One entry an open brace: where the content of its box begins, None for a plain brace.
  last: tuple[int, int] | None = None
  at = 0
  while at < len(text):
    if text.startswith(_BOX, at):
      at += len(_BOX)
      opened.append(at)
      continue
    if text[at] == "\\" and not text.startswith(_BOX, at + 1):
      at += 2
      continue
    if text[at] == "{":
      opened.append(None)
    elif text[at] == "}" and opened:
      begin = opened.pop()
      if begin is not None and (last is None or begin > last[0]):
        last = begin, at
    at += 1
  return None if last is None else text[last[0] : last[1]]


def parse_number(text: str) -> Fraction | None:
  r"""Exact value of an integer, decimal or fraction (`3/4`, `\frac{3}{4}`, `1,234.5`), or None. Evaluates nothing."""
  text = text.strip()
  if not text or len(text) > _LONGEST_NUMBER:
    return None
  if match := _RATIO.fullmatch(text):
    sign, top_frac, bottom_frac, top_slash, bottom_slash = match.groups()
    top, bottom = (_integer(x) for x in ((top_frac, bottom_frac) if top_frac else (top_slash, bottom_slash)))
    if bottom == 0:
      return None
    value = Fraction(top, bottom)
  else:
    match = _DECIMAL.fullmatch(text)
    if match is None or not (match[2] or match[3]):
      return None
    sign, decimals = match[1], match[3] or ""
    value = _integer(match[2] or "0") + Fraction(int(decimals or "0"), 10 ** len(decimals))
  return -value if sign == "-" else value


def _integer(digits: str) -> int:
  return int(digits.replace(",", ""))


def _number_form(text: str) -> str:
  value = parse_number(text)
  return text.strip() if value is None else str(value)


def _letter_form(text: str) -> str:
  match = _LETTER.fullmatch(text.strip())
  return match[1].upper() if match else text.strip()


@dataclasses.dataclass(frozen=True)
class BoxedVerifier:
  r"""Reward 1 where the last boxed answer, brought to a normal form, equals the problem's answer in that form, else 0.

  Attributes:
    normal_form: Brings an answer to the form in which strings are compared.
  """

  normal_form: Callable[[str], str]

  def answer(self, episode: Episode) -> str | None:
    boxed = last_boxed(episode.last_turn_text)
    return None if boxed is None else self.normal_form(boxed)

  def __call__(self, episode: Episode) -> Reward:
    answer = self.answer(episode)
    correct = float(answer is not None and answer == self.normal_form(episode.problem.answer))
    return Reward(correct, {"correct": correct, "answered": float(answer is not None)})


register_verifier("boxed", BoxedVerifier(str.strip))
register_verifier("boxed_number", BoxedVerifier(_number_form))
register_verifier("choice", BoxedVerifier(_letter_form))
