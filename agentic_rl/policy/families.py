"""Published models by name: their shapes, and where their weights are.

The numbers are those of each model's `config.json`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from agentic_rl.errors import UserError
from agentic_rl.policy.config import PolicyConfig
from agentic_rl.policy.rope import RopeScaling


@dataclasses.dataclass(frozen=True)
class Family:
  """A published model.

  Attributes:
    config: Its shape.
    repository: Name of its weights at the Hugging Face hub.
  """

  config: PolicyConfig
  repository: str


def _qwen2(
  width: int, layers: int, heads: int, kv_heads: int, mlp_width: int, vocabulary: int, tied: bool
) -> PolicyConfig:
  return PolicyConfig(
    vocab_size=vocabulary,
    width=width,
    layers=layers,
    heads=heads,
    kv_heads=kv_heads,
    head_width=width // heads,
    mlp_width=mlp_width,
    rope_theta=1e6,
    qkv_bias=True,
    tied_embeddings=tied,
  )


def _qwen3(
  width: int, layers: int, heads: int, kv_heads: int, mlp_width: int, tied: bool, **experts: Any
) -> PolicyConfig:
  return PolicyConfig(
    vocab_size=151_936,
    width=width,
    layers=layers,
    heads=heads,
    kv_heads=kv_heads,
    head_width=128,
    mlp_width=mlp_width,
    rope_theta=1e6,
    qk_norm=True,
    tied_embeddings=tied,
    **experts,
  )


def _llama3(width: int, layers: int, heads: int, mlp_width: int, factor: float, tied: bool) -> PolicyConfig:
  return PolicyConfig(
    vocab_size=128_256,
    width=width,
    layers=layers,
    heads=heads,
    kv_heads=8,
    head_width=width // heads,
    mlp_width=mlp_width,
    rope_theta=5e5,
    rope_scaling=RopeScaling("llama3", factor, 8192, 1.0, 4.0),
    norm_eps=1e-5,
    tied_embeddings=tied,
  )


def _smollm2(width: int, layers: int, heads: int, kv_heads: int, mlp_width: int, theta: float) -> PolicyConfig:
  return PolicyConfig(
    vocab_size=49_152,
    width=width,
    layers=layers,
    heads=heads,
    kv_heads=kv_heads,
    head_width=64,
    mlp_width=mlp_width,
    rope_theta=theta,
    norm_eps=1e-5,
  )


FAMILIES: dict[str, Family] = {
  "qwen2_5_0p5b": Family(_qwen2(896, 24, 14, 2, 4864, 151_936, True), "Qwen/Qwen2.5-0.5B"),
  "qwen2_5_1p5b": Family(_qwen2(1536, 28, 12, 2, 8960, 151_936, True), "Qwen/Qwen2.5-1.5B"),
  "qwen2_5_3b": Family(_qwen2(2048, 36, 16, 2, 11_008, 151_936, True), "Qwen/Qwen2.5-3B"),
  "qwen2_5_7b": Family(_qwen2(3584, 28, 28, 4, 18_944, 152_064, False), "Qwen/Qwen2.5-7B"),
  "qwen2_5_14b": Family(_qwen2(5120, 48, 40, 8, 13_824, 152_064, False), "Qwen/Qwen2.5-14B"),
  "qwen2_5_32b": Family(_qwen2(5120, 64, 40, 8, 27_648, 152_064, False), "Qwen/Qwen2.5-32B"),
  "qwen3_0p6b": Family(_qwen3(1024, 28, 16, 8, 3072, True), "Qwen/Qwen3-0.6B"),
  "qwen3_1p7b": Family(_qwen3(2048, 28, 16, 8, 6144, True), "Qwen/Qwen3-1.7B"),
  "qwen3_4b": Family(_qwen3(2560, 36, 32, 8, 9728, True), "Qwen/Qwen3-4B"),
  "qwen3_8b": Family(_qwen3(4096, 36, 32, 8, 12_288, False), "Qwen/Qwen3-8B"),
  "qwen3_14b": Family(_qwen3(5120, 40, 40, 8, 17_408, False), "Qwen/Qwen3-14B"),
  "qwen3_32b": Family(_qwen3(5120, 64, 64, 8, 25_600, False), "Qwen/Qwen3-32B"),
  "qwen3_30b_a3b": Family(
    _qwen3(2048, 48, 32, 4, 6144, False, experts=128, experts_per_token=8, expert_width=768), "Qwen/Qwen3-30B-A3B"
  ),
  "llama3_2_1b": Family(_llama3(2048, 16, 32, 8192, 32.0, True), "meta-llama/Llama-3.2-1B"),
  "llama3_2_3b": Family(_llama3(3072, 28, 24, 8192, 32.0, True), "meta-llama/Llama-3.2-3B"),
  "llama3_1_8b": Family(_llama3(4096, 32, 32, 14_336, 8.0, False), "meta-llama/Llama-3.1-8B"),
  "smollm2_135m": Family(_smollm2(576, 30, 9, 3, 1536, 1e5), "HuggingFaceTB/SmolLM2-135M-Instruct"),
  "smollm2_360m": Family(_smollm2(960, 32, 15, 5, 2560, 1e5), "HuggingFaceTB/SmolLM2-360M-Instruct"),
  "smollm2_1p7b": Family(_smollm2(2048, 24, 32, 32, 8192, 1.3e5), "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
}


def named(name: str, **overrides: Any) -> PolicyConfig:
  """The shape of a published model.

  Args:
    name: A key of `FAMILIES`.
    **overrides: Options of `PolicyConfig` (`dtype`, `remat`, ...).

  Raises:
    UserError: There is no such model here.
  """
  if name not in FAMILIES:
    raise UserError(f"policy {name!r} is unknown; known: {', '.join(FAMILIES)}, or a Hugging Face directory")
  return dataclasses.replace(FAMILIES[name].config, **overrides)
