"""Rotary position embedding and the ways in which models stretch it to longer contexts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """How the rotary frequencies of a model differ from those of its base.

  Attributes:
    kind: `linear` (Chen et al., 2023): all frequencies divided by `factor`. `llama3`: only the low ones, with a smooth
      transition. `yarn` (Peng et al., 2023): interpolated by wavelength, and attention scaled.
    factor: By how much the context is stretched.
    original_length: Tokens that the model was trained on before; needed by `llama3` and `yarn`.
    low_freq_factor, high_freq_factor: `llama3`: wavelengths above `original_length / low_freq_factor` are stretched,
      those below `original_length / high_freq_factor` are kept.
    beta_fast, beta_slow: `yarn`: rotations within `original_length` above which a frequency is kept, and below which it
      is stretched.
    attention_factor: `yarn`: factor of cosines and sines; 0 takes 0.1 ln(factor) + 1.
  """

  kind: str
  factor: float
  original_length: int = 0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float = 0.0

  def __post_init__(self) -> None:
    if self.kind not in KINDS:
      raise ValueError(f"unknown rope scaling {self.kind!r}; choose one of {', '.join(KINDS)}")
    if self.factor < 1:
      raise ValueError(f"the factor of a rope scaling must be at least 1, got {self.factor}")
    if self.kind != "linear" and self.original_length < 1:
      raise ValueError(f"rope scaling {self.kind!r} needs original_length")
    if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
      raise ValueError("low_freq_factor must be above 0 and below high_freq_factor")

  @classmethod
  def from_dict(cls, values: Mapping[str, Any]) -> RopeScaling:
    """Builds from plain values; an unknown name raises `ValueError`."""
    known = {f.name for f in dataclasses.fields(cls)}
    if unknown := sorted(set(values) - known):
      raise ValueError(f"unknown option {unknown[0]!r} of rope_scaling; known: {', '.join(sorted(known))}")
    return cls(**values)


def frequencies(head_width: int, theta: float, scaling: RopeScaling | None = None) -> tuple[np.ndarray, float]:
  """Rotary frequencies and the factor of their cosines and sines.

  Args:
    head_width: C.
    theta: Base of the frequencies.
    scaling: How they are stretched, if at all.

  Returns:
    float32[C/2] in radians a token, and 1 for all kinds but `yarn`.
  """
  exponent = np.arange(0, head_width, 2, dtype=np.float64) / head_width
  base = theta**-exponent
  if scaling is None:
    return base.astype(np.float32), 1.0
  stretched = base / scaling.factor
  if scaling.kind == "linear":
    return stretched.astype(np.float32), 1.0
  if scaling.kind == "llama3":
    rotations = scaling.original_length * base / (2 * math.pi)  # of each frequency within the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return (kept * base + (1 - kept) * stretched).astype(np.float32), 1.0

  def place(rotations: float) -> float:
    """Index of the frequency that makes so many rotations within the original context."""
    return head_width * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

  first = max(math.floor(place(scaling.beta_fast)), 0)
  last = min(math.ceil(place(scaling.beta_slow)), head_width - 1)
  ramp = np.clip((np.arange(head_width // 2) - first) / max(last - first, 1e-3), 0.0, 1.0)
  factor = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
  return (ramp * stretched + (1 - ramp) * base).astype(np.float32), factor


def rotate(x: jax.Array, positions: jax.Array, frequency: jax.Array | np.ndarray, factor: float = 1.0) -> jax.Array:
  """Rotary position embedding, halves convention (Su et al., 2021; as Llama in transformers).

  Args:
    x: [B,T,N,C].
    positions: int32[B,T].
    frequency: float32[C/2].
    factor: Multiplies cosines and sines.
  """
  half = x.shape[-1] // 2
  angle = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequency)[None, None, :]
  cos, sin = factor * jnp.cos(angle)[:, :, None, :], factor * jnp.sin(angle)[:, :, None, :]
  a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
