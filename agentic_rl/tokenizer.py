"""Text to token ids and back. Imports nothing else of the project.

A tokenizer is used on text that enters (a prompt, a tool's output) and to read what the policy sampled; sampled ids are
never decoded and encoded again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Protocol


class Tokenizer(Protocol):
  """What the project asks of a tokenizer."""

  vocab_size: int
  pad_id: int
  eos_id: int

  def encode(self, text: str) -> list[int]:
    """Ids of `text`, no special tokens added or read out of it. Raises `ValueError` for what cannot be represented."""
    ...

  def encode_prompt(self, text: str) -> list[int]:
    """Ids of a rendered prompt, in which special tokens stand as text: the one place where they are read out of it."""
    ...

  def decode(self, token_ids: Iterable[int]) -> str:
    """Text of ids, special tokens included as their own text."""
    ...

  @property
  def fingerprint(self) -> str:
    """Hash of everything that decides ids."""
    ...


class PieceTokenizer:
  """A tokenizer over a fixed list of pieces, matched greedily, longest first.

  Made for small studies: characters plus the few strings that the dialect uses, so that a small vocabulary and a
  small model suffice. Characters outside the vocabulary become `unknown` (a piece itself), or are refused where there
  is none.
  """

  def __init__(self, pieces: Sequence[str], *, pad: str = "<pad>", eos: str = "<eos>", unknown: str | None = None):
    """Ids follow the order of `pieces`, after `pad` (0) and `eos` (1)."""
    self.pieces = (pad, eos, *pieces)
    if len(set(self.pieces)) != len(self.pieces):
      raise ValueError("a piece occurs twice in the vocabulary")
    self.pad_id, self.eos_id = 0, 1
    self.vocab_size = len(self.pieces)
    self._ids = {p: i for i, p in enumerate(self.pieces)}
    self._unknown = unknown
    if unknown is not None and unknown not in self._ids:
      raise ValueError(f"the unknown piece {unknown!r} is not in the vocabulary")
    # Special tokens are not matched in text: a tool's output cannot forge the end of a sequence.
    by_length = sorted(pieces, key=len, reverse=True)
    self._pattern = re.compile("|".join(map(re.escape, by_length)) + "|.", re.DOTALL)

  def encode(self, text: str) -> list[int]:
    ids = []
    for match in self._pattern.finditer(text):
      piece = match.group()
      token = self._ids.get(piece)
      if token is None:
        if self._unknown is None:
          raise ValueError(f"character {piece!r} at {match.start()} is not in the vocabulary")
        token = self._ids[self._unknown]
      ids.append(token)
    return ids

  def encode_prompt(self, text: str) -> list[int]:
    """The same as `encode`: templates of small studies have no special tokens."""
    return self.encode(text)

  def decode(self, token_ids: Iterable[int]) -> str:
    return "".join(self.pieces[i] for i in token_ids)

  @property
  def fingerprint(self) -> str:
    blob = json.dumps(["pieces", self.pieces, self._unknown])
    return hashlib.sha256(blob.encode()).hexdigest()[:16]
