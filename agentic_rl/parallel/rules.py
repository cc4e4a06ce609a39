"""One table from logical axis names to mesh axes, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LogicalAxes = tuple[str | None, ...]

BATCH_AXES = ("data", "fsdp", "expert")
"""Mesh axes over which the rows of a batch are spread."""

RULES: Mapping[str, str | tuple[str, ...] | None] = {
  "batch": BATCH_AXES,
  "length": "context",
  "tokens": (*BATCH_AXES, "context"),
  "vocab": "tensor",
  "embed": "fsdp",
  "heads": "tensor",
  "kv_heads": "tensor",
  "head_width": None,
  "mlp": "tensor",
  "experts": "expert",
  "layers": None,
}
"""Weights are sharded over `fsdp` along the model width, over `tensor` along heads, features and vocabulary, and over
`expert` along the experts; activations over the rows and, by `context`, along them."""


def partition_spec(axes: LogicalAxes) -> PartitionSpec:
  """The `PartitionSpec` of an array with these logical axes.

  Raises:
    ValueError: For an axis without a rule.
  """
  if unknown := [a for a in axes if a is not None and a not in RULES]:
    raise ValueError(f"logical axis {unknown[0]!r} has no rule; known: {', '.join(RULES)}")
  return PartitionSpec(*(RULES[a] if a is not None else None for a in axes))


def _axis_size(mesh: Mesh, names: str | tuple[str, ...] | None) -> int:
  if names is None:
    return 1
  size = 1
  for name in (names,) if isinstance(names, str) else names:
    size *= mesh.shape[name]
  return size


def shardings(mesh: Mesh, axes: Any, shapes: Any) -> Any:
  """`NamedSharding` of every leaf.

  Args:
    mesh: The mesh.
    axes: Tree of logical axes, one tuple a leaf.
    shapes: Tree of the same structure with arrays or `ShapeDtypeStruct`s.

  Raises:
    ValueError: If a mesh axis does not divide the array axis that it shards, or an array has more or fewer axes than
      names.
  """

  def one(path: Any, leaf: Any, leaf_axes: LogicalAxes) -> NamedSharding:
    spec = partition_spec(leaf_axes)
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    if len(leaf.shape) != len(leaf_axes):
      raise ValueError(f"parameter {name} has shape {tuple(leaf.shape)} but logical axes {leaf_axes}")
    for size, logical, names in zip(leaf.shape, leaf_axes, spec, strict=True):
      parts = _axis_size(mesh, names)
      if size % parts:
        nearest = max(n for n in range(1, parts + 1) if size % n == 0)
        raise ValueError(
          f"mesh axis {names!r} of size {parts} does not divide axis {logical!r} of size {size} of parameter {name}; "
          f"the nearest size that does is {nearest}"
        )
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(one, shapes, axes, is_leaf=lambda x: hasattr(x, "shape"))


def parts(mesh: Mesh, *axes: str) -> int:
  """Into how many pieces a mesh cuts arrays along these logical axes together."""
  return math.prod(_axis_size(mesh, RULES[axis]) for axis in axes)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
  """Constrains an activation's sharding inside `jit` under `jax.set_mesh`; the identity where no mesh is set."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return x
  return jax.lax.with_sharding_constraint(x, partition_spec(axes))
