"""What the zygote knows of a running snippet, and how it judges the end of one. Standard library only."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

from agentic_rl.sandbox import harness
from agentic_rl.sandbox.framing import Pieces, wipe
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
    self.kept = (Pieces(), Pieces(), Pieces())
    self.dropped = [0, 0, 0]
    cap = limits["output_bytes"]
    files = (limits["disk_mib"] << 20) + 4096 if fetch else 0
    self.result_room = 1 + harness.HEADER.size + 3 * (harness.FIELD.size + cap) + files
    self._caps = (cap, cap, self.result_room)

  def take(self, index: int, data: bytes | memoryview) -> None:
    """Keeps as much of the data as its cap allows."""
    kept, cap = self.kept[index], self._caps[index]
    if index == RESULT or self.limits["output_keep"] == "head":
      room = cap - len(kept)
      kept.add(data[:room] if room > 0 else b"")
      self.dropped[index] += max(0, len(data) - room)
      return
    head = self._head(index)
    missing = head - len(kept)
    if missing > 0:
      kept.add(data[:missing])
      data = data[missing:]
    kept.add(data)
    if len(kept) > 2 * cap:  # what lies between head and tail goes once there is much of it
      self._cut(index)

  def wipe(self) -> None:
    """Overwrites what was kept."""
    for kept in self.kept:
      kept.wipe()

  def _head(self, index: int) -> int:
    return 0 if self.limits["output_keep"] == "tail" else self._caps[index] // 2

  def _cut(self, index: int) -> None:
    excess = len(self.kept[index]) - self._caps[index]
    if excess > 0:
      self.kept[index].cut(self._head(index), excess)
      self.dropped[index] += excess

  def settle(self) -> None:
    """Brings what was kept of the outputs into its final form."""
    for index in (OUT, ERR) if self.limits["output_keep"] != "head" else ():
      self._cut(index)
      if self._head(index) and self.dropped[index]:
        text = b"\n[... %d bytes left out ...]\n" % self.dropped[index]
        self.kept[index].insert(self._head(index), text)

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
    left = self.limits["cpu_s"] - cpu_s
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


def parse_frame(data: bytearray) -> tuple[dict[str, Any], list[bytearray]] | None:
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
  fields: list[tuple[int, bytearray]] = []
  offset = size
  while offset < len(data):
    if offset + harness.FIELD.size > len(data):
      return None
    kind, count, dropped = harness.FIELD.unpack_from(data, offset)
    offset += harness.FIELD.size
    if offset + count > len(data) or kind > harness.FILE:
      return None
    fields.append((kind, data[offset : offset + count]))
    if dropped:
      result["value_dropped" if kind == harness.VALUE else "error_dropped"] = dropped
    offset += count
  texts = {kind: content for kind, content in fields if kind in (harness.VALUE, harness.ERROR)}
  files = [content for kind, content in fields if kind in (harness.FILE_NAME, harness.FILE)]
  if len(files) % 2:
    return None
  return result, [texts.get(harness.VALUE, bytearray()), texts.get(harness.ERROR, bytearray()), *files]


def frame_length(data: bytes | bytearray) -> int:
  """Bytes of the frame that begins here; 0 if that is not known yet, -1 if it is no frame."""
  if data[:4] != harness.MAGIC[: len(data)]:
    return -1
  if len(data) < harness.HEADER.size:
    return 0
  return int(harness.HEADER.size + harness.HEADER.unpack_from(data)[4])


def judge(execution: Execution, wait_status: int, cpu_s: float) -> tuple[dict[str, Any], list[bytearray]]:
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
    detail = said.joined(1).decode("utf-8", "replace") or f"wait status {wait_status}"
    text = f"{DIED_EARLY}: {detail}"
    return {"status": "infra_error"}, _texts(text)
  # The kernel's own limit, a second later, on sampled ticks that on a busy host run ahead of the exact time.
  kernel_s = math.ceil(limits["cpu_s"]) + 1
  if not reason and signal_number in (signal.SIGXCPU, signal.SIGKILL) and cpu_s >= 0.5 * kernel_s:
    reason = "cpu"
  if reason == "broken":
    return {"status": "exit", "exit_code": 1}, _texts("The session broke its protocol.\n")
  if reason in texts:
    status, error = texts[reason]
    return {"status": status, "limit": reason}, _texts(error)
  if signal_number:
    return {"status": "crash", "signal": signal_number}, _texts(f"Killed by signal {signal_number}.\n")
  exit_code = os.WEXITSTATUS(wait_status)
  frame = None
  if exit_code == 0 and not execution.dropped[RESULT]:
    data = said.joined(1)
    frame = parse_frame(data)
    wipe(data, len(data))
  return frame or ({"status": "exit", "exit_code": exit_code}, _texts(""))


def _texts(error: str) -> list[bytearray]:
  return [bytearray(), bytearray(error.encode())]


def answer(
  execution: Execution, result: dict[str, Any], parts: list[bytearray], cpu_s: float, **more: Any
) -> tuple[dict[str, Any], list[bytearray]]:
  """The header and the body, in pieces, that go to the pool."""
  execution.settle()
  out, err = execution.kept[OUT], execution.kept[ERR]
  header = {
    "id": execution.request_id,
    "sizes": [len(out), len(err), *map(len, parts)],
    "stdout_dropped": execution.dropped[OUT],
    "stderr_dropped": execution.dropped[ERR],
    "wall_s": time.monotonic() - execution.started,
    "cpu_s": cpu_s,
  }
  return header | result | more, [*out.pieces, *err.pieces, *parts]
