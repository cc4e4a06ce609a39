"""What the interpreter is measured beside: cold Python processes, Jupyter kernels and bubblewrap; and how."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterable

_TICKS = os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
  """Process ids of the children."""
  try:
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
      return [int(word) for word in file.read().split()]
  except OSError:
    return []


def cpu_s(pid: int) -> float:
  """User and system seconds of a process and of the children that it has collected."""
  with open(f"/proc/{pid}/stat", "rb") as file:
    words = file.read().rpartition(b")")[2].split()
  return sum(int(word) for word in words[11:15]) / _TICKS


def tree_pss_mib(pids: Iterable[int]) -> float:
  """Proportional share of memory of processes and all their descendants."""
  total = 0
  pending = list(pids)
  while pending:
    pid = pending.pop()
    pending += children(pid)
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
      total += next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
  return total / 1024


async def _run(*command: str) -> None:
  process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
  await process.communicate()
  if process.returncode:
    raise RuntimeError(f"{command[0]} ended with {process.returncode}")


async def cold(code: str) -> None:
  """A fresh interpreter, without the site's path handling."""
  await _run(sys.executable, "-I", "-c", code)


async def cold_cpu_ms(code: str, count: int) -> float:
  """CPU milliseconds of a fresh interpreter."""
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  for _ in range(count):
    await cold(code)
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  return 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / count


def has_bubblewrap() -> bool:
  """Whether bubblewrap is installed."""
  return shutil.which("bwrap") is not None


async def bubblewrap(code: str) -> None:
  """A fresh interpreter with namespaces of its own."""
  await _run(
    "bwrap",
    "--unshare-all",
    "--die-with-parent",
    "--ro-bind",
    "/",
    "/",
    "--tmpfs",
    "/tmp",
    sys.executable,
    "-I",
    "-c",
    code,
  )


def missing() -> list[str]:
  """Peers that are not installed, and how to get them."""
  reasons = []
  if not has_bubblewrap():
    reasons.append("bubblewrap (apt-get install bubblewrap)")
  try:
    import ipykernel  # noqa: F401
    import jupyter_client  # noqa: F401
  except ImportError:
    reasons.append("jupyter kernel (pip install jupyter_client ipykernel)")
  return reasons


class Kernel:
  """A running Jupyter kernel."""

  def __init__(self, manager: object, client: object, pid: int) -> None:
    self._manager, self._client, self._pid = manager, client, pid

  @classmethod
  @contextlib.asynccontextmanager
  async def start(cls) -> AsyncIterator[Kernel | None]:
    """Starts one; None where Jupyter is not installed."""
    try:
      from jupyter_client.manager import start_new_async_kernel
    except ImportError:
      yield None
      return
    begin = time.perf_counter()
    manager, client = await start_new_async_kernel(kernel_name="python3")
    pid = manager.provisioner.pid
    pss = tree_pss_mib([pid])
    print(f"jupyter kernel: {time.perf_counter() - begin:.2f} s to start, {pss:.0f} MiB PSS")
    try:
      yield cls(manager, client, pid)
    finally:
      client.stop_channels()
      await manager.shutdown_kernel(now=True)

  async def cpu_ms(self, code: str, count: int) -> float:
    """CPU milliseconds of the kernel for each cell."""
    before = cpu_s(self._pid)
    for _ in range(count):
      reply = await self._client.execute_interactive(code, output_hook=lambda _: None)  # type: ignore[attr-defined]
      if reply["content"]["status"] != "ok":
        raise RuntimeError(f"the kernel answered {reply['content']}")
    return 1e3 * (cpu_s(self._pid) - before) / count
