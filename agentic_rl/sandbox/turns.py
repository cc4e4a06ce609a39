"""The zygote's side of a session: which process it is, its channel, and the turn that runs. Standard library only."""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import os
import signal
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

from agentic_rl.sandbox import execution as executions
from agentic_rl.sandbox import framing, harness, lowlevel, seccomp
from agentic_rl.sandbox.execution import Execution

if TYPE_CHECKING:
  from agentic_rl.sandbox.zygote import Zygote

_READ_BYTES = 65_536
_MOST_BITES = 64
_CREDENTIALS = struct.Struct("=iII")  # process, user and group of a sender, filled in by the kernel
_ANCILLARY_BYTES = socket.CMSG_SPACE(_CREDENTIALS.size)


class Session:
  """One session.

  Everything that comes out of the channel may be forged by the session's own snippets. It is taken as bounded bytes in
  a fixed order, and whoever breaks the order loses the session; whose process has written is told by the kernel.

  Attributes:
    name: Name that the pool gave it.
    pid: Process that is the session now; a turn with a checkpoint runs in a fork of it.
    group: Process group of all its processes.
    turn: The execution that runs, or None.
    job: What the turn is to run.
    cpu_before: CPU seconds of the process when the turn was sent.
    opened: Whether it has set itself up.
    closed: Whether the pool has asked for its end.
    dying: Whether its processes have been killed; what it still says counts for nothing.
  """

  def __init__(
    self,
    zygote: Zygote,
    name: str,
    pid: int,
    channel: int,
    outputs: tuple[int, int],
    uid: int,
    directory: str,
    disk_mib: int,
  ) -> None:
    self.name, self.pid, self.group = name, pid, pid
    self.uid, self.directory, self.disk_mib = uid, directory, disk_mib
    self.turn: Execution | None = None
    self.job: harness.Job | None = None
    self.opened = False
    self.closed = False
    self.dying = False
    self._zygote = zygote
    self._outputs = list(outputs)
    self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=channel)
    self._channel.setblocking(False)
    self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    self._inbox = bytearray()
    self._pieces = framing.Pieces()  # what follows it, until a large message is complete
    self._awaited = 0  # bytes of the message that is not complete yet, if known
    self._gate: seccomp.ForkGate | None = None
    self._may_fork = False
    self._forks = False  # whether the turn runs in a fork
    self.cpu_before = 0.0  # of the process, when the turn was sent
    self._outbox: collections.deque[bytearray] = collections.deque()
    self._sent = 0  # of its first part
    self._stuck = False
    self._used = False  # whether a turn has run in it
    for fd in outputs:
      os.set_blocking(fd, False)
    zygote.watch(channel, self._read_channel)

  def is_member(self, pid: int) -> bool:
    """Whether a living process belongs to the session."""
    try:
      return os.getpgid(pid) == self.group
    except ProcessLookupError:
      return False

  def send_turn(self) -> None:
    """Hands the job to the session's process."""
    job = self.job
    if job is None or self.turn is None:
      return
    self.job = None
    header = {
      "sizes": [len(job.code), len(job.stdin)],
      "limits": job.limits,
      "fork": job.fork,
    }
    self._may_fork = self._forks = job.fork
    self.cpu_before = lowlevel.cpu_seconds(self.pid)
    if self._used:  # what earlier turns have left behind may hold this one up before it begins, on its own time
      self.turn.begin()
      self._zygote.plan_check(self.turn)
    self._used = True
    self._signal(signal.SIGCONT)
    for index, fd in enumerate(self._outputs):
      if fd >= 0:
        self._zygote.watch(fd, functools.partial(self._read_output, index))
    head = bytearray(framing.head(header, len(job.code) + len(job.stdin)))
    self._outbox.extend(part for part in (head, job.code, job.stdin) if part)
    self._hand_out()

  def _hand_out(self) -> None:
    """Writes what the channel takes now; the rest follows when its process reads, which it may never do."""
    stuck = False
    try:
      while self._outbox:
        part = self._outbox[0]
        with memoryview(part) as view:
          self._sent += self._channel.send(view[self._sent :])
        if self._sent == len(part):
          framing.wipe(part, len(part))
          self._outbox.popleft()
          self._sent = 0
    except BlockingIOError:
      stuck = True
    except OSError:
      self._zygote.break_session(self)
      return
    if stuck != self._stuck:
      self._stuck = stuck
      self._zygote.watch_writing(self._channel.fileno(), stuck)

  def cpu_seconds(self) -> float:
    """CPU time since the turn was sent, of the process that runs it and of the one that waits for it."""
    turn = self.turn
    used = lowlevel.cpu_seconds(self.pid) - self.cpu_before
    if turn is not None and turn.pid not in (0, self.pid):
      used += lowlevel.cpu_seconds(turn.pid)
    return max(0.0, used)

  def _signal(self, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(self.group, number)

  def wipe(self) -> None:
    """In a child of the zygote: forgets what the session has said and what it is to run."""
    if self.turn is not None:
      self.turn.wipe()
    if self.job is not None:
      self.job.wipe()
    for part in self._outbox:
      framing.wipe(part, len(part))
    framing.wipe(self._inbox, len(self._inbox))
    self._pieces.wipe()
    self._channel.detach()  # closed already with all others; its number may be another's now

  # -- what it says --------------------------------------------------------------------------------------------------

  def _read_output(self, index: int) -> bool:
    fd, turn = self._outputs[index], self.turn
    count = self._zygote.read_into(fd, turn, index)
    if count <= 0:
      if not count:
        self._zygote.unwatch(fd)
        os.close(fd)
        self._outputs[index] = -1
      return False
    if turn is not None and turn.flooded() and not turn.reason:
      turn.reason = "output"
      self._zygote.kill_turn(self)
    return True

  def drain(self) -> None:
    """Takes in what the turn has written, and stops listening until the next."""
    for index in range(len(self._outputs)):
      bites = 0
      while bites < _MOST_BITES and self._outputs[index] >= 0 and self._read_output(index):
        bites += 1
      if self._outputs[index] >= 0:
        self._zygote.unwatch(self._outputs[index])

  def _read_channel(self) -> None:
    if self._outbox:
      self._hand_out()
    room = _ANCILLARY_BYTES if self.opened else 2 * _ANCILLARY_BYTES
    data = bytearray(_READ_BYTES)
    try:
      count, ancillary, _, _ = self._channel.recvmsg_into([data], room, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
      return
    except ConnectionError:
      count, ancillary = 0, []
    sender = 0
    for level, kind, content in ancillary:
      if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
        sender = _CREDENTIALS.unpack(content)[0]
      elif level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
        self._take_listener(content)
    if not count:
      self._zygote.unwatch(self._channel.fileno())
      self._zygote.kill_session(self)
    elif not self.opened:
      self._open(bytes(data[:count]))
    else:
      self._take_in(data, count)
      while self._inbox and self._take(sender):
        continue

  def _take_in(self, data: bytearray, count: int) -> None:
    """Takes in bytes, leaving no copy behind."""
    with memoryview(data) as view:
      self._pieces.add(view[:count])
    framing.wipe(data, count)
    if len(self._inbox) + len(self._pieces) >= self._awaited:
      self._merge()

  def _merge(self) -> None:
    """Appends the pieces to the inbox: all at once, since each time copies what is there."""
    self._awaited = 0
    old, more = self._inbox, self._pieces.joined()
    self._inbox = bytearray(len(old) + len(more))
    self._inbox[: len(old)] = old
    self._inbox[len(old) :] = more
    for part in (old, more):
      framing.wipe(part, len(part))
    self._pieces.wipe()

  def _drop(self, count: int) -> None:
    """Removes bytes from the front of the inbox, leaving no copy behind."""
    old, self._inbox = self._inbox, self._inbox[count:]
    framing.wipe(old, len(old))

  def _take_listener(self, content: bytes) -> None:
    fds = array.array("i")
    fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    for fd in fds:
      if self.opened or self._gate is not None:
        os.close(fd)
      else:
        self._gate = seccomp.ForkGate(fd)
        self._zygote.watch(fd, self._decide_fork)

  def _open(self, data: bytes) -> None:
    if data == harness.READY:
      self.opened = True
      self.send_turn()
    else:
      if self.turn is not None:
        self.turn.kept[executions.RESULT].add(data)
      self._zygote.break_session(self)

  def _decide_fork(self) -> None:
    """Lets the session's process fork once a turn, and nobody else ever."""
    if self._gate is None:
      return
    asked = self._gate.receive()
    if asked is None:
      if self._gate.abandoned:
        self._zygote.unwatch(self._gate.fileno())
      return
    notification, pid = asked
    if self._may_fork and pid == self.pid:
      self._may_fork = False
      self._gate.allow(notification)
    else:
      self._gate.deny(notification)

  def _take(self, sender: int) -> bool:
    """Takes one message from the inbox; False if it is not complete or the session is broken."""
    turn, inbox = self.turn, self._inbox
    if self.dying:
      return False
    if turn is None or turn.reason == "broken":
      return self._broken()
    first = bytes(inbox[:1])
    if first == harness.READY and not turn.pid:
      self._drop(1)
      return self._begin(turn, sender)
    if first == harness.DIED:
      return self._rolled_back(turn)
    if not turn.pid:
      return self._broken()
    length = executions.frame_length(inbox)
    if length < 0 or length > turn.result_room or (0 < length < len(inbox)):
      return self._broken()
    if not length or len(inbox) < length:
      self._awaited = length
      return False
    frame = executions.parse_frame(inbox)
    self._drop(length)
    if frame is None:
      return self._broken()
    if turn.reason:  # it was faster than the kill; the turn is over, as it should be
      return False
    cpu_s = self.cpu_seconds()
    self.drain()
    if turn.pid != self.pid:
      self._zygote.hand_over(self, turn.pid)
    result, parts = frame
    result["max_rss_bytes"] = min(result["max_rss_bytes"], self._zygote.address_space_bound(turn.limits))
    self.answer(result, parts, state="kept", cpu_s=cpu_s)
    return True

  def _begin(self, turn: Execution, sender: int) -> bool:
    if self._forks and sender == self.pid:  # then the fork that it was allowed would be nobody's
      return self._broken()
    turn.pid = sender  # the kernel's word; it may be dead by now
    if not turn.ready:
      turn.begin()
    if turn.reason:  # killed before it began
      self._zygote.kill_turn(self)
    self._zygote.plan_check(turn)
    return True

  def _rolled_back(self, turn: Execution) -> bool:
    """The old process says that the fork has died, which has to be true, and tells its times, which may be.

    A fork that has not shown itself may be anywhere; then the session ends with all its processes.
    """
    inbox = self._inbox
    if len(inbox) < harness.DEATH.size:
      return False
    _, status, cpu_s, peak = harness.DEATH.unpack_from(inbox)
    if len(inbox) > harness.DEATH.size or turn.pid in (0, self.pid) or self.is_member(turn.pid):
      return self._broken()
    possible_s = (time.monotonic() - turn.started + 1.0) * (os.cpu_count() or 1)
    if not 0.0 <= cpu_s <= possible_s:  # nor not a number
      return self._broken()
    self._drop(len(inbox))
    self.drain()
    result, parts = executions.judge(turn, status, cpu_s)
    result["max_rss_bytes"] = min(peak, self._zygote.address_space_bound(turn.limits))
    waiting_s = max(0.0, lowlevel.cpu_seconds(self.pid) - self.cpu_before)
    self.answer(result, parts, state="rolled_back", cpu_s=cpu_s + waiting_s)
    return True

  def _broken(self) -> bool:
    self._merge()
    self._drop(len(self._inbox))
    self._zygote.break_session(self)
    return False

  def ended(self, status: int, cpu_s: float) -> None:
    """Its process has died: takes in what is still in the channel and tells the pool how the turn ended."""
    turn = self.turn
    if turn is None:
      return
    with contextlib.suppress(OSError):
      data = bytearray(_READ_BYTES)
      while count := self._channel.recv_into(data):
        self._take_in(data, min(count, max(0, turn.result_room - len(self._inbox) - len(self._pieces))))
    self._merge()
    if self.opened and not turn.pid and self._inbox[:1] == harness.READY:
      self._drop(1)
      if not turn.ready:
        turn.begin()
    self.drain()
    frame = None if turn.reason or not turn.ready else executions.parse_frame(self._inbox)
    if not self.opened:
      turn.kept[executions.RESULT].add(self._inbox)
    self._drop(len(self._inbox))
    self.answer(*(frame or executions.judge(turn, status, cpu_s)), state="gone", cpu_s=cpu_s)

  # -- ending --------------------------------------------------------------------------------------------------------

  def answer(self, result: dict[str, Any], parts: list[bytearray], *, state: str, cpu_s: float | None = None) -> None:
    """Tells the pool how the turn ended."""
    turn, self.turn, self.job = self.turn, None, None
    self._may_fork = False
    if state != "gone":
      self._signal(signal.SIGSTOP)  # threads that a turn has left running sleep until the next
    if turn is not None and turn.reason == "cancel":
      turn.wipe()
      self._zygote.send({"ended": turn.request_id})
      return
    if turn is None:
      return
    header, body = executions.answer(turn, result, parts, cpu_s or 0.0, state=state)
    self._zygote.send({"done": header}, body)

  def close(self) -> None:
    """Lets go of the descriptors."""
    self.drain()
    for fd in self._outputs:
      if fd >= 0:
        os.close(fd)
    self._zygote.unwatch(self._channel.fileno())
    self._channel.close()
    if self._gate is not None:
      self._zygote.unwatch(self._gate.fileno())
      self._gate.close()
