"""What a snippet may use, what the interpreter is told, and what comes back."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal

MAX_SOURCE_BYTES = 1_000_000
"""Longest source, in UTF-8 bytes; a longer one is `refused`."""

Status = Literal["ok", "error", "timeout", "cpu", "memory", "output", "exit", "crash", "refused", "infra_error"]
"""How an execution ended; see `ExecResult`."""


class SandboxError(Exception):
  """Root of the errors that the interpreter raises."""


class LimitsError(SandboxError, ValueError):
  """A limit or a setting lies outside its range."""


class SourceTypeError(SandboxError, TypeError):
  """The source is not a `str`."""


class SandboxStartError(SandboxError, RuntimeError):
  """The zygote did not start; the message carries the end of its stderr."""


class SandboxClosedError(SandboxError, RuntimeError):
  """The interpreter was used before `start` or after `close`."""


def _check_range(owner: str, name: str, value: Any, low: float, high: float, integral: bool) -> None:
  kinds = (int,) if integral else (int, float)
  if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
    raise LimitsError(f"{owner}.{name} must be {'an integer' if integral else 'a number'}, got {value!r}")
  if not low <= value <= high:
    raise LimitsError(f"{owner}.{name} must lie in [{low:g}, {high:g}], got {value!r}")


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one execution may use. Time in the queue does not count.

  CPU time is the limit that should bind: wall time on a busy host says little about the snippet, so keep it generous.

  Attributes:
    wall_s: Seconds from the moment that the child is ready; then its process tree is killed (`timeout`).
    cpu_s: CPU seconds of one process, rounded up to whole seconds by the kernel (`cpu`).
    memory_mib: Address space beyond that of the zygote, per process (`memory` if the MemoryError is not caught).
    file_mib: Largest file that may be written (OSError EFBIG in the snippet).
    open_files: Open descriptors per process (OSError EMFILE).
    processes: Processes and threads beyond those of the host (BlockingIOError). Does not bind for uid 0.
    output_bytes: Bytes kept of each of stdout, stderr, value and error; the rest is dropped and counted.
    flood_mib: stdout and stderr together beyond this end the execution (`output`).
  """

  wall_s: float = 15.0
  cpu_s: float = 5.0
  memory_mib: int = 512
  file_mib: int = 16
  open_files: int = 64
  processes: int = 32
  output_bytes: int = 16_384
  flood_mib: int = 16

  def __post_init__(self) -> None:
    for name, low, high, integral in (
      ("wall_s", 0.01, 86_400, False),
      ("cpu_s", 0.01, 86_400, False),
      ("memory_mib", 16, 1 << 20, True),
      ("file_mib", 0, 1 << 20, True),
      ("open_files", 16, 65_536, True),
      ("processes", 0, 65_536, True),
      ("output_bytes", 64, 16 << 20, True),
      ("flood_mib", 1, 1 << 16, True),
    ):
      _check_range("Limits", name, getattr(self, name), low, high, integral)


@dataclasses.dataclass(frozen=True)
class InterpreterConfig:
  """How the interpreter runs.

  Attributes:
    slots: Snippets that run at the same time; further ones wait. 0 means max(4, CPUs of the host).
    preload: Modules that the zygote imports before it forks, e.g. `("numpy", "sympy")`. A snippet then
      imports them for nothing, but each fork is dearer; empty is best for snippets without imports.
    python: Interpreter that runs the snippets. Give it its own virtual environment to keep the trainer's packages out.
    limits: Limits of a snippet that brings none.
    environment: Variables added to the small fixed environment that snippets see.
    nice: Nice value, also of the scheduler's autogroup where that is writable, so that the trainer goes first.
    scratch_dir: Where the private working directories lie; empty means the system's temporary directory.
    start_timeout_s: Longest start of a zygote, with its preloading.
    stall_s: A zygote that does not answer for this long while work is in flight is killed and replaced.
  """

  slots: int = 0
  preload: tuple[str, ...] = ()
  python: str = sys.executable
  limits: Limits = Limits()
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
  nice: int = 5
  scratch_dir: str = ""
  start_timeout_s: float = 60.0
  stall_s: float = 15.0

  def __post_init__(self) -> None:
    for name, low, high, integral in (
      ("slots", 0, 4096, True),
      ("nice", 0, 19, True),
      ("start_timeout_s", 0.1, 3600, False),
      ("stall_s", 0.3, 3600, False),
    ):
      _check_range("InterpreterConfig", name, getattr(self, name), low, high, integral)
    if isinstance(self.preload, str) or not all(isinstance(m, str) and m for m in self.preload):
      raise LimitsError(f"InterpreterConfig.preload must be a sequence of module names, got {self.preload!r}")

  def resolved_slots(self) -> int:
    """Number of slots, with the default filled in."""
    return self.slots or max(4, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True)
class ExecResult:
  """What one execution did.

  | status | meaning |
  |---|---|
  | `ok` | ran to its end |
  | `error` | an exception, or source that does not compile; `error` has the traceback of the snippet's own frames |
  | `timeout`, `cpu`, `output` | killed at that limit; what it had written so far is kept |
  | `memory` | an uncaught MemoryError |
  | `exit` | ended by `sys.exit`, `os._exit` or a broken result channel; `exit_code` tells the code |
  | `crash` | ended by a signal that no limit sent; `signal` tells which |
  | `refused` | not run: the source has a NUL or a lone surrogate or is too long; `error` says which |
  | `infra_error` | not the snippet's doing: the child died before it saw the snippet, or the zygote died |

  Attributes:
    status: See the table.
    stdout: What was written to descriptor 1, by whatever means; undecodable bytes are replaced.
    stderr: The same for descriptor 2.
    value: `repr` of the last statement if that is an expression and not None, else empty.
    error: Traceback or message; empty when `ok`.
    limit: Which limit ended it: `wall`, `cpu`, `memory`, `output`, or empty.
    wall_s: Seconds from ready to the end.
    cpu_s: User and system seconds of the child and of its waited-for children.
    queue_s: Seconds that it waited for a slot.
    max_rss_bytes: Peak resident memory of the child, shared pages of the zygote included.
    exit_code: Exit status of `exit`, else None.
    signal: Signal number of `crash`, else 0.
    stdout_dropped, stderr_dropped, value_dropped, error_dropped: Bytes beyond `Limits.output_bytes` that were not kept.
    attempt: 1, or 2 if the interpreter had to try again before the snippet ever started.
    level: Name of the isolation that was in force.
  """

  status: Status
  stdout: str = ""
  stderr: str = ""
  value: str = ""
  error: str = ""
  limit: str = ""
  wall_s: float = 0.0
  cpu_s: float = 0.0
  queue_s: float = 0.0
  max_rss_bytes: int = 0
  exit_code: int | None = None
  signal: int = 0
  stdout_dropped: int = 0
  stderr_dropped: int = 0
  value_dropped: int = 0
  error_dropped: int = 0
  attempt: int = 1
  level: str = "none"

  @property
  def ok(self) -> bool:
    """Whether the snippet ran to its end."""
    return self.status == "ok"

  @property
  def truncated(self) -> tuple[str, ...]:
    """Names of the text fields of which something was dropped."""
    return tuple(n for n in ("stdout", "stderr", "value", "error") if getattr(self, n + "_dropped"))
