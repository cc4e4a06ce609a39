"""The process that forks: one freshly forked, confined child for each snippet. Standard library only.

It never runs an untrusted byte itself. It talks with the trainer over one socket, in frames of a big-endian u32 length
and JSON; both ends are trusted. From the trainer: `{"run": id, "code", "seed", "limits", "attempt"}`, `{"cancel": id}`,
`{"ping": n}`. To the trainer: first `{"hello": facts}`, then `{"started": [id...], "done": [result...], "pong": n}`. A
request counts as started before its child exists, so that after a death of this process nobody runs a snippet twice
unknowingly.

End of file on the socket means that the trainer is gone: all descendants are killed and the process ends.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import importlib
import json
import math
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from typing import Any

from agentic_rl.sandbox import harness, lowlevel

_LENGTH = struct.Struct(">I")
_READ_BYTES = 65_536
_READY_TIMEOUT_S = 20.0
_CHILD_NICE = 4
_MOST_ATTEMPTS = 2


class _Execution:
  """One running child and what it has said so far."""

  def __init__(self, request: dict[str, Any], directory: str, received: float) -> None:
    self.request = request
    self.request_id: int = request["run"]
    self.limits: dict[str, Any] = request["limits"]
    self.directory = directory
    self.started = time.monotonic()
    self.queue_s = self.started - received
    self.deadline = self.started + _READY_TIMEOUT_S
    self.ready = False
    self.reason = ""
    self.pid = 0
    self.fds: dict[int, int] = {}  # read end -> index into `kept`
    self.kept = (bytearray(), bytearray(), bytearray())  # stdout, stderr, result
    self.dropped = [0, 0, 0]
    cap = self.limits["output_bytes"]
    self.caps = (cap, cap, 1 + harness.HEADER.size + 2 * cap)

  def take(self, index: int, data: bytes) -> None:
    """Keeps as much of the data as its cap allows."""
    room = self.caps[index] - len(self.kept[index])
    self.kept[index].extend(data[:room])
    self.dropped[index] += max(0, len(data) - room)
    if index == 2 and not self.ready and self.kept[2][:1] == harness.READY:
      self.ready = True
      self.started = time.monotonic()
      self.deadline = self.started + self.limits["wall_s"]

  def flooded(self) -> bool:
    written = sum(map(len, self.kept)) + sum(self.dropped)
    return written > (self.limits["flood_mib"] << 20) + self.caps[2]


def _parse_frame(data: bytes) -> dict[str, Any] | None:
  """Reads what the child reported. The bytes may be forged: anything but one exact frame is None."""
  size = harness.HEADER.size
  if len(data) < size:
    return None
  magic, status, code, value_len, value_dropped, error_len, error_dropped = harness.HEADER.unpack_from(data)
  if magic != harness.MAGIC or status >= len(harness.STATUSES) or len(data) != size + value_len + error_len:
    return None
  name = harness.STATUSES[status]
  return {
    "status": name,
    "limit": "memory" if name == "memory" else "",
    "exit_code": code if name == "exit" else None,
    "value": data[size : size + value_len].decode("utf-8", "replace"),
    "value_dropped": value_dropped,
    "error": data[size + value_len :].decode("utf-8", "replace"),
    "error_dropped": error_dropped,
  }


def _classify(execution: _Execution, wait_status: int, cpu_s: float) -> dict[str, Any]:
  """How a child ended, from what is known for certain first and from what it claims last."""
  killed_by = {
    "wall": ("timeout", f"Killed after {execution.limits['wall_s']:g} s of wall time.\n"),
    "output": ("output", f"Killed after writing more than {execution.limits['flood_mib']} MiB.\n"),
    "cpu": ("cpu", f"Killed after {execution.limits['cpu_s']:g} s of CPU time.\n"),
  }
  signal_number = os.WTERMSIG(wait_status) if os.WIFSIGNALED(wait_status) else 0
  reason = execution.reason
  if not execution.ready:
    detail = bytes(execution.kept[2][1:]).decode("utf-8", "replace") or f"wait status {wait_status}"
    return {"status": "infra_error", "error": f"the child died before it saw the snippet: {detail}"}
  # The kernel enforces the limit on sampled ticks, which on a busy host run well ahead of the exact time told here.
  soft = math.ceil(execution.limits["cpu_s"])
  at_soft = signal_number == signal.SIGXCPU and cpu_s >= 0.5 * soft
  at_hard = signal_number == signal.SIGKILL and cpu_s >= 0.7 * (soft + 1)
  if not reason and (at_soft or at_hard):
    reason = "cpu"
  if reason in killed_by:
    status, error = killed_by[reason]
    return {"status": status, "limit": reason, "error": error}
  if signal_number:
    return {"status": "crash", "signal": signal_number, "error": f"Killed by signal {signal_number}.\n"}
  exit_code = os.WEXITSTATUS(wait_status)
  frame = _parse_frame(bytes(execution.kept[2][1:])) if exit_code == 0 and not execution.dropped[2] else None
  return frame or {"status": "exit", "exit_code": exit_code}


class Zygote:
  """Forks, watches and reaps children; answers the trainer. One thread, one epoll loop."""

  def __init__(self, control: socket.socket, directory: str, slots: int) -> None:
    control.setblocking(False)
    self._control = control
    self._directory = directory
    self._slots = slots
    self._inbox = bytearray()
    self._outbox = bytearray()
    self._stuck = False  # the socket did not take all of the outbox
    self._message: dict[str, Any] = {}
    self._waiting: collections.deque[tuple[dict[str, Any], float]] = collections.deque()
    self._to_fork: collections.deque[tuple[dict[str, Any], float]] = collections.deque()
    self._running: dict[int, _Execution] = {}  # by process id
    self._by_fd: dict[int, _Execution] = {}
    self._sweepers: set[int] = set()
    self._count = 0
    self._pid = os.getpid()
    self._children = lowlevel.Children()
    self._base_bytes = 0
    self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    self._wake_in, self._wake_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
    self._epoll = select.epoll()
    self._epoll.register(control, select.EPOLLIN)
    self._epoll.register(self._wake_in, select.EPOLLIN)

  def serve(self, facts: dict[str, Any]) -> None:
    """Runs until the trainer hangs up."""
    gc.collect()
    gc.freeze()
    self._base_bytes = lowlevel.address_space_bytes()
    self._message = {"hello": facts}
    control_fd = self._control.fileno()
    try:
      while True:
        self._flush()
        for fd, event in self._epoll.poll(self._patience()):
          if fd == control_fd:
            if event & ~select.EPOLLOUT and not self._receive():
              return
          elif fd == self._wake_in:
            with contextlib.suppress(BlockingIOError):
              os.read(fd, 4096)
          elif fd in self._by_fd:
            self._read(fd)
        self._reap()
        self._enforce_deadlines()
        self._start_next()
    finally:
      if os.getpid() == self._pid:
        self._kill_everything()

  # -- the trainer's side --------------------------------------------------------------------------------------------

  def _receive(self) -> bool:
    """Takes in the trainer's frames; False at the end of file."""
    try:
      data = self._control.recv(1 << 20)
    except BlockingIOError:
      return True
    except ConnectionError:
      return False
    self._inbox += data
    offset = 0
    while len(self._inbox) - offset >= _LENGTH.size:
      (size,) = _LENGTH.unpack_from(self._inbox, offset)
      end = offset + _LENGTH.size + size
      if len(self._inbox) < end:
        break
      self._handle(json.loads(self._inbox[offset + _LENGTH.size : end]))
      offset = end
    del self._inbox[:offset]
    return bool(data)

  def _handle(self, message: dict[str, Any]) -> None:
    if "run" in message:
      self._waiting.append((message, time.monotonic()))
    elif "cancel" in message:
      self._cancel(message["cancel"])
    else:
      self._message["pong"] = message["ping"]

  def _cancel(self, request_id: int) -> None:
    for item in self._waiting:
      if item[0]["run"] == request_id:
        self._waiting.remove(item)
        return
    for execution in self._running.values():
      if execution.request_id == request_id:
        self._kill(execution, "cancel")

  def _flush(self) -> None:
    """Sends what is due, then forks those whose start has been told."""
    if self._message:
      data = json.dumps(self._message).encode()
      self._outbox += _LENGTH.pack(len(data)) + data
      self._message = {}
    if self._outbox:
      try:
        del self._outbox[: self._control.send(self._outbox)]
      except BlockingIOError:
        pass
      except ConnectionError:
        self._outbox.clear()  # the end of file follows
      if self._stuck != bool(self._outbox):
        self._stuck = not self._stuck
        self._epoll.modify(self._control, select.EPOLLIN | (select.EPOLLOUT if self._stuck else 0))
    while self._to_fork and not self._outbox:
      self._fork(*self._to_fork.popleft())

  def _start_next(self) -> None:
    """Announces the next requests. Stops while the trainer does not read, so that results never pile up here."""
    if self._outbox:
      return
    while self._waiting and len(self._running) + len(self._to_fork) < self._slots:
      item = self._waiting.popleft()
      self._to_fork.append(item)
      self._message.setdefault("started", []).append(item[0]["run"])

  # -- the children's side -------------------------------------------------------------------------------------------

  def _forget(self) -> None:
    """In a child: drops everything that belongs to other requests."""
    for store in (self._inbox, self._outbox, self._message, self._waiting, self._to_fork, self._running, self._by_fd):
      store.clear()

  def _fork(self, request: dict[str, Any], received: float) -> None:
    self._count += 1
    directory = os.path.join(self._directory, str(self._count))
    pipes: list[int] = []
    execution = _Execution(request, directory, received)
    try:
      os.mkdir(directory, 0o700)
      for _ in range(3):
        pipes += os.pipe()
      pid = os.fork()
    except OSError as error:
      for fd in pipes:
        os.close(fd)
      execution.kept[2].extend(b" " + repr(error).encode())
      with contextlib.suppress(OSError):
        os.rmdir(directory)
      self._answer(execution, 1 << 8, None)
      return
    readers, writers = pipes[::2], pipes[1::2]
    if pid == 0:
      try:
        ends = (writers[0], writers[1], writers[2])
        harness.child_main(request, self._pid, ends, self._base_bytes, directory, _CHILD_NICE, self._forget)
      finally:
        os._exit(1)
    execution.pid = pid
    self._running[pid] = execution
    for index, (reader, writer) in enumerate(zip(readers, writers, strict=True)):
      os.close(writer)
      os.set_blocking(reader, False)
      execution.fds[reader] = index
      self._by_fd[reader] = execution
      self._epoll.register(reader, select.EPOLLIN)

  def _read(self, fd: int) -> bool:
    """Takes one bite from a pipe; False if there is nothing more now."""
    execution = self._by_fd[fd]
    try:
      data = os.read(fd, _READ_BYTES)
    except BlockingIOError:
      return False
    if not data:
      self._close(execution, fd)
      return False
    execution.take(execution.fds[fd], data)
    if execution.flooded():
      self._kill(execution, "output")
    return True

  def _close(self, execution: _Execution, fd: int) -> None:
    self._epoll.unregister(fd)
    os.close(fd)
    del execution.fds[fd], self._by_fd[fd]

  def _kill(self, execution: _Execution, reason: str) -> None:
    execution.reason = execution.reason or reason
    execution.deadline = float("inf")
    for send in (os.killpg, os.kill):  # the group may not exist yet
      with contextlib.suppress(ProcessLookupError, PermissionError):
        send(execution.pid, signal.SIGKILL)

  def _kill_strays(self) -> bool:
    """Kills children that we did not fork: daemons of snippets that the kernel gave to us. True if there were any."""
    found = False
    for pid in self._children.pids():
      if pid not in self._running and pid not in self._sweepers:
        found = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
          os.kill(pid, signal.SIGKILL)
    return found

  def _reap(self) -> None:
    """Collects every dead child; the descendants of a dead snippet die with it."""
    while True:
      try:
        dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
      except ChildProcessError:
        return
      if dead is None:
        return
      pid = dead.si_pid
      if pid in self._running:  # it is still a zombie, so that its group id cannot have been given to others
        with contextlib.suppress(ProcessLookupError, PermissionError):
          os.killpg(pid, signal.SIGKILL)
      _, status, usage = os.wait4(pid, 0)
      self._sweepers.discard(pid)
      execution = self._running.pop(pid, None)
      if execution is not None:
        self._finish(execution, status, usage)
      self._kill_strays()

  def _finish(self, execution: _Execution, status: int, usage: resource.struct_rusage) -> None:
    for fd in list(execution.fds):
      bites = 0
      while bites < 64 and fd in execution.fds and self._read(fd):  # a dying stray may still be writing
        bites += 1
      if fd in execution.fds:
        self._close(execution, fd)
    self._discard(execution.directory)
    self._answer(execution, status, usage)

  def _answer(self, execution: _Execution, status: int, usage: resource.struct_rusage | None) -> None:
    if execution.reason == "cancel":
      return
    cpu_s = usage.ru_utime + usage.ru_stime if usage else 0.0
    result = _classify(execution, status, cpu_s)
    request = execution.request
    attempt = request["attempt"]
    if result["status"] == "infra_error" and attempt < _MOST_ATTEMPTS:
      request["attempt"] = attempt + 1
      self._waiting.appendleft((request, time.monotonic()))
      return
    result |= {
      "id": execution.request_id,
      "stdout": execution.kept[0].decode("utf-8", "replace"),
      "stderr": execution.kept[1].decode("utf-8", "replace"),
      "stdout_dropped": execution.dropped[0],
      "stderr_dropped": execution.dropped[1],
      "wall_s": time.monotonic() - execution.started,
      "cpu_s": cpu_s,
      "queue_s": execution.queue_s,
      "max_rss_bytes": usage.ru_maxrss * 1024 if usage else 0,
      "attempt": attempt,
    }
    self._message.setdefault("done", []).append(result)

  def _patience(self) -> float | None:
    if self._message or (not self._outbox and self._waiting and len(self._running) < self._slots):
      return 0
    deadline = min((e.deadline for e in self._running.values()), default=float("inf"))
    if deadline == float("inf"):
      return None
    return max(0.0, deadline - time.monotonic())

  def _enforce_deadlines(self) -> None:
    now = time.monotonic()
    for execution in self._running.values():
      if now >= execution.deadline:
        self._kill(execution, "wall")

  # -- cleaning up ---------------------------------------------------------------------------------------------------

  def _discard(self, directory: str) -> None:
    """Removes a working directory; a full one in a child of its own, as that may take long."""
    with contextlib.suppress(OSError):
      os.rmdir(directory)
      return
    try:
      pid = os.fork()
    except OSError:
      remove_tree(directory)
      return
    if pid:
      self._sweepers.add(pid)
      return
    try:
      self._control.close()
      remove_tree(directory)
    finally:
      os._exit(0)

  def _kill_everything(self) -> None:
    signal.set_wakeup_fd(-1)
    give_up = time.monotonic() + 5.0
    for execution in self._running.values():
      self._kill(execution, "cancel")
    self._running.clear()
    self._sweepers.clear()
    while (self._kill_strays() or self._children.pids()) and time.monotonic() < give_up:
      with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
          continue
      time.sleep(0.002)
    remove_tree(self._directory)


def remove_tree(top: str) -> None:
  """Removes a directory whatever depth, names and modes its content has; does not follow symbolic links.

  Nested directories are first moved up into `top`, so that no path grows long and nothing recurses.
  """
  moved = 0
  progress = True
  while progress:
    progress = False
    with contextlib.suppress(OSError):
      os.chmod(top, stat.S_IRWXU)
    for path in _entries(top):
      with contextlib.suppress(OSError):
        if os.path.islink(path) or not os.path.isdir(path):
          os.unlink(path)
        else:
          os.chmod(path, stat.S_IRWXU)
          for inner in _entries(path):
            moved += 1
            if os.path.islink(inner) or not os.path.isdir(inner):
              os.unlink(inner)
            else:
              os.chmod(inner, stat.S_IRWXU)  # a directory that changes its parent must be writable
              os.rename(inner, os.path.join(top, f"{time.monotonic_ns()}-{moved}"))
          os.rmdir(path)
        progress = True
  with contextlib.suppress(OSError):
    os.rmdir(top)


def _entries(directory: str) -> list[str]:
  try:
    return [os.path.join(directory, name) for name in os.listdir(directory)]
  except OSError:
    return []


def _calm_down(nice: int) -> bool:
  """Lets the trainer go first; the zygote itself stays a little more eager than its children."""
  os.nice(nice)
  return lowlevel.set_autogroup_nice(os.getpid(), nice)


def main(arguments: list[str]) -> None:
  """Starts the zygote.

  Args:
    arguments: Descriptor of the control socket, scratch directory, and JSON with `slots`, `nice` and `preload`.
  """
  control = socket.socket(fileno=int(arguments[0]))
  control.set_inheritable(False)
  config = json.loads(arguments[2])
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)  # the trainer's end of file is the one way to stop
  autogroup = _calm_down(config["nice"])
  hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
  most = harness.MOST_DESCRIPTORS
  resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard == resource.RLIM_INFINITY else min(hard, most), hard))
  sys.set_int_max_str_digits(0)  # the CPU limit bounds long conversions
  for name in config["preload"]:
    importlib.import_module(name)
  facts = {
    "subreaper": lowlevel.become_subreaper(),
    "no_new_privileges": lowlevel.forbid_new_privileges(),
    "capabilities_dropped": lowlevel.drop_capabilities(),
    "autogroup": autogroup,
    "process_limit": os.geteuid() != 0,
    "pid": os.getpid(),
    "python": sys.version.split()[0],
  }
  harness.make_streams()
  sys.argv = [""]
  for name in [n for n in sys.modules if n.split(".")[0] == "agentic_rl"]:
    del sys.modules[name]  # snippets see the modules of a plain interpreter
  Zygote(control, arguments[1], config["slots"]).serve(facts)
