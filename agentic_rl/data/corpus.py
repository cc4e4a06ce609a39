"""Documents for the supervised stage: runs of text, some of which the model learns to write.

A document is a list of `(text, learn)` pairs. Text that is only read (questions, tool output) carries no loss.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator

import numpy as np

from agentic_rl.data import arithmetic
from agentic_rl.data.arithmetic import CorpusMix, Document
from agentic_rl.data.packing import Batch, pack_sequences
from agentic_rl.errors import UserError
from agentic_rl.tokenizer import Tokenizer

_STREAM = 0xC09B  # keeps these random numbers apart from those of other uses of the same seed


@dataclasses.dataclass(frozen=True)
class ArithmeticCorpus:
  """The nano study's corpus, endless: documents are drawn anew for every step."""

  mix: CorpusMix
  template: str

  def documents(self, rng: np.random.Generator) -> Iterator[Document]:
    while True:
      yield arithmetic.document(rng, self.mix, template=self.template)


@dataclasses.dataclass(frozen=True)
class FileCorpus:
  """Documents of a JSONL file, drawn with replacement.

  A line is `{"runs": [["text", true], ...]}` or `{"text": "..."}`.
  """

  lines: tuple[Document, ...]

  @classmethod
  def load(cls, path: str | os.PathLike[str]) -> FileCorpus:
    """Reads a file.

    Raises:
      UserError: If the file is missing or empty, or a line is not a document.
    """
    documents: list[Document] = []
    try:
      text = pathlib.Path(path).read_text(encoding="utf-8")
    except OSError as error:
      raise UserError(f"the corpus {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
      raise UserError(f"the corpus {path} is not UTF-8: {error}") from error
    # Not `splitlines`: JSON strings may hold other line separators, such as U+2028, as they are.
    for number, line in enumerate(text.split("\n"), 1):
      if not line.strip():
        continue
      try:
        row = json.loads(line)
        runs = row["runs"] if "runs" in row else [[row["text"], True]]
        if not all(isinstance(t, str) and isinstance(learn, bool) for t, learn in runs):
          raise TypeError("a run is a text and true or false")
        documents.append([(t, learn) for t, learn in runs])
      except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
          f'{path}, line {number}: a document is {{"runs": [["text", true], ...]}} or {{"text": "..."}}; {error}'
        ) from error
    if not documents:
      raise UserError(f"the corpus {path} has no documents")
    return cls(tuple(documents))

  def documents(self, rng: np.random.Generator) -> Iterator[Document]:
    while True:
      yield self.lines[int(rng.integers(len(self.lines)))]


Corpus = ArithmeticCorpus | FileCorpus


def corpus_batch(
  corpus: Corpus, tokenizer: Tokenizer, seed: int, step: int, *, rows: int, length: int, row_multiple: int
) -> Batch:
  """The packed batch of one step, a function of the seed and the step alone.

  Args:
    corpus: Where documents come from.
    tokenizer: Encodes each run of text.
    seed, step: Seed of the draw.
    rows: Most rows; documents are drawn until they would not fit any more.
    length: T, tokens of a row; a longer document is cut.
    row_multiple: As in `pack_sequences`; divides `rows`.

  Raises:
    UserError: If `row_multiple` does not divide `rows`.
  """
  if rows % row_multiple:
    raise UserError(f"{rows} rows of a supervised batch are not a multiple of the {row_multiple} rows of a micro-batch")
  rng = np.random.default_rng([_STREAM, seed, step])
  token_ids: list[np.ndarray] = []
  masks: list[np.ndarray] = []
  budget = rows * length
  # Best fit leaves a few per cent of padding; drawing to 97 % almost never overflows, and what does is given back.
  fill = 0
  for runs in corpus.documents(rng):
    ids: list[int] = []
    learn: list[bool] = []
    for text, learned in runs:
      piece = tokenizer.encode(text)
      ids += piece
      learn += [learned] * len(piece)
    ids, learn = [*ids, tokenizer.eos_id][:length], [*learn, True][:length]
    learn[0] = False  # nothing predicts a first token
    if fill + len(ids) > 0.97 * budget and token_ids:
      break
    fill += len(ids)
    token_ids.append(np.array(ids, np.int32))
    masks.append(np.array(learn, bool))
  while True:
    batch = pack_sequences(token_ids, masks, length_buckets=(length,), row_multiple=row_multiple)
    if batch.shape[0] <= rows or len(token_ids) == 1:
      return batch
    token_ids.pop()
    masks.pop()
