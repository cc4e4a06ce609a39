from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
import subprocess
import sys
from typing import Any

import jax
import pytest
from ml_collections import ConfigDict

from agentic_rl.errors import UserError
from agentic_rl.parallel import MeshShape, make_mesh
from agentic_rl.planning import Request, make_plan, plan, topologies
from agentic_rl.planning.compile import DoesNotFit, Program, compile_step, read_out_of_memory, state_bytes
from agentic_rl.planning.plan import MOST_TRIES, advise, largest_that_fits, parse_pairs
from agentic_rl.policy import Policy, PolicyConfig
from agentic_rl.train.config_check import load_config
from agentic_rl.train.learner import Learner, LearnerConfig, policy_loss
from agentic_rl.train.optimizer import OptimizerConfig

SMALL = PolicyConfig(
  vocab_size=512, width=64, layers=2, heads=8, kv_heads=4, head_width=16, mlp_width=128, dtype="bfloat16", remat="layer"
)
NARROW = "attention=blocks"


def small_learner(devices: list[jax.Device], rows: int = 8) -> Learner:
  mesh = make_mesh(MeshShape(fsdp=len(devices)), devices)
  loss = policy_loss(clip_low=0.2, clip_high=0.2)
  return Learner(Policy(SMALL), OptimizerConfig(), loss, LearnerConfig(rows, 64), mesh)


@pytest.fixture
def config(repository: pathlib.Path) -> ConfigDict:
  config = load_config(str(repository / "configs" / "zerotir_nano.py"))
  config.mesh.data, config.mesh.fsdp = 1, -1
  return config


@pytest.fixture
def on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
  """The simulated CPU devices stand for the chips of a topology."""
  monkeypatch.setattr(plan, "topology_devices", lambda topology: jax.devices("cpu")[: topology.chips])


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Program:
  """Nothing is compiled: every step has this program."""
  program = request.getfixturevalue("plan").program
  monkeypatch.setattr(plan, "compile_step", lambda *_, **__: program)
  return program


# ---- The compiled step ----


@functools.cache
def small_program() -> tuple[Program, Any]:
  """The small step on the simulated devices, and what JAX says of its memory."""
  compiled = []
  compile_ = jax.stages.Lowered.compile
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax.stages.Lowered, "compile", lambda self: compiled.append(compile_(self)) or compiled[0])
    program = compile_step(small_learner(jax.devices()), micro_batches=2, length=64)
  return program, compiled[0].memory_analysis()


def test_memory_is_what_the_compiler_says():
  program, stats = small_program()
  memory = program.memory
  assert memory.peak == stats.peak_memory_in_bytes
  assert memory.temporaries == stats.temp_size_in_bytes
  assert memory.arguments == stats.argument_size_in_bytes == memory.params + memory.optimizer + memory.batch


def test_state_is_counted_a_device():
  learner = small_learner(jax.devices())
  params, optimizer = state_bytes(learner)
  # Everything is divided by the eight devices; each moment is as large as the parameters; the two step counts are not.
  assert params == learner.policy.parameter_count() * 4 // 8
  assert optimizer == 2 * params + 2 * 4


def test_layers_are_counted_once_a_trip():
  program, _ = small_program()
  assert program.collectives.unplaced == 0
  assert SMALL.layers in program.collectives.trips
  # Weights of two layers are gathered at least once in each pass of both micro-batches, in bfloat16 or wider.
  gathered = sum(c.payload_bytes for c in program.collectives.found if c.kind == "all-gather")
  layers = 2 * (2 * 64 * 12 * 16 + 3 * 64 * 128)
  assert gathered >= 2 * 2 * 2 * layers


@pytest.mark.parametrize(
  ("message", "needed", "available"),
  [
    (
      "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (17.50G) exceeds "
      "available HBM (15.75G).",
      17.5 * 2**30,
      15.75 * 2**30,
    ),
    (
      "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.00G of "
      "15.75G hbm. Exceeded hbm capacity by 4.25G.",
      20 * 2**30,
      15.75 * 2**30,
    ),
    ("RESOURCE_EXHAUSTED: no numbers", None, None),
  ],
)
def test_the_compilers_complaint_is_read(message: str, needed: float | None, available: float | None):
  error = DoesNotFit(message)
  assert read_out_of_memory(message) == (needed, available) == (error.needed_bytes, error.available_bytes)


def test_running_out_of_memory_is_a_verdict(monkeypatch: pytest.MonkeyPatch):
  def refuse(self: Any, *_: Any, **__: Any) -> None:
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: HLO temporaries (17.50G) exceeds available HBM (15.75G)")

  monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
  with pytest.raises(DoesNotFit):
    compile_step(small_learner(jax.devices()), micro_batches=2, length=64)


def test_a_missing_assembler_is_named(monkeypatch: pytest.MonkeyPatch):
  def refuse(self: Any, *_: Any, **__: Any) -> None:
    raise jax.errors.JaxRuntimeError("INTERNAL: No PTX compilation provider is available")

  monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
  with pytest.raises(UserError, match="plan-gpu"):
    compile_step(small_learner(jax.devices()), micro_batches=2, length=64)


# ---- The plan ----


def test_a_plan_of_the_configs_own_policy(config: ConfigDict, on_this_cpu: None):
  made = make_plan(config, Request("v5e-8", length=64, options=f"{NARROW},dtype=float32"))
  assert made.fits and made.program and made.roofline
  assert made.needed_bytes == made.program.memory.peak
  assert made.mesh["fsdp"] == 8 and made.rows % 8 == 0 and made.length == 64
  assert (made.policy.remat, made.policy.dtype) == ("layer", "float32")
  assert made.work.tokens == made.rows * 64
  assert made.program.collectives.found


def test_a_policy_by_name_needs_no_tokenizer(
  config: ConfigDict, on_this_cpu: None, compiled: Program, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setattr(plan, "named", lambda name: SMALL)
  made = make_plan(config, Request("v5e-4", policy="small", length=64, rows=8, mesh="fsdp=2,tensor=2"))
  assert (made.name, made.rows, made.mesh["fsdp"], made.mesh["tensor"]) == ("small", 8, 2, 2)
  assert (made.policy.attention, made.policy.remat, made.policy.dtype) == ("splash", "layer", "bfloat16")
  assert made.parameters == Policy(SMALL).parameter_count()


def test_what_does_not_fit_has_advice(config: ConfigDict, on_this_cpu: None, monkeypatch: pytest.MonkeyPatch):
  def refuse(*_: Any, **__: Any) -> None:
    raise DoesNotFit("RESOURCE_EXHAUSTED: Used 20.00G of 15.75G hbm")

  monkeypatch.setattr(plan, "compile_step", refuse)
  made = make_plan(config, Request("v5e-8", length=64, options="remat=none"))
  assert not made.fits and made.program is None
  assert made.needed_bytes == 20 * 2**30
  assert any("remat=layer" in advice for advice in made.advice)


def test_a_gpu_needs_what_its_runtime_reserves(
  config: ConfigDict, on_this_cpu: None, compiled: Program, monkeypatch: pytest.MonkeyPatch
):
  monkeypatch.setattr(plan, "has_cudnn", lambda: False)
  made = make_plan(config, Request("h100-2", length=64))
  assert made.needed_bytes == compiled.memory.reserved > compiled.memory.peak
  assert made.fits and made.policy.attention == "blocks"
  chip = dataclasses.replace(topologies.CHIPS["h100"], hbm_bytes=float(compiled.memory.reserved - 1))
  monkeypatch.setitem(topologies.CHIPS, "h100", chip)
  assert not make_plan(config, Request("h100-2", length=64)).fits


def test_the_largest_micro_batch_is_searched_in_rows(
  config: ConfigDict, on_this_cpu: None, compiled: Program, monkeypatch: pytest.MonkeyPatch
):
  def compile_small(learner: Learner, **_: Any) -> Program:
    if learner.config.microbatch_rows > 40:
      raise DoesNotFit("RESOURCE_EXHAUSTED")
    return compiled

  monkeypatch.setattr(plan, "compile_step", compile_small)
  assert make_plan(config, Request("v5e-8", length=64, rows=16, largest=True)).largest_rows == 40


@pytest.mark.parametrize(
  ("values", "message"),
  [
    ({"topology": "v5e-7"}, "slices are"),
    ({"mesh": "fsdp=3"}, "the mesh on v5e-8"),
    ({"mesh": "dat=2"}, "axis 'dat' is unknown; known: data, fsdp"),
    ({"mesh": "sideways=8"}, "the mesh on v5e-8"),
    ({"mesh": "fsdp"}, "not of the form name=value"),
    ({"rows": 12}, "multiple of the 8 devices"),
    ({"options": "remta=none"}, "unknown 'remta'"),
    ({"options": "remat=some"}, "unknown remat"),
    ({"micro_batches": 0}, "at least 1"),
    ({"policy": "no_such_model"}, "no_such_model"),
  ],
)
def test_mistakes_are_told_in_a_line(config: ConfigDict, on_this_cpu: None, values: dict[str, Any], message: str):
  with pytest.raises(UserError, match=message):
    make_plan(config, Request(**{"topology": "v5e-8", "length": 64, **values}))


@pytest.mark.parametrize("limit", [0, 1, 3, 5, 8, 13])
@pytest.mark.parametrize("start", [1, 4, 6])
def test_the_largest_is_found(limit: int, start: int):
  tried = []

  def fits(n: int) -> bool:
    tried.append(n)
    return n <= limit

  assert largest_that_fits(fits, start=start, start_fits=start <= limit) == limit
  assert len(tried) == len(set(tried)) <= MOST_TRIES and start not in tried


def test_the_search_ends_where_everything_fits():
  assert largest_that_fits(lambda n: True, start=1, start_fits=True) == 2**MOST_TRIES


def test_advice_goes_by_what_is_the_matter():
  mesh = {"data": 2, "fsdp": 4, "expert": 1, "context": 1, "tensor": 1}
  kept = dataclasses.replace(SMALL, remat="none", dtype="float32")
  advice = "\n".join(advise(kept, mesh, 16, 4096, 0.9))
  for part in ("data=1,fsdp=8", "alone take 90%", "remat=layer", "bfloat16", "8 in a micro-batch", "tensor=2,fsdp=2"):
    assert part in advice
  little = "\n".join(advise(SMALL, {**mesh, "data": 1, "fsdp": 1}, 1, 4096, 0.1))
  assert little == "shorter rows than 4096 tokens\nmore chips, or chips with more memory"


def test_pairs():
  assert parse_pairs("a=1, b=x,c=true,d=-1", "mesh") == {"a": 1, "b": "x", "c": True, "d": -1}
  assert parse_pairs("", "mesh") == {}


# ---- The script, and the true compiler ----


def test_the_script_tells_a_missing_compiler_in_a_line(repository: pathlib.Path):
  if importlib.util.find_spec("libtpu"):
    pytest.skip("libtpu is installed")
  command = ["launch/plan.py", "--config=configs/zerotir_nano.py", "--topology=v5e-8"]
  done = subprocess.run([sys.executable, *command], cwd=repository, capture_output=True, text=True, check=False)
  assert done.returncode == 2
  assert done.stderr == "error: v5e-8: the TPU compiler (libtpu) is missing; pip install -e '.[plan-tpu]'\n"


def test_a_tpu_program_is_compiled_without_a_tpu(config: ConfigDict, monkeypatch: pytest.MonkeyPatch):
  pytest.importorskip("libtpu")
  monkeypatch.setattr(plan, "named", lambda name: SMALL)
  request = Request("v5e-8", policy="small", length=256, options=NARROW, fast=True)
  made = make_plan(config, request)
  assert made.fits and made.program is not None
  assert made.needed_bytes == made.program.memory.peak
  assert made.program.memory.params == Policy(SMALL).parameter_count() * 4 // 8
  assert made.program.flops and made.program.collectives.unplaced == 0
  assert {c.kind for c in made.program.collectives.found} >= {"all-gather", "all-reduce"}
