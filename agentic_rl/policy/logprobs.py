"""Log-probabilities and entropy of tokens without a `[B, T, V]` array."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp


def token_logprobs(
  hidden: jax.Array, unembedding: jax.Array, targets: jax.Array, *, temperature: float = 1.0, chunk: int = 1024
) -> tuple[jax.Array, jax.Array]:
  """Log-probability of each target and entropy of each distribution.

  Logits exist for `chunk` tokens at a time, in the forward and in the backward pass: each chunk is recomputed when its
  gradient is taken.

  Args:
    hidden: [N,D] final hidden states.
    unembedding: [V,D] output head.
    targets: int32[N] token whose log-probability is wanted.
    temperature: Softmax temperature, the one that the engine sampled with.
    chunk: Tokens a chunk.

  Returns:
    float32[N] log-probabilities and float32[N] entropies, in nats.
  """
  chex.assert_rank([hidden, unembedding, targets], [2, 2, 1])
  n, d = hidden.shape
  chunk = min(chunk, n)
  padding = -n % chunk
  hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, chunk, d)
  targets = jnp.pad(targets, (0, padding)).reshape(-1, chunk)

  @jax.checkpoint
  def one(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
    h, t = xs
    # The cast is inside, so that the head's gradient is summed over chunks in its own type, not in bfloat16.
    head = unembedding.astype(h.dtype)
    logits = jnp.einsum("nd,vd->nv", h, head, preferred_element_type=jnp.float32) / temperature
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    entropy = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
    return None, (jnp.take_along_axis(logprobs, t[:, None], axis=-1)[:, 0], entropy)

  _, (logp, entropy) = jax.lax.scan(one, None, (hidden, targets))
  return logp.reshape(-1)[:n], entropy.reshape(-1)[:n]
