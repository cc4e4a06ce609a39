"""The optimizer: AdamW with gradient clipping and a warm-up, from optax."""

from __future__ import annotations

import dataclasses

import jax
import optax

SCHEDULES = ("constant", "cosine")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW (Loshchilov & Hutter, 2019) with global-norm clipping.

  Attributes:
    learning_rate: Peak learning rate.
    warmup_steps: W steps of linear warm-up: step i = 0, 1, ... has rate (i + 1) / (W + 1) of the peak. The first is
      not 0: with few updates a lost one counts.
    schedule: `constant`, or `cosine` to a tenth of the peak at `total_steps`, and constant from there.
    total_steps: Length of the cosine schedule, its warm-up included.
    weight_decay: Decoupled weight decay, on matrices only, neither norm scales nor biases.
    clip_norm: Largest global norm of the gradient.
    b1, b2, eps: Adam's moments and epsilon.
  """

  learning_rate: float = 1e-6
  warmup_steps: int = 0
  schedule: str = "constant"
  total_steps: int = 0
  weight_decay: float = 0.01
  clip_norm: float = 1.0
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8

  def __post_init__(self) -> None:
    if self.schedule not in SCHEDULES:
      raise ValueError(f"unknown schedule {self.schedule!r}; choose one of {', '.join(SCHEDULES)}")
    if self.schedule == "cosine" and self.total_steps <= self.warmup_steps:
      raise ValueError(f"a cosine schedule needs total_steps ({self.total_steps}) above warmup_steps")

  def rate(self) -> optax.Schedule:
    """Learning rate as a function of the optimizer step."""
    first = self.learning_rate / (self.warmup_steps + 1)
    if self.schedule == "cosine":
      return optax.warmup_cosine_decay_schedule(
        first, self.learning_rate, self.warmup_steps, self.total_steps, self.learning_rate / 10
      )
    if self.warmup_steps:
      return optax.linear_schedule(first, self.learning_rate, self.warmup_steps)
    return optax.constant_schedule(self.learning_rate)

  def build(self) -> optax.GradientTransformation:
    """The gradient transformation."""

    def decayed(params: dict) -> dict:
      # Scales and biases of stacked layers have two axes or more, as matrices do: their names tell them apart.
      def is_matrix(path: tuple, leaf: jax.Array) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return "norm" not in name and "bias" not in name and leaf.ndim >= 2

      return jax.tree_util.tree_map_with_path(is_matrix, params)

    return optax.chain(
      optax.clip_by_global_norm(self.clip_norm),
      optax.adamw(self.rate(), b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=self.weight_decay, mask=decayed),
    )
