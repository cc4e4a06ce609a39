"""From a config to the parts that it names."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from agentic_rl.data import load_jsonl, load_tfds
from agentic_rl.data.arithmetic import problems as arithmetic_problems
from agentic_rl.data.arithmetic import tokenizer as arithmetic_tokenizer
from agentic_rl.episode import Problem, Publication
from agentic_rl.errors import UserError
from agentic_rl.parallel import MeshShape, initialize_distributed, make_mesh, serving_mesh
from agentic_rl.policy import COMPUTATION, Params, Policy, PolicyConfig
from agentic_rl.policy.families import named
from agentic_rl.policy.huggingface import load, read_config
from agentic_rl.rollout.native import NativeConfig, NativeEngine
from agentic_rl.sandbox import Interpreter, InterpreterConfig, Limits, RemoteConfig, RemoteInterpreter, SandboxError
from agentic_rl.tokenizer import Tokenizer
from agentic_rl.tools import FencedDialect, InterpreterTool
from agentic_rl.train.learner import Learner, LearnerConfig, TokenLoss
from agentic_rl.train.optimizer import OptimizerConfig
from agentic_rl.train.publication import check_fits, open_publication, read_params, weights_fingerprint, write_text

log = logging.getLogger(__name__)


def start_backend(config: ConfigDict) -> None:
  """Joins a multi-host run where there is one, and gives a CPU-only host `config.cpu_devices` simulated devices.

  To be called before anything else touches a device. `XLA_FLAGS` and an accelerator take precedence.
  """
  initialize_distributed()
  if config.cpu_devices > 1 and "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", config.cpu_devices)


def build_tokenizer(config: ConfigDict) -> Tokenizer:
  """The tokenizer that `config.tokenizer` names."""
  kind = config.tokenizer.kind
  if kind == "arithmetic":
    return arithmetic_tokenizer()
  if kind == "huggingface":
    try:
      from agentic_rl.hf_tokenizer import HFTokenizer
    except ImportError as error:
      raise UserError(f"{error.name} is missing: pip install -e '.[smollm2]'") from error
    try:
      return HFTokenizer.from_directory(config.tokenizer.path)
    except OSError as error:
      raise UserError(
        f"config.tokenizer.path={config.tokenizer.path!r} has no tokenizer.json; the recipe says how to make it"
      ) from error
  raise UserError(f"config.tokenizer.kind={kind!r} is unknown; known: arithmetic, huggingface")


def build_policy(config: ConfigDict, tokenizer: Tokenizer) -> Policy:
  """The policy of `config.policy`.

  Its `name` is that of a published model or a Hugging Face directory; of the other fields only `COMPUTATION` counts
  then. Without a name they are the shape, and a `vocab_size` of 0 takes the tokenizer's.
  """
  values = config.policy.to_dict()
  name = values.pop("name", "")
  if name:
    options = {key: values[key] for key in COMPUTATION if key in values}
    try:
      policy = read_config(name, **options) if os.path.isdir(name) else named(name, **options)
    except ValueError as error:
      raise UserError(f"config.policy: {error}") from error
    if policy.vocab_size < tokenizer.vocab_size:
      raise UserError(
        f"the tokenizer has {tokenizer.vocab_size} tokens, more than the {policy.vocab_size} that policy {name!r} can "
        f"embed; use the model's own tokenizer"
      )
    return Policy(policy)  # published models have some more rows than their tokenizers have tokens
  values["vocab_size"] = values["vocab_size"] or tokenizer.vocab_size
  try:
    policy = PolicyConfig.from_dict(values)
  except ValueError as error:
    raise UserError(f"config.policy: {error}") from error
  if policy.vocab_size != tokenizer.vocab_size:
    raise UserError(
      f"config.policy.vocab_size={policy.vocab_size} is not the tokenizer's {tokenizer.vocab_size}: ids that stand for "
      f"no text could be sampled; set it to 0"
    )
  return Policy(policy)


def build_mesh(config: ConfigDict) -> Mesh:
  """The mesh over all devices of this host."""
  if jax.process_count() > 1:
    raise UserError(
      f"{jax.process_count()} hosts: training runs on the devices of one host for now; start it on a single host"
    )
  try:
    return make_mesh(MeshShape(**config.mesh.to_dict()))
  except ValueError as error:
    raise UserError(f"config.mesh: {error}") from error


def build_optimizer(section: ConfigDict, steps: int) -> OptimizerConfig:
  """The optimizer of a config section; a `total_steps` of 0 takes the `steps` of the run."""
  options = section.to_dict()
  options["total_steps"] = options.get("total_steps") or steps
  try:
    return OptimizerConfig(**options)
  except (TypeError, ValueError) as error:
    raise UserError(f"config.optimizer: {error}") from error


def build_dialect(config: ConfigDict) -> FencedDialect:
  """The dialect; `config.dialect` holds its options beside its name."""
  options = config.dialect.to_dict()
  del options["name"]
  options["stop"] = tuple(options["stop"])
  try:
    return FencedDialect(**options)
  except (TypeError, ValueError) as error:
    raise UserError(f"config.dialect: {error}") from error


async def start_tool(config: ConfigDict, stack: contextlib.AsyncExitStack) -> InterpreterTool:
  """The interpreter as a tool, in this host or at the servers of `config.interpreter.hosts`; the stack closes it."""
  options = config.interpreter.to_dict()
  urls, protocol, stateful = tuple(options.pop("hosts")), options.pop("protocol"), options.pop("stateful")
  interpreter: Interpreter | RemoteInterpreter
  try:
    limits = Limits(**options.pop("limits"))
    if urls:
      token = os.environ.get("AGENTIC_RL_SANDBOX_TOKEN", "")
      interpreter = await RemoteInterpreter.start(RemoteConfig(urls, token=token, protocol=protocol, limits=limits))
    else:
      preload = options.pop("preload")
      groups = None if preload is None else tuple(tuple(group) for group in preload)
      interpreter = await Interpreter.start(InterpreterConfig(limits=limits, preload=groups, **options))
  except (TypeError, ValueError, SandboxError) as error:
    raise UserError(f"config.interpreter: {error}") from error
  stack.push_async_callback(interpreter.close)
  facts = interpreter.capabilities()
  log.info("interpreter at level %s of isolation; left open: %s", facts.get("level"), "; ".join(facts.get("gaps", ())))
  return InterpreterTool(interpreter, stateful=stateful)


def build_learner(
  config: ConfigDict, policy: Policy, optimizer: OptimizerConfig, loss: TokenLoss, *, temperature: float = 1.0
) -> Learner:
  """The learner on the mesh of the config."""
  options = LearnerConfig(config.train.microbatch_rows, config.train.logprob_chunk, temperature)
  try:
    return Learner(policy, optimizer, loss, options, build_mesh(config))
  except ValueError as error:
    raise UserError(f"config.mesh and train.microbatch_rows: {error}") from error


def build_problems(section: ConfigDict) -> list[Problem]:
  """The problems of one data section, by its `kind`.

  `arithmetic`: the nano study's generator. `jsonl`, `tfds`: a file or a data set with a column map. `python`: a
  function `module:name` called with `options`, for generators of one's own.
  """
  kind, options = section.kind, section.options.to_dict()
  try:
    if kind == "arithmetic":
      return arithmetic_problems(**options)
    if kind == "jsonl":
      return load_jsonl(**options)
    if kind == "tfds":
      return load_tfds(**options)
    if kind == "python":
      module, _, name = options.pop("function").partition(":")
      return list(getattr(importlib.import_module(module), name)(**options))
  except OSError as error:
    raise UserError(f"problems of kind {kind!r} cannot be read: {error.strerror}: {error.filename}") from error
  except (TypeError, ValueError, ImportError, AttributeError) as error:
    raise UserError(f"problems of kind {kind!r} with options {options} could not be made: {error}") from error
  raise UserError(f"data kind {kind!r} is unknown; known: arithmetic, jsonl, python, tfds")


def build_engine(config: ConfigDict, policy: Policy, tokenizer: Tokenizer, mesh: Mesh) -> NativeEngine:
  """The rollout engine."""
  rollout = config.rollout
  if rollout.engine != "native":
    raise UserError(f"config.rollout.engine={rollout.engine!r} cannot be trained with yet; use native")
  where = serving_mesh(mesh) if rollout.sharded and mesh.size > 1 else None
  try:
    native = NativeConfig(slots=rollout.slots, max_length=rollout.max_tokens, **_tuples(rollout.native.to_dict()))
    return NativeEngine(policy, tokenizer, native, read=read_params, mesh=where)
  except (TypeError, ValueError) as error:
    raise UserError(f"config.rollout and its section native: {error}") from error


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
  return {k: tuple(v) if isinstance(v, list | tuple) else v for k, v in values.items()}


def initial_publication(config: ConfigDict, policy: Policy, tokenizer: Tokenizer) -> Publication:
  """The publication that `config.init_from` names, checked to fit the policy and the tokenizer."""
  if not config.init_from:
    raise UserError("config.init_from is empty: name a publication to start from (train_sft prints one)")
  publication = open_publication(config.init_from)
  check_fits(publication, policy.config)
  stored = json.loads((pathlib.Path(publication.path) / "manifest.json").read_text()).get("tokenizer")
  if stored != tokenizer.fingerprint:
    raise UserError(f"the weights at {publication.path} were trained with another tokenizer; use the config's own")
  return publication


def initial_params(config: ConfigDict, policy: Policy, tokenizer: Tokenizer, where: Any) -> Params:
  """The weights that `config.init_from` names, a publication or a Hugging Face directory.

  Args:
    config: The config.
    policy: What they have to fit.
    tokenizer: What a publication has to have been trained with.
    where: Tree of shardings; a Hugging Face directory is read straight into them.
  """
  if not is_huggingface(config.init_from):
    return read_params(initial_publication(config, policy, tokenizer))
  found = read_config(config.init_from).architecture()
  for name, value in policy.config.architecture().items():
    if found[name] != value:
      raise UserError(
        f"the weights at {config.init_from} have policy.{name}={found[name]!r}, the config says {value!r}; "
        f"set config.policy.name={config.init_from!r}"
      )
  return load(config.init_from, shardings=where)[1]


def initial_fingerprint(config: ConfigDict, policy: Policy, tokenizer: Tokenizer) -> str:
  """Tells the weights of `config.init_from` from others."""
  if not is_huggingface(config.init_from):
    return weights_fingerprint(initial_publication(config, policy, tokenizer))
  digest = hashlib.sha256()
  for file in sorted(pathlib.Path(config.init_from).glob("*.safetensors")):
    with file.open("rb") as opened:  # a checksum of all would read as much again as the weights
      digest.update(f"{file.name} {file.stat().st_size} ".encode() + opened.read(1 << 20))
  return digest.hexdigest()[:16]


def is_huggingface(path: str) -> bool:
  """Whether a path is a Hugging Face model directory."""
  return (pathlib.Path(path) / "config.json").is_file() and not (pathlib.Path(path) / "manifest.json").is_file()


def open_workdir(workdir: str | os.PathLike[str]) -> pathlib.Path:
  """Creates the run directory. Raises `UserError` if it cannot be written."""
  path = pathlib.Path(workdir).absolute()
  try:
    path.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise UserError(f"the run directory {path} cannot be written: {error.strerror}") from error
  return path


def write_config(config: ConfigDict, workdir: pathlib.Path) -> None:
  """Writes `config.json`; to be called once the config is known to fit what the directory holds already."""
  try:
    write_text(workdir / "config.json", config.to_json_best_effort(indent=1, sort_keys=True) + "\n")
  except OSError as error:
    raise UserError(f"the run directory {workdir} cannot be written: {error.strerror}") from error
