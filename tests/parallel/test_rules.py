from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from agentic_rl.parallel import MeshShape, constrain, make_mesh, partition_spec, shardings
from agentic_rl.parallel.rules import RULES
from agentic_rl.policy import Policy, PolicyConfig

CUBE = MeshShape(data=2, fsdp=2, tensor=2)


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(sizes, jnp.float32)


def test_logical_axes_become_mesh_axes():
  assert partition_spec(("vocab", "embed")) == P("tensor", "fsdp")
  assert partition_spec(("batch", "length", None)) == P(("data", "fsdp", "expert"), "context", None)
  assert partition_spec(("layers", "embed", "heads", "head_width")) == P(None, "fsdp", "tensor", None)
  with pytest.raises(ValueError, match=r"'expert' has no rule; known: .*embed"):
    partition_spec(("expert",))


def test_every_leaf_of_a_policy_has_a_sharding():
  policy = Policy(
    PolicyConfig(
      vocab_size=6,
      width=4,
      layers=3,
      heads=4,
      kv_heads=2,
      head_width=2,
      mlp_width=8,
      qk_norm=True,
      qkv_bias=True,
      tied_embeddings=False,
    )
  )
  mesh, abstract = make_mesh(CUBE), policy.abstract_params()
  where = shardings(mesh, policy.logical_axes(), abstract)
  assert jax.tree.structure(where) == jax.tree.structure(abstract)
  pieces = jax.tree.map(lambda s, x: s.shard_shape(x.shape), where, abstract)
  assert pieces["embed"]["table"] == pieces["head"] == (3, 2)
  assert pieces["layers"]["attention"]["q"] == (3, 2, 2, 2)
  assert pieces["layers"]["attention"]["k"] == (3, 2, 1, 2)
  assert pieces["layers"]["attention"]["o"] == (3, 2, 2, 2)
  assert pieces["layers"]["attention"]["k_bias"] == (3, 1, 2)
  assert pieces["layers"]["mlp"]["down"] == (3, 4, 2)
  assert pieces["final_norm"] == (2,)
  assert set(jax.tree.leaves(policy.logical_axes())) <= set(RULES)


def test_a_mesh_that_does_not_divide_a_parameter_is_refused():
  mesh = make_mesh(MeshShape(data=1, fsdp=2, tensor=4))
  axes = {"layers": {"k": ("layers", "embed", "kv_heads", "head_width")}}
  with pytest.raises(ValueError) as error:
    shardings(mesh, axes, {"layers": {"k": shape(2, 8, 2, 4)}})
  message = str(error.value)
  assert "'tensor' of size 4 does not divide axis 'kv_heads' of size 2 of parameter layers/k" in message
  assert message.endswith("the nearest size that does is 2")


def test_a_wrong_number_of_axes_is_refused():
  with pytest.raises(ValueError, match=r"parameter table has shape \(4,\) but logical axes \('vocab', 'embed'\)"):
    shardings(make_mesh(CUBE), {"table": ("vocab", "embed")}, {"table": shape(4)})


def test_constrain_shards_inside_a_program_on_a_mesh_alone():
  x = np.arange(8.0, dtype=np.float32).reshape(4, 2)

  def double(x: jax.Array) -> jax.Array:
    return constrain(2 * x, "batch", "heads")

  assert "sharding_constraint" not in str(jax.make_jaxpr(double)(x)), "without a mesh it is the identity"
  with jax.set_mesh(make_mesh(MeshShape(), jax.devices()[:1])):
    assert "sharding_constraint" not in str(jax.make_jaxpr(double)(x)), "on one device too"
  with jax.set_mesh(make_mesh(CUBE)):
    y = jax.jit(double)(x)
  assert y.sharding.shard_shape(y.shape) == (1, 1)
  np.testing.assert_array_equal(y, 2 * x)
