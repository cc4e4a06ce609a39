"""How a module declares a parameter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


def parameter(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], std: float | None) -> nnx.Param:
  """A float32 parameter with logical axes; `std` None means ones (norm scales), 0 means zeros (biases)."""
  if std is None:
    value = jnp.ones(shape, jnp.float32)
  elif std == 0:
    value = jnp.zeros(shape, jnp.float32)
  else:
    value = std * jax.random.normal(rngs.params(), shape, jnp.float32)
  return nnx.Param(value, logical_axes=axes)
