"""Refuses what cannot work, before anything is computed, with one clear message.

Two gates. `run_app` starts a launch script: a flag that does not exist, or does not parse, ends with one line on
standard error and exit code 2. `check_config` then looks at the values: wrong types, unknown names, contradictions.
"""

from __future__ import annotations

import difflib
import errno
import gc
import logging
import pathlib
import re
import runpy
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from agentic_rl.errors import UserError

EXIT_CODE = 2
_FLAG = "config"
_OVERRIDE = re.compile(rf"--?(no)?{_FLAG}\.(?P<path>[^=]+)")

ENGINES = ("native",)
DIALECTS = ("fenced",)


class _Range(NamedTuple):
  """Type and range of a numeric field."""

  kind: type
  low: float = -float("inf")
  high: float = float("inf")
  above: bool = False  # `low` itself is not allowed

  def describe(self) -> str:
    kind = "a whole number" if self.kind is int else "a number"
    bounds = [f"{'above' if self.above else 'at least'} {self.low:g}"] if self.low > -float("inf") else []
    bounds += [f"at most {self.high:g}"] if self.high < float("inf") else []
    return " ".join([kind, " and ".join(bounds)]).rstrip()

  def holds(self, value: Any) -> bool:
    allowed = (int,) if self.kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
      return False
    return (value > self.low if self.above else value >= self.low) and value <= self.high


_OPTIMIZER = {
  "learning_rate": _Range(float, 0),
  "warmup_steps": _Range(int, 0),
  "weight_decay": _Range(float, 0),
  "clip_norm": _Range(float, 0, above=True),
  "b1": _Range(float, 0, 0.99999),
  "b2": _Range(float, 0, 0.99999),
}
RANGES: dict[str, _Range] = {
  "seed": _Range(int, 0),
  "dialect.call_budget": _Range(int, 0),
  "dialect.max_observation_tokens": _Range(int, 1),
  "interpreter.slots": _Range(int, 1),
  "interpreter.limits.wall_s": _Range(float, 0, above=True),
  "interpreter.limits.cpu_s": _Range(float, 0, above=True),
  "rollout.slots": _Range(int, 1),
  "rollout.max_tokens": _Range(int, 1),
  "rollout.max_in_flight": _Range(int, 1),
  "rollout.episode_timeout_s": _Range(float, 0),
  "rollout.max_aborted_frac": _Range(float, 0, 1),
  "rollout.temperature": _Range(float, 0),
  "rollout.top_p": _Range(float, 0, 1, above=True),
  "rollout.top_k": _Range(int, -1),
  "rollout.problems": _Range(int, 1),
  "rollout.samples": _Range(int, 1),
  "algorithm.loss_options.clip_low": _Range(float, 0, 1, above=True),
  "algorithm.loss_options.clip_high": _Range(float, 0, above=True),
  "algorithm.fixed_norm": _Range(float, 0),
  "algorithm.filter_low": _Range(float),
  "algorithm.filter_high": _Range(float),
  **{
    f"{section}.{field}": allowed for section in ("optimizer", "sft.optimizer") for field, allowed in _OPTIMIZER.items()
  },
  "train.iterations": _Range(int, 1),
  "train.minibatches": _Range(int, 1),
  "train.microbatch_rows": _Range(int, 1),
  "train.checkpoint_every": _Range(int, 1),
  "train.logprob_chunk": _Range(int, 1),
  "publication.probe_tokens": _Range(int, 1),
  "publication.max_logprob_diff": _Range(float, 0, above=True),
  "sft.steps": _Range(int, 1),
  "sft.rows": _Range(int, 1),
  "sft.checkpoint_every": _Range(int, 1),
  "evaluation.every": _Range(int, 0),
  "evaluation.samples": _Range(int, 1),
  "evaluation.temperature": _Range(float, 0),
  "evaluation.top_p": _Range(float, 0, 1, above=True),
}


def check_config(config: ConfigDict, *, devices: int | None = None, longest_prompt: int | None = None) -> None:
  """Checks a config of `train_sft` or `train_rl`. A section that is absent is not checked.

  Args:
    config: As `get_config()` of a recipe returns it.
    devices: Number of devices; checks the mesh where given.
    longest_prompt: Tokens of the longest prompt; checks the sequence budget where given.

  Raises:
    UserError: At the first contradiction; the message names the field, its value and what to do.
  """
  for path, allowed in RANGES.items():
    value = _get(config, path)
    if value is not None and not allowed.holds(value):
      raise UserError(f"config.{path} must be {allowed.describe()}, got {value!r}")
  for path, names in _choices().items():
    value = _get(config, path)
    if value is not None and value not in names:
      raise UserError(f"config.{path}={value!r} is unknown{_nearest(value, names)}; known: {', '.join(names)}")
  _check_sampling(config)
  _check_groups(config)
  _check_lengths(config, longest_prompt)
  if devices is not None:
    _check_mesh(config, devices)


def _choices() -> dict[str, tuple[str, ...]]:
  """The names that a config may choose from, by field."""
  # Imported here so that a script that needs no device, or has a bad flag, does not wait for jax.
  from agentic_rl.algorithms import ADVANTAGES, AGGREGATIONS, POLICY_LOSSES
  from agentic_rl.tools.fenced import BUDGET_ENDS

  return {
    "algorithm.advantage": tuple(ADVANTAGES),
    "algorithm.loss": tuple(POLICY_LOSSES),
    "algorithm.aggregation": tuple(AGGREGATIONS),
    "rollout.engine": ENGINES,
    "dialect.name": DIALECTS,
    "dialect.budget_end": tuple(BUDGET_ENDS),
  }


def _check_sampling(config: ConfigDict) -> None:
  # Truncated sampling renormalises: log-probabilities and ratios would belong to another distribution.
  top_p, top_k = _get(config, "rollout.top_p"), _get(config, "rollout.top_k")
  if top_p is not None and top_p < 1:
    raise UserError(
      f"config.rollout.top_p={top_p:g}: training rollouts must sample the whole distribution, or ratios are biased; "
      "set it to 1 (top-p is for evaluation)"
    )
  if top_k is not None and top_k > 0:
    raise UserError(
      f"config.rollout.top_k={top_k}: training rollouts must sample the whole distribution, or ratios are biased; "
      "set it to -1 (top-k is for evaluation)"
    )
  if _get(config, "rollout.temperature") == 0:
    raise UserError(
      "config.rollout.temperature=0: greedy training rollouts are all alike and have no log-probabilities to learn "
      "from; set it above 0, e.g. 1"
    )


def _check_groups(config: ConfigDict) -> None:
  advantage, samples = _get(config, "algorithm.advantage"), _get(config, "rollout.samples")
  if advantage is not None and samples == 1:
    raise UserError(
      f"config.rollout.samples=1 with config.algorithm.advantage={advantage!r}: a group of one has no other sample to "
      "compare with, every advantage is 0; set rollout.samples to 2 or more"
    )
  low, high = _get(config, "algorithm.filter_low"), _get(config, "algorithm.filter_high")
  if None not in (low, high) and low >= high:
    raise UserError(
      f"config.algorithm.filter_low={low:g} is not below filter_high={high:g}, so no group would be kept; lower it"
    )


def _check_lengths(config: ConfigDict, longest_prompt: int | None) -> None:
  budget = _get(config, "rollout.max_tokens")
  if None not in (budget, longest_prompt) and budget <= longest_prompt:
    raise UserError(
      f"config.rollout.max_tokens={budget} leaves no room for a response: the longest prompt has {longest_prompt} "
      "tokens; raise the budget or drop the long problems"
    )
  buckets = _get(config, "train.length_buckets")
  if buckets is None:
    return
  if not isinstance(buckets, Sequence) or not buckets or not all(_Range(int, 1).holds(b) for b in buckets):
    raise UserError(f"config.train.length_buckets must be a tuple of whole numbers at least 1, got {buckets!r}")
  if list(buckets) != sorted(set(buckets)):
    raise UserError(f"config.train.length_buckets must rise, got {tuple(buckets)}")
  if budget is not None and budget > buckets[-1]:
    raise UserError(
      f"config.rollout.max_tokens={budget} is above the largest of config.train.length_buckets={tuple(buckets)}, so a "
      "full episode would not fit a row; add a bucket or lower the budget"
    )


def _check_mesh(config: ConfigDict, devices: int) -> None:
  from agentic_rl.parallel.mesh import MeshShape

  mesh = _get(config, "mesh")
  if mesh is not None:
    try:
      MeshShape(**mesh.to_dict()).resolve(devices)
    except (TypeError, ValueError) as error:
      raise UserError(f"config.mesh: {error}") from error


def _get(config: ConfigDict, path: str) -> Any:
  """Value at a dotted path, None where it or its section is absent."""
  value: Any = config
  for part in path.split("."):
    if not isinstance(value, ConfigDict) or part not in value:
      return None
    value = value[part]
  return value


def _nearest(name: object, known: Iterable[str]) -> str:
  near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
  return f", did you mean {near[0]!r}?" if near else ""


# ---- Launch scripts -------------------------------------------------------------------------------------------------

_default_config: str | None = None


def define_config(default: str | None = None) -> flags.FlagHolder[ConfigDict]:
  """Defines `--config`, a locked config file with `--config.x.y=z` overrides; for scripts started by `run_app`.

  Args:
    default: Config file used when `--config` is not given; without one the flag is required.
  """
  global _default_config
  _default_config = default
  # ml_collections applies overrides of a default while flags are still being defined, where no one can catch its
  # errors; `run_app` therefore adds the default to the command line instead.
  holder = config_flags.DEFINE_config_file(_FLAG, None, "Config file; fields are set by --config.section.field=value.")
  flags.mark_flag_as_required(_FLAG)
  return holder


def run_app(main: Callable[[list[str]], int | None]) -> None:
  """`absl.app.run` with one-line errors: a bad flag or a `UserError` prints no traceback and exits with code 2.

  Args:
    main: Takes the command line without flags; returns the exit code, None for 0.
  """
  if _default_config is not None and not any(re.match(rf"--?{_FLAG}(=|$)", arg) for arg in sys.argv):
    sys.argv.insert(1, f"--{_FLAG}={_default_config}")
  # `--config.policy=qwen3_4b` is what people write. Done here, since ml_collections looks at `sys.argv` for itself.
  sys.argv[1:] = [re.sub(rf"^(--?{_FLAG}\.policy)=", r"\1.name=", arg) for arg in sys.argv[1:]]

  def run(argv: list[str]) -> int | None:
    try:
      return main(argv)
    except UserError as error:
      complaint = str(error)
    except KeyboardInterrupt as error:
      sys.stderr.write(f"{str(error) or 'interrupted'}; the same command goes on from here\n")
      return 128 + (signal.SIGTERM if "SIGTERM" in str(error) else signal.SIGINT)
    except OSError as error:
      if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise
      complaint = f"the disk of {error.filename or 'the run directory'} is full; make room and start again"
    # What the traceback has kept alive may complain as it is freed (futures of a failed write): before our line.
    gc.collect()
    return _complain(complaint)

  app.run(run, flags_parser=_parse_flags)


def _complain(message: object) -> int:
  sys.stderr.write(f"error: {message}\n")
  return EXIT_CODE


def _parse_flags(argv: list[str]) -> list[str]:
  try:
    check_overrides(argv)
    rest: list[str] = flags.FLAGS(argv)
    if len(rest) > 1:
      raise UserError(f"unexpected argument {rest[1]!r}; flags are written --name=value")
    if flags.FLAGS["verbosity"].using_default_value:
      # Orbax reports every step of every checkpoint over the progress of the run, and with its traceback what it raises
      # as well. `--verbosity=0` shows it.
      flags.FLAGS.verbosity = -1  # type: ignore[assignment]
      logging.getLogger("absl").setLevel(logging.CRITICAL)
      logging.getLogger("agentic_rl").setLevel(logging.INFO)
    return rest
  except UserError as error:
    sys.exit(_complain(error))
  except flags.UnrecognizedFlagError as error:
    name = error.flagname.split(".")[0]
    sys.exit(_complain(f"unknown flag --{error.flagname}{_nearest(name, flags.FLAGS)} (--help lists the flags)"))
  except flags.Error as error:
    sys.exit(_complain(f"{error} (--help lists the flags)"))


def check_overrides(argv: Sequence[str]) -> None:
  """Checks that the config file can be loaded and that every `--config.x.y` on the command line exists in it.

  Raises:
    UserError: Names the key and the nearest that is known.
  """
  argv = flags.FLAGS.read_flags_from_files(list(argv), force_gnu=False)
  path = None
  for i, arg in enumerate(argv):
    if match := re.match(rf"--?{_FLAG}(=(?P<path>.*))?$", arg):
      path = match["path"] if match["path"] is not None else "".join(argv[i + 1 : i + 2])
  if not path or _FLAG not in flags.FLAGS:
    return  # absl says what is missing
  config = load_config(path)
  for arg in argv:
    if match := _OVERRIDE.match(arg):
      check_key(config, match["path"])


def load_config(path: str) -> ConfigDict:
  """The config of a file, or of `file.py:argument`, locked.

  Raises:
    UserError: There is no such file, or it does not define `get_config`.
  """
  file = pathlib.Path(path.split(":", 1)[0])
  if not file.is_file():
    siblings = [str(p) for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
    raise UserError(f"config file {str(file)!r} does not exist{_nearest(file, siblings)}")
  get_config = runpy.run_path(str(file)).get("get_config")
  if get_config is None:
    raise UserError(f"config file {str(file)!r} defines no get_config()")
  config = get_config(*path.split(":", 1)[1:])
  if not isinstance(config, ConfigDict):
    raise UserError(f"get_config() of {str(file)!r} must return a ConfigDict, got {type(config).__name__}")
  config.lock()
  return config


def check_key(config: ConfigDict, path: str) -> None:
  """Checks that `path`, e.g. `rollout.temperature`, names a field (not a section) of the config.

  Raises:
    UserError: Names the key and the nearest that is known, in its own section or in another.
  """
  known = list(_fields(config))
  if path in known:
    return
  if any(field.startswith(f"{path}.") for field in known):
    raise UserError(f"config.{path} is a section; set one of its fields, e.g. --config.{_first(known, path)}=…")
  parts = path.split(".")
  section, depth = config, 0
  while isinstance(section, ConfigDict) and parts[depth] in section:
    section, depth = section[parts[depth]], depth + 1
  names = list(section) if isinstance(section, ConfigDict) else []
  head, rest = parts[:depth], parts[depth + 1 :]
  near = difflib.get_close_matches(parts[depth], names, n=1, cutoff=0.6)
  if not isinstance(section, ConfigDict):
    hint = ".".join(head)  # The path goes on below a value.
  elif near:
    guess = ".".join([*head, near[0], *rest])
    hint = guess if guess in known else _first(known, ".".join([*head, near[0]]))
  else:
    hint = _same_field_elsewhere(known, path)
  advice = f"did you mean config.{hint}?" if hint else f"known: {', '.join(sorted(names or known))}"
  raise UserError(f"unknown config key config.{path}; {advice}")


def _same_field_elsewhere(known: Sequence[str], path: str) -> str:
  names = [field.rsplit(".", 1)[-1] for field in known]
  near = difflib.get_close_matches(path.rsplit(".", 1)[-1], names, n=1, cutoff=0.7)
  return known[names.index(near[0])] if near else ""


def _first(known: Sequence[str], section: str) -> str:
  return next((f for f in known if f == section or f.startswith(f"{section}.")), section)


def _fields(config: ConfigDict, prefix: str = "") -> Iterable[str]:
  for name in config:
    value = config[name]
    if isinstance(value, ConfigDict) and len(value):
      yield from _fields(value, f"{prefix}{name}.")
    else:
      yield f"{prefix}{name}"
