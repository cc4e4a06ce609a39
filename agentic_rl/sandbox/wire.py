"""What the interpreter's service and its client say to each other: JSON, checked field by field on both sides."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import math
import reprlib
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_args

from agentic_rl.sandbox.limits import LEVELS, Checkpoint, ExecResult, Limits, LimitsError, SandboxError, State, Status

UNKNOWN_LEVEL = "unknown"
"""`ExecResult.level` where the server does not tell what isolation it has."""

INSTANCE_HEADER = "X-Sandbox-Instance"
"""Header of each answer of our own servers: a name of the process that gives it."""
MAX_NAME = 200
"""Longest name: of an owner, a request or a session."""

_MOST_DIGITS = 300  # as many as a float can take
_BRIEF = reprlib.Repr()  # looks at little of a value, however large or deep that is
_BRIEF.maxstring = _BRIEF.maxlong = _BRIEF.maxother = 80
_BRIEF.maxlevel = 2


class WireError(SandboxError, ValueError):
  """A message does not have the form that it should have; the text names the field."""


# -- fields ------------------------------------------------------------------------------------------------------------


def parse(body: bytes) -> Any:
  """Reads JSON.

  Raises:
    WireError: It is not JSON.
  """
  try:
    return json.loads(body, parse_int=_whole)
  except (ValueError, RecursionError) as error:
    raise WireError(f"the body is not JSON: {error}") from error


def _whole(digits: str) -> int:
  if len(digits) > _MOST_DIGITS:
    raise ValueError(f"a number has {len(digits)} digits, more than {_MOST_DIGITS}")
  return int(digits)


def dump(value: Any) -> bytes:
  """Writes JSON. All but ASCII is escaped, so that lone surrogates survive as well."""
  return json.dumps(value, separators=(",", ":")).encode("ascii")


def _say(kind: str) -> Callable[[str, Any], WireError]:
  return lambda name, value: WireError(f"field {name!r} must be {kind}, got {_shown(value)}")


def _shown(value: Any) -> str:
  return value if isinstance(value, str) and value.startswith("nothing") else _BRIEF.repr(value)


def text(name: str, value: Any) -> str:
  """A string."""
  if not isinstance(value, str):
    raise _say("a string")(name, value)
  return value


def input_text(name: str, value: Any) -> str:
  """A string for standard input, which has to have bytes."""
  try:
    text(name, value).encode("utf-8", "surrogateescape")
  except UnicodeEncodeError as error:
    raise WireError(f"field {name!r} has a lone surrogate at position {error.start}") from error
  return str(value)


def short_text(name: str, value: Any) -> str:
  """A string that names something."""
  if len(text(name, value)) > MAX_NAME:
    raise _say(f"a string of at most {MAX_NAME} characters")(name, value)
  return str(value)


def integer(name: str, value: Any) -> int:
  """A whole number."""
  if isinstance(value, bool) or not isinstance(value, int):
    raise _say("an integer")(name, value)
  return value


def number(name: str, value: Any) -> float:
  """A finite number."""
  if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
    raise _say("a number")(name, value)
  return value


def count(name: str, value: Any) -> int:
  """A whole number from 0 on."""
  if integer(name, value) < 0:
    raise _say("an integer from 0 on")(name, value)
  return int(value)


def positive(name: str, value: Any) -> int:
  """A whole number from 1 on."""
  if integer(name, value) < 1:
    raise _say("an integer from 1 on")(name, value)
  return int(value)


def seconds(name: str, value: Any) -> float:
  """A finite number from 0 on."""
  if number(name, value) < 0:
    raise _say("a number from 0 on")(name, value)
  return float(value)


def mapping(name: str, value: Any) -> dict[str, Any]:
  """An object."""
  if not isinstance(value, dict):
    raise _say("an object")(name, value)
  return value


def names(name: str, value: Any) -> tuple[str, ...]:
  """A list of strings."""
  if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
    raise _say("a list of strings")(name, value)
  return tuple(value)


def one_of(*choices: str) -> Callable[[str, Any], Any]:
  """One of some strings."""

  def check(name: str, value: Any) -> str:
    if not isinstance(value, str) or value not in choices:
      raise _say("one of " + ", ".join(choices))(name, value)
    return value

  return check


def optional(check: Callable[[str, Any], Any], default: Any = None) -> Callable[[str, Any], Any]:
  """Null, which stands for the default, or what another check says."""
  return lambda name, value: default if value is None else check(name, value)


def files(name: str, value: Any) -> dict[str, bytes]:
  """Contents in base64 by file name."""
  found = {}
  for key, content in mapping(name, value).items():
    if not isinstance(content, str):
      raise _say("base64 text")(f"{name}.{key[:MAX_NAME]}", content)
    try:
      found[key] = base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
      raise WireError(f"field {name + '.' + key[:MAX_NAME]!r} is not base64: {error}") from error
  return found


def encode_files(contents: Mapping[str, bytes]) -> dict[str, str]:
  """The reverse of `files`."""
  return {name: base64.b64encode(content).decode("ascii") for name, content in contents.items()}


def fields(
  value: Any, required: Mapping[str, Callable[[str, Any], Any]], known: Mapping[str, tuple[Any, Any]], where: str = ""
) -> dict[str, Any]:
  """Checks an object.

  Args:
    value: What came.
    required: Checks of the fields that have to be there.
    known: Checks and defaults of those that may be missing.
    where: What the object is, for the message; empty for the whole body.

  Raises:
    WireError: A field is missing, unknown or of the wrong kind.
  """
  if not isinstance(value, dict):
    raise _say("an object")(where, value) if where else WireError("the body must be a JSON object")
  prefix = f"{where}." if where else ""
  for name in value:
    if name not in required and name not in known:
      options = ", ".join([*required, *known])
      raise WireError(f"unknown field {prefix + name[:MAX_NAME]!r}; there are {options}")
  found: dict[str, Any] = {}
  for name, check in required.items():
    if name not in value:
      raise WireError(f"field {prefix + name!r} is missing")
    found[name] = check(prefix + name, value[name])
  for name, (check, default) in known.items():
    found[name] = check(prefix + name, value[name]) if name in value else default
  return found


# -- limits and results ------------------------------------------------------------------------------------------------

_LIMITS = frozenset(field.name for field in dataclasses.fields(Limits))


def limits(value: Any, default: Limits, where: str = "limits") -> Limits:
  """Limits of which some are given and the rest come from `default`.

  Raises:
    WireError: There is no such limit, or it lies outside its range.
  """
  for name in mapping(where, value):
    if name not in _LIMITS:
      raise WireError(f"unknown field {where + '.' + name[:MAX_NAME]!r}; there are {', '.join(sorted(_LIMITS))}")
  try:
    return dataclasses.replace(default, **value)
  except LimitsError as error:
    raise WireError(f"field {where!r}: {error}") from error


@dataclasses.dataclass(frozen=True)
class RunRequest:
  """A snippet, or a turn of a session, as it was asked for.

  Attributes:
    code: Python source.
    limits: Limits, or None for the server's.
    seed: As for `Interpreter.run`.
    stdin: As for `Interpreter.run`.
    files: As for `Interpreter.run`.
    fetch: As for `Interpreter.run`.
    owner: As for `Interpreter.run`.
    request_id: The same snippet asked for again has the same; empty where there is none.
  """

  code: str
  limits: Limits | None = None
  seed: int = 0
  stdin: str = ""
  files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
  fetch: tuple[str, ...] = ()
  owner: str = ""
  request_id: str = ""


def run_request(value: Any, default: Limits) -> RunRequest:
  """Reads the body of `POST /v1/run`."""
  found = fields(
    value,
    {"code": text},
    {
      "limits": (optional(lambda name, item: limits(item, default, name)), None),
      "seed": (integer, 0),
      "stdin": (input_text, ""),
      "files": (files, {}),
      "fetch": (names, ()),
      "owner": (short_text, ""),
      "request_id": (short_text, ""),
    },
  )
  return RunRequest(**found)


def encode_run_request(request: RunRequest, used: Limits) -> dict[str, Any]:
  """The reverse of `run_request`."""
  found = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
  return found | {"limits": encode_limits(used), "files": encode_files(request.files), "fetch": list(request.fetch)}


def session_request(value: Any, default: Limits) -> dict[str, Any]:
  """Reads the body of `POST /v1/sessions` into the arguments of `Interpreter.session`."""
  return fields(
    value,
    {},
    {
      "limits": (optional(lambda name, item: limits(item, default, name)), None),
      "seed": (integer, 0),
      "checkpoint": (one_of(*get_args(Checkpoint)), "auto"),
      "owner": (short_text, ""),
    },
  )


def session_name(value: Any) -> str:
  """Reads the answer of `POST /v1/sessions`."""
  name: str = fields(value, {"session": short_text}, {})["session"]
  if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
    raise _say("a name of letters and digits")("session", name)
  return name


def turn_request(value: Any, default: Limits) -> tuple[int, RunRequest]:
  """Reads the body of `POST /v1/sessions/{id}/run`: the number of the turn, and what to run."""
  found = fields(
    value,
    {"code": text, "turn": integer},
    {"limits": (optional(lambda name, item: limits(item, default, name)), None), "stdin": (input_text, "")},
  )
  return found.pop("turn"), RunRequest(**found)


_RESULT: dict[str, Callable[[str, Any], Any]] = {
  "status": one_of(*get_args(Status)),
  **dict.fromkeys(("stdout", "stderr", "value", "error"), text),
  "limit": one_of("", "wall", "cpu", "memory", "output", "disk"),
  **dict.fromkeys(("wall_s", "cpu_s", "queue_s"), seconds),
  "max_rss_bytes": count,
  "exit_code": optional(integer),
  "signal": count,
  **dict.fromkeys(("stdout_dropped", "stderr_dropped", "value_dropped", "error_dropped"), count),
  "files": files,
  "state": one_of(*get_args(State)),
  "attempt": positive,
  "level": one_of(*LEVELS, UNKNOWN_LEVEL),
}


def encode_result(result: ExecResult) -> dict[str, Any]:
  """A result as JSON has it."""
  found = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
  return found | {"files": encode_files(result.files)}


def decode_result(value: Any, fetch: Collection[str] = ()) -> ExecResult:
  """The reverse of `encode_result`; nothing is taken that does not have its type.

  Args:
    value: What came.
    fetch: Names of the files that were asked for.

  Raises:
    WireError: It is not a result, or has a file that was not asked for.
  """
  result = ExecResult(**fields(value, _RESULT, {}))
  for name in result.files:
    if name not in fetch:
      raise WireError(f"field 'files' has {name[:MAX_NAME]!r}, which was not asked for")
  return result


def encode_limits(value: Limits) -> dict[str, Any]:
  """Limits as JSON has them."""
  return dataclasses.asdict(value)


# -- SandboxFusion's form ----------------------------------------------------------------------------------------------

_FINISHED, _ERROR, _TIMED_OUT = "Finished", "Error", "TimeLimitExceeded"
_KILLED = {"output": 9, "disk": 9}


def _fusion_files(name: str, value: Any) -> dict[str, bytes]:
  """Contents by file name, of which those that are null do not count."""
  return files(name, {key: content for key, content in mapping(name, value).items() if content is not None})


def fusion_request(value: Any, default: Limits) -> RunRequest:
  """Reads the body of `POST /run_code`.

  Raises:
    WireError: It does not have SandboxFusion's form, or asks for what is not offered here.
  """
  found = fields(
    value,
    {"code": text, "language": text},
    {
      "compile_timeout": (seconds, 0.0),
      "run_timeout": (seconds, default.wall_s),
      "memory_limit_MB": (integer, -1),
      "stdin": (optional(input_text, ""), ""),
      "files": (_fusion_files, {}),
      "fetch_files": (names, ()),
      "args": (names, ()),
    },
  )
  if found["language"] != "python":
    raise WireError(f"field 'language' must be python, the one language here, got {found['language'][:MAX_NAME]!r}")
  if found["args"]:
    raise WireError("field 'args' must be empty; a snippet takes no arguments here")
  wall, memory = found["run_timeout"], found["memory_limit_MB"]
  chosen: dict[str, Any] = {"wall_s": wall, "cpu_s": min(wall, default.cpu_s)}
  if memory > 0:
    chosen["memory_mib"] = memory
  try:
    used = dataclasses.replace(default, **chosen)
  except LimitsError as error:
    named = "memory_limit_MB" if "memory_mib" in str(error) else "run_timeout"
    raise WireError(f"field {named!r}: {error}") from error
  return RunRequest(
    found["code"], used, stdin=found["stdin"], files=found["files"], fetch=found["fetch_files"], owner=""
  )


def encode_fusion(result: ExecResult) -> dict[str, Any]:
  """A result as SandboxFusion gives it: that of a script, which shows no value.

  A snippet that was killed at its time limit has no return code. One that was killed for its output or its files looks
  like any that was killed, with return code -9.
  """
  ran: dict[str, Any] = {
    "status": _FINISHED,
    "execution_time": result.wall_s,
    "return_code": 1,
    "stdout": result.stdout,
    "stderr": result.stderr + result.error,
  }
  failed = result.status == "infra_error"
  if failed:
    ran |= {"status": _ERROR, "return_code": None}
  elif result.status in ("timeout", "cpu"):
    ran |= {"status": _TIMED_OUT, "return_code": None}
  elif result.status == "ok":
    ran["return_code"] = 0
  elif result.status == "exit":
    ran["return_code"] = result.exit_code if result.exit_code is not None else 1
  elif result.status == "crash" or result.status in _KILLED:
    ran["return_code"] = -(result.signal or _KILLED.get(result.status, 9))
  status = "SandboxError" if failed else "Success" if ran["return_code"] == 0 else "Failed"
  return {
    "status": status,
    "message": result.error if failed else "",
    "compile_result": None,
    "run_result": ran,
    "executor_pod_name": None,
    "files": encode_files(result.files),
  }


def encode_fusion_request(request: RunRequest, used: Limits) -> dict[str, Any]:
  """A snippet as SandboxFusion wants it."""
  return {
    "code": request.code,
    "language": "python",
    "compile_timeout": used.wall_s,
    "run_timeout": used.wall_s,
    "memory_limit_MB": used.memory_mib,
    "stdin": request.stdin,
    "files": encode_files(request.files),
    "fetch_files": list(request.fetch),
  }


def decode_fusion(value: Any, request: RunRequest, used: Limits) -> ExecResult:
  """Makes a result of SandboxFusion's answer. Outputs are cut to the limits here, as the server does not.

  Raises:
    WireError: It does not have SandboxFusion's form.
  """
  answer = mapping("body", value)
  status = one_of("Success", "Failed", "SandboxError")("status", answer.get("status"))
  if status == "SandboxError":
    why = text("message", answer.get("message"))[: used.output_bytes]
    return ExecResult("infra_error", error=why or "the server reports SandboxError", level=UNKNOWN_LEVEL)
  ran = mapping("run_result", answer.get("run_result"))
  how = one_of(_FINISHED, _ERROR, _TIMED_OUT)("run_result.status", ran.get("status"))
  code = optional(integer)("run_result.return_code", ran.get("return_code"))
  out = optional(text, "")("run_result.stdout", ran.get("stdout"))
  err = optional(text, "")("run_result.stderr", ran.get("stderr"))
  took = optional(seconds, 0.0)("run_result.execution_time", ran.get("execution_time"))
  sent = files("files", answer.get("files", {}))
  found: dict[str, Any] = {"status": "ok"}
  if how == _ERROR:
    found = {"status": "infra_error", "error": err or "the server reports Error"}
  elif how == _TIMED_OUT:
    found = {"status": "timeout", "limit": "wall", "error": f"Killed after {took:g} s of wall time.\n"}
  elif code is None:
    raise _say("an integer")("run_result.return_code", None)
  elif code < 0:
    found = {"status": "crash", "signal": -code, "error": f"Killed by signal {-code}.\n"}
  elif code:
    before, trace = _split_traceback(err) if code == 1 else (err, "")
    memory = trace.rstrip().rpartition("\n")[2].startswith("MemoryError")
    found = {"status": "exit", "exit_code": code}
    if trace:
      found = {"status": "memory" if memory else "error", "error": trace, "limit": "memory" if memory else ""}
    err = before
  for name, whole in (("stdout", out), ("stderr", err), ("error", found.get("error", ""))):
    data = whole.encode("utf-8", "replace")
    found[name] = data[: used.output_bytes].decode("utf-8", "replace")
    found[name + "_dropped"] = max(0, len(data) - used.output_bytes)
  fetched = {name: sent[name] for name in request.fetch if name in sent}
  return ExecResult(**found, wall_s=took, files=fetched, level=UNKNOWN_LEVEL)


def _split_traceback(err: str) -> tuple[str, str]:
  """Parts the traceback at the end of a script's stderr from what it wrote itself."""
  for mark in ("Traceback (most recent call last):\n", '  File "'):
    start = ("\n" + err).rfind("\n" + mark)
    if start >= 0:
      return err[:start], err[start:]
  return err, ""
