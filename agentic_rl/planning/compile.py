"""Compiles the learner's step ahead of time and reads off what it needs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import re
import time
from collections.abc import Iterator
from typing import Any

import jax

from agentic_rl.errors import UserError
from agentic_rl.planning.hlo import Collectives, read_collectives
from agentic_rl.train.learner import Learner

log = logging.getLogger(__name__)

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_TOO_LARGE = re.compile(r"([\d.]+)([KMGT]?)\)? (?:of|exceeds available HBM \()\s*\(?([\d.]+)([KMGT]?)")


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes on one device.

  Attributes:
    params: Parameters, float32.
    optimizer: Optimizer state.
    batch: The arrays of a batch.
    arguments: What lies in memory when the step begins, as the compiler counts it: the three above.
    temporaries: What the step allocates: gradients (as many bytes as `params`), activations, gathered weights, logits.
    outputs: Results that do not take the place of an argument.
    code: The program itself.
    peak: Most bytes in use at one time, as the compiler counts it. What the TPU compiler holds against the HBM.
  """

  params: int
  optimizer: int
  batch: int
  arguments: int
  temporaries: int
  outputs: int
  code: int
  peak: int

  @property
  def reserved(self) -> int:
    """Bytes that a runtime reserves which takes all temporaries as one block, as that for GPUs does."""
    return self.arguments + self.temporaries + self.outputs + self.code


@dataclasses.dataclass(frozen=True)
class Program:
  """The compiled step on one device.

  Attributes:
    memory: What it holds.
    flops: The compiler's count, with the body of each loop counted once and fused kernels not at all; None for GPUs,
      whose compiler gives none.
    bytes_accessed: The compiler's count of memory traffic, with the same gaps.
    collectives: What it sends.
    lower_s, compile_s: Time that lowering and compiling took here.
  """

  memory: Memory
  flops: float | None
  bytes_accessed: float | None
  collectives: Collectives
  lower_s: float
  compile_s: float


class DoesNotFit(Exception):
  """The compiler found that the step needs more memory than a device has.

  Attributes:
    needed_bytes, available_bytes: What it said; None where its message holds no numbers.
  """

  def __init__(self, message: str):
    super().__init__(message)
    self.needed_bytes, self.available_bytes = read_out_of_memory(message)


def compile_step(learner: Learner, *, micro_batches: int, length: int, fast: bool = False) -> Program:
  """Lowers and compiles one step.

  Args:
    learner: On a mesh of a topology's devices.
    micro_batches: Micro-batches of a step.
    length: Tokens in a row.
    fast: Compile with few optimizations: three to five times faster, memory within some percent.

  Raises:
    DoesNotFit: The compiler ran out of device memory.
    UserError: A tool that the compiler calls is missing.
  """
  start = time.perf_counter()
  lowered = learner.lower(micro_batches * learner.config.microbatch_rows, length)
  lower_s = time.perf_counter() - start
  start = time.perf_counter()
  try:
    with _optimization("O0") if fast else contextlib.nullcontext():
      compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    message = str(error)
    if "RESOURCE_EXHAUSTED" in message:
      raise DoesNotFit(message) from error
    if "PTX compilation provider" in message or "ptxas" in message:
      raise UserError("the CUDA compiler ptxas is missing; pip install -e '.[plan-gpu]'") from error
    raise
  compile_s = time.perf_counter() - start
  costs = compiled.cost_analysis() or {}
  return Program(
    memory=_memory(learner, compiled.memory_analysis()),
    flops=costs.get("flops"),
    bytes_accessed=costs.get("bytes accessed"),
    collectives=read_collectives(compiled.as_text() or "", devices=learner.mesh.size, unknown_trips=micro_batches),
    lower_s=lower_s,
    compile_s=compile_s,
  )


def state_bytes(learner: Learner) -> tuple[int, int]:
  """Bytes of parameters and of optimizer state on one device. Needs no compiler."""
  state = learner.abstract_state()
  return _shard_bytes(state.params), _shard_bytes(state.opt_state)


def read_out_of_memory(message: str) -> tuple[int | None, int | None]:
  """Bytes (needed, available) in the compiler's message; None for what is not there."""
  match = _TOO_LARGE.search(message)
  if match is None:
    return None, None
  needed, available = ((float(match[i]) * _UNITS[match[i + 1]]) for i in (1, 3))
  return int(needed), int(available)


def _memory(learner: Learner, stats: Any) -> Memory:
  params, optimizer = state_bytes(learner)
  return Memory(
    params=params,
    optimizer=optimizer,
    batch=max(0, stats.argument_size_in_bytes - params - optimizer),
    arguments=stats.argument_size_in_bytes,
    temporaries=stats.temp_size_in_bytes,
    outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
    code=stats.generated_code_size_in_bytes,
    peak=stats.peak_memory_in_bytes,
  )


def _shard_bytes(tree: Any) -> int:
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@contextlib.contextmanager
def _optimization(level: str) -> Iterator[None]:
  before = getattr(jax.config, "jax_optimization_level")  # noqa: B009  # defined at run time
  jax.config.update("jax_optimization_level", level)
  try:
    yield
  finally:
    jax.config.update("jax_optimization_level", before)
