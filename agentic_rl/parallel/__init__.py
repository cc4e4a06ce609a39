"""Device meshes, logical axis rules and multi-host start."""

from agentic_rl.parallel.mesh import AXES, MeshShape, initialize_distributed, make_mesh, serving_mesh
from agentic_rl.parallel.rules import BATCH_AXES, constrain, partition_spec, parts, shardings

__all__ = [
  "AXES",
  "BATCH_AXES",
  "MeshShape",
  "constrain",
  "initialize_distributed",
  "make_mesh",
  "partition_spec",
  "parts",
  "serving_mesh",
  "shardings",
]
