"""The mesh: axes `data` (replicated weights), `fsdp` (sharded weights), `expert` (sharded experts), `context` (rows cut
along their tokens) and `tensor` (sharded heads and features). Rows are spread over the first three.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "expert", "context", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshShape:
  """Devices along each axis; at most one may be -1, which takes all that are left."""

  data: int = 1
  fsdp: int = -1
  tensor: int = 1
  context: int = 1
  expert: int = 1

  def resolve(self, devices: int) -> tuple[int, ...]:
    """The sizes of `AXES` for a number of devices.

    Raises:
      ValueError: If the axes do not multiply to `devices`.
    """
    named = {name: getattr(self, name) for name in AXES}
    shape = list(named.values())
    if shape.count(-1) > 1 or any(n < 1 and n != -1 for n in shape):
      raise ValueError(f"mesh axes must be positive, or -1 for at most one of them; got {named}")
    if -1 in shape:
      rest = math.prod(n for n in shape if n != -1)
      if devices % rest:
        raise ValueError(f"mesh {named} does not divide {devices} devices")
      shape[shape.index(-1)] = devices // rest
    if math.prod(shape) != devices:
      raise ValueError(f"mesh {named} needs {math.prod(shape)} devices, {devices} are there; set one axis to -1")
    return tuple(shape)


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh over `devices` (all of them by default), arranged for the interconnect by JAX."""
  devices = list(jax.devices() if devices is None else devices)
  sizes, types = shape.resolve(len(devices)), (AxisType.Auto,) * len(AXES)
  try:
    return jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)
  except NotImplementedError:  # an axis of the mesh that is no product of whole axes of a TPU's torus
    arranged = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(arranged, AXES, axis_types=types)


def serving_mesh(mesh: Mesh) -> Mesh:
  """The same devices for an engine, whose rows are too short to be cut: `context` becomes part of `data`."""
  data, fsdp, expert, context, tensor = mesh.devices.shape
  devices = mesh.devices.transpose(0, 3, 1, 2, 4).reshape(data * context, fsdp, expert, 1, tensor)
  return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def initialize_distributed() -> None:
  """Joins a multi-host run where the environment announces one (SLURM, GKE, Cloud TPU); on a single host nothing."""
  coordinators = ("JAX_COORDINATOR_ADDRESS", "COORDINATOR_ADDRESS", "MEGASCALE_COORDINATOR_ADDRESS")
  announced = any(os.environ.get(name) for name in coordinators)
  # SLURM sets the number of tasks for the whole allocation; only a process started by srun has a step.
  slurm_tasks = "SLURM_STEP_NODELIST" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1
  tpu_hosts = "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
  if announced or slurm_tasks or tpu_hosts:
    jax.distributed.initialize()
