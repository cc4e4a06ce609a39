"""From a config and a topology to a plan: does the step fit, what does it send, how fast can it be."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

from agentic_rl.errors import UserError
from agentic_rl.parallel import AXES, BATCH_AXES, MeshShape, make_mesh, parts
from agentic_rl.planning.compile import DoesNotFit, Program, compile_step, state_bytes
from agentic_rl.planning.flops import Work, count_work, hbm_traffic
from agentic_rl.planning.roofline import Assumptions, Roofline, roofline
from agentic_rl.planning.topologies import Topology, has_cudnn, parse_topology, topology_devices
from agentic_rl.policy import Policy, PolicyConfig
from agentic_rl.policy.families import named
from agentic_rl.policy.huggingface import read_config
from agentic_rl.train import setup
from agentic_rl.train.learner import Learner, LearnerConfig, policy_loss

FLOAT32_BYTES = 4
LARGE_STATE = 0.7
"""Share of memory above which state leaves too little for anything else."""

MOST_TRIES = 8
"""Programs that the search for the largest micro-batch compiles at most."""


@dataclasses.dataclass(frozen=True)
class Request:
  """What is planned; what is empty or 0 comes from the config.

  Attributes:
    topology: Name of the accelerators, e.g. `v5e-8`.
    policy: A name of `policy.families`, or a Hugging Face directory.
    length: Tokens in a row.
    rows: Rows of a micro-batch, over all chips.
    micro_batches: Micro-batches of a step.
    mesh: Sizes of the mesh, e.g. `data=1,fsdp=8,tensor=1`.
    options: Options of the policy, e.g. `remat=none`, separated by commas.
    fast: Compile with few optimizations.
    largest: Search for the largest micro-batch that fits.
  """

  topology: str
  policy: str = ""
  length: int = 0
  rows: int = 0
  micro_batches: int = 2
  mesh: str = ""
  options: str = ""
  fast: bool = False
  largest: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
  """The answer.

  Attributes:
    name: Of the policy.
    policy: The policy, with what the topology chose: bfloat16, recomputed layers, a fused attention kernel.
    topology: The chips.
    mesh: Sizes of the mesh's axes.
    rows, length, micro_batches: Rows of a micro-batch, tokens in a row, micro-batches of a step.
    parameters: Number of parameters.
    program: The compiled step; None where it does not fit a TPU, whose compiler then makes none.
    params_bytes, optimizer_bytes: On one chip; known without a program.
    needed_bytes: Memory that the step needs on one chip; None where the compiler did not say.
    fits: Whether that is within the chip's memory.
    advice: What to try where it does not.
    work: FLOPs of a micro-batch, counted from the policy.
    hbm_bytes: Memory traffic of a step on one chip, estimated from the policy.
    assumed: Efficiencies of the roofline.
    roofline: Time of a step; None without a program.
    largest_rows: Most rows of a micro-batch that fit; 0 for none, None where it was not asked for.
  """

  name: str
  policy: PolicyConfig
  topology: Topology
  mesh: dict[str, int]
  rows: int
  length: int
  micro_batches: int
  parameters: int
  program: Program | None
  params_bytes: int
  optimizer_bytes: int
  needed_bytes: int | None
  fits: bool
  advice: tuple[str, ...]
  work: Work
  hbm_bytes: float
  assumed: Assumptions
  roofline: Roofline | None
  largest_rows: int | None = None


def make_plan(config: ConfigDict, request: Request, assumed: Assumptions | None = None) -> Plan:
  """Compiles the learner's step for the topology and reads the plan off it.

  Args:
    config: A config of `launch/train_rl.py`: policy, loss, optimizer, mesh and row length.
    request: What replaces the config's values.
    assumed: Efficiencies of the roofline.

  Raises:
    UserError: A name is unknown, a compiler is missing, or the mesh does not divide the chips, the parameters or rows.
  """
  topology = parse_topology(request.topology)
  if request.micro_batches < 1 or request.rows < 0 or request.length < 0:
    raise UserError("rows and tokens must be positive, and micro_batches at least 1")
  name, policy_config = _policy_config(config, request, topology)
  try:
    mesh = make_mesh(_mesh_shape(config, request.mesh), topology_devices(topology))
  except (TypeError, ValueError) as error:
    raise UserError(f"the mesh on {topology.name}: {error}") from error
  length = request.length or int(config.train.length_buckets[-1])
  devices = parts(mesh, "batch")
  rows = request.rows or -(-int(config.train.microbatch_rows) // devices) * devices
  learner = _build_learner(config, policy_config, rows, mesh)
  program, needed = _compile(learner, request, length)
  available = topology.chip.hbm_bytes
  if program is not None:
    needed = _needed(program, topology)
  fits = program is not None and needed is not None and needed <= available
  largest = None
  if request.largest:
    largest = largest_that_fits(
      lambda n: _fits(config, policy_config, n * devices, mesh, request, length, topology),
      start=max(1, rows // devices),
      start_fits=fits,
    )
    largest *= devices
  work = count_work(policy_config, rows, length)
  assumed = assumed or Assumptions()
  params_bytes, optimizer_bytes = state_bytes(learner)
  tensor = mesh.shape["tensor"]
  each, once = hbm_traffic(
    policy_config, work.tokens * tensor // mesh.size, shard=params_bytes // FLOAT32_BYTES, tensor=tensor
  )
  hbm_bytes = each * request.micro_batches + once
  state = 2 * params_bytes + optimizer_bytes
  return Plan(
    name=name,
    policy=policy_config,
    topology=topology,
    mesh=dict(mesh.shape),
    rows=rows,
    length=length,
    micro_batches=request.micro_batches,
    parameters=learner.policy.parameter_count(),
    program=program,
    params_bytes=params_bytes,
    optimizer_bytes=optimizer_bytes,
    needed_bytes=needed,
    fits=fits,
    advice=() if fits else advise(policy_config, dict(mesh.shape), rows, length, state / available),
    work=work,
    hbm_bytes=hbm_bytes,
    assumed=assumed,
    roofline=None if program is None else _roofline(program, topology, work, hbm_bytes, request.micro_batches, assumed),
    largest_rows=largest,
  )


def advise(policy: PolicyConfig, mesh: dict[str, int], rows: int, length: int, state: float) -> tuple[str, ...]:
  """What to try where a step does not fit, the most promising first.

  Args:
    policy: The policy.
    mesh: Sizes of the mesh's axes.
    rows: Rows of a micro-batch.
    length: Tokens in a row.
    state: Share of a chip's memory that parameters, their gradients and the optimizer's state take.
  """
  least, advice = math.prod(mesh[axis] for axis in BATCH_AXES), []
  if mesh["data"] > 1:
    advice.append(f"more fsdp: data=1,fsdp={mesh['data'] * mesh['fsdp']} shards what data={mesh['data']} replicates")
  if state > LARGE_STATE:
    advice.append(f"more chips: weights, gradients and optimizer state alone take {state:.0%} of each chip's memory")
  if policy.remat != "layer":
    advice.append("remat=layer (config.policy.remat): layers are computed again instead of kept")
  if policy.dtype != "bfloat16":
    advice.append("dtype=bfloat16 (config.policy.dtype): activations take half")
  if rows > least:
    advice.append(f"fewer rows: {least} in a micro-batch instead of {rows}, and more micro-batches")
  advice.append(f"shorter rows than {length} tokens")
  twice = mesh["tensor"] * 2
  if mesh["fsdp"] % 2 == 0 and policy.heads % twice == 0 and policy.kv_heads % twice == 0:
    advice.append(f"tensor={twice},fsdp={mesh['fsdp'] // 2}: halves logits, features and gathered weights")
  if state <= LARGE_STATE:
    advice.append("more chips, or chips with more memory")
  return tuple(advice)


def largest_that_fits(fits: Callable[[int], bool], *, start: int, start_fits: bool) -> int:
  """Largest n >= 1 for which `fits(n)`, 0 if none does; `fits` is true up to some number and false from there.

  Doubles or halves from `start` to bracket the number, then bisects; gives the best known after `MOST_TRIES` calls.
  """
  tries = 0
  low, high = (start, 0) if start_fits else (0, start)  # low fits, high does not; 0: none known
  while tries < MOST_TRIES and (not high or high - low > 1):
    middle = 2 * low if not high else (low + high) // 2
    low, high = (middle, high) if fits(middle) else (low, middle)
    tries += 1
  return low


def _policy_config(config: ConfigDict, request: Request, topology: Topology) -> tuple[str, PolicyConfig]:
  name, base = _base_policy(config, request.policy)
  options: dict[str, Any] = {"dtype": "bfloat16", "remat": "layer", "attention": _attention(topology)}
  options |= parse_pairs(request.options, "policy_options")
  known = {field.name for field in dataclasses.fields(PolicyConfig)}
  if unknown := sorted(set(options) - known):
    raise UserError(f"--policy_options: unknown {unknown[0]!r}; known: {', '.join(sorted(known))}")
  try:
    return name, dataclasses.replace(base, **options)
  except (TypeError, ValueError) as error:
    raise UserError(f"the policy {name}: {error}") from error


def _attention(topology: Topology) -> str:
  """What `auto` means there; without the library jax lowers no cuDNN kernel, and plain blocks stand for it."""
  if topology.chip.platform == "tpu":
    return "splash"
  return "cudnn" if has_cudnn() else "blocks"


def _base_policy(config: ConfigDict, name: str) -> tuple[str, PolicyConfig]:
  values = config.policy.to_dict()
  own = values.pop("name", "")
  if name := name or own:
    return name, read_config(name) if os.path.isdir(name) else named(name)
  values["vocab_size"] = values["vocab_size"] or setup.build_tokenizer(config).vocab_size
  try:
    return "the config's policy", PolicyConfig.from_dict(values)
  except ValueError as error:
    raise UserError(f"config.policy: {error}") from error


def parse_pairs(text: str, flag: str) -> dict[str, Any]:
  """`a=1,b=x` as a dict; whole numbers become int, `true` and `false` bool."""
  pairs: dict[str, Any] = {}
  for item in filter(None, (part.strip() for part in text.split(","))):
    key, equals, value = item.partition("=")
    if not equals:
      raise UserError(f"--{flag}={text!r}: {item!r} is not of the form name=value")
    number = value.lstrip("-").isdigit()
    pairs[key] = int(value) if number else {"true": True, "false": False}.get(value.lower(), value)
  return pairs


def _mesh_shape(config: ConfigDict, text: str) -> MeshShape:
  values = parse_pairs(text, "mesh") if text else config.mesh.to_dict()
  if unknown := sorted(set(values) - set(AXES)):
    raise ValueError(f"axis {unknown[0]!r} is unknown; known: {', '.join(AXES)}")
  return MeshShape(**values)


def _build_learner(config: ConfigDict, policy: PolicyConfig, rows: int, mesh: Mesh) -> Learner:
  optimizer = setup.build_optimizer(config.optimizer, config.train.iterations * config.train.minibatches)
  loss = policy_loss(config.algorithm.loss, **config.algorithm.loss_options.to_dict())
  try:
    options = LearnerConfig(rows, config.train.logprob_chunk, config.rollout.temperature)
    return Learner(Policy(policy), optimizer, loss, options, mesh)
  except ValueError as error:
    raise UserError(f"rows, policy and mesh: {error}") from error


def _compile(learner: Learner, request: Request, length: int) -> tuple[Program | None, int | None]:
  try:
    return compile_step(learner, micro_batches=request.micro_batches, length=length, fast=request.fast), None
  except DoesNotFit as error:
    return None, error.needed_bytes
  except ValueError as error:
    raise UserError(f"rows, policy and mesh: {error}") from error


def _fits(
  config: ConfigDict, policy: PolicyConfig, rows: int, mesh: Mesh, request: Request, length: int, topology: Topology
) -> bool:
  program, _ = _compile(_build_learner(config, policy, rows, mesh), request, length)
  return program is not None and _needed(program, topology) <= topology.chip.hbm_bytes


def _needed(program: Program, topology: Topology) -> int:
  """Bytes that a chip must have: what the TPU compiler itself holds against the HBM, what a GPU's runtime reserves."""
  return program.memory.reserved if topology.chip.platform == "gpu" else program.memory.peak


def _roofline(
  program: Program, topology: Topology, work: Work, hbm_bytes: float, micro_batches: int, assumed: Assumptions
) -> Roofline:
  return roofline(
    executed_flops=work.executed * micro_batches / topology.chips,
    model_flops=work.model * micro_batches / topology.chips,
    hbm_bytes=hbm_bytes,
    transfers=[(c.sent_bytes, topology.bandwidth(c.group)) for c in program.collectives.found],
    tokens=work.tokens * micro_batches,
    chips=topology.chips,
    peak_flops=topology.chip.flops,
    hbm_bandwidth=topology.chip.hbm_bandwidth,
    assumed=assumed,
  )
