"""What the interpreter is measured beside: cold Python processes, Jupyter kernels and bubblewrap; and how."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")

# -- processes ---------------------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
  """Process ids of the children, whichever thread has started them."""
  found: list[int] = []
  with contextlib.suppress(OSError):
    for thread in os.listdir(f"/proc/{pid}/task"):
      with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
        found += map(int, file.read().split())
  return found


def tree(pids: Iterable[int]) -> list[int]:
  """Processes and all their descendants."""
  pending, found = list(pids), []
  while pending:
    found.append(pending.pop())
    pending += children(found[-1])
  return found


def cpu_s(pid: int) -> float:
  """User and system seconds of a process and of the children that it has collected; 0 if it has ended."""
  try:
    with open(f"/proc/{pid}/stat", "rb") as file:
      words = file.read().rpartition(b")")[2].split()
  except OSError:
    return 0.0
  return sum(int(word) for word in words[11:15]) / _TICKS


def tree_cpu_s(pids: Iterable[int]) -> float:
  """The same for processes and all their descendants, those that have ended included."""
  return sum(map(cpu_s, tree(pids)))


def own_cpu_s() -> float:
  """User and system seconds of this process."""
  usage = resource.getrusage(resource.RUSAGE_SELF)
  return usage.ru_utime + usage.ru_stime


def pss_mib(pid: int, kind: str = "Pss") -> float:
  """Memory of a process, shared pages in proportion; 0 if it has ended. `Pss_Anon` leaves out pages of files."""
  try:
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
      return next(int(line.split()[1]) for line in file if line.startswith(f"{kind}:")) / 1024
  except (OSError, StopIteration):
    return 0.0


def tree_pss_mib(pids: Iterable[int], kind: str = "Pss") -> float:
  """The same for processes and all their descendants."""
  return sum(pss_mib(pid, kind) for pid in tree(pids))


# -- fresh processes ---------------------------------------------------------------------------------------------------


async def _run(*command: str) -> str:
  process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
  out, _ = await process.communicate()
  if process.returncode:
    raise RuntimeError(f"{command[0]} ended with {process.returncode}")
  return out.decode()


async def cold(code: str) -> str:
  """A fresh interpreter; returns what it has printed."""
  return await _run(sys.executable, "-I", "-c", code)


async def cold_cpu_ms(code: str, count: int) -> float:
  """CPU milliseconds of a fresh interpreter."""
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  for _ in range(count):
    await cold(code)
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  return 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / count


async def bubblewrap(code: str) -> str:
  """A fresh interpreter with namespaces of its own; returns what it has printed."""
  walls = ("--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev")
  return await _run("bwrap", *walls, "--tmpfs", "/tmp", sys.executable, "-I", "-c", code)


async def why_no_bubblewrap() -> str:
  """Why bubblewrap cannot be measured, or an empty string."""
  if shutil.which("bwrap") is None:
    return "bubblewrap is not installed (apt install bubblewrap)"
  try:
    await bubblewrap("pass")
  except RuntimeError as error:
    return f"bubblewrap does not work here: {error}"
  return ""


# -- Jupyter -----------------------------------------------------------------------------------------------------------


def why_no_jupyter() -> str:
  """Why Jupyter kernels cannot be measured, or an empty string."""
  absent = [name for name in ("jupyter_client", "ipykernel") if importlib.util.find_spec(name) is None]
  return f"{' and '.join(absent)} not installed (pip install jupyter_client ipykernel)" if absent else ""


class Kernel:
  """A running Jupyter kernel.

  Attributes:
    start_s: How long it took to start.
  """

  def __init__(self, manager: Any, client: Any, start_s: float) -> None:
    self._manager, self._client, self.start_s = manager, client, start_s

  @classmethod
  async def start(cls) -> Kernel:
    """Starts one and waits until it answers."""
    from jupyter_client.manager import start_new_async_kernel

    begin = time.perf_counter()
    manager, client = await start_new_async_kernel(kernel_name="python3", stderr=subprocess.DEVNULL)
    return cls(manager, client, time.perf_counter() - begin)

  async def run(self, code: str) -> str:
    """Runs one cell; returns what it has printed."""
    texts: list[str] = []

    def take(message: dict[str, Any]) -> None:
      if message["msg_type"] == "stream":
        texts.append(message["content"]["text"])

    reply = await self._client.execute_interactive(code, output_hook=take)
    if reply["content"]["status"] != "ok":
      raise RuntimeError(f"the kernel answered {reply['content']}")
    return "".join(texts)

  @property
  def pid(self) -> int:
    """Its process."""
    return int(self._manager.provisioner.pid)

  async def cpu_ms(self, code: str, count: int) -> float:
    """CPU milliseconds of the kernel for each cell; the client's, which takes about as much, are left out."""
    before = tree_cpu_s([self.pid])
    for _ in range(count):
      await self.run(code)
    return 1e3 * (tree_cpu_s([self.pid]) - before) / count

  async def close(self) -> None:
    """Ends it."""
    self._client.stop_channels()
    await self._manager.shutdown_kernel(now=True)


class Kernels:
  """Several kernels, each of which runs one cell at a time."""

  def __init__(self, kernels: list[Kernel]) -> None:
    self._all = kernels
    self._free: asyncio.Queue[Kernel] = asyncio.Queue()
    for kernel in kernels:
      self._free.put_nowait(kernel)

  @classmethod
  @contextlib.asynccontextmanager
  async def start(cls, count: int) -> AsyncIterator[Kernels]:
    """So many kernels for the time of a `with` block."""
    kernels: list[Kernel] = []
    try:
      for _ in range(count):
        kernels.append(await Kernel.start())
      yield cls(kernels)
    finally:
      for kernel in kernels:
        await kernel.close()

  def __getitem__(self, index: int) -> Kernel:
    return self._all[index]

  async def run(self, code: str) -> str:
    """Runs one cell in one that is free."""
    kernel = await self._free.get()
    try:
      return await kernel.run(code)
    finally:
      self._free.put_nowait(kernel)
