"""Every implementation of packed attention against the reference, which `test_attention.py` holds to loops."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.parallel import MeshShape, make_mesh
from agentic_rl.policy import attention
from agentic_rl.policy.attention import choose, packed_attention

WINDOWS = [(0, True), (5, True), (5, False)]


def arrays(b: int, t: int, h: int, k: int, c: int) -> tuple[jax.Array, ...]:
  rng = np.random.default_rng(0)
  return tuple(jnp.asarray(rng.normal(size=(b, t, n, c)), jnp.float32) for n in (h, k, k))


def segments(b: int, t: int) -> np.ndarray:
  """Rows with segments of many lengths, one of a single token among them, and padding."""
  rng = np.random.default_rng(1)
  rows = np.zeros((b, t), np.int32)
  for row in rows:
    at, number = 0, 1
    for length in (1, *rng.integers(1, t // 3, 9)):
      row[at : at + length] = number
      at, number = at + length, number + 1
    row[t - rng.integers(1, t // 4) :] = 0
  return rows


def value_and_grads(attend: Any, q: jax.Array, k: jax.Array, v: jax.Array, rows: np.ndarray) -> tuple[Any, Any]:
  weight = jnp.asarray(np.random.default_rng(2).normal(size=q.shape), jnp.float32) * (rows > 0)[:, :, None, None]

  def total(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = attend(q, k, v, rows)
    return jnp.sum(out * weight), out * (rows > 0)[:, :, None, None]

  grads, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)
  return out, grads


def close(got: Any, want: Any, atol: float = 2e-5) -> None:
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol)


@pytest.mark.parametrize(("window", "windowed"), WINDOWS)
@pytest.mark.parametrize("name", ["blocks", "splash"])
def test_it_is_the_reference(name: str, window: int, windowed: bool, monkeypatch: pytest.MonkeyPatch):
  """`splash` as the TPU's kernel, interpreted."""
  monkeypatch.setitem(attention._KERNELS, "splash", functools.partial(attention._splash, interpret=True))
  monkeypatch.setattr(attention, "QUERY_BLOCK", 16)
  monkeypatch.setattr(attention, "SPLASH_BLOCK", 128)
  length = 200 if name == "splash" else 70  # more than a block, and no multiple of one
  q, k, v = arrays(2, length, 4, 2, 8)
  rows = segments(2, length)
  options = {"window": window, "windowed": windowed}
  want = value_and_grads(functools.partial(packed_attention, implementation="reference", **options), q, k, v, rows)
  got = value_and_grads(functools.partial(packed_attention, implementation=name, **options), q, k, v, rows)
  close(got, want)


@pytest.mark.parametrize("name", ["blocks", "splash"])
def test_whether_the_window_holds_may_be_traced(name: str, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setitem(attention._KERNELS, "splash", functools.partial(attention._splash, interpret=True))
  q, k, v = arrays(1, 128, 2, 1, 8)
  rows = segments(1, 128)

  @jax.jit
  def attend(windowed: jax.Array) -> jax.Array:
    return packed_attention(q, k, v, rows, window=3, windowed=windowed, implementation=name)

  for windowed in (False, True):
    want = packed_attention(q, k, v, rows, window=3, windowed=windowed, implementation="reference")
    np.testing.assert_allclose(np.asarray(attend(windowed))[rows > 0], np.asarray(want)[rows > 0], atol=2e-5)


@pytest.mark.parametrize(
  "shape",
  [
    MeshShape(1, 1, 1, context=8),
    MeshShape(1, 2, 2, context=2),
    MeshShape(2, 1, 1, context=4),
    MeshShape(1, 1, 2, context=2, expert=2),
    MeshShape(2, 2, 2),
  ],
)
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("name", ["blocks", "reference"])
def test_rows_may_be_cut_over_devices(name: str, window: int, shape: MeshShape):
  q, k, v = arrays(4, 64, 4, 2, 8)
  rows = segments(4, 64)
  attend = functools.partial(packed_attention, implementation=name, window=window)
  want = value_and_grads(attend, q, k, v, rows)
  with jax.set_mesh(make_mesh(shape)):
    close(value_and_grads(attend, q, k, v, rows), want)


def test_the_kernel_of_tpus_on_rows_that_are_cut(monkeypatch: pytest.MonkeyPatch):
  """One branch for each device's place in the row; interpreted."""
  monkeypatch.setitem(attention._KERNELS, "splash", functools.partial(attention._splash, interpret=True))
  q, k, v = arrays(2, 256, 2, 1, 8)
  rows = segments(2, 256)
  want = value_and_grads(functools.partial(packed_attention, implementation="reference"), q, k, v, rows)
  with jax.set_mesh(make_mesh(MeshShape(2, 1, 1, context=2), jax.devices()[:4])):
    got = value_and_grads(functools.partial(packed_attention, implementation="splash"), q, k, v, rows)
  close(got, want)


def test_the_platform_decides():
  assert [choose(p, jnp.bfloat16) for p in ("cpu", "gpu", "cuda", "tpu")] == ["blocks", "cudnn", "cudnn", "splash"]
  assert [choose(p, jnp.float32) for p in ("cpu", "gpu", "tpu")] == ["blocks", "blocks", "splash"]
