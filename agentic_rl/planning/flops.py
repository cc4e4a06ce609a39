"""Operations and memory traffic of one micro-batch, counted from the shape of the policy."""

from __future__ import annotations

import dataclasses

from agentic_rl.policy import PolicyConfig

_F32, _BF16 = 4, 2


@dataclasses.dataclass(frozen=True)
class Work:
  """FLOPs of one micro-batch over all chips; a multiply-add counts two.

  Attributes:
    tokens: Tokens of the micro-batch, padding included.
    matrices: Weights that a token meets: layers and output head, of experts those that it is sent to.
    model: 6 x matrices x tokens for weights, plus attention: forward once, backward twice. What "MFU" counts.
    attention: The part of `model` that is attention.
    executed: `model` and what the backward pass recomputes: the head's logits always, layers under `remat="layer"`.
  """

  tokens: int
  matrices: int
  model: float
  attention: float
  executed: float


def layer_matrices(config: PolicyConfig) -> int:
  """Weights of the matrices of one layer that a token meets."""
  c = config
  attention = 2 * c.width * (c.heads + c.kv_heads) * c.head_width
  if c.experts:
    return attention + c.width * c.experts + 3 * c.width * c.expert_width * c.experts_per_token
  return attention + 3 * c.width * c.mlp_width


def visible_pairs(length: int, window: int) -> float:
  """Query-key pairs of one causal row of `length` tokens; a `window` of 0 sees all that came before."""
  seen = min(window, length) if window else length
  return seen * (seen + 1) / 2 + (length - seen) * seen


def count_work(config: PolicyConfig, rows: int, length: int) -> Work:
  """Work of `rows` rows of `length` tokens, each one segment: packed rows of several segments need less attention."""
  c, tokens = config, rows * length
  layers, head = c.layers * layer_matrices(c), c.vocab_size * c.width
  # Scores and their product with values: two matrix products of C for each pair and head.
  pairs = sum(visible_pairs(length, c.window(i)) for i in range(c.layers))
  attention = 4.0 * c.heads * c.head_width * pairs * rows
  forward_layers, forward_head = 2.0 * layers * tokens + attention, 2.0 * head * tokens
  model = 3 * (forward_layers + forward_head)
  recomputed = forward_head
  if c.remat == "layer":
    # A dense layer ends in a product whose result the backward pass does not need; the gradient of a router does.
    last = 0 if c.experts else c.width * c.mlp_width
    recomputed += forward_layers - 2.0 * c.layers * last * tokens
  return Work(tokens, layers + head, model, 3 * attention, model + recomputed)


def parameter_count(config: PolicyConfig) -> int:
  """All matrices of the policy, experts and embedding included; norm scales and biases are left out."""
  c = config
  per_layer = layer_matrices(c)
  if c.experts:
    per_layer += 3 * c.width * c.expert_width * (c.experts - c.experts_per_token)
  return c.layers * per_layer + c.vocab_size * c.width * (1 if c.tied_embeddings else 2)


def hbm_traffic(config: PolicyConfig, tokens: int, *, shard: int, tensor: int) -> tuple[float, float]:
  """Bytes that a chip moves to and from its memory, estimated: (each micro-batch, once in a step).

  Matrices are gathered in the compute type, written and read, in the forward pass, the recomputation and the backward
  pass; gradients are accumulated in float32; activations are written and read once for each matrix product; logits are
  float32 and pass memory four times in each direction of the loss. The optimizer reads weights, gradients and two
  moments and writes three of them. Attention scores never reach memory in a fused kernel.

  Args:
    config: The policy.
    tokens: Tokens of a micro-batch on one chip.
    shard: Parameters that lie on one chip.
    tensor: Chips that share heads, features and vocabulary.
  """
  c = config
  size = _F32 if c.dtype == "float32" else _BF16
  passes = 4 if c.remat == "layer" else 3
  count = parameter_count(c)
  weights = (passes - 1) * 2 * size * count / tensor
  gradients = 2 * _F32 * shard
  features = 2 * (c.expert_width * c.experts_per_token if c.experts else c.mlp_width)
  stream = 8 * c.width + (2 * features + 2 * (c.heads + c.kv_heads) * c.head_width) / tensor
  activations = passes * size * stream * c.layers * tokens
  logits = 2 * 4 * _F32 * c.vocab_size * tokens / tensor
  return weights + gradients + activations + logits, 7.0 * _F32 * shard
