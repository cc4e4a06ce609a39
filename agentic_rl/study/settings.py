"""What a run of a sweep was started with, noted beside its results, so that runs of different settings never mix."""

from __future__ import annotations

import ast
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from agentic_rl.errors import UserError
from agentic_rl.train.config_check import check_key, load_config

FILE_NAME = "launched.json"
_ABSENT = "absent"
_NAMED = 5  # Differences that a message names.

Settings = Mapping[str, Any]
"""Every field of a recipe by its dotted name."""


def split_overrides(texts: Sequence[str]) -> dict[str, str]:
  """`["train.iterations=3"]` as `{"train.iterations": "3"}`. Raises `UserError` where there is no `=`."""
  overrides = {}
  for text in texts:
    field, equals, value = text.partition("=")
    if not equals:
      raise UserError(f"the override {text!r} has no value; write section.field=value")
    overrides[field] = value
  return overrides


def resolve(recipe: str | os.PathLike[str], overrides: Mapping[str, Any]) -> Settings:
  """The fields of a recipe as a run with these overrides has them, in the form that JSON gives back.

  Args:
    recipe: Config file.
    overrides: Values by field; strings as they stand on a command line.

  Raises:
    UserError: There is no such recipe or field.
  """
  config = load_config(str(recipe))
  for field in overrides:
    check_key(config, field)
  values = _flat(config.to_dict()) | {field: _value(value) for field, value in overrides.items()}
  settings: dict[str, Any] = json.loads(json.dumps(values, default=str))
  return settings


def note(directory: pathlib.Path, settings: Settings) -> None:
  """Writes `launched.json` into a run directory."""
  from agentic_rl.train.publication import write_text  # Imported here: Orbax takes seconds.

  directory.mkdir(parents=True, exist_ok=True)
  write_text(directory / FILE_NAME, json.dumps(settings, indent=1, sort_keys=True) + "\n")


def check(directory: pathlib.Path, settings: Settings) -> None:
  """Raises `UserError`, naming what differs, unless a run directory was started with these settings."""
  try:
    before = json.loads((directory / FILE_NAME).read_bytes())
  except (FileNotFoundError, ValueError) as error:
    raise UserError(
      f"{directory} does not say with which settings it was run: {FILE_NAME} is missing or broken; choose another "
      "workdir or delete the directory"
    ) from error
  changed = [n for n in sorted(before.keys() | settings.keys()) if before.get(n, _ABSENT) != settings.get(n, _ABSENT)]
  if not changed:
    return
  was, now = (
    ", ".join(f"{name}={values.get(name, _ABSENT)}" for name in changed[:_NAMED]) for values in (before, settings)
  )
  more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
  raise UserError(
    f"{directory} was run with {was}{more}, now it would be {now}; give the same settings again, choose another "
    "workdir or delete the directory"
  )


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  flat: dict[str, Any] = {}
  for name, value in values.items():
    flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
  return flat


def _value(value: Any) -> Any:
  """What a text on the command line says, so that `1e-3` is the `0.001` of a recipe; anything else is left as it is."""
  if not isinstance(value, str):
    return value
  if value.lower() in ("true", "false"):
    return value.lower() == "true"
  try:
    return ast.literal_eval(value)
  except (ValueError, SyntaxError):
    return value
