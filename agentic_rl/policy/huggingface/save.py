"""Export."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from agentic_rl.errors import UserError
from agentic_rl.policy.config import PolicyConfig
from agentic_rl.policy.decoder import Params
from agentic_rl.policy.huggingface.load import INDEX, SINGLE, lookup, some
from agentic_rl.policy.huggingface.table import Leaf, Path, huggingface_config, leaves

_TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template.jinja",
)


def save(
  directory: str | os.PathLike[str],
  config: PolicyConfig,
  params: Params,
  *,
  max_length: int,
  dtype: Any = None,
  tokenizer_from: str | os.PathLike[str] | None = None,
  eos_id: int | None = None,
  pad_id: int | None = None,
  shard_bytes: int = 4 << 30,
) -> FilePath:
  """Writes a directory that `transformers` and SGLang load. Nothing is written under `directory` until all is there.

  Args:
    directory: Where to; must not exist.
    config: The policy.
    params: Its parameters, NumPy or JAX; one leaf at a time is brought to the host.
    max_length: Longest sequence that the model is meant for, in tokens (`max_position_embeddings`).
    dtype: Of the written tensors; None keeps that of the parameters.
    tokenizer_from: Directory whose tokenizer files are copied.
    eos_id, pad_id: Written into `config.json`.
    shard_bytes: Largest file.

  Returns:
    The directory.

  Raises:
    UserError: `directory` exists, or `tokenizer_from` holds no tokenizer.
    ValueError: A leaf is missing, extra, or of another shape, or no family has these options.
  """
  table = leaves(config)
  _check_tree(params, table, config)
  kept = np.dtype(lookup(params, table[0].path).dtype if dtype is None else dtype)
  values = huggingface_config(config, max_length=max_length, dtype=kept.name, eos_id=eos_id, pad_id=pad_id)

  def tensors() -> Iterator[tuple[str, np.ndarray]]:
    for leaf in table:
      array = np.asarray(lookup(params, leaf.path))
      if dtype is not None:
        array = array.astype(dtype)
      for place, name in leaf.names(config):
        yield name, leaf.to_theirs(array[place])

  copies = []
  if tokenizer_from is not None:
    copies = [path for name in _TOKENIZER_FILES if (path := FilePath(tokenizer_from) / name).is_file()]
    if not copies:
      raise UserError(f"no tokenizer files in {tokenizer_from}")
  return write_directory(directory, tensors(), {"config.json": values}, copies=copies, shard_bytes=shard_bytes)


def _check_tree(params: Params, table: Sequence[Leaf], config: PolicyConfig) -> None:
  for leaf in table:
    want = (*leaf.stacked(config), *leaf.shape)
    got = tuple(lookup(params, leaf.path).shape)
    if got != want:
      raise ValueError(f"the parameter {'/'.join(leaf.path)} is {got}, the policy's configuration says {want}")
  known = {leaf.path for leaf in table}
  if extra := sorted("/".join(path) for path in _paths(params) if path not in known):
    raise ValueError(f"the parameters have leaves that the policy's configuration does not: {some(extra)}")


def _paths(tree: Params, prefix: Path = ()) -> Iterator[Path]:
  for key, value in tree.items():
    if isinstance(value, Mapping):
      yield from _paths(dict(value), (*prefix, key))
    else:
      yield (*prefix, key)


def write_directory(
  directory: str | os.PathLike[str],
  tensors: Iterable[tuple[str, np.ndarray]],
  files: Mapping[str, Any],
  *,
  copies: Sequence[FilePath] = (),
  shard_bytes: int = 4 << 30,
) -> FilePath:
  """Writes tensors and JSON files beside their final place and renames the directory once it is complete.

  Args:
    directory: Where to; must not exist.
    tensors: Names and arrays, taken one after another; a shard is written as soon as it is full.
    files: JSON values by file name.
    copies: Files to copy in.
    shard_bytes: Largest file (a larger tensor gets one of its own).
  """
  target = FilePath(directory)
  if target.exists():
    raise UserError(f"{target} exists already; remove it or name another directory")
  target.parent.mkdir(parents=True, exist_ok=True)
  staging = FilePath(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
  try:
    _write_shards(staging, tensors, shard_bytes)
    for name, value in files.items():
      text = json.dumps(value, indent=2, ensure_ascii=False)
      (staging / name).write_text(text + "\n", encoding="utf-8")
    for source in copies:
      shutil.copyfile(source, staging / source.name)
    staging.chmod(0o755)
    staging.rename(target)
  finally:
    shutil.rmtree(staging, ignore_errors=True)  # nothing is left of it once it has been renamed
  return target


def _write_shards(root: FilePath, tensors: Iterable[tuple[str, np.ndarray]], shard_bytes: int) -> None:
  shards: list[list[str]] = []
  pending: dict[str, np.ndarray] = {}
  total = size = 0

  def flush() -> None:
    # `format` is what transformers asks for before it reads a file.
    file = root / f"shard-{len(shards)}"
    save_file(pending, file, metadata={"format": "pt"})
    file.chmod(0o644)  # The library makes its files private.
    shards.append(list(pending))
    pending.clear()

  for name, array in tensors:
    if pending and size + array.nbytes > shard_bytes:
      flush()
      size = 0
    pending[name] = array
    size += array.nbytes
    total += array.nbytes
  flush()
  if len(shards) == 1:
    (root / "shard-0").rename(root / SINGLE)
    return
  weight_map = {}
  for i, names in enumerate(shards):
    file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
    (root / f"shard-{i}").rename(root / file)
    weight_map.update(dict.fromkeys(names, file))
  index = {"metadata": {"total_size": total}, "weight_map": weight_map}
  (root / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
