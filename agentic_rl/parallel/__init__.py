"""Device meshes, logical axis rules and multi-host start."""

from agentic_rl.parallel.mesh import MeshShape, initialize_distributed, make_mesh
from agentic_rl.parallel.rules import constrain, partition_spec, shardings

__all__ = ["MeshShape", "constrain", "initialize_distributed", "make_mesh", "partition_spec", "shardings"]
