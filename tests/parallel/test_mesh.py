from __future__ import annotations

import jax
import numpy as np
import pytest

from agentic_rl.parallel import MeshShape, initialize_distributed, make_mesh, serving_mesh


@pytest.mark.parametrize(
  ("shape", "want"),
  [
    (MeshShape(), (1, 8, 1, 1, 1)),
    (MeshShape(data=1, context=2, expert=2), (1, 2, 2, 2, 1)),
    (MeshShape(data=-1, fsdp=1), (8, 1, 1, 1, 1)),
    (MeshShape(data=2, fsdp=-1, tensor=2), (2, 2, 1, 1, 2)),
    (MeshShape(data=2, fsdp=2, tensor=-1), (2, 2, 1, 1, 2)),
    (MeshShape(data=4, fsdp=2, tensor=1), (4, 2, 1, 1, 1)),
  ],
)
def test_one_axis_takes_the_devices_that_are_left(shape: MeshShape, want: tuple[int, ...]):
  assert shape.resolve(8) == want


@pytest.mark.parametrize(
  ("shape", "words"),
  [
    (MeshShape(data=-1, fsdp=-1), "at most one of them"),
    (MeshShape(data=0), "must be positive"),
    (MeshShape(tensor=-2), "must be positive"),
    (MeshShape(data=3), "'data': 3.*does not divide 8 devices"),
    (MeshShape(data=2, fsdp=2, tensor=1), "needs 4 devices, 8 are there; set one axis to -1"),
    (MeshShape(data=4, fsdp=4, tensor=1), "needs 16 devices, 8 are there"),
  ],
)
def test_a_shape_that_does_not_fit_is_refused(shape: MeshShape, words: str):
  with pytest.raises(ValueError, match=words):
    shape.resolve(8)


def test_a_mesh_has_named_axes_over_all_devices_or_some():
  mesh = make_mesh(MeshShape(data=2, fsdp=-1, tensor=2))
  assert mesh.shape == {"data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
  assert set(mesh.devices.ravel()) == set(jax.devices())
  one = make_mesh(MeshShape(), jax.devices()[3:4])
  assert one.shape == {"data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
  assert one.devices.ravel().tolist() == [jax.devices()[3]]


NAMES = (
  "JAX_COORDINATOR_ADDRESS",
  "COORDINATOR_ADDRESS",
  "MEGASCALE_COORDINATOR_ADDRESS",
  "SLURM_NTASKS",
  "SLURM_STEP_NODELIST",
  "TPU_WORKER_HOSTNAMES",
)


@pytest.mark.parametrize(
  ("environment", "joins"),
  [
    ({}, False),
    ({"JAX_COORDINATOR_ADDRESS": "host0:1234"}, True),
    ({"MEGASCALE_COORDINATOR_ADDRESS": "host0"}, True),
    ({"COORDINATOR_ADDRESS": ""}, False),
    ({"SLURM_NTASKS": "4"}, False),  # an allocation; this process was not started by srun
    ({"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n[1-4]"}, True),
    ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "n1"}, False),
    ({"TPU_WORKER_HOSTNAMES": "t0"}, False),
    ({"TPU_WORKER_HOSTNAMES": "t0,t1"}, True),
  ],
)
def test_hosts_are_joined_where_the_environment_announces_them(
  environment: dict[str, str], joins: bool, monkeypatch: pytest.MonkeyPatch
):
  calls: list[bool] = []
  monkeypatch.setattr(jax.distributed, "initialize", lambda: calls.append(True))
  for name in NAMES:
    monkeypatch.delenv(name, raising=False)
  for name, value in environment.items():
    monkeypatch.setenv(name, value)
  initialize_distributed()
  assert calls == [True] * joins


def test_an_engine_has_whole_rows_on_the_same_devices():
  mesh = make_mesh(MeshShape(data=1, fsdp=2, tensor=2, context=2))
  served = serving_mesh(mesh)
  assert served.shape == {"data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
  assert set(served.devices.ravel()) == set(mesh.devices.ravel())
  # Devices that share weights along fsdp and tensor still do, so that no weight has to travel further than before.
  for i in range(2):
    np.testing.assert_array_equal(served.devices[i, :, 0, 0, :], mesh.devices[0, :, 0, i, :])
