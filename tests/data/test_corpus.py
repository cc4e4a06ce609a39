from __future__ import annotations

import json
import pathlib
import time

import numpy as np
import pytest

from agentic_rl.data import Batch
from agentic_rl.data.arithmetic import CorpusMix, tokenizer
from agentic_rl.data.corpus import ArithmeticCorpus, Corpus, FileCorpus, corpus_batch
from agentic_rl.errors import UserError
from agentic_rl.tokenizer import PieceTokenizer

ARITHMETIC = ArithmeticCorpus(CorpusMix(), "{problem}\n")
LETTERS = PieceTokenizer([chr(c) for c in range(97, 123)])


def batch(corpus: Corpus = ARITHMETIC, seed: int = 0, step: int = 0, **options: int) -> Batch:
  options = {"rows": 8, "length": 128, "row_multiple": 4} | options
  words = tokenizer() if isinstance(corpus, ArithmeticCorpus) else LETTERS
  return corpus_batch(corpus, words, seed, step, **options)


def documents_of(batch: Batch) -> list[tuple[list[int], list[bool]]]:
  """Ids and loss mask of each document, in the order in which they were drawn."""
  found = []
  for index in range(batch.sequence_ids.max() + 1):
    at = batch.sequence_ids == index
    found.append((batch.token_ids[at].tolist(), batch.loss_mask[at].tolist()))
  return found


def write(path: pathlib.Path, *rows: object) -> pathlib.Path:
  path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
  return path


def same(a: Batch, b: Batch) -> bool:
  return all(np.array_equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def test_a_batch_is_a_function_of_seed_and_step():
  again = [batch(seed=3, step=7) for _ in range(2)]
  np.random.seed(1)  # nobody's global state matters
  again.append(batch(seed=3, step=7))
  assert same(again[0], again[1]) and same(again[0], again[2])
  others = [batch(seed=3, step=8), batch(seed=4, step=7), batch(seed=7, step=3)]
  assert not any(same(again[0], other) for other in others)


def test_batches_are_full_and_never_too_large():
  for step in range(20):
    got = batch(step=step)
    assert got.shape == (8, 128)
    assert got.padding_fraction < 0.1
    assert got.loss_weights.sum() == pytest.approx(1.0, abs=1e-5)


def test_documents_are_whole_and_end_in_a_trained_end_of_sequence():
  words = tokenizer()
  for ids, mask in documents_of(batch()):
    assert ids[-1] == words.eos_id and mask[-1]
    assert ids.count(words.eos_id) == 1 and words.pad_id not in ids
    assert not mask[0]


def test_only_what_is_learned_carries_loss(tmp_path: pathlib.Path):
  path = write(tmp_path / "c.jsonl", {"runs": [["ab", False], ["cd", True], ["e", False], ["f", True]]})
  ids, mask = documents_of(batch(FileCorpus.load(path), rows=1, length=64, row_multiple=1))[0]
  assert ids == [*LETTERS.encode("abcdef"), LETTERS.eos_id]
  assert mask == [False, False, True, True, False, True, True]


def test_the_first_token_is_never_trained(tmp_path: pathlib.Path):
  ids, mask = documents_of(batch(FileCorpus.load(write(tmp_path / "c.jsonl", {"text": "abc"})), length=16))[0]
  assert ids == [*LETTERS.encode("abc"), LETTERS.eos_id]
  assert mask == [False, True, True, True]


def test_a_long_document_is_cut(tmp_path: pathlib.Path):
  corpus = FileCorpus.load(write(tmp_path / "c.jsonl", {"text": "abcdefgh"}))
  got = batch(corpus, rows=2, length=4, row_multiple=2)
  assert got.shape == (2, 4)
  assert documents_of(got)[0] == (LETTERS.encode("abcd"), [False, True, True, True])


def test_lines_of_a_file_are_all_drawn(tmp_path: pathlib.Path):
  texts = ["a", "bb", "ccc"]
  corpus = FileCorpus.load(write(tmp_path / "c.jsonl", *({"text": t} for t in texts)))
  drawn = {LETTERS.decode(ids[:-1]) for ids, _ in documents_of(batch(corpus))}
  assert drawn == set(texts)


def test_a_line_ends_at_a_newline_alone(tmp_path: pathlib.Path):
  """JSON strings may hold other line separators as they are; blank lines and carriage returns do no harm."""
  text = "a\u2028b\u0085c"
  path = tmp_path / "c.jsonl"
  path.write_bytes(f'\n{{"text": "{text}"}}\r\n\n{{"text": "d"}}'.encode())
  assert FileCorpus.load(path).lines == ([(text, True)], [("d", True)])


@pytest.mark.parametrize(
  ("content", "words"),
  [
    ("", "has no documents"),
    ("\n\n", "has no documents"),
    ('{"text": "a"}\n{"text": ', "line 2: a document is"),
    ('{"words": "a"}', "line 1: .*'text'"),
    ('["a"]', "line 1"),
    ('{"runs": [["a"]]}', "line 1"),
    ('{"text": 3}', "line 1: .*a run is a text and true or false"),
    ('{"runs": [["a", "false"]]}', "line 1: .*a run is a text and true or false"),
  ],
)
def test_a_broken_file_is_refused_with_its_line(content: str, words: str, tmp_path: pathlib.Path):
  path = tmp_path / "c.jsonl"
  path.write_text(content)
  with pytest.raises(UserError, match=words):
    FileCorpus.load(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: pathlib.Path):
  with pytest.raises(UserError, match="cannot be read: No such file"):
    FileCorpus.load(tmp_path / "none.jsonl")
  (tmp_path / "latin.jsonl").write_bytes('{"text": "\xe4"}'.encode("latin-1"))
  with pytest.raises(UserError, match="is not UTF-8"):
    FileCorpus.load(tmp_path / "latin.jsonl")


def test_rows_that_micro_batches_do_not_divide_are_refused():
  with pytest.raises(UserError, match="6 rows of a supervised batch are not a multiple of the 4 rows"):
    batch(rows=6)


def test_drawing_a_batch_is_quick():
  batch()
  start = time.process_time()
  for step in range(5):
    batch(step=step, rows=32)
  assert (time.process_time() - start) / 5 < 0.25, "a step of the study takes longer than that (0.02 s measured)"
