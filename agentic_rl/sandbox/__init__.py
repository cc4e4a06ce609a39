"""Runs untrusted Python, such as a policy writes it, in processes of its own.

```python
async with await Interpreter.start(InterpreterConfig()) as interpreter:
  result = await interpreter.run("sum(range(10))")
assert result.status == "ok" and result.value == "45"
```

A parent process, started afresh and free of the trainer's modules, forks one child for each snippet or session. Groups
of modules (numpy, sympy, scipy) have parents of their own, which have imported and warmed them up.

What is covered at every level (`LEVELS`):

* Wall and CPU time, memory, file size, open files, output, disk space.
* The whole process tree of a snippet is killed when it ends. When the trainer dies, by whatever signal, all of it ends.
* A clean environment, no inherited descriptor, a private working directory that is removed, no terminal.
* No new privileges and no capabilities; a user of its own where the host allows that.
* Typed results. Nothing that a snippet writes is parsed as anything but bounded bytes.

From `seccomp` on there are no other processes, no network and no signals to others, so that a snippet cannot feign a
failure of the infrastructure; from `landlock` on no files but the interpreter's; at `namespace` a root directory of its
own. The strongest level that the host allows is found and tested at start; `InterpreterConfig.min_isolation` refuses to
run below. `python -m agentic_rl.sandbox --capabilities` prints what is in force and what it leaves open.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agentic_rl.sandbox.interpreter import Interpreter
from agentic_rl.sandbox.limits import (
  LEVELS,
  MAX_SOURCE_BYTES,
  Checkpoint,
  ExecResult,
  InterpreterConfig,
  Limits,
  LimitsError,
  SandboxBusyError,
  SandboxClosedError,
  SandboxError,
  SandboxStartError,
  SourceTypeError,
  State,
  Status,
)
from agentic_rl.sandbox.session import Session

if TYPE_CHECKING:
  from agentic_rl.sandbox.client import RemoteConfig, RemoteInterpreter, RemoteSession

_REMOTE = ("RemoteConfig", "RemoteInterpreter", "RemoteSession")


def __getattr__(name: str) -> Any:
  """The client of a server is imported when first asked for, since nothing else here needs an HTTP library."""
  if name in _REMOTE:
    return getattr(importlib.import_module("agentic_rl.sandbox.client"), name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
  "LEVELS",
  "MAX_SOURCE_BYTES",
  "Checkpoint",
  "ExecResult",
  "Interpreter",
  "InterpreterConfig",
  "Limits",
  "LimitsError",
  "RemoteConfig",
  "RemoteInterpreter",
  "RemoteSession",
  "SandboxBusyError",
  "SandboxClosedError",
  "SandboxError",
  "SandboxStartError",
  "Session",
  "SourceTypeError",
  "State",
  "Status",
]
