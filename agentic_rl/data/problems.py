"""Problems from files, and the order in which they are trained on.

A column map says where the fields of a `Problem` are found in a row: `{"prompt": "question", "answer": "gold.value"}`.
Dots lead into nested objects. Fields that the map leaves out are the same for all rows, or for `uid` the row's number.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentic_rl.episode import Message, Problem
from agentic_rl.errors import UserError

DEFAULT_COLUMNS: Mapping[str, str] = {"prompt": "prompt", "answer": "answer"}
FIELDS = ("uid", "source", "domain", "prompt", "answer", "verifier")


def load_jsonl(
  path: str | os.PathLike[str],
  columns: Mapping[str, str] = DEFAULT_COLUMNS,
  *,
  source: str | None = None,
  domain: str = "math",
  verifier: str = "boxed",
  metadata: Sequence[str] = (),
) -> list[Problem]:
  """Reads one problem from each line that holds a JSON object; blank lines are skipped.

  Args:
    path: File in UTF-8.
    columns: From fields of `Problem` to columns of the file; `prompt` and `answer` are required.
    source: Name of the data set; default the file's name without its ending. A uid is `source/line` unless mapped.
    domain, verifier: For all rows, unless mapped.
    metadata: Columns that are kept in `Problem.metadata`.

  Raises:
    UserError: for a file without rows, a line that is not a JSON object, a missing column, an empty prompt or answer,
      a duplicate uid, a column map with unknown fields. The message names the file and the line.
  """
  file = Path(path)

  def rows() -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    with file.open("rb") as lines:
      for number, line in enumerate(lines, 1):
        where = f"{file}, line {number}"
        if not line.strip():
          continue
        try:
          row = json.loads(line)
        except ValueError as error:  # also not UTF-8
          raise UserError(f"{where}: not JSON ({error})") from error
        if not isinstance(row, dict):
          raise UserError(f"{where}: expected a JSON object, got {type(row).__name__}")
        yield where, number, row

  defaults = {"source": source or file.stem, "domain": domain, "verifier": verifier}
  return _problems(rows(), str(file), columns, defaults, metadata)


def load_tfds(
  name: str | None = None,
  *,
  split: str,
  directory: str | os.PathLike[str] | None = None,
  data_dir: str | os.PathLike[str] | None = None,
  download: bool = False,
  columns: Mapping[str, str] = DEFAULT_COLUMNS,
  source: str | None = None,
  domain: str = "math",
  verifier: str = "boxed",
  metadata: Sequence[str] = (),
) -> list[Problem]:
  """Reads problems from a TFDS data set stored as ArrayRecord, without TensorFlow.

  Args:
    name: Registered name, e.g. `gsm8k`; or None and
    directory: The folder of one prepared version, e.g. `.../my_set/1.0.0`.
    split: A TFDS split, e.g. `train[:500]`.
    data_dir: Where TFDS keeps prepared data sets; with `name` only.
    download: Whether to download and prepare `name` where it is absent.
    columns, source, domain, verifier, metadata: As in `load_jsonl`; the default source is the data set's name.

  Raises:
    UserError: for both or neither of `name` and `directory`, a data set or split that is absent, one stored in another
      format, and as `load_jsonl`.
  """
  # Imported here: it takes long, and those who read JSONL need not have it.
  import tensorflow_datasets as tfds

  if (name is None) == (directory is None):
    raise UserError("give either the name of a TFDS data set or the directory of a prepared one")
  label = f"{directory or name}[{split}]"
  try:
    if directory is not None:
      builder = tfds.builder_from_directory(os.fspath(directory))
    else:
      builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
  except OSError as error:
    raise UserError(f"{label}: the folder holds no prepared TFDS data set ({error})") from error
  except tfds.core.DatasetNotFoundError as error:
    raise UserError(f"{label}: TFDS knows no data set of that name, nor is one in {data_dir}") from error
  if download:
    builder.download_and_prepare()
  if not builder.is_prepared():
    raise UserError(f"{label} is not prepared in {builder.data_dir}; allow the download or correct data_dir")
  # TFDS reads a set stored as Parquet short without a word, and needs TensorFlow for the other formats.
  if builder.info.file_format is not tfds.core.FileFormat.ARRAY_RECORD:
    stored = builder.info.file_format.value
    raise UserError(f"{label} is stored as {stored!r}; prepare it again with file_format='array_record'")
  try:
    data = builder.as_data_source(split=split)
  except ValueError as error:
    raise UserError(f"{label}: {error}") from error
  defaults = {"source": source or builder.info.name, "domain": domain, "verifier": verifier}
  rows = ((f"{label}, row {i}", i, _plain(data[i])) for i in range(len(data)))
  return _problems(rows, label, columns, defaults, metadata)


_STREAM = 0x04DE  # keeps these random numbers apart from those of other uses of the same seed


class ProblemOrder:
  """A shuffled order over epochs that any iteration can be asked for: nothing needs to be saved to resume.

  In each epoch every problem occurs once. A batch may span two epochs; it never holds a problem twice, since groups are
  told apart by uid: what would repeat is moved to just after the batch.
  """

  def __init__(self, problems: Sequence[Problem], seed: int):
    """Raises `UserError` for no problems, a duplicate uid, or a negative seed."""
    if not problems:
      raise UserError("there are no problems to order")
    if seed < 0:
      raise UserError(f"the seed of the problem order must not be negative, got {seed}")
    _check_unique(((p.uid, f"problem {i}") for i, p in enumerate(problems)), "the problems")
    self.problems = tuple(problems)
    self.seed = seed
    self.fingerprint = fingerprint(problems)
    self._last: tuple[int, int, np.ndarray] | None = None  # size, epoch, order: only a shortcut

  def batch(self, iteration: int, size: int) -> list[Problem]:
    """The problems of one iteration, a function of `(seed, iteration, size)` and the problems alone.

    Args:
      iteration: Counted from 0.
      size: Problems in a batch; to be kept the same over a run.

    Raises:
      UserError: if `size` is not positive or exceeds the number of problems.
    """
    count = len(self.problems)
    if not 0 < size <= count:
      raise UserError(f"a batch of {size} distinct problems cannot be drawn from {count}; change the batch size")
    if iteration < 0:
      raise UserError(f"iterations are counted from 0, got {iteration}")
    epoch, start = divmod(iteration * size, count)
    chosen = list(self._epoch(epoch, size)[start : start + size])
    if len(chosen) < size:
      chosen += list(self._epoch(epoch + 1, size)[: size - len(chosen)])
    return [self.problems[i] for i in chosen]

  def check_unchanged(self, stored: str, *, allow_change: bool = False) -> None:
    """Raises `UserError` if the problems are not those whose fingerprint was `stored`, unless `allow_change`."""
    if stored != self.fingerprint and not allow_change:
      raise UserError(
        f"the problems have changed since the run began (fingerprint {stored} then, {self.fingerprint} now), so its "
        f"order cannot be continued; restore the data or allow the change explicitly"
      )

  def _epoch(self, epoch: int, size: int) -> np.ndarray:
    """Order of an epoch: a seeded permutation, changed where its first batch would repeat the last epoch's tail."""
    count = len(self.problems)
    if self._last is not None and self._last[0] == size and self._last[1] <= epoch:
      _, at, order = self._last
    else:
      at, order = 0, self._shuffled(0)
    while at < epoch:
      at += 1
      tail = (at * count) % size
      following = self._shuffled(at)
      if tail:
        fresh = ~np.isin(following, order[count - tail :])
        head = np.flatnonzero(fresh)[: size - tail]
        following = np.concatenate([following[head], np.delete(following, head)])
      order = following
    if self._last is None or self._last[:2] != (size, epoch):
      self._last = (size, at, order)
    return order

  def _shuffled(self, epoch: int) -> np.ndarray:
    return np.random.default_rng([_STREAM, self.seed, epoch]).permutation(len(self.problems))


def fingerprint(problems: Iterable[Problem]) -> str:
  """Hash of everything in the problems and of their order, 16 hexadecimal digits."""
  digest = hashlib.sha256()
  for problem in problems:
    digest.update(json.dumps(dataclasses.asdict(problem), sort_keys=True, ensure_ascii=True).encode())
    digest.update(b"\n")
  return digest.hexdigest()[:16]


def _problems(
  rows: Iterable[tuple[str, int, Mapping[str, Any]]],
  label: str,
  columns: Mapping[str, str],
  defaults: Mapping[str, str],
  metadata: Sequence[str],
) -> list[Problem]:
  """Problems of rows `(where, number, row)`."""
  for field in columns:
    if field not in FIELDS:
      nearest = difflib.get_close_matches(field, FIELDS, n=1, cutoff=0.0)[0]
      raise UserError(f"the column map has the unknown field {field!r}; did you mean {nearest!r}?")
  for field in ("prompt", "answer"):
    if field not in columns:
      raise UserError(f"the column map for {label} does not say which column holds the {field}")
  problems, places = [], []
  for where, number, row in rows:
    values = {field: _column(row, column, where) for field, column in columns.items()}
    fields = {"uid": f"{defaults['source']}/{number}", **defaults, **{k: _text(v) for k, v in values.items()}}
    for field in columns:
      if not fields[field].strip():
        raise UserError(f"{where}: column {columns[field]!r} holds no {field}; remove the row or complete it")
    prompt = _prompt(values["prompt"], fields["prompt"], where)
    kept = {column: _column(row, column, where) for column in metadata}
    problems.append(Problem(**{**fields, "prompt": prompt, "metadata": kept}))  # type: ignore[arg-type]
    places.append((fields["uid"], where))
  if not problems:
    raise UserError(f"{label} holds no problems")
  _check_unique(places, label)
  return problems


def _column(row: Mapping[str, Any], column: str, where: str) -> Any:
  """Value at a dotted path; a name that contains dots itself is found first."""
  if column in row:
    return row[column]
  value: Any = row
  for part in column.split("."):
    if not isinstance(value, Mapping) or part not in value:
      known = list(value) if isinstance(value, Mapping) else []
      nearest = difflib.get_close_matches(part, known, n=1, cutoff=0.0)
      hint = f"; the nearest is {nearest[0]!r}" if nearest else ""
      inside = "" if part == column else f" (looking for {part!r})"
      raise UserError(f"{where}: there is no column {column!r}{inside}{hint}")
    value = value[part]
  return value


def _text(value: Any) -> str:
  """A cell as text: null is empty, lists and objects are JSON."""
  if value is None:
    return ""
  if isinstance(value, str):
    return value
  if isinstance(value, Mapping | list):
    return json.dumps(value, sort_keys=True) if value else ""
  return str(value)


def _prompt(value: Any, text: str, where: str) -> str | tuple[Message, ...]:
  """Text, or chat messages given as a list of objects or as an object of two lists (the form TFDS returns)."""
  if isinstance(value, Mapping) and set(value) == {"role", "content"} and isinstance(value["role"], list):
    value = [{"role": r, "content": c} for r, c in zip(value["role"], value["content"], strict=True)]
  if not isinstance(value, list):
    return text
  if not all(isinstance(m, Mapping) and "role" in m and "content" in m for m in value):
    raise UserError(f"{where}: a prompt that is a list must hold messages with 'role' and 'content'")
  return tuple(value)


def _check_unique(places: Iterable[tuple[str, str]], label: str) -> None:
  seen: dict[str, str] = {}
  for uid, where in places:
    if uid in seen:
      raise UserError(f"{label}: uid {uid!r} occurs twice ({seen[uid]}; {where}); uids must be unique")
    seen[uid] = where


def _plain(value: Any) -> Any:
  """What TFDS returns as plain Python: bytes are text in UTF-8, arrays and scalars of numpy are lists and numbers."""
  if isinstance(value, bytes):
    return value.decode("utf-8")
  if isinstance(value, Mapping):
    return {k: _plain(v) for k, v in value.items()}
  if isinstance(value, np.ndarray | np.generic):
    return _plain(value.tolist())
  if isinstance(value, list | tuple):
    return [_plain(v) for v in value]
  return value
