"""Starts launch scripts, one after another, each in a fork of a process that has imported everything already.

Reads a JSON line `{"script", "args", "log"}`, answers with the pid, then with `{"code", "seconds", "left"}` once the
script has ended; `left` counts the processes that outlived it by more than two seconds. No device is touched before
the fork, so that each script finds JAX as in a process of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import runpy
import sys
import time

import agentic_rl.train.rl
import agentic_rl.train.sft  # noqa: F401

PR_SET_CHILD_SUBREAPER = 36


def run(script: str, args: list[str], log: str) -> None:
  """In the child: becomes `python script args`."""
  out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.dup2(out, 1)
  os.dup2(out, 2)
  sys.argv = [script, *args]
  sys.stdin = open(0, closefd=False)
  code = 0
  try:
    runpy.run_path(script, run_name="__main__")
  except SystemExit as error:
    code = error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error.code, str):
      print(error.code, file=sys.stderr)
  except BaseException:  # noqa: BLE001 - this is what the interpreter itself does at the top
    sys.excepthook(*sys.exc_info())
    code = 1
  sys.stdout.flush()
  sys.stderr.flush()
  # Not `os._exit`: what hangs at the end of a process shall hang here as well.
  sys.exit(code)


def wait_for_orphans() -> int:
  deadline = time.monotonic() + 2
  while True:
    try:
      if os.waitpid(-1, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
          return len(children())
        time.sleep(0.02)
    except ChildProcessError:
      return 0


def children() -> list[str]:
  found = []
  for pid in filter(str.isdigit, os.listdir("/proc")):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
      if file.read().rsplit(")", 1)[1].split()[1] == str(os.getpid()):
        found.append(pid)
  return found


def main() -> None:
  # Orphans of a script become children of this process and can be counted.
  ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
  gc.freeze()  # so that a child does not copy every page of what is imported when it ends
  for line in sys.stdin:
    request = json.loads(line)
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
      run(**request)
    print(pid, flush=True)
    _, status = os.waitpid(pid, 0)
    seconds = time.monotonic() - began
    answer = {"code": os.waitstatus_to_exitcode(status), "seconds": seconds, "left": wait_for_orphans()}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
  main()
