"""Attention over packed rows and over a key-value cache. Pure functions; softmax in float32.

Packed rows have one interface, `packed_attention`, and several implementations of it:

| name | where | memory |
|---|---|---|
| `blocks` | everywhere; the fastest on a CPU | scores of one block of queries |
| `splash` | TPU: Pallas splash attention | none of the scores |
| `cudnn` | NVIDIA GPU, bfloat16: cuDNN's flash attention | a mask [B,1,T,T] |
| `reference` | everywhere; what the others are tested against | all scores |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from agentic_rl.parallel.rules import partition_spec

QUERY_BLOCK = 128
"""Queries a block; a block attends to its prefix only, which halves the work of a causal mask. Measured best on CPU."""
SPLASH_BLOCK = 512
"""Queries and keys a block of the TPU kernel; a row that is shorter is one block."""
LANES = 128
"""Of a TPU's vector unit: the kernel wants rows and heads in multiples of it."""

_MASKED = -1e30


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
  """`q` [B,Q,H,C], `k`, `v` [B,T,K,C], `visible` bool[B,Q,T] -> [B,Q,H,C]; query heads share keys in groups of H/K."""
  b, n, h, c = q.shape
  groups = k.shape[2]
  # [B,K,(H/K) Q,C] x [B,K,T,C]: one plain batched product, the layout that XLA runs fastest on CPU and GPU.
  q = q.reshape(b, n, groups, h // groups, c).transpose(0, 2, 3, 1, 4).reshape(b, groups, (h // groups) * n, c)
  scores = jnp.einsum("bkqc,btkc->bkqt", q, k, preferred_element_type=jnp.float32) * (c**-0.5)
  scores = scores.reshape(b, groups, h // groups, n, -1)
  scores = jnp.where(visible[:, None, None], scores, _MASKED)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(b, groups, (h // groups) * n, -1)
  out = jnp.einsum("bkqt,btkc->bkqc", weights, v)
  return out.reshape(b, groups, h // groups, n, c).transpose(0, 3, 1, 2, 4).reshape(b, n, h, c)


def _in_sight(back: jax.Array, window: int, windowed: jax.Array | bool) -> jax.Array:
  """Whether a key that lies `back` tokens before its query is seen."""
  seen = back >= 0
  return seen & ((back < window) | ~jnp.asarray(windowed)) if window else seen


def _visible(
  q_segments: jax.Array, k_segments: jax.Array, first: Any, window: int, windowed: jax.Array | bool
) -> jax.Array:
  """bool[B,Q,T]: which keys the queries `first`, `first + 1`, ... of the row see."""
  back = first + jnp.arange(q_segments.shape[1])[:, None] - jnp.arange(k_segments.shape[1])[None, :]
  return (q_segments[:, :, None] == k_segments[:, None, :]) & _in_sight(back, window, windowed)[None]


# Every implementation: (q [B,Q,H,C], k and v [B,T,K,C], segments int32[B,Q] and int32[B,T], place of the first query in
# the row, options) -> [B,Q,H,C].


def _reference(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_segments: jax.Array,
  k_segments: jax.Array,
  first: Any,
  *,
  window: int,
  windowed: jax.Array | bool,
) -> jax.Array:
  return _attend(q, k, v, _visible(q_segments, k_segments, first, window, windowed))


def _blocks(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_segments: jax.Array,
  k_segments: jax.Array,
  first: Any,
  *,
  window: int,
  windowed: jax.Array | bool,
) -> jax.Array:
  out = []
  for start in range(0, q.shape[1], QUERY_BLOCK):
    stop = min(start + QUERY_BLOCK, q.shape[1])
    # The keys after the block are never seen; where the block lies is known unless the row is cut over devices.
    end = first + stop if isinstance(first, int) else k.shape[1]
    visible = _visible(q_segments[:, start:stop], k_segments[:, :end], first + start, window, windowed)
    out.append(_attend(q[:, start:stop], k[:, :end], v[:, :end], visible))
  return out[0] if len(out) == 1 else jnp.concatenate(out, axis=1)


def _cudnn(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_segments: jax.Array,
  k_segments: jax.Array,
  first: Any,
  *,
  window: int,
  windowed: jax.Array | bool,
) -> jax.Array:
  mask = _visible(q_segments, k_segments, first, window, windowed)[:, None]
  return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn")


def _splash(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_segments: jax.Array,
  k_segments: jax.Array,
  first: Any,
  *,
  window: int,
  windowed: jax.Array | bool,
  shards: int = 1,
  interpret: bool = False,
) -> jax.Array:
  """The kernel's mask is part of the program: one for each place of the first query, and with and without window."""
  if not isinstance(first, int):
    choices = [
      functools.partial(_splash, first=i * q.shape[1], **_options(window, windowed, interpret)) for i in range(shards)
    ]
    return jax.lax.switch(first // q.shape[1], choices, q, k, v, q_segments, k_segments)
  if window and not isinstance(windowed, bool):
    choices = [functools.partial(_splash, first=first, **_options(w, True, interpret)) for w in (0, window)]
    return jax.lax.switch(jnp.asarray(windowed).astype(jnp.int32), choices, q, k, v, q_segments, k_segments)
  from jax.experimental.pallas.ops.tpu import splash_attention as splash

  n, t, c = q.shape[1], k.shape[1], q.shape[3]
  size = min(SPLASH_BLOCK, _round_up(n), _round_up(t))
  q, k, v = (_pad(x, size, c) for x in (q, k, v))
  q_segments, k_segments = (jnp.pad(s, ((0, 0), (0, -s.shape[1] % size))) for s in (q_segments, k_segments))
  shape = (q.shape[1], k.shape[1])
  mask = (
    splash.LocalMask(shape, (window - 1, 0), offset=first)
    if window and windowed
    else splash.CausalMask(shape, offset=first)
  )
  blocks = splash.BlockSizes(
    block_q=size,
    block_kv=size,
    block_kv_compute=size,
    block_q_dkv=size,
    block_kv_dkv=size,
    block_kv_dkv_compute=size,
    block_q_dq=size,
    block_kv_dq=size,
  )
  kernel = splash.make_splash_mha(
    splash.MultiHeadMask([mask] * q.shape[2]), head_shards=1, q_seq_shards=1, block_sizes=blocks, interpret=interpret
  )
  heads_first = (x.swapaxes(1, 2) for x in (q * (c**-0.5), k, v))
  segments = splash.SegmentIds(q_segments, k_segments)
  return jax.vmap(kernel)(*heads_first, segments).swapaxes(1, 2)[:, :n, :, :c].astype(v.dtype)


def _options(window: int, windowed: jax.Array | bool, interpret: bool) -> dict[str, Any]:
  return {"window": window, "windowed": windowed, "interpret": interpret}


def _round_up(n: int) -> int:
  return -(-n // LANES) * LANES


def _pad(x: jax.Array, length: int, width: int) -> jax.Array:
  """Zeros up to a multiple of the block along the row, and of the lanes along the head."""
  return jnp.pad(x, ((0, 0), (0, -x.shape[1] % length), (0, 0), (0, -width % LANES)))


_KERNELS: dict[str, Callable[..., jax.Array]] = {
  "blocks": _blocks,
  "splash": _splash,
  "cudnn": _cudnn,
  "reference": _reference,
}


def choose(platform: str, dtype: Any) -> str:
  """The implementation for a platform (`cpu`, `gpu` or `cuda`, `tpu`) and a type of queries."""
  if platform == "tpu":
    return "splash"
  half = jnp.dtype(dtype) in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
  return "cudnn" if platform in ("gpu", "cuda") and half else "blocks"


def packed_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  *,
  window: int = 0,
  windowed: jax.Array | bool = True,
  implementation: str = "auto",
) -> jax.Array:
  """Causal self-attention within segments.

  On a mesh rows and heads lie on different devices. Where rows are cut (mesh axis `context`), each device gathers the
  keys and values of its rows and attends with its own queries.

  Args:
    q: [B,T,H,C] queries.
    k: [B,T,K,C] keys.
    v: [B,T,K,C] values.
    segment_ids: int32[B,T]; tokens attend to earlier tokens of the same segment only. 0 is padding (whose outputs are
      finite and meaningless).
    window: Tokens that a query sees, itself included; 0 for all.
    windowed: bool[], whether the window holds; may be traced, for layers that differ in it.
    implementation: A name of the table above; `auto` goes by the platform of the default device.

  Returns:
    [B,T,H,C].
  """
  chex.assert_rank([q, k, v, segment_ids], [4, 4, 4, 2])
  chex.assert_equal_shape([k, v])
  chex.assert_equal_shape_prefix([q, k, segment_ids], 2)
  name = choose(jax.default_backend(), q.dtype) if implementation == "auto" else implementation
  kernel = functools.partial(_KERNELS[name], window=window)
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return kernel(q, k, v, segment_ids, segment_ids, 0, windowed=windowed)
  cut = mesh.shape["context"]
  if cut == 1 and name in ("blocks", "reference"):  # plain operations, which XLA divides by itself
    return kernel(q, k, v, segment_ids, segment_ids, 0, windowed=windowed)
  if name == "splash":
    kernel = functools.partial(kernel, shards=cut)

  def on_device(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, windowed: jax.Array) -> jax.Array:
    first: Any = 0
    all_segments = segments
    if cut > 1:
      first = jax.lax.axis_index("context") * q.shape[1]
      k, v, all_segments = (jax.lax.all_gather(x, "context", axis=1, tiled=True) for x in (k, v, segments))
    return kernel(q, k, v, segments, all_segments, first, windowed=windowed if window else True)

  heads = partition_spec(("batch", "length", "heads", "head_width"))
  specs = (heads, heads, heads, partition_spec(("batch", "length")), PartitionSpec())
  divided = jax.shard_map(on_device, in_specs=specs, out_specs=heads, check_vma=False)
  return divided(q, k, v, segment_ids, jnp.asarray(windowed))


def cached_attention(
  q: jax.Array, k_cache: jax.Array, v_cache: jax.Array, positions: jax.Array, *, window: int = 0
) -> jax.Array:
  """Attention of new queries to a cache that already holds their own keys.

  Args:
    q: [B,Q,H,C] queries.
    k_cache: [B,T,K,C] keys by absolute position.
    v_cache: [B,T,K,C] values.
    positions: int32[B,Q] absolute position of each query; it sees cache positions up to its own.
    window: Tokens that a query sees, itself included; 0 for all.

  Returns:
    [B,Q,H,C].
  """
  chex.assert_rank([q, k_cache, v_cache, positions], [4, 4, 4, 2])
  back = positions[:, :, None] - jnp.arange(k_cache.shape[1])[None, None, :]
  return _attend(q, k_cache, v_cache, _in_sight(back, window, True))
