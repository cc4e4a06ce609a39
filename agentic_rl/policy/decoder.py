"""The policy: a Flax NNX decoder whose parameters carry logical axis names.

Layers are stacked along a leading axis L, so that one block is compiled once and `scan`ned. The module is used through
`Policy`, which splits it into a static graph and a plain tree of arrays: what the learner differentiates, Orbax writes
and the engine serves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from agentic_rl.parallel.rules import constrain
from agentic_rl.policy import attention
from agentic_rl.policy.config import PolicyConfig
from agentic_rl.policy.experts import Experts
from agentic_rl.policy.parameters import parameter
from agentic_rl.policy.rope import frequencies, rotate

Params = dict[str, Any]
"""Nested dict of arrays: {"embed": {"table"}, "layers": {...: [L, ...]}, "final_norm", "head" (untied)}."""

KeyValueCache = list[tuple[jax.Array, jax.Array]]
"""One (keys, values) pair of [S,T,K,C] arrays a layer; S slots, T positions."""

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """RMSNorm over the last axis in float32 (Zhang & Sennrich, 2019)."""
  y = x.astype(jnp.float32)
  y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
  return (y * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)


class Attention(nnx.Module):
  """Grouped-query attention with rotary positions."""

  def __init__(self, config: PolicyConfig, rngs: nnx.Rngs):
    c = config
    n, std = c.layers, c.width**-0.5
    self.config = config
    self.q = parameter(rngs, (n, c.width, c.heads, c.head_width), ("layers", "embed", "heads", "head_width"), std)
    self.k = parameter(rngs, (n, c.width, c.kv_heads, c.head_width), ("layers", "embed", "kv_heads", "head_width"), std)
    self.v = parameter(rngs, (n, c.width, c.kv_heads, c.head_width), ("layers", "embed", "kv_heads", "head_width"), std)
    out_std = (c.heads * c.head_width) ** -0.5 / (2 * n) ** 0.5  # residual branches add up to unit variance
    self.o = parameter(rngs, (n, c.heads, c.head_width, c.width), ("layers", "heads", "head_width", "embed"), out_std)
    if c.qkv_bias:
      self.q_bias = parameter(rngs, (n, c.heads, c.head_width), ("layers", "heads", "head_width"), 0)
      self.k_bias = parameter(rngs, (n, c.kv_heads, c.head_width), ("layers", "kv_heads", "head_width"), 0)
      self.v_bias = parameter(rngs, (n, c.kv_heads, c.head_width), ("layers", "kv_heads", "head_width"), 0)
    if c.qk_norm:
      self.q_norm = parameter(rngs, (n, c.head_width), ("layers", "head_width"), None)
      self.k_norm = parameter(rngs, (n, c.head_width), ("layers", "head_width"), None)

  def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
    """`x` [B,T,D], `positions` int32[B,T] -> [B,T,D]. The layer axis has been taken off the parameters."""
    c, dtype = self.config, x.dtype
    q = jnp.einsum("btd,dhc->bthc", x, self.q[...].astype(dtype))
    k = jnp.einsum("btd,dkc->btkc", x, self.k[...].astype(dtype))
    v = jnp.einsum("btd,dkc->btkc", x, self.v[...].astype(dtype))
    if c.qkv_bias:
      q = q + self.q_bias[...].astype(dtype)[None, None]
      k = k + self.k_bias[...].astype(dtype)[None, None]
      v = v + self.v_bias[...].astype(dtype)[None, None]
    if c.qk_norm:
      q, k = rms_norm(q, self.q_norm[...], c.norm_eps), rms_norm(k, self.k_norm[...], c.norm_eps)
    frequency, factor = frequencies(c.head_width, c.rope_theta, c.rope_scaling)
    q = constrain(rotate(q, positions, frequency, factor), "batch", "length", "heads", "head_width")
    k = constrain(rotate(k, positions, frequency, factor), "batch", "length", "kv_heads", "head_width")
    return jnp.einsum("bthc,hcd->btd", attend(q, k, v), self.o[...].astype(dtype))


class MLP(nnx.Module):
  """SwiGLU feed-forward layer (Shazeer, 2020)."""

  def __init__(self, config: PolicyConfig, rngs: nnx.Rngs):
    n, d, f = config.layers, config.width, config.mlp_width
    self.gate = parameter(rngs, (n, d, f), ("layers", "embed", "mlp"), d**-0.5)
    self.up = parameter(rngs, (n, d, f), ("layers", "embed", "mlp"), d**-0.5)
    self.down = parameter(rngs, (n, f, d), ("layers", "mlp", "embed"), f**-0.5 / (2 * n) ** 0.5)

  def __call__(self, x: jax.Array) -> jax.Array:
    dtype = x.dtype
    hidden = jax.nn.silu(x @ self.gate[...].astype(dtype)) * (x @ self.up[...].astype(dtype))
    return constrain(hidden, "batch", "length", "mlp") @ self.down[...].astype(dtype)


class Block(nnx.Module):
  """One pre-norm transformer layer; holds the parameters of all layers until the layer axis is taken off."""

  def __init__(self, config: PolicyConfig, rngs: nnx.Rngs):
    self.eps = config.norm_eps
    self.attention_norm = parameter(rngs, (config.layers, config.width), ("layers", "embed"), None)
    self.attention = Attention(config, rngs)
    self.mlp_norm = parameter(rngs, (config.layers, config.width), ("layers", "embed"), None)
    self.mlp = Experts(config, rngs) if config.experts else MLP(config, rngs)

  def __call__(self, x: jax.Array, positions: jax.Array, attend: Attend) -> jax.Array:
    x = x + self.attention(rms_norm(x, self.attention_norm[...], self.eps), positions, attend)
    x = x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps))
    return constrain(x, "batch", "length", None)


class Embed(nnx.Module):
  """The embedding table."""

  def __init__(self, config: PolicyConfig, rngs: nnx.Rngs):
    self.table = parameter(rngs, (config.vocab_size, config.width), ("vocab", "embed"), config.width**-0.5)


class Decoder(nnx.Module):
  """Embedding, stacked blocks, final norm and, unless tied, a head."""

  def __init__(self, config: PolicyConfig, rngs: nnx.Rngs):
    self.embed = Embed(config, rngs)
    self.layers = Block(config, rngs)
    self.final_norm = parameter(rngs, (config.width,), ("embed",), None)
    if not config.tied_embeddings:
      self.head = parameter(rngs, (config.vocab_size, config.width), ("vocab", "embed"), config.width**-0.5)


class Policy:
  """A decoder of one configuration as pure functions of its parameters."""

  def __init__(self, config: PolicyConfig):
    self.config = config
    decoder = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(params=0)))
    state = nnx.state(decoder, nnx.Param)
    self._axes = jax.tree.map(
      lambda p: p.get_metadata("logical_axes"), state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    self._axes = nnx.to_pure_dict(self._axes)
    self._abstract = nnx.to_pure_dict(state)
    self._block_graph, self._block_state = nnx.split(decoder.layers)

  def abstract_params(self) -> Params:
    """The tree of `ShapeDtypeStruct`s, float32."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._abstract)

  def logical_axes(self) -> Params:
    """The tree of logical axis names, one tuple a leaf."""
    return self._axes

  def parameter_count(self) -> int:
    return sum(x.size for x in jax.tree.leaves(self._abstract))

  def init(self, key: jax.Array) -> Params:
    """Random float32 parameters; traceable, so that `jit` with output shardings builds them in place."""
    return nnx.to_pure_dict(nnx.state(Decoder(self.config, nnx.Rngs(params=key)), nnx.Param))

  def unembedding(self, params: Params) -> jax.Array:
    """[V,D] output head."""
    return params["embed"]["table"] if self.config.tied_embeddings else params["head"]

  def hidden(self, params: Params, token_ids: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Final hidden states of packed rows.

    Args:
      params: Parameters.
      token_ids: int32[B,T].
      positions: int32[B,T], counted from 0 within each segment.
      segment_ids: int32[B,T], 0 for padding.

    Returns:
      [B,T,D] in the compute type, after the final norm.
    """
    chex.assert_rank([token_ids, positions, segment_ids], 2)
    chex.assert_equal_shape([token_ids, positions, segment_ids])
    c = self.config
    sliding = jnp.array(c.sliding_layers) if c.sliding_layers else None
    packed = functools.partial(attention.packed_attention, segment_ids=segment_ids, implementation=c.attention)

    def layer(x: jax.Array, of_layer: tuple[Params, jax.Array | None]) -> tuple[jax.Array, None]:
      layer_params, windowed = of_layer
      attend = packed if windowed is None else functools.partial(packed, window=c.sliding_window, windowed=windowed)
      return self._block(layer_params)(x, positions, attend), None

    if self.config.remat == "layer":
      layer = jax.checkpoint(layer)
    x = self._embed(params, token_ids)
    x, _ = jax.lax.scan(
      layer, x, (params["layers"], sliding), unroll=self.config.layers if self.config.unroll_layers else 1
    )
    return rms_norm(x, params["final_norm"], self.config.norm_eps)

  def init_cache(self, slots: int, length: int) -> KeyValueCache:
    """A zeroed cache for `slots` sequences of at most `length` tokens."""
    c = self.config
    shape = (slots, length, c.kv_heads, c.head_width)
    return [(jnp.zeros(shape, c.dtype), jnp.zeros(shape, c.dtype)) for _ in range(c.layers)]

  def unstack(self, params: Params) -> Params:
    """The same parameters with `layers` as a list: a decode step then reads each layer's weights where they lie."""
    layers = [jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(self.config.layers)]
    return {**params, "layers": layers}

  def extend(
    self, params: Params, token_ids: jax.Array, start: jax.Array, cache: KeyValueCache, attend_length: int | None = None
  ) -> tuple[jax.Array, KeyValueCache]:
    """Feeds new tokens after a cached prefix.

    Args:
      params: Unstacked parameters (`unstack`).
      token_ids: int32[B,Q] new tokens; rows may be padded on the right, since a padded key lies at a later position
        than every real query and is overwritten before it could be seen.
      start: int32[B] tokens already cached.
      cache: Cache of B slots. Positions beyond its length are dropped.
      attend_length: Static bound on start + Q: only that much of the cache is read.

    Returns:
      [B,Q,D] hidden states after the final norm, and the new cache.
    """
    chex.assert_rank([token_ids, start], [2, 1])
    positions = start[:, None] + jnp.arange(token_ids.shape[1], dtype=jnp.int32)[None]
    rows = jnp.arange(token_ids.shape[0], dtype=jnp.int32)[:, None]
    x = self._embed(params, token_ids)
    new_cache: KeyValueCache = []
    for number, (layer_params, (keys, values)) in enumerate(zip(params["layers"], cache, strict=True)):
      window = self.config.window(number)

      def attend(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        keys: jax.Array = keys,
        values: jax.Array = values,
        window: int = window,
      ) -> jax.Array:
        keys = keys.at[rows, positions].set(k, mode="drop")
        values = values.at[rows, positions].set(v, mode="drop")
        new_cache.append((keys, values))
        seen = keys[:, :attend_length], values[:, :attend_length]
        return attention.cached_attention(q, *seen, positions, window=window)

      x = self._block(layer_params)(x, positions, attend)
    return rms_norm(x, params["final_norm"], self.config.norm_eps), new_cache

  def _embed(self, params: Params, token_ids: jax.Array) -> jax.Array:
    # Gathering from a table that is sharded along D makes XLA re-materialise activations; gather it along D first.
    table = constrain(params["embed"]["table"], "vocab", None)
    # Cast after the gather, so that the gradient of a frequent token is summed in the table's type, not in bfloat16.
    return constrain(jnp.take(table, token_ids, axis=0).astype(self.config.dtype), "batch", "length", None)

  def _block(self, layer_params: Params) -> Block:
    state = jax.tree.map(lambda x: x, self._block_state)
    nnx.replace_by_pure_dict(state, layer_params)
    return nnx.merge(self._block_graph, state)


def sequence_positions(segment_ids: Sequence[int]) -> list[int]:
  """Positions that restart with every segment of one packed row."""
  positions: list[int] = []
  for i, s in enumerate(segment_ids):
    positions.append(positions[-1] + 1 if i and segment_ids[i - 1] == s else 0)
  return positions
