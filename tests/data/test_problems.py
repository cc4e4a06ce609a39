from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import shutil
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from agentic_rl.data import ProblemOrder, fingerprint, load_jsonl, load_tfds
from agentic_rl.episode import Problem
from agentic_rl.errors import UserError

COLUMNS = {"prompt": "question", "answer": "answer"}


def write(path: pathlib.Path, *rows: Any) -> pathlib.Path:
  path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
  return path


def problems(count: int) -> list[Problem]:
  return [Problem(uid=f"p{i}", source="s", domain="math", prompt=f"{i}+1?", answer=str(i + 1)) for i in range(count)]


# JSONL


def test_load_jsonl(tmp_path: pathlib.Path) -> None:
  file = write(
    tmp_path / "small.jsonl",
    {"question": "Wie groß ist π?", "answer": 3.14, "level": 2},
    "",
    {"question": "1+1", "answer": 2, "level": 1},
  )
  one, two = load_jsonl(file, COLUMNS, metadata=["level"])
  assert one == Problem("small/1", "small", "math", "Wie groß ist π?", "3.14", "boxed", {"level": 2})
  assert (two.uid, two.answer) == ("small/3", "2")


def test_all_fields_nested_columns_and_messages(tmp_path: pathlib.Path) -> None:
  message = {"role": "user", "content": "Hi"}
  row = {
    "id": 7,
    "set": "dapo",
    "kind": "code",
    "chat": [message],
    "reward": {"gold": {"inputs": ["1"], "outputs": ["2"]}},
    "style": "stdin",
    "a.b": "dotted",
  }
  columns = {
    "uid": "id",
    "source": "set",
    "domain": "kind",
    "prompt": "chat",
    "answer": "reward.gold",
    "verifier": "style",
  }
  (problem,) = load_jsonl(write(tmp_path / "x.jsonl", row), columns, metadata=["a.b"])
  assert problem == Problem(
    "7", "dapo", "code", (message,), '{"inputs": ["1"], "outputs": ["2"]}', "stdin", {"a.b": "dotted"}
  )


@pytest.mark.parametrize(
  "rows, message",
  [
    ([], "bad.jsonl holds no problems"),
    (["", "  "], "bad.jsonl holds no problems"),
    ([{"question": "a", "answer": "1"}, {"question": "b", "answer": " "}], "line 2: column 'answer' holds no answer"),
    ([{"question": "a", "answer": None}], "line 1: column 'answer' holds no answer"),
    ([{"question": "a", "answer": []}], "line 1: column 'answer' holds no answer"),
    ([{"question": "", "answer": "1"}], "line 1: column 'question' holds no prompt"),
    ([{"question": "a", "answr": "1"}], "line 1: there is no column 'answer'; the nearest is 'answr'"),
    ([{}], "line 1: there is no column 'question'$"),
    (["", "{'question': 1}"], "line 2: not JSON"),
    (["[1, 2]"], "line 1: expected a JSON object, got list"),
    ([{"question": ["a"], "answer": "1"}], "line 1: a prompt that is a list must hold messages"),
  ],
)
def test_bad_files(tmp_path: pathlib.Path, rows: list[Any], message: str) -> None:
  file = write(tmp_path / "bad.jsonl", *rows)
  with pytest.raises(UserError, match=message) as error:
    load_jsonl(file, COLUMNS)
  assert str(file) in str(error.value)


def test_bad_encoding(tmp_path: pathlib.Path) -> None:
  file = tmp_path / "latin.jsonl"
  file.write_bytes('{"question": "groß", "answer": "1"}\n'.encode("latin-1"))
  with pytest.raises(UserError, match="line 1: not JSON"):
    load_jsonl(file, COLUMNS)


def test_duplicate_uid_names_both_lines(tmp_path: pathlib.Path) -> None:
  rows = [{"q": "a", "a": 1, "id": "x"}, {"q": "b", "a": 1, "id": "y"}, {"q": "c", "a": 1, "id": "x"}]
  file = write(tmp_path / "d.jsonl", *rows)
  with pytest.raises(UserError, match=r"uid 'x' occurs twice .*line 1; .*line 3"):
    load_jsonl(file, {"uid": "id", "prompt": "q", "answer": "a"})


def test_bad_column_maps(tmp_path: pathlib.Path) -> None:
  file = write(tmp_path / "m.jsonl", {"question": "a", "answer": "1", "extra": {"level": 1}})
  with pytest.raises(UserError, match="unknown field 'promt'; did you mean 'prompt'"):
    load_jsonl(file, {"promt": "question", "answer": "answer"})
  with pytest.raises(UserError, match="does not say which column holds the answer"):
    load_jsonl(file, {"prompt": "question"})
  with pytest.raises(UserError, match=r"no column 'extra.levels' \(looking for 'levels'\); the nearest is 'level'"):
    load_jsonl(file, COLUMNS, metadata=["extra.levels"])


# TFDS


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[pathlib.Path, pathlib.Path]]:
  """Folder of TFDS data sets, and the folder of one version of `tiny_problems` in it."""
  tfds = pytest.importorskip("tensorflow_datasets")

  class TinyProblems(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> Any:
      features = tfds.features.FeaturesDict(
        {
          "question": tfds.features.Text(),
          "answer": np.int64,
          "chat": tfds.features.Sequence({"role": tfds.features.Text(), "content": tfds.features.Text()}),
        }
      )
      return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
      return {"train": self._generate_examples(5), "test": self._generate_examples(2)}

    def _generate_examples(self, count: int) -> Iterator[tuple[int, dict[str, Any]]]:
      for i in range(count):
        chat = [{"role": "system", "content": "Rechne schön."}, {"role": "user", "content": f"{i}+1?"}]
        yield i, {"question": f"{i}+1?", "answer": i + 1, "chat": chat}

  folder = tmp_path_factory.mktemp("tfds")
  builder = TinyProblems(data_dir=folder, file_format="array_record")
  builder.download_and_prepare()
  yield folder, pathlib.Path(builder.data_path)


def test_load_tfds_by_directory(prepared: tuple[pathlib.Path, pathlib.Path]) -> None:
  got = load_tfds(split="train", directory=prepared[1], columns=COLUMNS)
  assert [p.uid for p in got] == [f"tiny_problems/{i}" for i in range(5)]
  assert got[3].prompt == "3+1?" and got[3].answer == "4" and got[3].source == "tiny_problems"
  part = load_tfds(split="train[1:3]", directory=prepared[1], columns=COLUMNS, source="part")
  assert [p.prompt for p in part] == ["1+1?", "2+1?"]
  assert "tensorflow" not in sys.modules


def test_load_tfds_by_name(prepared: tuple[pathlib.Path, pathlib.Path]) -> None:
  got = load_tfds("tiny_problems", split="test", data_dir=prepared[0], columns={"prompt": "chat", "answer": "answer"})
  assert got[1].prompt == ({"role": "system", "content": "Rechne schön."}, {"role": "user", "content": "1+1?"})
  assert "tensorflow" not in sys.modules


def test_tfds_refusals(prepared: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path) -> None:
  folder, directory = prepared
  with pytest.raises(UserError, match=r"\[train\], row 0: there is no column 'anser'; the nearest is 'answer'"):
    load_tfds(split="train", directory=directory, columns={"prompt": "question", "answer": "anser"})
  with pytest.raises(UserError, match="give either the name"):
    load_tfds(split="train")
  with pytest.raises(UserError, match="give either the name"):
    load_tfds("tiny_problems", split="train", directory=directory)
  with pytest.raises(UserError, match=r"no_such_set.*knows no data set of that name"):
    load_tfds("no_such_set", split="train", data_dir=folder)
  with pytest.raises(UserError, match=r"tiny_problems\[train\] is not prepared in"):
    load_tfds("tiny_problems", split="train", data_dir=tmp_path)
  with pytest.raises(UserError, match=r"Unknown split 'validation'. Should be one of \['train', 'test'\]"):
    load_tfds(split="validation", directory=directory)
  with pytest.raises(UserError, match=f"{tmp_path}.*holds no prepared"):
    load_tfds(split="train", directory=tmp_path)
  other = tmp_path / "1.0.0"
  shutil.copytree(directory, other)
  info = other / "dataset_info.json"
  info.write_text(info.read_text().replace("array_record", "parquet"))
  with pytest.raises(UserError, match="stored as 'parquet'; prepare it again"):
    load_tfds(split="train", directory=other)


# The order


def uids(order: ProblemOrder, iterations: range, size: int) -> list[str]:
  return [p.uid for i in iterations for p in order.batch(i, size)]


@pytest.mark.parametrize("count, size", [(12, 4), (10, 4), (10, 7), (7, 7), (5, 4), (3, 1)])
def test_every_problem_once_an_epoch(count: int, size: int) -> None:
  order = ProblemOrder(problems(count), seed=3)
  stream = uids(order, range(4 * count), size)
  epochs = [stream[i * count : (i + 1) * count] for i in range(4 * size)]
  assert all(sorted(epoch) == sorted(f"p{i}" for i in range(count)) for epoch in epochs)
  for i in range(4 * count):
    assert len({p.uid for p in order.batch(i, size)}) == size, "a batch holds no problem twice"
  if count > 4:
    assert len({tuple(epoch) for epoch in epochs}) > 1, "epochs differ"


def test_shuffled_by_seed() -> None:
  given = problems(50)
  one, same, other = (ProblemOrder(given, seed).batch(0, 50) for seed in (1, 1, 2))
  assert one == same and one != other and one != given


@pytest.mark.parametrize("size", [3, 5])
def test_resuming_anywhere_goes_on_as_if_never_stopped(size: int) -> None:
  given = problems(10)
  whole = [uids(ProblemOrder(given, 0), range(i, i + 1), size) for i in range(10)]  # fresh for each: no memory
  straight = ProblemOrder(given, 0)
  assert [uids(straight, range(i, i + 1), size) for i in range(10)] == whole
  for killed in range(11):  # epoch ends included
    before = uids(ProblemOrder(given, 0), range(killed), size)
    after = uids(ProblemOrder(given, 0), range(killed, 10), size)
    assert before + after == [u for batch in whole for u in batch]
    assert collections.Counter(before + after) == collections.Counter(u for batch in whole for u in batch)
  backwards = [uids(straight, range(i, i + 1), size) for i in reversed(range(10))]
  assert backwards[::-1] == whole


def test_other_sizes_asked_in_between_do_not_matter() -> None:
  given, mixed = problems(10), ProblemOrder(problems(10), 0)
  for iteration in range(12):
    for size in (7, 3, 4):
      assert mixed.batch(iteration, size) == ProblemOrder(given, 0).batch(iteration, size)


def test_fingerprint_sees_every_change() -> None:
  given = problems(5)
  stored = fingerprint(given)
  assert stored == fingerprint(problems(5)) == ProblemOrder(given, 0).fingerprint
  changes = [
    given[:4],
    given[::-1],
    [dataclasses.replace(given[0], answer="9"), *given[1:]],
    [dataclasses.replace(given[0], metadata={"level": 1}), *given[1:]],
    [dataclasses.replace(given[0], verifier="exact"), *given[1:]],
  ]
  assert len({stored, *map(fingerprint, changes)}) == 6


def test_changed_data_is_an_error_with_an_override() -> None:
  stored = fingerprint(problems(5))
  ProblemOrder(problems(5), 0).check_unchanged(stored)
  changed = ProblemOrder(problems(6), 0)
  with pytest.raises(UserError, match=f"problems have changed .*{stored} then, {changed.fingerprint} now"):
    changed.check_unchanged(stored)
  changed.check_unchanged(stored, allow_change=True)


def test_order_refusals() -> None:
  with pytest.raises(UserError, match="no problems"):
    ProblemOrder([], 0)
  with pytest.raises(UserError, match="uid 'p0' occurs twice"):
    ProblemOrder(problems(2) + problems(1), 0)
  with pytest.raises(UserError, match="must not be negative"):
    ProblemOrder(problems(1), -1)
  with pytest.raises(UserError, match="batch of 3 distinct problems cannot be drawn from 2"):
    ProblemOrder(problems(2), 0).batch(0, 3)
  with pytest.raises(UserError, match="counted from 0"):
    ProblemOrder(problems(2), 0).batch(-1, 1)
