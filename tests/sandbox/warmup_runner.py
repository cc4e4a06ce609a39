"""Runs in a fresh interpreter: imports modules, warms up or not, runs each snippet in a fork, prints the outcomes."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import sys
import threading
import time
import traceback


def _private_bytes() -> int:
  with open("/proc/self/smaps_rollup", encoding="ascii") as file:
    return next(int(line.split()[1]) << 10 for line in file if line.startswith("Anonymous:"))


def _output(source: str) -> str:
  """What a snippet prints, or the exception that ends it."""
  stream = io.StringIO()
  with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
    try:
      exec(compile(source, "<snippet>", "exec"), {"__name__": "__main__"})
    except (ArithmeticError, NotImplementedError):
      stream.write(traceback.format_exc(limit=0))
  return stream.getvalue()


def _forked(source: str) -> dict[str, object]:
  reader, writer = os.pipe()
  pid = os.fork()
  if pid == 0:
    known = set(sys.modules)
    begin = time.process_time()
    output = _output(source)
    cpu_s = time.process_time() - begin
    text = json.dumps({"output": output, "cpu_s": cpu_s, "modules": sorted(set(sys.modules) - known)})
    with open(writer, "w", encoding="utf-8") as file:
      file.write(text)
    os._exit(0)
  os.close(writer)
  with open(reader, encoding="utf-8") as file:
    text = file.read()
  os.waitpid(pid, 0)
  return json.loads(text)


def main(path: str, modules: list[str], warmed: bool, snippets: list[str]) -> None:
  """Prints one JSON object."""
  for name in modules:
    importlib.import_module(name)
  spec = importlib.util.spec_from_file_location("warmup", path)
  assert spec is not None and spec.loader is not None
  warmup = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(warmup)
  memory, cpu_s = _private_bytes(), time.process_time()
  files = sorted(os.listdir("/proc/self/fd"))
  problems = warmup.warm(modules) if warmed else {}
  facts = {
    "problems": problems,
    "cpu_s": time.process_time() - cpu_s,
    "grown": _private_bytes() - memory,
    "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
    "new_files": sorted(set(os.listdir("/proc/self/fd")) - set(files)),
  }
  runs = [_forked(source) for source in snippets]
  print(json.dumps({"facts": facts, "runs": runs}))


if __name__ == "__main__":
  main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "warm", json.load(sys.stdin))
