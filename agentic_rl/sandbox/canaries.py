"""Negative tests of the isolation in force, run through the interpreter itself whenever one starts."""

from __future__ import annotations

import ast
import os
import socket
import tempfile
from typing import TYPE_CHECKING

from agentic_rl.sandbox.limits import LEVELS, Limits, SandboxStartError

if TYPE_CHECKING:
  from agentic_rl.sandbox.interpreter import Interpreter

_CLOSED_FROM = {
  "start a process": "seccomp",
  "execute a program": "seccomp",
  "signal its parent": "seccomp",
  "trace its parent": "seccomp",
  "open a network connection": "seccomp",
  "reach an abstract socket of the host": "seccomp",
  "change a mode of the trainer's file": "landlock",
  "read the trainer's file": "landlock",
  "write beside the trainer's file": "landlock",
  "read the environment of another process": "landlock",
  "see the trainer's file": "namespace",
}
"""What a snippet must not be able to do, and from which level on."""

_SNIPPET = """
import ctypes, os, signal, socket
secret, folder, port, name = {arguments!r}
open_ones = []
def probe(what, action):
  try:
    action()
  except OSError:
    return
  open_ones.append(what)
def fork():
  pid = os.fork()
  if pid == 0:
    os._exit(0)
  os.waitpid(pid, 0)
def check(result):
  if result < 0:
    raise OSError
def connect(family, address):
  with socket.socket(family) as s:
    s.settimeout(1.0)
    s.connect(address)
def execute():
  # One argument that no kernel takes: what is denied fails with EPERM, what is allowed with another error.
  libc = ctypes.CDLL(None, use_errno=True)
  libc.execve(b"/nonexistent", None, None)
  if ctypes.get_errno() == 1:
    raise OSError
def environ():
  with open("/proc/%d/environ" % os.getppid(), "rb") as file:
    file.read()
probe("start a process", fork)
probe("execute a program", execute)
probe("signal its parent", lambda: os.kill(os.getppid() or 1, 0))
probe("trace its parent", lambda: check(ctypes.CDLL(None).ptrace(16, os.getppid() or 1, 0, 0)))
probe("open a network connection", lambda: connect(socket.AF_INET, ("127.0.0.1", port)))
probe("reach an abstract socket of the host", lambda: connect(socket.AF_UNIX, name))
probe("change a mode of the trainer's file", lambda: os.chmod(secret, 0o600))
probe("read the trainer's file", lambda: open(secret).close())
probe("write beside the trainer's file", lambda: open(folder + "/new", "w").close())
probe("read the environment of another process", environ)
probe("see the trainer's file", lambda: os.stat(secret))
print(open_ones)
"""


async def find_open(interpreter: Interpreter) -> list[str]:
  """Has a snippet try what the level in force forbids; returns what it could do all the same.

  What a weaker level leaves open is not counted.

  Raises:
    SandboxStartError: The snippet did not run.
  """
  rank = LEVELS.index(interpreter.level)
  if not rank:
    return []
  with tempfile.TemporaryDirectory(prefix="agentic_rl-canary-") as folder, socket.socket() as listener:
    os.chmod(folder, 0o755)
    secret = os.path.join(folder, "secret")
    with open(secret, "w", encoding="ascii") as file:
      file.write("canary")
    os.chmod(secret, 0o644)
    listener.bind(("127.0.0.1", 0))
    listener.listen(4)
    with socket.socket(socket.AF_UNIX) as abstract:
      name = "\0agentic_rl-canary-" + os.urandom(8).hex()
      abstract.bind(name)
      abstract.listen(4)
      arguments = (secret, folder, listener.getsockname()[1], name)
      code = _SNIPPET.format(arguments=arguments).replace("\0", "\\x00")
      result = await interpreter.run(code, Limits(wall_s=20.0, cpu_s=5.0))
  if result.status != "ok":
    raise SandboxStartError(f"the sandbox cannot run its own test ({result.status}): {result.error or result.stderr}")
  found = ast.literal_eval(result.stdout.strip())
  return [what for what in found if LEVELS.index(_CLOSED_FROM[what]) <= rank]
