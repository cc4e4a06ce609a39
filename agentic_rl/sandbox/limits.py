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

Status = Literal["ok", "error", "timeout", "cpu", "memory", "output", "disk", "exit", "crash", "refused", "infra_error"]
"""How an execution ended; see `ExecResult`."""

LEVELS = ("process", "seccomp", "landlock", "namespace")
"""Names of the isolation, weakest first; `python -m agentic_rl.sandbox --capabilities` says what each leaves open.

* `process`: limits, clean environment, killed process tree. Files, network and other processes are reachable.
* `seccomp`: besides, no network, no new processes, no signals or tracing; files are reachable.
* `landlock`: besides, the content of no file but those of the interpreter and of the scratch directory.
* `namespace`: besides, a root directory, process table, network and IPC of its own, and a size limit on scratch space.
"""

State = Literal["none", "kept", "rolled_back", "replayed", "lost"]
"""What became of a session; see `ExecResult.state`."""

Checkpoint = Literal["auto", "fork", "replay", "none"]
"""What brings a session back after a turn that was killed; see `Interpreter.session`."""


DIED_EARLY = "the process died before it saw the snippet"
"""Begins the `error` of an `infra_error` of a single snippet."""


class SandboxError(Exception):
  """Root of the errors that the interpreter raises."""


class LimitsError(SandboxError, ValueError):
  """A limit or a setting lies outside its range."""


class SourceTypeError(SandboxError, TypeError):
  """The source is not a `str`."""


class SandboxStartError(SandboxError, RuntimeError):
  """The zygote did not start; the message carries the end of its stderr."""


class SandboxClosedError(SandboxError, RuntimeError):
  """The interpreter or the session was used before it was started or after it was closed."""


class SandboxBusyError(SandboxError, RuntimeError):
  """As many snippets wait as the config allows; try again later."""


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
    cpu_s: CPU seconds (`cpu`).
    memory_mib: Address space beyond that of the parent, per process (`memory` if the MemoryError is not caught).
    disk_mib: Space for files in the scratch directory (OSError ENOSPC at level `namespace`). At other levels it is
      measured four times a second, without files that have no name any more; that, and more than 4,096 files, end it
      (`disk`).
    file_mib: Largest file that may be written (OSError EFBIG in the snippet).
    open_files: Open descriptors per process (OSError EMFILE).
    threads: Threads besides the first (RuntimeError). Under uid 0 without a spare uid only memory limits them.
    processes: Processes besides the first (PermissionError or BlockingIOError). Needs level `namespace` or `process`;
      at `process` the kernel exempts uid 0 from it.
    output_bytes: Bytes kept of each of stdout, stderr, value and error; the rest is dropped and counted.
    output_keep: Which part of a longer stdout or stderr is kept: its `head`, its `tail`, or half of both (`middle` is
      left out, and a line says how much). Of value and error it is the head.
    flood_mib: stdout and stderr together beyond this end the execution (`output`).
  """

  wall_s: float = 15.0
  cpu_s: float = 5.0
  memory_mib: int = 512
  disk_mib: int = 32
  file_mib: int = 16
  open_files: int = 64
  threads: int = 32
  processes: int = 0
  output_bytes: int = 16_384
  output_keep: Literal["head", "middle", "tail"] = "head"
  flood_mib: int = 16

  def __post_init__(self) -> None:
    for name, low, high, integral in (
      ("wall_s", 0.01, 86_400, False),
      ("cpu_s", 0.01, 86_400, False),
      ("memory_mib", 16, 1 << 20, True),
      ("disk_mib", 1, 1 << 20, True),
      ("file_mib", 0, 1 << 20, True),
      ("open_files", 16, 65_536, True),
      ("threads", 0, 65_536, True),
      ("processes", 0, 65_536, True),
      ("output_bytes", 64, 16 << 20, True),
      ("flood_mib", 1, 1 << 16, True),
    ):
      _check_range("Limits", name, getattr(self, name), low, high, integral)
    if self.output_keep not in ("head", "middle", "tail"):
      raise LimitsError(f"Limits.output_keep must be 'head', 'middle' or 'tail', got {self.output_keep!r}")


@dataclasses.dataclass(frozen=True)
class InterpreterConfig:
  """How the interpreter runs.

  Attributes:
    slots: Snippets that run at the same time; further ones wait. 0 means max(4, CPUs of the host).
    queue: Snippets that may wait before `run` raises SandboxBusyError; 0 means any number.
    preload: Groups of modules. Each group has parent processes of its own, started when first needed, that import and
      warm up its modules and then fork; a snippet runs in the smallest group that covers the modules it names, and
      imports them for nothing. None means: numpy, then sympy, then scipy, as far as `python` has them. The group
      without modules always exists.
    python: Interpreter that runs the snippets. Give it its own virtual environment to keep the trainer's packages out.
    limits: Limits of a snippet that brings none.
    min_isolation: The weakest of `LEVELS` that will do; below it the interpreter refuses to start.
    max_isolation: The strongest to use, for measurements and for hosts where a stronger one is a nuisance.
    sessions: Sessions that may be open at the same time.
    environment: Variables added to the small fixed environment that snippets see.
    nice: Nice value, also of the scheduler's autogroup where that is writable, so that the trainer goes first.
    total_memory_mib: Memory of all snippets together, enforced by a control group; 0 means no such limit. Refuses to
      start where no control group can be made.
    scratch_dir: Where the private directories lie; empty means the system's temporary directory.
    start_timeout_s: Longest start of a parent, with its preloading.
    stall_s: A parent that does not answer for this long while work is in flight is killed and replaced.
    recycle_growth_mib: A parent whose own memory has grown by this much is replaced when its work is done.
  """

  slots: int = 0
  queue: int = 0
  preload: tuple[tuple[str, ...], ...] | None = None
  python: str = sys.executable
  limits: Limits = Limits()
  min_isolation: str = "landlock"
  max_isolation: str = "namespace"
  sessions: int = 1024
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
  nice: int = 5
  total_memory_mib: int = 0
  scratch_dir: str = ""
  start_timeout_s: float = 60.0
  stall_s: float = 15.0
  recycle_growth_mib: int = 64

  def __post_init__(self) -> None:
    for name, low, high, integral in (
      ("slots", 0, 4096, True),
      ("queue", 0, 1 << 20, True),
      ("sessions", 1, 65_536, True),
      ("nice", 0, 19, True),
      ("total_memory_mib", 0, 1 << 24, True),
      ("start_timeout_s", 0.1, 3600, False),
      ("stall_s", 0.3, 3600, False),
      ("recycle_growth_mib", 1, 1 << 20, True),
    ):
      _check_range("InterpreterConfig", name, getattr(self, name), low, high, integral)
    for name in ("min_isolation", "max_isolation"):
      if getattr(self, name) not in LEVELS:
        raise LimitsError(f"InterpreterConfig.{name} must be one of {', '.join(LEVELS)}, got {getattr(self, name)!r}")
    if LEVELS.index(self.min_isolation) > LEVELS.index(self.max_isolation):
      raise LimitsError(
        f"InterpreterConfig.min_isolation {self.min_isolation!r} is above max_isolation {self.max_isolation!r}"
      )
    for group in () if self.preload is None else self.preload:
      if isinstance(group, str) or not all(isinstance(module, str) and module for module in group):
        raise LimitsError(f"InterpreterConfig.preload must be groups of module names, got {group!r} as a group")

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
  | `timeout`, `cpu`, `output`, `disk` | killed at that limit; what it had written so far is kept |
  | `memory` | an uncaught MemoryError |
  | `exit` | ended by `sys.exit`, `os._exit` or a broken result channel; `exit_code` tells the code |
  | `crash` | ended by a signal that no limit sent; `signal` tells which |
  | `refused` | not run: the source has a NUL or a lone surrogate or is too long, or the level allows no processes |
  | `infra_error` | not the snippet's doing: its process died before it saw the snippet, or the parent process died |

  Attributes:
    status: See the table.
    stdout: What was written to descriptor 1, by whatever means; undecodable bytes are replaced.
    stderr: The same for descriptor 2.
    value: `repr` of the last statement if that is an expression and not None, else empty.
    error: Traceback or message; empty when `ok`.
    limit: Which limit ended it: `wall`, `cpu`, `memory`, `output`, `disk`, or empty.
    wall_s: Seconds from ready to the end.
    cpu_s: User and system seconds of the child and of its waited-for children.
    queue_s: Seconds that it waited for a slot.
    max_rss_bytes: Peak resident memory of the child, shared pages of the parent included.
    exit_code: Exit status of `exit`, else None.
    signal: Signal number of `crash`, else 0.
    stdout_dropped, stderr_dropped, value_dropped, error_dropped: Bytes beyond `Limits.output_bytes` that were not kept.
    files: Content of the files that were asked for and exist, by name.
    state: `none` for a snippet of its own. In a session: `kept` (the next turn sees what this one did), `rolled_back`
      (killed, the next turn sees the state before it), `replayed` (killed, or the process had gone; the state was
      built anew from the session's turns) or `lost` (the next turn starts empty).
    attempt: 1, or more if the interpreter had to try again before the snippet ever started.
    level: Name of the isolation that was in force, one of `LEVELS`.
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
  files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
  state: State = "none"
  attempt: int = 1
  level: str = "process"

  @property
  def ok(self) -> bool:
    """Whether the snippet ran to its end."""
    return self.status == "ok"

  @property
  def truncated(self) -> tuple[str, ...]:
    """Names of the text fields of which something was dropped."""
    return tuple(n for n in ("stdout", "stderr", "value", "error") if getattr(self, n + "_dropped"))
