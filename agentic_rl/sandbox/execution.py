"""What the zygote knows of a running snippet, and how it judges the end of one. Standard library only."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

from agentic_rl.sandbox import harness
from agentic_rl.sandbox.limits import DIED_EARLY
from agentic_rl.sandbox.scratch import disk_bytes

READY_TIMEOUT_S = 20.0
_LEAST_CPU_CHECK_S = 0.02
_DISK_CHECK_S = 0.25
_CPUS = os.cpu_count() or 1

OUT, ERR, RESULT = range(3)


class Execution:
  """One snippet or one turn of a session: what it may use, and what it has said so far.

  Attributes:
    ready: Whether it has said that it saw the snippet; only before that can a failure be the infrastructure's.
    reason: Why it was killed, or empty.
    next_check: Monotonic time at which to look at its limits again.
    pid: Process whose CPU time counts; 0 until known.
  """

  def __init__(self, request_id: int, limits: dict[str, Any], fetch: bool) -> None:
    self.request_id = request_id
    self.limits = limits
    self.started = time.monotonic()
    self.deadline = self.started + READY_TIMEOUT_S
    self.next_check = self.deadline
    self.ready = False
    self.reason = ""
    self.pid = 0
    self.uid = 0
    self.scratch = ""  # working directory
    self.directory = ""  # the same where disk_mib has to be watched, since no file system limits it
    self.cpu_before = 0.0
    self.kept = (bytearray(), bytearray(), bytearray())
    self.dropped = [0, 0, 0]
    cap = limits["output_bytes"]
    files = (limits["disk_mib"] << 20) + 4096 if fetch else 0
    self.result_room = 1 + harness.HEADER.size + 3 * (harness.FIELD.size + cap) + files
    self._caps = (cap, cap, self.result_room)

  def take(self, index: int, data: bytes) -> None:
    """Keeps as much of the data as its cap allows."""
    keep = self.limits["output_keep"]
    if index != RESULT and keep != "head":
      self._take_tail(index, data, 0 if keep == "tail" else self._caps[index] // 2)
      return
    room = self._caps[index] - len(self.kept[index])
    self.kept[index].extend(data[:room])
    self.dropped[index] += max(0, len(data) - room)

  def _take_tail(self, index: int, data: bytes, head: int) -> None:
    """Keeps the first `head` bytes and, of the rest, the last ones; what lies between goes once there is much of it."""
    kept, cap = self.kept[index], self._caps[index]
    kept.extend(data)
    if len(kept) > 2 * cap:
      self._cut(index, head, cap)

  def _cut(self, index: int, head: int, cap: int) -> None:
    kept = self.kept[index]
    excess = len(kept) - cap
    if excess > 0:
      del kept[head : head + excess]
      self.dropped[index] += excess

  def settle(self) -> None:
    """Brings what was kept of the outputs into its final form."""
    keep = self.limits["output_keep"]
    for index in (OUT, ERR) if keep != "head" else ():
      cap = self._caps[index]
      head = 0 if keep == "tail" else cap // 2
      self._cut(index, head, cap)
      if head and self.dropped[index]:
        self.kept[index][head:head] = b"\n[... %d bytes left out ...]\n" % self.dropped[index]

  def begin(self) -> None:
    """Time counts from here: the snippet runs."""
    self.ready = True
    self.started = time.monotonic()
    self.deadline = self.started + self.limits["wall_s"]
    self._plan_check(self.started, self.limits["cpu_s"])

  def flooded(self) -> bool:
    """Whether it has written more than it may."""
    written = sum(map(len, self.kept)) + sum(self.dropped)
    return written > (self.limits["flood_mib"] << 20) + self._caps[RESULT]

  def overrun(self, now: float, cpu_s: float) -> str:
    """The limit that is exceeded, or an empty string; then plans the next look."""
    if self.reason:
      return ""
    if now >= self.deadline:
      return "wall"
    if not self.ready:
      return ""
    left = self.limits["cpu_s"] - (cpu_s - self.cpu_before)
    if left <= 0:
      return "cpu"
    if self.directory and disk_bytes(self.directory) > self.limits["disk_mib"] << 20:
      return "disk"
    self._plan_check(now, left)
    return ""

  def _plan_check(self, now: float, cpu_left: float) -> None:
    """No thread group can use up its CPU time sooner than on all CPUs at once."""
    wait = max(_LEAST_CPU_CHECK_S, cpu_left / min(_CPUS, 1 + self.limits["threads"]))
    if self.directory:
      wait = min(wait, _DISK_CHECK_S)
    self.next_check = min(self.deadline, now + wait)


def parse_frame(data: bytes | bytearray) -> tuple[dict[str, Any], list[bytes]] | None:
  """Reads what a child reported: header for the pool and the body's parts. The bytes may be forged.

  Returns:
    None for anything but one exact frame.
  """
  size = harness.HEADER.size
  if len(data) < size:
    return None
  magic, status, code, peak, length = harness.HEADER.unpack_from(data)
  if magic != harness.MAGIC or not 0 <= status < len(harness.STATUSES) or len(data) != size + length:
    return None
  name = harness.STATUSES[status]
  result: dict[str, Any] = {
    "status": name,
    "limit": "memory" if name == "memory" else "",
    "exit_code": code if name == "exit" else None,
    "max_rss_bytes": peak,
  }
  fields: list[tuple[int, bytes]] = []
  offset = size
  while offset < len(data):
    if offset + harness.FIELD.size > len(data):
      return None
    kind, count, dropped = harness.FIELD.unpack_from(data, offset)
    offset += harness.FIELD.size
    if offset + count > len(data) or kind > harness.FILE:
      return None
    fields.append((kind, bytes(data[offset : offset + count])))
    if dropped:
      result["value_dropped" if kind == harness.VALUE else "error_dropped"] = dropped
    offset += count
  texts = {kind: content for kind, content in fields if kind in (harness.VALUE, harness.ERROR)}
  files = [content for kind, content in fields if kind in (harness.FILE_NAME, harness.FILE)]
  if len(files) % 2:
    return None
  return result, [texts.get(harness.VALUE, b""), texts.get(harness.ERROR, b""), *files]


def frame_length(data: bytes | bytearray) -> int:
  """Bytes of the frame that begins here; 0 if that is not known yet, -1 if it is no frame."""
  if data[:4] != harness.MAGIC[: len(data)]:
    return -1
  if len(data) < harness.HEADER.size:
    return 0
  return int(harness.HEADER.size + harness.HEADER.unpack_from(data)[4])


def judge(execution: Execution, wait_status: int, cpu_s: float) -> tuple[dict[str, Any], list[bytes]]:
  """How a child ended, from what is known for certain first and from what it claims last.

  Returns:
    Header for the pool, and the parts of the body after stdout and stderr: value, error and files.
  """
  limits = execution.limits
  texts = {
    "wall": ("timeout", f"Killed after {limits['wall_s']:g} s of wall time.\n"),
    "output": ("output", f"Killed after writing more than {limits['flood_mib']} MiB.\n"),
    "cpu": ("cpu", f"Killed after {limits['cpu_s']:g} s of CPU time.\n"),
    "disk": ("disk", f"Killed with more than {limits['disk_mib']} MiB of files.\n"),
  }
  signal_number = os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else 0
  said = execution.kept[RESULT]
  reason = execution.reason
  if not execution.ready:
    detail = bytes(said[1:]).decode("utf-8", "replace") or f"wait status {wait_status}"
    text = f"{DIED_EARLY}: {detail}"
    return {"status": "infra_error"}, [b"", text.encode()]
  # The kernel's own limit, a second later, on sampled ticks that on a busy host run ahead of the exact time.
  kernel_s = math.ceil(limits["cpu_s"]) + 1
  if not reason and signal_number in (signal.SIGXCPU, signal.SIGKILL) and cpu_s >= 0.5 * kernel_s:
    reason = "cpu"
  if reason == "broken":
    return {"status": "exit", "exit_code": 1}, [b"", b"The session broke its protocol.\n"]
  if reason in texts:
    status, error = texts[reason]
    return {"status": status, "limit": reason}, [b"", error.encode()]
  if signal_number:
    return {"status": "crash", "signal": signal_number}, [b"", f"Killed by signal {signal_number}.\n".encode()]
  exit_code = os.WEXITSTATUS(wait_status)
  frame = parse_frame(said[1:]) if exit_code == 0 and not execution.dropped[RESULT] else None
  return frame or ({"status": "exit", "exit_code": exit_code}, [b"", b""])


def answer(
  execution: Execution, result: dict[str, Any], parts: list[bytes], cpu_s: float, **more: Any
) -> tuple[dict[str, Any], list[bytes | bytearray]]:
  """The header and the body that go to the pool."""
  execution.settle()
  body: list[bytes | bytearray] = [execution.kept[OUT], execution.kept[ERR], *parts]
  header = {
    "id": execution.request_id,
    "sizes": [len(part) for part in body],
    "stdout_dropped": execution.dropped[OUT],
    "stderr_dropped": execution.dropped[ERR],
    "wall_s": time.monotonic() - execution.started,
    "cpu_s": cpu_s,
  }
  return header | result | more, body
