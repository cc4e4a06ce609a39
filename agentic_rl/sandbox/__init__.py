"""Runs untrusted Python, such as a policy writes it, in processes of its own.

```python
async with await Interpreter.start(InterpreterConfig()) as interpreter:
  result = await interpreter.run("sum(range(10))")
assert result.status == "ok" and result.value == "45"
```

A zygote process, started afresh and free of the trainer's modules, forks one child for each snippet.

What is covered:

* Wall time, CPU time, address space, file size, open files, output; processes too unless the user is root.
* The whole process tree of a snippet is killed when it ends, daemons included. When the trainer dies, by whatever
  signal, all of it ends. Processes that outlive even a killed zygote are found by a mark in their environment.
* A clean environment, no inherited descriptor, a private working directory that is removed, /dev/null as stdin.
* No new privileges, and no capabilities: under root, a snippet cannot raise its limits, nor read the memory or the
  environment of the trainer.
* Typed results. Nothing that a snippet writes is parsed as anything but bounded bytes.

What is not covered:

* Files. A snippet can read what the trainer's user can read, write what it can write, and see the host's processes.
* The network: a snippet can open connections.
* Signals: a snippet can kill or stop processes of the same user, the trainer and the zygote among them. A killed or
  stopped zygote is replaced, and what ran is reported as `infra_error`: by this one way a snippet can cause one, also
  to others. Without root it can also read the environment and the memory of the trainer.
* Disk space as a whole, and the number of processes under root. Wall time bounds both.
* Memory as a whole: the limit is per process. Faults of the kernel.

Run it in a container of its own where that matters. `python -m agentic_rl.sandbox --capabilities` prints what is in
force.
"""

from __future__ import annotations

from agentic_rl.sandbox.interpreter import Interpreter
from agentic_rl.sandbox.limits import (
  LEVELS,
  MAX_SOURCE_BYTES,
  ExecResult,
  InterpreterConfig,
  Limits,
  LimitsError,
  SandboxClosedError,
  SandboxError,
  SandboxStartError,
  SourceTypeError,
  Status,
)

__all__ = [
  "LEVELS",
  "MAX_SOURCE_BYTES",
  "ExecResult",
  "Interpreter",
  "InterpreterConfig",
  "Limits",
  "LimitsError",
  "SandboxClosedError",
  "SandboxError",
  "SandboxStartError",
  "SourceTypeError",
  "Status",
]
