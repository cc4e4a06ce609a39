"""Feed-forward layers of several experts, of which each token uses a few (Shazeer et al., 2017; as Qwen3-MoE)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from agentic_rl.parallel.rules import constrain
from agentic_rl.policy.config import PolicyConfig
from agentic_rl.policy.parameters import parameter


class Experts(nnx.Module):
  """SwiGLU experts behind a softmax router. No token is dropped: experts take as many as are sent to them."""

  def __init__(self, config: PolicyConfig, rngs: nnx.Rngs):
    c = config
    n, e, d, f = c.layers, c.experts, c.width, c.expert_width
    self.config = config
    self.router = parameter(rngs, (n, d, e), ("layers", "embed", None), d**-0.5)
    self.gate = parameter(rngs, (n, e, d, f), ("layers", "experts", "embed", "mlp"), d**-0.5)
    self.up = parameter(rngs, (n, e, d, f), ("layers", "experts", "embed", "mlp"), d**-0.5)
    down_std = f**-0.5 / (2 * n) ** 0.5
    self.down = parameter(rngs, (n, e, f, d), ("layers", "experts", "mlp", "embed"), down_std)

  def __call__(self, x: jax.Array) -> jax.Array:
    """`x` [B,T,D] -> [B,T,D]. The layer axis has been taken off the parameters."""
    b, t, d = x.shape
    tokens = x.reshape(b * t, d)
    weights, ids = self._route(tokens)
    per_token = ids.shape[1]
    # Tokens in the order of their experts: each expert's matrix product is then one contiguous piece.
    order = jnp.argsort(ids.reshape(-1), stable=True)
    sizes = jnp.bincount(ids.reshape(-1), length=self.config.experts).astype(jnp.int32)
    sent = jnp.take(tokens, order // per_token, axis=0)
    hidden = jax.nn.silu(_grouped(sent, self.gate[...], sizes)) * _grouped(sent, self.up[...], sizes)
    out = _grouped(hidden, self.down[...], sizes)
    back = jnp.take(out, jnp.argsort(order), axis=0).reshape(b * t, per_token, d)
    mixed = jnp.sum(back * weights[:, :, None].astype(x.dtype), axis=1)
    return constrain(mixed.reshape(b, t, d), "batch", "length", None)

  def _route(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32[N,k] weights and int32[N,k] numbers of the experts that each token [N,D] goes to."""
    logits = tokens @ self.router[...].astype(tokens.dtype)
    shares = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, ids = jax.lax.top_k(shares, self.config.experts_per_token)
    if self.config.normalize_experts:
      weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, ids


def _grouped(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
  """[N,I] rows in groups of `sizes` [E], each times its own matrix of [E,I,O] -> [N,O]."""
  return jax.lax.ragged_dot(rows, matrices.astype(rows.dtype), sizes)
