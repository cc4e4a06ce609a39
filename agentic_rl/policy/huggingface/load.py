"""Import."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import jax
import numpy as np
import safetensors

from agentic_rl.errors import UserError
from agentic_rl.policy.config import PolicyConfig
from agentic_rl.policy.decoder import Params
from agentic_rl.policy.huggingface.table import Leaf, Path, leaves, policy_config

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = ("F32", "F16", "BF16", "F64")


def read_config(directory: str | os.PathLike[str], **overrides: Any) -> PolicyConfig:
  """The policy that a Hugging Face directory holds; weights are not looked at.

  Args:
    directory: Holds `config.json`.
    **overrides: Options of `PolicyConfig` (`dtype`, `remat`, ...).

  Raises:
    UserError: No `config.json`, or one that the decoder cannot follow.
  """
  file = FilePath(directory) / "config.json"
  try:
    values = json.loads(file.read_text(encoding="utf-8"))
  except OSError as error:
    raise UserError(f"no config.json in {directory}; a Hugging Face model directory is needed") from error
  except ValueError as error:
    raise UserError(f"{file} is not JSON ({error}); download it again") from error
  try:
    return policy_config(values, **overrides)
  except KeyError as error:
    raise UserError(f"{file} has no {error}, which a model of type {values.get('model_type')!r} needs") from error


def load(
  directory: str | os.PathLike[str], *, dtype: Any = np.float32, shardings: Any = None, **overrides: Any
) -> tuple[PolicyConfig, Params]:
  """Reads a Hugging Face directory.

  Args:
    directory: Holds `config.json` and `model.safetensors`, or its shards and their index.
    dtype: Of the parameters.
    shardings: Tree of shardings, one a leaf. Each host then reads the pieces of its own devices, one after the other,
      and never holds more than one of them. Without it all leaves are NumPy arrays.
    **overrides: Options of `PolicyConfig` (`dtype`, `remat`, ...).

  Returns:
    The configuration and the tree of `Policy(config)`.

  Raises:
    UserError: No `config.json`; no weights, or a shard that the index names is missing or damaged; an unsupported
      architecture; missing, extra, wrong-shaped, wrong-typed or non-finite tensors, which are named.
  """
  root = FilePath(directory)
  config = read_config(root, **overrides)
  params: Params = {}
  with _Checkpoint(root) as checkpoint:
    _check(root, checkpoint, leaves(config), config)
    for leaf in leaves(config):
      sharding = None if shardings is None else lookup(shardings, leaf.path)
      _insert(params, leaf.path, _read(leaf, config, checkpoint, np.dtype(dtype), sharding))
  return config, params


def _read(leaf: Leaf, config: PolicyConfig, checkpoint: _Checkpoint, dtype: np.dtype, sharding: Any) -> Any:
  """One leaf, from its tensors."""
  stacked = leaf.stacked(config)
  shape = (*stacked, *leaf.shape)
  names = dict(leaf.names(config))

  def piece(bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
    sizes = [stop - start for start, stop in bounds]
    array = np.empty(sizes, dtype)
    inner = tuple(slice(*b) for b in bounds[len(stacked) :])
    for place in np.ndindex(*sizes[: len(stacked)]):
      there = tuple(i + b[0] for i, b in zip(place, bounds, strict=False))
      array[place] = leaf.to_ours(checkpoint.read(names[there], leaf.their_slice(inner)), array[place].shape)
    return array

  if sharding is None:
    return piece(tuple((0, size) for size in shape))
  devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}  # those that hold copies of one piece
  for device, index in sharding.addressable_devices_indices_map(shape).items():
    bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
    devices.setdefault(bounds, []).append(device)
  parts = []
  for bounds, holders in devices.items():
    array = piece(bounds)
    parts += [jax.device_put(array, device) for device in holders]
  return jax.make_array_from_single_device_arrays(shape, sharding, parts)


class _Checkpoint(contextlib.ExitStack):
  """Open safetensors files of one directory, read a piece of a tensor at a time."""

  def __init__(self, root: FilePath):
    super().__init__()
    if (root / INDEX).is_file():
      files = sorted(set(json.loads((root / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    elif (root / SINGLE).is_file():
      files = [SINGLE]
    else:
      raise UserError(f"no {SINGLE} and no {INDEX} in {root}; other weight formats must be converted first")
    if absent := [name for name in files if not (root / name).is_file()]:
      raise UserError(f"the shard {absent[0]} that {INDEX} names is missing in {root}; download it again")
    self._handles: dict[str, Any] = {}
    self._files: dict[str, FilePath] = {}
    for name in files:
      try:
        handle = self.enter_context(safetensors.safe_open(root / name, framework="numpy"))
      except safetensors.SafetensorError as error:
        self.close()
        raise UserError(f"{root / name} is damaged ({error}); download it again") from error
      for tensor in handle.keys():
        self._handles[tensor], self._files[tensor] = handle, root / name

  @property
  def names(self) -> frozenset[str]:
    return frozenset(self._handles)

  def shape(self, name: str) -> tuple[int, ...]:
    return tuple(self._handles[name].get_slice(name).get_shape())

  def dtype(self, name: str) -> str:
    return str(self._handles[name].get_slice(name).get_dtype())

  def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
    """The tensor, or a piece of it; refuses values that are not finite."""
    handle = self._handles[name]
    array: np.ndarray = handle.get_slice(name)[index] if index else handle.get_tensor(name)
    if not np.isfinite(array).all():
      raise UserError(f"tensor {name} in {self._files[name]} has values that are not finite; download it again")
    return array

  def file(self, name: str) -> FilePath:
    return self._files[name]


def _check(root: FilePath, checkpoint: _Checkpoint, table: Sequence[Leaf], config: PolicyConfig) -> None:
  """Compares names, shapes and types of a checkpoint with the table before anything is read."""
  expected = {name: leaf.their_shape for leaf in table for _, name in leaf.names(config)}
  problems = []
  if missing := sorted(set(expected) - checkpoint.names):
    problems.append(f"{len(missing)} missing: {some(missing)}")
  ignored = {name for name in checkpoint.names if name.endswith("rotary_emb.inv_freq")}
  extra = checkpoint.names - set(expected) - ignored
  if config.tied_embeddings and "lm_head.weight" in extra:
    # Some exporters write the tied head as well; harmless exactly where it is the embedding.
    extra -= {"lm_head.weight"}
    if not missing and not np.array_equal(checkpoint.read("lm_head.weight"), checkpoint.read(table[0].name)):
      problems.append("lm_head.weight differs from the embedding though config.json says tie_word_embeddings")
  if extra:
    problems.append(f"{len(extra)} extra: {some(sorted(extra))}")
  there = [name for name in expected if name in checkpoint.names]
  wrong = [
    f"{name} is {checkpoint.shape(name)}, not {expected[name]}"
    for name in there
    if checkpoint.shape(name) != expected[name]
  ]
  if wrong:
    problems.append(f"{len(wrong)} of another shape than config.json says: {some(wrong)}")
  typed = [
    f"{name} in {checkpoint.file(name).name} is {checkpoint.dtype(name)}"
    for name in there
    if checkpoint.dtype(name) not in _DTYPES
  ]
  if typed:
    problems.append(
      f"{len(typed)} of a type that is no float (quantised weights must be converted first): {some(typed)}"
    )
  if problems:
    raise UserError(f"the tensors in {root} do not fit its config.json: {'; '.join(problems)}")


def some(names: Sequence[str], limit: int = 8) -> str:
  """The first few of a list of names."""
  more = f" and {len(names) - limit} more" if len(names) > limit else ""
  return ", ".join(names[:limit]) + more


def _insert(tree: Params, path: Path, value: Any) -> None:
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = value


def lookup(tree: Params, path: Path) -> Any:
  """A leaf of a tree; raises `ValueError` if it is not there."""
  node: Any = tree
  for i, key in enumerate(path):
    if not isinstance(node, Mapping) or key not in node:
      raise ValueError(f"the parameters have no leaf {'/'.join(path[: i + 1])}, which the policy's configuration needs")
    node = node[key]
  return node
