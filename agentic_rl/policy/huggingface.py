"""Weights from and to Hugging Face directories: dense Llama (SmolLM2 too), Qwen2 / Qwen2.5 and Qwen3.

One table (`_leaves`) names every parameter on both sides; import, export and the checks all read it. Matrices differ by
a transposition (`[out, in]` there, `[in, heads, head width]` here) and by the layer axis, so a round trip is exact.
Both directions stream: import fills one stacked leaf at a time, export writes one shard at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save_file

from agentic_rl.errors import UserError
from agentic_rl.policy.config import PolicyConfig
from agentic_rl.policy.decoder import Params

Path = tuple[str, ...]
"""Keys from the root of a parameter tree to a leaf, e.g. `("layers", "attention", "q")`."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TOKENIZER_FILES = (
  "tokenizer.json",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template.jinja",
)


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """One parameter on both sides.

  Attributes:
    path: Where it lies in our tree.
    name: Tensor name there; `{layer}` is the layer number of a stacked parameter.
    shape: Our shape, without the layer axis.
    outputs: How many trailing axes of `shape` are the output of a matrix product; None for anything but a matrix. The
      tensor there is the matrix of flattened inputs and outputs, transposed.
  """

  path: Path
  name: str
  shape: tuple[int, ...]
  outputs: int | None = None

  @property
  def stacked(self) -> bool:
    return "{layer}" in self.name

  @property
  def _matrix(self) -> tuple[int, int]:
    split = len(self.shape) - (self.outputs or 0)
    return int(np.prod(self.shape[:split])), int(np.prod(self.shape[split:]))

  @property
  def their_shape(self) -> tuple[int, ...]:
    if self.outputs is not None:
      return self._matrix[::-1]
    return self.shape if self.path in (("embed", "table"), ("head",)) else (int(np.prod(self.shape)),)

  def to_ours(self, tensor: np.ndarray) -> np.ndarray:
    return (tensor.T if self.outputs is not None else tensor).reshape(self.shape)

  def to_theirs(self, array: np.ndarray) -> np.ndarray:
    if self.outputs is not None:
      return np.ascontiguousarray(array.reshape(self._matrix).T)
    return np.ascontiguousarray(array.reshape(self.their_shape))


def _leaves(config: PolicyConfig) -> list[_Leaf]:
  """Every parameter of a policy."""
  c = config
  d, f, h, k, w = c.width, c.mlp_width, c.heads, c.kv_heads, c.head_width
  attention, mlp, layer = ("layers", "attention"), ("layers", "mlp"), "model.layers.{layer}."
  leaves = [
    _Leaf(("embed", "table"), "model.embed_tokens.weight", (c.vocab_size, d)),
    _Leaf(("layers", "attention_norm"), layer + "input_layernorm.weight", (d,)),
    _Leaf((*attention, "q"), layer + "self_attn.q_proj.weight", (d, h, w), outputs=2),
    _Leaf((*attention, "k"), layer + "self_attn.k_proj.weight", (d, k, w), outputs=2),
    _Leaf((*attention, "v"), layer + "self_attn.v_proj.weight", (d, k, w), outputs=2),
    _Leaf((*attention, "o"), layer + "self_attn.o_proj.weight", (h, w, d), outputs=1),
    _Leaf(("layers", "mlp_norm"), layer + "post_attention_layernorm.weight", (d,)),
    _Leaf((*mlp, "gate"), layer + "mlp.gate_proj.weight", (d, f), outputs=1),
    _Leaf((*mlp, "up"), layer + "mlp.up_proj.weight", (d, f), outputs=1),
    _Leaf((*mlp, "down"), layer + "mlp.down_proj.weight", (f, d), outputs=1),
    _Leaf(("final_norm",), "model.norm.weight", (d,)),
  ]
  if c.qkv_bias:
    for name, heads in (("q", h), ("k", k), ("v", k)):
      leaves.append(_Leaf((*attention, f"{name}_bias"), f"{layer}self_attn.{name}_proj.bias", (heads, w)))
  if c.qk_norm:
    for name in ("q", "k"):
      leaves.append(_Leaf((*attention, f"{name}_norm"), f"{layer}self_attn.{name}_norm.weight", (w,)))
  if not c.tied_embeddings:
    leaves.append(_Leaf(("head",), "lm_head.weight", (c.vocab_size, d)))
  return leaves


#### Configurations ####


def policy_config(values: Mapping[str, Any], **overrides: Any) -> PolicyConfig:
  """The policy of a Hugging Face `config.json`.

  Args:
    values: The file's content.
    **overrides: Options of `PolicyConfig` that the file does not know (`dtype`, `remat`, ...).

  Raises:
    UserError: An architecture, or an option of one, that the decoder does not have.
  """
  family = values.get("model_type")
  if family not in ("llama", "qwen2", "qwen3"):
    raise UserError(f"model_type {family!r} is not supported; known: llama (SmolLM2 too), qwen2, qwen3")
  rope = dict(values.get("rope_parameters") or {})
  scaling = values.get("rope_scaling") or rope
  kind = scaling.get("rope_type", scaling.get("type", "default"))
  bias = values.get("attention_bias")
  for wrong, what in (
    (kind != "default", f"rope type {kind!r}"),
    (values.get("hidden_act", "silu") != "silu", f"hidden_act {values.get('hidden_act')!r}"),
    (family != "qwen2" and bool(bias), f"attention_bias={bias} of {family}"),
    (bool(values.get("mlp_bias")), "mlp_bias=True"),
    (bool(values.get("use_sliding_window")), "use_sliding_window=True"),
    (values.get("partial_rotary_factor", 1.0) != 1.0, "partial_rotary_factor other than 1"),
  ):
    if wrong:
      raise UserError(f"config.json asks for {what}, which the decoder does not have")
  heads = values["num_attention_heads"]
  read: dict[str, Any] = {
    "vocab_size": values["vocab_size"],
    "width": values["hidden_size"],
    "layers": values["num_hidden_layers"],
    "heads": heads,
    "kv_heads": values.get("num_key_value_heads") or heads,
    "head_width": values.get("head_dim") or values["hidden_size"] // heads,
    "mlp_width": values["intermediate_size"],
    "rope_theta": float(rope.get("rope_theta") or values.get("rope_theta", 10_000.0)),
    "norm_eps": float(values.get("rms_norm_eps", 1e-6)),
    "qk_norm": family == "qwen3",
    "qkv_bias": family == "qwen2",
    "tied_embeddings": bool(values.get("tie_word_embeddings", False)),
  }
  return PolicyConfig.from_dict({**read, **overrides})


def huggingface_config(
  config: PolicyConfig,
  *,
  max_length: int,
  dtype: str = "float32",
  eos_id: int | None = None,
  pad_id: int | None = None,
) -> dict[str, Any]:
  """The `config.json` under which `transformers` and SGLang load the policy.

  Raises:
    ValueError: No family has this combination of options.
  """
  if config.qk_norm and config.qkv_bias:
    raise ValueError("qk_norm together with qkv_bias is no Llama, Qwen2 or Qwen3, so it cannot be exported")
  if config.qkv_bias and config.heads * config.head_width != config.width:
    raise ValueError("qkv_bias (Qwen2) needs head_width = width / heads to be exported")
  family, architecture = "llama", "LlamaForCausalLM"
  if config.qk_norm:
    family, architecture = "qwen3", "Qwen3ForCausalLM"
  elif config.qkv_bias:
    family, architecture = "qwen2", "Qwen2ForCausalLM"
  values: dict[str, Any] = {
    "architectures": [architecture],
    "model_type": family,
    "vocab_size": config.vocab_size,
    "hidden_size": config.width,
    "num_hidden_layers": config.layers,
    "num_attention_heads": config.heads,
    "num_key_value_heads": config.kv_heads,
    "head_dim": config.head_width,
    "intermediate_size": config.mlp_width,
    "hidden_act": "silu",
    "rope_theta": config.rope_theta,
    "rms_norm_eps": config.norm_eps,
    "max_position_embeddings": max_length,
    "tie_word_embeddings": config.tied_embeddings,
    "torch_dtype": dtype,
    "eos_token_id": eos_id,
    "pad_token_id": pad_id,
    "bos_token_id": None,
  }
  if family != "qwen2":
    values["attention_bias"] = False
  return values


#### Import ####


def load(
  directory: str | os.PathLike[str],
  *,
  dtype: Any = np.float32,
  place: Callable[[Path, np.ndarray], Any] | None = None,
  **overrides: Any,
) -> tuple[PolicyConfig, Params]:
  """Reads a Hugging Face directory.

  Args:
    directory: Holds `config.json` and `model.safetensors`, or its shards and their index.
    dtype: Of the parameters.
    place: Called once a leaf with its path and its array; what it returns goes into the tree. Puts leaves on devices,
      so that the host never holds more than one of them.
    **overrides: Options of `PolicyConfig` (`dtype`, `remat`, ...).

  Returns:
    The configuration and the tree of `Policy(config)`.

  Raises:
    UserError: No `config.json`; no weights, or a shard that the index names is missing or damaged; an unsupported
      architecture; missing, extra, wrong-shaped or non-finite tensors, which are named.
  """
  root = FilePath(directory)
  if not (root / "config.json").is_file():
    raise UserError(f"no config.json in {root}; a Hugging Face model directory is needed")
  config = policy_config(json.loads((root / "config.json").read_text(encoding="utf-8")), **overrides)
  leaves = _leaves(config)
  params: Params = {}
  with _Checkpoint(root) as checkpoint:
    _check(root, checkpoint, leaves, config)
    for leaf in leaves:
      names = [leaf.name.format(layer=i) for i in range(config.layers)] if leaf.stacked else [leaf.name]
      array = np.empty((len(names), *leaf.shape), np.dtype(dtype))
      for i, name in enumerate(names):
        array[i] = leaf.to_ours(checkpoint.read(name))
        if not np.isfinite(array[i]).all():
          raise UserError(f"tensor {name} in {checkpoint.file(name)} has values that are not finite")
      value = array if leaf.stacked else array[0]
      _insert(params, leaf.path, place(leaf.path, value) if place is not None else value)
  return config, params


class _Checkpoint(contextlib.ExitStack):
  """Open safetensors files of one directory, read a tensor at a time."""

  def __init__(self, root: FilePath):
    super().__init__()
    if (root / _INDEX).is_file():
      files = sorted(set(json.loads((root / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    elif (root / _SINGLE).is_file():
      files = [_SINGLE]
    else:
      raise UserError(f"no {_SINGLE} and no {_INDEX} in {root}; other weight formats must be converted first")
    if absent := [name for name in files if not (root / name).is_file()]:
      raise UserError(f"the shard {absent[0]} that {_INDEX} names is missing in {root}; download it again")
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

  def read(self, name: str) -> np.ndarray:
    return self._handles[name].get_tensor(name)

  def file(self, name: str) -> FilePath:
    return self._files[name]


def _check(root: FilePath, checkpoint: _Checkpoint, leaves: Sequence[_Leaf], config: PolicyConfig) -> None:
  """Compares the names and shapes of a checkpoint with the table before anything is read."""
  expected = {
    leaf.name.format(layer=i): leaf.their_shape for leaf in leaves for i in range(config.layers if leaf.stacked else 1)
  }
  problems = []
  if missing := sorted(set(expected) - checkpoint.names):
    problems.append(f"{len(missing)} missing: {_some(missing)}")
  ignored = {name for name in checkpoint.names if name.endswith("rotary_emb.inv_freq")}
  extra = checkpoint.names - set(expected) - ignored
  if config.tied_embeddings and "lm_head.weight" in extra:
    # Some exporters write the tied head as well; harmless exactly where it is the embedding.
    extra -= {"lm_head.weight"}
    if not missing and not np.array_equal(checkpoint.read("lm_head.weight"), checkpoint.read(leaves[0].name)):
      problems.append("lm_head.weight differs from the embedding though config.json says tie_word_embeddings")
  if extra:
    problems.append(f"{len(extra)} extra: {_some(sorted(extra))}")
  wrong = [
    f"{name} is {checkpoint.shape(name)}, not {shape}"
    for name, shape in expected.items()
    if name in checkpoint.names and checkpoint.shape(name) != shape
  ]
  if wrong:
    problems.append(f"{len(wrong)} of another shape than config.json says: {_some(wrong)}")
  if problems:
    raise UserError(f"the tensors in {root} do not fit its config.json: {'; '.join(problems)}")


def _some(names: Sequence[str], limit: int = 8) -> str:
  """The first few of a list of names."""
  more = f" and {len(names) - limit} more" if len(names) > limit else ""
  return ", ".join(names[:limit]) + more


def _insert(tree: Params, path: Path, value: Any) -> None:
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = value


def _lookup(tree: Params, path: Path) -> Any:
  node: Any = tree
  for i, key in enumerate(path):
    if not isinstance(node, Mapping) or key not in node:
      raise ValueError(f"the parameters have no leaf {'/'.join(path[: i + 1])}, which the policy's configuration needs")
    node = node[key]
  return node


#### Export ####


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
  leaves = _leaves(config)
  _check_tree(params, leaves, config)
  kept = np.dtype(_lookup(params, leaves[0].path).dtype if dtype is None else dtype)
  values = huggingface_config(config, max_length=max_length, dtype=kept.name, eos_id=eos_id, pad_id=pad_id)

  def tensors() -> Iterator[tuple[str, np.ndarray]]:
    for leaf in leaves:
      array = np.asarray(_lookup(params, leaf.path))
      if dtype is not None:
        array = array.astype(dtype)
      if leaf.stacked:
        for i in range(config.layers):
          yield leaf.name.format(layer=i), leaf.to_theirs(array[i])
      else:
        yield leaf.name, leaf.to_theirs(array)

  copies = []
  if tokenizer_from is not None:
    copies = [path for name in _TOKENIZER_FILES if (path := FilePath(tokenizer_from) / name).is_file()]
    if not copies:
      raise UserError(f"no tokenizer files in {tokenizer_from}")
  return write_directory(directory, tensors(), {"config.json": values}, copies=copies, shard_bytes=shard_bytes)


def _check_tree(params: Params, leaves: Sequence[_Leaf], config: PolicyConfig) -> None:
  for leaf in leaves:
    want = (config.layers, *leaf.shape) if leaf.stacked else leaf.shape
    got = tuple(_lookup(params, leaf.path).shape)
    if got != want:
      raise ValueError(f"the parameter {'/'.join(leaf.path)} is {got}, the policy's configuration says {want}")
  known = {leaf.path for leaf in leaves}
  if extra := sorted("/".join(path) for path in _paths(params) if path not in known):
    raise ValueError(f"the parameters have leaves that the policy's configuration does not: {_some(extra)}")


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
    (root / "shard-0").rename(root / _SINGLE)
    return
  weight_map = {}
  for i, names in enumerate(shards):
    file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
    (root / f"shard-{i}").rename(root / file)
    weight_map.update(dict.fromkeys(names, file))
  index = {"metadata": {"total_size": total}, "weight_map": weight_map}
  (root / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
