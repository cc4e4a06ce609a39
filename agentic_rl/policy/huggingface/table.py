"""Names, shapes and configurations on both sides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from agentic_rl.errors import UserError
from agentic_rl.policy.config import PolicyConfig
from agentic_rl.policy.rope import RopeScaling

Path = tuple[str, ...]
"""Keys from the root of a parameter tree to a leaf, e.g. `("layers", "attention", "q")`."""

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
_INDICES = ("layer", "expert")


@dataclasses.dataclass(frozen=True)
class Leaf:
  """One parameter on both sides.

  Attributes:
    path: Where it lies in our tree.
    name: Tensor name there; `{layer}` and `{expert}` are numbers along the stacked axes, which lead our shape.
    shape: Our shape, without the stacked axes.
    outputs: How many trailing axes of `shape` are the output of a matrix product; None for anything but a matrix. The
      tensor there is the matrix of flattened inputs and outputs, transposed.
  """

  path: Path
  name: str
  shape: tuple[int, ...]
  outputs: int | None = None

  def stacked(self, config: PolicyConfig) -> tuple[int, ...]:
    """Sizes of the stacked axes."""
    sizes = {"layer": config.layers, "expert": config.experts}
    return tuple(sizes[index] for index in _INDICES if f"{{{index}}}" in self.name)

  def names(self, config: PolicyConfig) -> Iterator[tuple[tuple[int, ...], str]]:
    """Each tensor: its place along the stacked axes and its name."""
    for place in np.ndindex(self.stacked(config)):
      yield place, self.name.format(**dict(zip(_INDICES, place, strict=False)))

  @property
  def _matrix(self) -> tuple[int, int]:
    split = len(self.shape) - (self.outputs or 0)
    return int(np.prod(self.shape[:split])), int(np.prod(self.shape[split:]))

  @property
  def their_shape(self) -> tuple[int, ...]:
    if self.outputs is not None:
      return self._matrix[::-1]
    return self.shape if self.path in (("embed", "table"), ("head",)) else (int(np.prod(self.shape)),)

  def their_slice(self, ours: tuple[slice, ...]) -> tuple[slice, ...]:
    """Where a piece of our array, cut along whole leading axes of inputs and of outputs, lies in the tensor there."""
    if len(self.their_shape) == len(self.shape) and self.outputs is None:
      return ours
    if self.outputs is None:
      return (_flattened(ours, self.shape),)
    split = len(self.shape) - self.outputs
    return (_flattened(ours[split:], self.shape[split:]), _flattened(ours[:split], self.shape[:split]))

  def to_ours(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The piece of ours, of this shape, that a piece of theirs is."""
    return (tensor.T if self.outputs is not None else tensor).reshape(shape)

  def to_theirs(self, array: np.ndarray) -> np.ndarray:
    """Their tensor of our array, the stacked axes taken off."""
    if self.outputs is not None:
      return np.ascontiguousarray(array.reshape(self._matrix).T)
    return np.ascontiguousarray(array.reshape(self.their_shape))


def _flattened(pieces: tuple[slice, ...], shape: tuple[int, ...]) -> slice:
  """One range of the flattened axes; all axes but the first must be whole."""
  inner = int(np.prod(shape[1:]))
  if any(piece.indices(size)[:2] != (0, size) for piece, size in zip(pieces[1:], shape[1:], strict=True)):
    raise ValueError(f"a piece {pieces} of axes {shape} is not contiguous where they are flattened")
  start, stop, _ = pieces[0].indices(shape[0])
  return slice(start * inner, stop * inner)


def leaves(config: PolicyConfig) -> list[Leaf]:
  """Every parameter of a policy."""
  c = config
  d, f, h, k, w = c.width, c.mlp_width, c.heads, c.kv_heads, c.head_width
  attention, mlp, layer = ("layers", "attention"), ("layers", "mlp"), "model.layers.{layer}."
  found = [
    Leaf(("embed", "table"), "model.embed_tokens.weight", (c.vocab_size, d)),
    Leaf(("layers", "attention_norm"), layer + "input_layernorm.weight", (d,)),
    Leaf((*attention, "q"), layer + "self_attn.q_proj.weight", (d, h, w), outputs=2),
    Leaf((*attention, "k"), layer + "self_attn.k_proj.weight", (d, k, w), outputs=2),
    Leaf((*attention, "v"), layer + "self_attn.v_proj.weight", (d, k, w), outputs=2),
    Leaf((*attention, "o"), layer + "self_attn.o_proj.weight", (h, w, d), outputs=1),
    Leaf(("layers", "mlp_norm"), layer + "post_attention_layernorm.weight", (d,)),
    Leaf(("final_norm",), "model.norm.weight", (d,)),
  ]
  each = layer + "mlp."
  if c.experts:
    found.append(Leaf((*mlp, "router"), each + "gate.weight", (d, c.experts), outputs=1))
    each, f = each + "experts.{expert}.", c.expert_width
  for name, shape in (("gate", (d, f)), ("up", (d, f)), ("down", (f, d))):
    found.append(Leaf((*mlp, name), f"{each}{name}_proj.weight", shape, outputs=1))
  if c.qkv_bias:
    for name, heads in (("q", h), ("k", k), ("v", k)):
      found.append(Leaf((*attention, f"{name}_bias"), f"{layer}self_attn.{name}_proj.bias", (heads, w)))
  if c.qk_norm:
    for name in ("q", "k"):
      found.append(Leaf((*attention, f"{name}_norm"), f"{layer}self_attn.{name}_norm.weight", (w,)))
  if not c.tied_embeddings:
    found.append(Leaf(("head",), "lm_head.weight", (c.vocab_size, d)))
  return found


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
  if family not in FAMILIES:
    raise UserError(f"model_type {family!r} is not supported; known: {', '.join(FAMILIES)} (SmolLM2 is a llama)")
  rope = dict(values.get("rope_parameters") or {})
  bias = values.get("attention_bias")
  layers, heads = values["num_hidden_layers"], values["num_attention_heads"]
  for wrong, what in (
    (values.get("hidden_act", "silu") != "silu", f"hidden_act {values.get('hidden_act')!r}"),
    (family != "qwen2" and bool(bias), f"attention_bias={bias} of {family}"),
    (bool(values.get("mlp_bias")), "mlp_bias=True"),
    (values.get("partial_rotary_factor", 1.0) != 1.0, "partial_rotary_factor other than 1"),
    (bool(values.get("mlp_only_layers")), f"dense layers {values.get('mlp_only_layers')} among those of experts"),
    (values.get("decoder_sparse_step", 1) != 1, "experts in some layers only (decoder_sparse_step)"),
  ):
    if wrong:
      raise UserError(f"config.json asks for {what}, which the decoder does not have")
  read: dict[str, Any] = {
    "vocab_size": values["vocab_size"],
    "width": values["hidden_size"],
    "layers": layers,
    "heads": heads,
    "kv_heads": values.get("num_key_value_heads") or heads,
    "head_width": values.get("head_dim") or values["hidden_size"] // heads,
    "mlp_width": values["intermediate_size"],
    "rope_theta": float(rope.get("rope_theta") or values.get("rope_theta", 10_000.0)),
    "norm_eps": float(values.get("rms_norm_eps", 1e-6)),
    "qk_norm": family in ("qwen3", "qwen3_moe"),
    "qkv_bias": family == "qwen2",
    "tied_embeddings": bool(values.get("tie_word_embeddings", False)),
    **_read_windows(family, values, layers),
  }
  if family == "qwen3_moe":
    read |= {
      "experts": values.get("num_experts") or values["num_local_experts"],
      "experts_per_token": values["num_experts_per_tok"],
      "expert_width": values["moe_intermediate_size"],
      "normalize_experts": bool(values.get("norm_topk_prob", False)),
    }
  try:
    scaling = _read_scaling(values.get("rope_scaling") or rope, values.get("max_position_embeddings", 0))
    return PolicyConfig.from_dict({**read, "rope_scaling": scaling, **overrides})
  except ValueError as error:
    raise UserError(f"config.json does not describe a decoder that can be built: {error}") from error


def _read_scaling(values: Mapping[str, Any], max_length: int) -> RopeScaling | None:
  kind = values.get("rope_type", values.get("type", "default"))
  if kind == "default":
    return None
  if kind not in ("linear", "llama3", "yarn"):
    raise UserError(f"config.json asks for rope type {kind!r}, which the decoder does not have")
  if values.get("mscale") or values.get("mscale_all_dim") or values.get("truncate") is False:
    raise UserError("config.json asks for a variant of yarn (mscale, truncate) that the decoder does not have")
  original = 0 if kind == "linear" else int(values.get("original_max_position_embeddings") or max_length)
  names = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_fast", "beta_slow")
  given = {name: float(values[name]) for name in names if kind != "linear" and values.get(name) is not None}
  attention = float(values.get("attention_factor") or 0.0) if kind == "yarn" else 0.0
  return RopeScaling(kind, float(values["factor"]), original, attention_factor=attention, **given)


def _read_windows(family: str, values: Mapping[str, Any], layers: int) -> dict[str, Any]:
  if family == "llama" or not values.get("use_sliding_window") or not values.get("sliding_window"):
    return {}
  kinds = values.get("layer_types")
  if kinds is not None:
    sliding = [kind == "sliding_attention" for kind in kinds]
  else:
    full = values.get("max_window_layers", layers)
    sliding = [i >= full for i in range(layers)]
  return {"sliding_window": values["sliding_window"], "sliding_layers": tuple(sliding)} if any(sliding) else {}


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
  c = config
  if c.qk_norm and c.qkv_bias:
    raise ValueError("qk_norm together with qkv_bias is no Llama, Qwen2 or Qwen3, so it cannot be exported")
  if c.qkv_bias and c.heads * c.head_width != c.width:
    raise ValueError("qkv_bias (Qwen2) needs head_width = width / heads to be exported")
  if c.experts and not c.qk_norm:
    raise ValueError("experts without qk_norm are no Qwen3-MoE, so they cannot be exported")
  family, architecture = "llama", "LlamaForCausalLM"
  if c.experts:
    family, architecture = "qwen3_moe", "Qwen3MoeForCausalLM"
  elif c.qk_norm:
    family, architecture = "qwen3", "Qwen3ForCausalLM"
  elif c.qkv_bias:
    family, architecture = "qwen2", "Qwen2ForCausalLM"
  if c.sliding_layers and family == "llama":
    raise ValueError("a sliding window without qk_norm or qkv_bias is no Llama, so it cannot be exported")
  values: dict[str, Any] = {
    "architectures": [architecture],
    "model_type": family,
    "vocab_size": c.vocab_size,
    "hidden_size": c.width,
    "num_hidden_layers": c.layers,
    "num_attention_heads": c.heads,
    "num_key_value_heads": c.kv_heads,
    "head_dim": c.head_width,
    "intermediate_size": c.mlp_width,
    "hidden_act": "silu",
    "rope_theta": c.rope_theta,
    "rms_norm_eps": c.norm_eps,
    "max_position_embeddings": max_length,
    "tie_word_embeddings": c.tied_embeddings,
    "torch_dtype": dtype,
    "eos_token_id": eos_id,
    "pad_token_id": pad_id,
    "bos_token_id": None,
  }
  if c.rope_scaling is not None:
    values["rope_scaling"] = _written_scaling(c.rope_scaling)
  if family != "qwen2":
    values["attention_bias"] = False
  if c.sliding_layers:
    kinds = ["sliding_attention" if sliding else "full_attention" for sliding in c.sliding_layers]
    values |= {"use_sliding_window": True, "sliding_window": c.sliding_window, "layer_types": kinds}
    # Readers from before `layer_types` take one number: the layers before it see everything.
    values["max_window_layers"] = c.sliding_layers.index(True)
  if c.experts:
    values |= {
      "num_experts": c.experts,
      "num_experts_per_tok": c.experts_per_token,
      "moe_intermediate_size": c.expert_width,
      "norm_topk_prob": c.normalize_experts,
      "decoder_sparse_step": 1,
      "mlp_only_layers": [],
    }
  return values


def _written_scaling(scaling: RopeScaling) -> dict[str, Any]:
  values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
  if scaling.kind != "linear":
    values["original_max_position_embeddings"] = scaling.original_length
  if scaling.kind == "llama3":
    values |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
  if scaling.kind == "yarn":
    values |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    if scaling.attention_factor:
      values["attention_factor"] = scaling.attention_factor
  return values
