"""Cuts a tool's output to a number of tokens or characters."""

from __future__ import annotations

from typing import Literal

from agentic_rl.tokenizer import Tokenizer

Truncation = Literal["replace", "head", "middle", "tail"]
TRUNCATIONS: tuple[Truncation, ...] = ("replace", "head", "middle", "tail")
_MARK = "[...]"


def truncate_characters(text: str, limit: int, how: Truncation, message: str) -> str:
  """Returns `text` if it has at most `limit` characters, else a shorter one.

  `how` and `message` are those of `truncate_tokens`.
  """
  if len(text) <= limit:
    return text
  if how == "replace":
    return message
  keep = max(limit - len(_MARK), 0)
  front = {"head": keep, "middle": (keep + 1) // 2, "tail": 0}[how]
  return (text[:front] + _MARK + text[len(text) - (keep - front) :])[:limit]


def truncate_tokens(text: str, limit: int, how: Truncation, message: str, tokenizer: Tokenizer) -> str:
  """Returns `text` if it has at most `limit` tokens, else a shorter one.

  Args:
    text: Output of a tool.
    limit: Most tokens of the result, at least 1 (`message` itself is exempt).
    how: `replace` gives `message` instead (ZeroTIR); `head` and `tail` keep that side; `middle` keeps both sides and
      cuts the middle out (the default of verl).
    message: Text for `replace`.
    tokenizer: Counts the tokens.
  """
  ids = tokenizer.encode(text)
  if len(ids) <= limit:
    return text
  if how == "replace":
    return message
  keep = max(limit - len(tokenizer.encode(_MARK)), 0)
  while True:
    front = {"head": keep, "middle": (keep + 1) // 2, "tail": 0}[how]
    # A cut through a character of several tokens decodes to U+FFFD; the half character goes.
    head = tokenizer.decode(ids[:front]).rstrip("\ufffd")
    tail = tokenizer.decode(ids[len(ids) - (keep - front) :]).lstrip("\ufffd")
    cut = f"{head}{_MARK}{tail}"
    # Pieces joined anew may encode to more tokens than they had, so the result is counted, not assumed.
    if keep == 0 or len(tokenizer.encode(cut)) <= limit:
      return cut if keep else tokenizer.decode(tokenizer.encode(_MARK)[:limit])
    keep -= 1
