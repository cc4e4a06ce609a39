"""Feed-forward layers of several experts, of which each token uses a few (Shazeer et al., 2017; as Qwen3-MoE)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from agentic_rl.parallel.rules import partition_spec
from agentic_rl.policy.config import PolicyConfig
from agentic_rl.policy.parameters import parameter


class Experts(nnx.Module):
  """SwiGLU experts behind a softmax router. No token is dropped: experts take as many as are sent to them.

  On a mesh each device has some of the experts (axis `expert`) and a slice of their width (`tensor`). It gathers the
  tokens of the devices that have the other experts, gives them to its own, and the results are summed where the tokens
  came from.
  """

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
    router, gate, up, down = (w[...].astype(x.dtype) for w in (self.router, self.gate, self.up, self.down))
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
      return self._mix(x.reshape(-1, x.shape[-1]), router, gate, up, down, jnp.int32(0)).reshape(x.shape)

    def on_device(x: jax.Array, router: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
      router = jax.lax.all_gather(router, "fsdp", axis=0, tiled=True)
      gate, up = (jax.lax.all_gather(w, "fsdp", axis=1, tiled=True) for w in (gate, up))
      down = jax.lax.all_gather(down, "fsdp", axis=2, tiled=True)
      tokens = jax.lax.all_gather(x.reshape(-1, x.shape[-1]), "expert", axis=0, tiled=True)
      first = jax.lax.axis_index("expert") * gate.shape[0]
      out = jax.lax.psum(self._mix(tokens, router, gate, up, down, first), "tensor")
      return jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True).reshape(x.shape)

    activations = partition_spec(("batch", "length", None))
    wide = partition_spec(("experts", "embed", "mlp"))
    specs = (activations, partition_spec(("embed", None)), wide, wide, partition_spec(("experts", "mlp", "embed")))
    return jax.shard_map(on_device, in_specs=specs, out_specs=activations, check_vma=False)(x, router, gate, up, down)

  def _mix(
    self, tokens: jax.Array, router: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, first: jax.Array
  ) -> jax.Array:
    """What the experts `first`, `first + 1`, ... add to the tokens [N,D]."""
    count, per_token = gate.shape[0], self.config.experts_per_token
    weights, ids = self._route(tokens, router)
    local = ids.reshape(-1) - first
    mine = (local >= 0) & (local < count)
    # Tokens in the order of their experts, those of other devices last: each product is then one contiguous piece.
    key = jnp.where(mine, local, count)
    order = jnp.argsort(key, stable=True)
    sizes = jnp.bincount(key, length=count + 1)[:count].astype(jnp.int32)
    sent = jnp.take(tokens, order // per_token, axis=0)
    hidden = jax.nn.silu(jax.lax.ragged_dot(sent, gate, sizes)) * jax.lax.ragged_dot(sent, up, sizes)
    out = jnp.take(jax.lax.ragged_dot(hidden, down, sizes), jnp.argsort(order), axis=0)
    share = jnp.where(mine, weights.reshape(-1), 0.0)[:, None].astype(tokens.dtype)
    out = jnp.where(mine[:, None], out, 0.0)  # what is in no group has no defined product
    return jnp.sum((out * share).reshape(-1, per_token, tokens.shape[-1]), axis=1)

  def _route(self, tokens: jax.Array, router: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32[N,k] weights and int32[N,k] numbers of the experts that each token [N,D] goes to."""
    shares = jax.nn.softmax((tokens @ router).astype(jnp.float32), axis=-1)
    weights, ids = jax.lax.top_k(shares, self.config.experts_per_token)
    if self.config.normalize_experts:
      weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, ids
