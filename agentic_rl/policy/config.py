"""Shape of a decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from agentic_rl.policy.rope import RopeScaling

COMPUTATION = ("dtype", "attention", "remat", "unroll_layers")
"""Options that say how a policy is computed; all others decide which weights fit it."""

REMAT = ("none", "layer")
ATTENTION = ("auto", "blocks", "splash", "cudnn", "reference")


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
  """A decoder of the Llama / Qwen2 / Qwen3 / Qwen3-MoE form.

  Attributes:
    vocab_size: V.
    width: D, model width.
    layers: L.
    heads: H, query heads.
    kv_heads: K, key-value heads; divides H.
    head_width: C; need not be D / H.
    mlp_width: F.
    rope_theta: Base of the rotary frequencies.
    rope_scaling: How they are stretched to longer contexts; None where they are not.
    norm_eps: Epsilon of RMSNorm.
    qk_norm: RMSNorm on queries and keys, per head (Qwen3).
    qkv_bias: Bias on query, key and value projections (Qwen2).
    tied_embeddings: The output head is the embedding table.
    sliding_window: Tokens that a query sees, itself included, in the layers of `sliding_layers`; 0 for no such layer.
    sliding_layers: L booleans: which layers see the window only. Empty for none.
    experts: E, experts of each feed-forward layer; 0 for a dense one.
    experts_per_token: Experts that each token goes to.
    expert_width: Feed-forward width of an expert; `mlp_width` is unused then.
    normalize_experts: The weights of a token's experts are made to sum to 1.
    dtype: Type of activations and matrix products; parameters are float32 in the learner.
    attention: Implementation of attention over packed rows, see `attention`; `auto` goes by the platform.
    remat: `layer` recomputes each layer in the backward pass, `none` keeps all activations.
    unroll_layers: Unroll the loop over layers: faster on CPU, slower to compile for deep models.
  """

  vocab_size: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_width: int
  mlp_width: int
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6
  qk_norm: bool = False
  qkv_bias: bool = False
  tied_embeddings: bool = True
  rope_scaling: RopeScaling | None = None
  sliding_window: int = 0
  sliding_layers: tuple[bool, ...] = ()
  experts: int = 0
  experts_per_token: int = 0
  expert_width: int = 0
  normalize_experts: bool = True
  dtype: str = "float32"
  attention: str = "auto"
  remat: str = "none"
  unroll_layers: bool = False

  def __post_init__(self) -> None:
    for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_width", "mlp_width"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
    if self.heads % self.kv_heads:
      raise ValueError(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
    if self.head_width % 2:
      raise ValueError(f"head_width must be even for rotary embeddings, got {self.head_width}")
    if self.sliding_layers and (len(self.sliding_layers) != self.layers or self.sliding_window < 1):
      raise ValueError(f"sliding_layers needs {self.layers} entries, one a layer, and a sliding_window of at least 1")
    if self.experts and not 1 <= self.experts_per_token <= self.experts:
      raise ValueError(f"experts_per_token must be from 1 to experts ({self.experts}), got {self.experts_per_token}")
    if self.experts and self.expert_width < 1:
      raise ValueError(f"expert_width must be at least 1, got {self.expert_width}")
    if self.attention not in ATTENTION:
      raise ValueError(f"unknown attention {self.attention!r}; choose one of {', '.join(ATTENTION)}")
    if self.remat not in REMAT:
      raise ValueError(f"unknown remat {self.remat!r}; choose one of {', '.join(REMAT)}")
    if self.dtype not in ("float32", "bfloat16"):
      raise ValueError(f"dtype must be float32 or bfloat16, got {self.dtype!r}")

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> PolicyConfig:
    """Builds from plain values; unknown and missing names raise `ValueError`."""
    known = {f.name: f.default is dataclasses.MISSING for f in dataclasses.fields(cls)}
    if unknown := sorted(set(values) - set(known)):
      raise ValueError(f"unknown policy option {unknown[0]!r}; known: {', '.join(sorted(known))}")
    if missing := [name for name, required in known.items() if required and name not in values]:
      raise ValueError(f"policy option {missing[0]!r} is missing")
    values = dict(values)
    if isinstance(values.get("rope_scaling"), Mapping):
      values["rope_scaling"] = RopeScaling.from_dict(values["rope_scaling"])
    if "sliding_layers" in values:
      values["sliding_layers"] = tuple(bool(x) for x in values["sliding_layers"])
    return cls(**values)

  def to_dict(self) -> dict[str, Any]:
    """Plain values, as JSON gives them back."""
    values = dataclasses.asdict(self)
    values["sliding_layers"] = list(self.sliding_layers)
    return values

  def window(self, layer: int) -> int:
    """Tokens that a query of this layer sees, itself included; 0 for all."""
    return self.sliding_window if self.sliding_layers and self.sliding_layers[layer] else 0

  def architecture(self) -> dict[str, Any]:
    """The options that decide which checkpoints fit: all but how it is computed."""
    values = self.to_dict()
    for name in COMPUTATION:
      del values[name]
    return values
