"""Accelerators by name (`v5e-8`, `h100-8`): what a chip can do, and devices to compile for that are not there."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from agentic_rl.errors import UserError

GIB = 2**30
GPUS_PER_HOST = 8


@dataclasses.dataclass(frozen=True)
class Chip:
  """What the vendor publishes of one chip.

  Attributes:
    kind: Name in topologies, e.g. `v5e`.
    platform: `tpu` or `gpu`.
    title: Name in reports.
    flops: Peak FLOP/s of bfloat16 matrix products, dense.
    hbm_bytes: Memory that a program may use. For a TPU what its compiler grants, for a GPU what its driver shows.
    hbm_bandwidth: Bytes/s.
    link_bandwidth: Bytes/s that a chip sends to its neighbours over ICI or NVLink, all links together, one direction.
    network_bandwidth: Bytes/s that a chip sends to other hosts, where that is another network; 0 where it is not.
    cores_in_name: Cores of a chip that the number in a name counts; 1 where it counts chips.
  """

  kind: str
  platform: str
  title: str
  flops: float
  hbm_bytes: float
  hbm_bandwidth: float
  link_bandwidth: float
  network_bandwidth: float = 0.0
  cores_in_name: int = 1


# TPUs: cloud.google.com/tpu/docs/v4, /v5e, /v5p and /v6e: peak compute, HBM bandwidth, inter-chip interconnect (2400
# Gbit/s for v4; 400, 1200 and 800 GB/s for both directions). `hbm_bytes` is the limit that the TPU compiler names in
# its error. GPUs: NVIDIA's data sheets of H100 SXM and H200 SXM: dense bf16 (half of the figure "with sparsity"),
# bandwidth, NVLink 900 GB/s for both directions. Between hosts: one 400 Gbit/s adapter a GPU, as in DGX H100 and H200.
CHIPS = {
  chip.kind: chip
  for chip in (
    Chip("v4", "tpu", "TPU v4", 275e12, 30.75 * GIB, 1228e9, 300e9, cores_in_name=2),
    Chip("v5e", "tpu", "TPU v5e", 197e12, 15.75 * GIB, 819e9, 200e9),
    Chip("v5p", "tpu", "TPU v5p", 459e12, 95.74 * GIB, 2765e9, 600e9, cores_in_name=2),
    Chip("v6e", "tpu", "TPU v6e", 918e12, 31.25 * GIB, 1640e9, 400e9),
    Chip("h100", "gpu", "H100 SXM 80 GB", 989e12, 79.1 * GIB, 3350e9, 450e9, 50e9),
    Chip("h200", "gpu", "H200 SXM 141 GB", 989e12, 139.8 * GIB, 4800e9, 450e9, 50e9),
  )
}

# Slices as Google offers them. A v5e or v6e slice is a rectangle, a v4 or v5p slice a box of chips.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_BOX = {
  4: "2x2x1",
  8: "2x2x2",
  16: "2x2x4",
  32: "2x4x4",
  64: "4x4x4",
  128: "4x4x8",
  256: "4x8x8",
  512: "8x8x8",
  1024: "8x8x16",
  2048: "8x16x16",
}


@dataclasses.dataclass(frozen=True)
class Topology:
  """Chips of one kind in one arrangement.

  Attributes:
    name: As it was asked for, e.g. `v5p-128`.
    chip: The chip.
    chips: How many.
    layout: `2x4` for TPUs, `slices x hosts x GPUs` for GPUs.
  """

  name: str
  chip: Chip
  chips: int
  layout: str

  def bandwidth(self, group: int) -> float:
    """Bytes/s that a chip sends in a collective over `group` chips, before any efficiency."""
    crosses_hosts = self.chip.network_bandwidth > 0 and group > GPUS_PER_HOST
    return self.chip.network_bandwidth if crosses_hosts else self.chip.link_bandwidth


def parse_topology(name: str) -> Topology:
  """The topology of a name such as `v5e-8`, `v5p-128` (128 cores: 64 chips) or `h100-8`.

  Raises:
    UserError: For an unknown chip, or a number of chips that there is no slice of.
  """
  match = re.fullmatch(r"([a-z]+\d+[a-z]*)-(\d+)", name.strip().lower())
  chip = CHIPS.get(match[1]) if match else None
  if match is None or chip is None:
    raise UserError(f"unknown topology {name!r}; known: {', '.join(f'{kind}-N' for kind in CHIPS)}, e.g. v5e-8")
  number = int(match[2])
  if chip.platform == "gpu":
    if number < 1 or (number > GPUS_PER_HOST and number % GPUS_PER_HOST):
      raise UserError(f"topology {name!r}: above {GPUS_PER_HOST} GPUs only whole hosts of {GPUS_PER_HOST} are known")
    hosts = -(-number // GPUS_PER_HOST)
    return Topology(name, chip, number, f"1x{hosts}x{number // hosts}")
  layouts = _BOX if chip.cores_in_name > 1 else _FLAT
  sizes = [n * chip.cores_in_name for n in layouts]
  if number not in sizes:
    raise UserError(f"topology {name!r}: {chip.title} slices are {', '.join(f'{chip.kind}-{n}' for n in sizes)}")
  chips = number // chip.cores_in_name
  return Topology(name, chip, chips, layouts[chips])


def topology_devices(topology: Topology) -> list[jax.Device]:
  """Devices to compile for. No such hardware, driver or metadata server is asked.

  Raises:
    UserError: The compiler is not installed, with the command that installs it.
  """
  # The process itself works on the CPU: an accelerator that is there is neither needed nor taken.
  jax.config.update("jax_platforms", "cpu")
  return _tpu_devices(topology) if topology.chip.platform == "tpu" else _gpu_devices(topology)


def _tpu_devices(topology: Topology) -> list[jax.Device]:
  if importlib.util.find_spec("libtpu") is None:
    raise UserError(f"{topology.name}: the TPU compiler (libtpu) is missing; pip install -e '.[plan-tpu]'")
  # libtpu reads these when it is loaded: without them it asks a metadata server that only a TPU host has, and lets no
  # second process load it.
  for variable, value in {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
  }.items():
    os.environ.setdefault(variable, value)
  options: dict[str, Any] = {}
  if topology.chips == 1:
    options["chips_per_host_bounds"] = (1, 1, 1)
  if topology.chip.kind == "v4":
    options["chip_config_name"] = "megacore"  # both cores of a chip are one device
  return list(topologies.get_topology_desc(f"{topology.chip.kind}:{topology.layout}", "tpu", **options).devices)


def _gpu_devices(topology: Topology) -> list[jax.Device]:
  plugins = importlib.util.find_spec("jax_plugins")
  if plugins is None or not any(importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (13, 12)):
    raise UserError(f"{topology.name}: the compiler for NVIDIA GPUs is missing; pip install -e '.[plan-gpu]'")
  described = topologies.get_topology_desc(
    "", "cuda", target_config=_gpu_target(topology.chip), topology=topology.layout
  )
  return list(described.devices)


def has_cudnn() -> bool:
  """Whether the cuDNN library is installed as a package: jax asks it for its version before it lowers a call of it."""
  return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cudnn") is not None


def _gpu_target(chip: Chip) -> str:
  """A Hopper GPU as XLA's `GpuTargetConfigProto` in text form.

  The limits are those of compute capability 9.0 in NVIDIA's CUDA C++ Programming Guide, the counts those of the SXM
  boards in the H100 and H200 data sheets.
  """
  name = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}[chip.kind]
  device = {
    "name": f'"{name}"',
    "cuda_compute_capability": "{ major: 9 }",
    "core_count": 132,
    "fpus_per_core": 128,
    "clock_rate_ghz": 1.98,
    "threads_per_warp": 32,
    "threads_per_block_limit": 1024,
    "threads_per_core_limit": 2048,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
    "shared_memory_per_core": 228 * 1024,
    "shared_memory_per_block": 48 * 1024,
    "shared_memory_per_block_optin": 227 * 1024,
    "l2_cache_size": 50 * 2**20,
    "memory_bandwidth": int(chip.hbm_bandwidth),
    "device_memory_size": int(chip.hbm_bytes),
    "driver_version": '"13.0.0"',
    "runtime_version": '"13.0.0"',
    "compile_time_toolkit_version": '"13.0.0"',
  }
  fields = "\n".join(f"  {key}{'' if str(value).startswith('{') else ':'} {value}" for key, value in device.items())
  return (
    f"gpu_device_info {{\n{fields}\n}}\n"
    'platform_name: "CUDA"\n'
    "dnn_version_info { major: 9 minor: 10 }\n"
    f'device_description_str: "{name}"\n'
  )
