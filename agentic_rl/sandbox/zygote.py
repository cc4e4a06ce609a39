"""The process that forks: one freshly forked, shut-in child for each snippet or session. Standard library only.

It never runs an untrusted byte itself. It talks with the pool over one socket in the frames of `framing`; both ends are
trusted. From the pool: `{"run": id, ...}`, a snippet, or with `"session"` a turn of a session that opens at its first;
`{"cancel": id}`; `{"close": session}`; `{"ping": n}`. To the pool: first `{"hello": facts}`, then `{"done": result}`,
`{"gone": [session...]}`, `{"pong": n}`.

End of file on the socket means that the trainer is gone: all descendants are killed and the process ends.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from agentic_rl.sandbox import execution as executions
from agentic_rl.sandbox import framing, harness, heap, isolation, landlock, lowlevel, seccomp
from agentic_rl.sandbox.execution import Execution
from agentic_rl.sandbox.rooms import Lender
from agentic_rl.sandbox.turns import Session

_READ_BYTES = 65_536
_CHILD_NICE = 4
_MOST_BITES = 64
_MOST_PIECES = 512  # fewer than the kernel takes at once
_LARGE_BYTES = 1 << 17


class Zygote:
  """Forks, watches and reaps children; answers the pool. One thread, one epoll loop."""

  def __init__(self, control: socket.socket, directory: str, plan: isolation.Plan, proc: lowlevel.OwnProc) -> None:
    control.setblocking(False)
    self._control = control
    self._plan = plan
    self._proc = proc
    self._inbox = framing.Inbox()
    self._outbox: collections.deque[bytearray] = collections.deque()
    self._sent = 0  # of the first piece
    self._trim = False  # a large result has been sent
    self._buffer = bytearray(_READ_BYTES)
    self._stuck = False  # the socket did not take all of the outbox
    self._jobs: list[harness.Job] = []
    self._running: dict[int, tuple[Execution, list[int]]] = {}  # by process id, with the read ends
    self._sessions: dict[str, Session] = {}
    self._by_pid: dict[int, Session] = {}  # the process that is the session now
    self._retired: dict[int, int] = {}  # processes that have handed over a session, and to which; sweepers, and 0
    self._handlers: dict[int, Callable[[], object]] = {}
    self._lender = Lender(plan, directory, lambda pid: self._retired.update({pid: 0}))
    self._next_check = float("inf")
    self._pid = os.getpid()
    self._own_table = plan.level == "namespace"
    self._children = None if self._own_table else lowlevel.Children()
    self._rules = isolation.landlock_rules() if plan.level == "landlock" else None
    self._filters: dict[tuple[bool, bool], seccomp.Filter] = {}
    self._base_bytes = 0
    self._wake_in, self._wake_out = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)
    self._epoll = select.epoll()
    self.watch(control.fileno(), lambda: None)
    self.watch(self._wake_in, self._drain_wakeups)

  def serve(self, facts: dict[str, Any]) -> None:
    """Runs until the pool hangs up."""
    for sessions in (False, True):
      self._filter(False, sessions)
    facts["facts"]["immortal objects"] = heap.settle()
    facts["facts"]["huge pages"] = self._proc.collapse_memory()
    self._base_bytes = self._proc.address_space_bytes()
    self.send({"hello": facts})
    control_fd = self._control.fileno()
    try:
      while True:
        self._flush()
        for fd, event in self._epoll.poll(self._patience()):
          if fd == control_fd:
            if event & ~select.EPOLLOUT and not self._receive():
              return
          elif fd in self._handlers:
            self._handlers[fd]()
        self._reap()
        if time.monotonic() >= self._next_check:
          self._enforce_limits()
    finally:
      if os.getpid() == self._pid:
        self._kill_everything()

  # -- the pool's side -----------------------------------------------------------------------------------------------

  def send(self, header: dict[str, Any], body: Sequence[bytearray] = ()) -> None:
    """Queues one frame for the pool; the pieces of the body are wiped when they have been sent."""
    size = sum(map(len, body))
    self._outbox.append(bytearray(framing.head(header, size)))
    self._outbox.extend(piece for piece in body if piece)
    self._trim = self._trim or size > _LARGE_BYTES

  def _flush(self) -> None:
    try:
      while self._outbox:
        batch = [self._outbox[i] for i in range(min(len(self._outbox), _MOST_PIECES))]
        batch_views: list[bytearray | memoryview] = [memoryview(batch[0])[self._sent :], *batch[1:]]
        sent = self._sent + self._control.sendmsg(batch_views)
        batch_views.clear()
        batch.clear()
        while self._outbox and sent >= len(self._outbox[0]):
          sent -= len(self._outbox[0])
          framing.wipe(self._outbox[0], len(self._outbox[0]))
          self._outbox.popleft()
        self._sent = sent
    except BlockingIOError:
      pass
    except ConnectionError:
      self._outbox.clear()  # the end of file follows
    if self._trim and not self._outbox:
      self._trim = False
      lowlevel.trim_heap()
    if self._stuck != bool(self._outbox):
      self._stuck = not self._stuck
      self._epoll.modify(self._control, select.EPOLLIN | (select.EPOLLOUT if self._stuck else 0))

  def _receive(self) -> bool:
    """Takes in the pool's frames; False at the end of file."""
    try:
      with self._inbox.free() as room:
        count = self._control.recv_into(room)
    except BlockingIOError:
      return True
    except ConnectionError:
      return False
    self._inbox.received(count)
    for header, body in self._inbox.frames():
      self._trim = self._trim or len(body) > _LARGE_BYTES
      self._handle(header, body)
    return count > 0

  def _handle(self, header: dict[str, Any], body: bytearray) -> None:
    if "run" in header:
      sizes = header["sizes"]
      parts = framing.split(body, sizes)
      framing.wipe(body, len(body))
      fork = header.get("checkpoint") == "fork"
      job = harness.Job(header["limits"], header["seed"], parts[0], parts[1], parts[2], parts[3:], fork)
      execution = Execution(header["run"], header["limits"], header["fetch"])
      if "session" in header:
        self._take_turn(header["session"], job, execution, header["open"])
      else:
        self._run(job, execution)
    elif "cancel" in header:
      self._cancel(header["cancel"])
    elif "close" in header:
      session = self._sessions.get(header["close"])
      if session is not None:
        session.closed = True
        self.kill_session(session)
    else:
      self.send({"pong": header["ping"], "anonymous_bytes": self._proc.anonymous_bytes()})

  def _cancel(self, request_id: int) -> None:
    for execution, _ in self._running.values():
      if execution.request_id == request_id:
        self._kill(execution, "cancel")
    for session in self._sessions.values():
      if session.turn is not None and session.turn.request_id == request_id:
        session.turn.reason = "cancel"
        self.kill_turn(session)

  # -- forking -------------------------------------------------------------------------------------------------------

  def _filter(self, processes: bool, listener: bool) -> seccomp.Filter | None:
    if not self._plan.at_least("seccomp"):
      return None
    # As uid 0 of the host a snippet would own the devices, which are the host's.
    metadata = self._own_table and (self._plan.first_uid > 0 or os.geteuid() != 0)
    key = (processes, listener)
    if key not in self._filters:
      self._filters[key] = seccomp.Filter(
        processes=processes,
        fork_listener=listener,
        metadata=metadata,
        truncate=self._plan.level != "landlock" or landlock.governs_truncation(),
      )
    return self._filters[key]

  def _room(self, directory: str, uid: int, processes: int, listener: bool) -> harness.Room:
    return harness.Room(
      plan=self._plan,
      parent=0 if self._own_table else self._pid,
      base_bytes=self._base_bytes,
      tasks=0 if uid else self._proc.tasks_of_host(),
      uid=uid,
      directory=directory,
      nice=_CHILD_NICE,
      filter=self._filter(processes > 0, listener),
      rules=self._rules,
      forget=self._forget,
    )

  def _forget(self) -> None:
    """In a child: drops what belongs to others."""
    self._inbox.clear()
    for piece in self._outbox:
      framing.wipe(piece, len(piece))
    for execution, _ in self._running.values():
      execution.wipe()
    for session in self._sessions.values():
      session.wipe()
    for store in (self._outbox, self._running, self._sessions, self._by_pid, self._handlers, self._filters):
      store.clear()

  def fork(self, processes: int) -> int:
    """Forks; with processes allowed, into a process table of its own, which dies with the child."""
    if not processes or not self._own_table:
      return os.fork()
    lowlevel.unshare(lowlevel.CLONE_NEWPID)
    pid = -1
    try:
      pid = os.fork()
    finally:
      if pid:  # in the child there is nothing to undo
        lowlevel.setns(self._proc.process_table, lowlevel.CLONE_NEWPID)
    return pid

  def _run(self, job: harness.Job, execution: Execution) -> None:
    pipes: list[int] = []
    room_taken: tuple[str, int] | None = None
    try:
      directory, uid = room_taken = self._lender.take(job.limits["disk_mib"])
      for _ in range(3):
        pipes += os.pipe()
      room = self._room(directory, uid, job.limits["processes"], False)
      pid = self.fork(job.limits["processes"])
    except OSError as error:
      for fd in pipes:
        os.close(fd)
      if room_taken is not None:
        self._lender.give_back(*room_taken, job.limits["disk_mib"])
      execution.kept[executions.RESULT].add(b" " + repr(error).encode())
      self.send(*self._unstarted(execution))
      return
    readers, writers = pipes[::2], pipes[1::2]
    if pid == 0:
      try:
        harness.run_once(job, room, writers)
      finally:
        harness.leave(1)
    job.wipe()
    execution.pid, execution.uid = pid, uid
    execution.scratch = directory
    if not self._own_table:
      execution.directory = directory
    self._running[pid] = execution, readers
    self.plan_check(execution)
    for index, (reader, writer) in enumerate(zip(readers, writers, strict=True)):
      os.close(writer)
      os.set_blocking(reader, False)
      self.watch(reader, functools.partial(self._read, execution, readers, index, reader))

  def _unstarted(self, execution: Execution) -> tuple[dict[str, Any], list[bytearray]]:
    result, parts = executions.judge(execution, 1 << 8, 0.0)
    header, body = executions.answer(execution, result, parts, 0.0, state="gone")
    return {"done": header}, body

  # -- reading -------------------------------------------------------------------------------------------------------

  def watch(self, fd: int, handler: Callable[[], object]) -> None:
    """Calls the handler whenever the descriptor can be read."""
    self._handlers[fd] = handler
    self._epoll.register(fd, select.EPOLLIN)

  def watch_writing(self, fd: int, wanted: bool) -> None:
    """Calls the handler of a watched descriptor also whenever it can be written, or no longer."""
    if fd in self._handlers:
      self._epoll.modify(fd, select.EPOLLIN | (select.EPOLLOUT if wanted else 0))

  def address_space_bound(self, limits: dict[str, Any]) -> int:
    """More than a child with these limits can ever have in memory."""
    return self._base_bytes + (limits["memory_mib"] << 20) + harness.MEMORY_RESERVE

  def unwatch(self, fd: int) -> None:
    """Undoes `watch`, if it was done."""
    if self._handlers.pop(fd, None) is not None:
      self._epoll.unregister(fd)

  def _drain_wakeups(self) -> None:
    with contextlib.suppress(BlockingIOError):
      os.read(self._wake_in, 4096)

  def _read(self, execution: Execution, readers: list[int], index: int, fd: int) -> bool:
    """Takes one bite from a pipe; False if there is nothing more now."""
    count = self.read_into(fd, execution, index)
    if count <= 0:
      if not count:
        self._close(readers, fd)
      return False
    if index == executions.RESULT and not execution.ready and execution.kept[index].first() == harness.READY:
      execution.begin()
      self.plan_check(execution)
    if execution.flooded():
      self._kill(execution, "output")
    return True

  def read_into(self, fd: int, execution: Execution | None, index: int) -> int:
    """Reads once, by way of a buffer that is wiped; returns how many bytes came, -1 if there are none now."""
    try:
      count = os.readv(fd, [self._buffer])
    except BlockingIOError:
      return -1
    if execution is not None:
      with memoryview(self._buffer) as view:
        execution.take(index, view[:count])
    framing.wipe(self._buffer, count)
    return count

  def _close(self, readers: list[int], fd: int) -> None:
    self.unwatch(fd)
    os.close(fd)
    readers[readers.index(fd)] = -1

  # -- ending --------------------------------------------------------------------------------------------------------

  def plan_check(self, execution: Execution) -> None:
    """Looks at the execution's limits when it is due."""
    self._next_check = min(self._next_check, execution.next_check)

  def _patience(self) -> float | None:
    if self._next_check == float("inf"):
      return None
    return max(0.0, self._next_check - time.monotonic())

  def _enforce_limits(self) -> None:
    now = time.monotonic()
    self._next_check = float("inf")
    for execution, _ in self._running.values():
      if now >= execution.next_check and (reason := execution.overrun(now, lowlevel.cpu_seconds(execution.pid))):
        self._kill(execution, reason)
      if not execution.reason:
        self.plan_check(execution)
    for session in list(self._sessions.values()):
      self._enforce_turn(session, now)

  def _kill(self, execution: Execution, reason: str) -> None:
    execution.reason = execution.reason or reason
    for send in (os.killpg, os.kill):  # the group may not exist yet
      with contextlib.suppress(ProcessLookupError, PermissionError):
        send(execution.pid, signal.SIGKILL)

  def _kill_strays(self) -> bool:
    """Kills children that we did not fork: daemons of snippets that the kernel gave to us. True if there were any."""
    if self._children is None or self._plan.level != "process":
      return False  # there are none: nothing can be forked, or it dies with its process table
    known = self._running.keys() | self._retired.keys() | self._by_pid.keys()
    known |= {session.turn.pid for session in self._sessions.values() if session.turn is not None}
    found = False
    for pid in self._children.pids():
      if pid not in known:
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
      session = self._by_pid.get(pid)
      group = session.group if session is not None else pid if pid in self._running else 0
      if group:  # there still is a zombie in it, so that its number cannot have been given to others
        with contextlib.suppress(ProcessLookupError, PermissionError):
          os.killpg(group, signal.SIGKILL)
      _, status, usage = os.wait4(pid, 0)
      heir = self._by_pid.get(self._retired.pop(pid, 0))
      if heir is not None and not lowlevel.is_child(
        heir.pid
      ):  # it had died, and the old process was faster to collect it
        self._session_ended(heir, signal.SIGKILL, usage)
      elif session is not None:
        self._session_ended(session, status, usage)
      elif pid in self._running:
        self._finish(*self._running.pop(pid), status, usage)
      self._kill_strays()

  def _finish(self, execution: Execution, readers: list[int], status: int, usage: resource.struct_rusage) -> None:
    for index, fd in enumerate(readers):
      bites = 0
      while readers[index] >= 0 and bites < _MOST_BITES and self._read(execution, readers, index, fd):
        bites += 1  # a dying stray may still be writing
      if readers[index] >= 0:
        self._close(readers, fd)
    self._lender.give_back(execution.scratch, execution.uid, execution.limits["disk_mib"])
    if execution.reason == "cancel":
      execution.wipe()
      self.send({"ended": execution.request_id})
      return
    cpu_s = usage.ru_utime + usage.ru_stime
    result, parts = executions.judge(execution, status, cpu_s)
    result["max_rss_bytes"] = usage.ru_maxrss * 1024
    header, body = executions.answer(execution, result, parts, cpu_s, state="none")
    execution.kept[executions.RESULT].wipe()
    self.send({"done": header}, body)

  # -- sessions ------------------------------------------------------------------------------------------------------

  def _take_turn(self, name: str, job: harness.Job, execution: Execution, may_open: bool) -> None:
    session = self._sessions.get(name)
    if session is None and not may_open:  # it has died, and the pool did not know yet
      self.send(*self._unstarted(execution))
      return
    if session is None:
      try:
        session = self._open_session(name, job)
      except OSError as error:
        execution.kept[executions.RESULT].add(b" " + repr(error).encode())
        self.send(*self._unstarted(execution))
        return
    session.turn = execution
    session.job = job
    self.plan_check(execution)
    if session.opened:
      session.send_turn()

  def _open_session(self, name: str, job: harness.Job) -> Session:
    ends: list[int] = []
    room_taken: tuple[str, int] | None = None
    try:
      directory, uid = room_taken = self._lender.take(job.limits["disk_mib"])
      ends += os.pipe()
      ends += os.pipe()
      ends += (end.detach() for end in socket.socketpair())
      room = self._room(directory, uid, 0, job.fork)
      pid = os.fork()
    except OSError:
      for fd in ends:
        os.close(fd)
      if room_taken is not None:
        self._lender.give_back(*room_taken, job.limits["disk_mib"])
      raise
    if pid == 0:
      try:
        harness.run_session(job, room, (ends[1], ends[3], ends[5]))
      finally:
        harness.leave(1)
    for fd in (ends[1], ends[3], ends[5]):
      os.close(fd)
    session = Session(self, name, pid, ends[4], (ends[0], ends[2]), uid, directory, job.limits["disk_mib"])
    self._sessions[name] = session
    self._by_pid[pid] = session
    return session

  def hand_over(self, session: Session, pid: int) -> None:
    """The fork of a session is the session from now on; the old process ends."""
    old, session.pid = session.pid, pid
    del self._by_pid[old]
    self._by_pid[pid] = session
    self._retired[old] = pid
    with contextlib.suppress(ProcessLookupError):
      os.kill(old, signal.SIGKILL)

  def kill_turn(self, session: Session) -> None:
    """Ends what runs in a session; with a checkpoint, only the fork."""
    turn = session.turn
    if turn is not None and turn.pid and turn.pid != session.pid:
      if session.is_member(turn.pid):  # else it has died by itself just now
        with contextlib.suppress(ProcessLookupError):
          os.kill(turn.pid, signal.SIGKILL)
      turn.next_check = turn.deadline = time.monotonic() + 2.0  # the old process has to report by then
      self.plan_check(turn)
    else:
      self.kill_session(session)

  def kill_session(self, session: Session) -> None:
    """Ends all processes of a session."""
    session.dying = True
    for send, target in ((os.killpg, session.group), (os.kill, session.pid)):
      with contextlib.suppress(ProcessLookupError, PermissionError):
        send(target, signal.SIGKILL)

  def break_session(self, session: Session) -> None:
    """Ends a session that has broken the protocol."""
    if session.turn is not None:
      session.turn.reason = session.turn.reason or "broken"
    self.kill_session(session)

  def _enforce_turn(self, session: Session, now: float) -> None:
    turn = session.turn
    if turn is None:
      return
    if turn.reason:
      if now >= turn.deadline:
        self.kill_session(session)
      else:
        self.plan_check(turn)
      return
    if now >= turn.next_check and (reason := turn.overrun(now, session.cpu_seconds())):
      turn.reason = reason
      self.kill_turn(session)
    else:
      self.plan_check(turn)

  def _session_ended(self, session: Session, status: int, usage: resource.struct_rusage) -> None:
    del self._by_pid[session.pid], self._sessions[session.name]
    if session.turn is not None:
      session.ended(status, usage.ru_utime + usage.ru_stime - session.cpu_before)
    elif not session.closed:
      self.send({"gone": [session.name]})
    session.close()
    self._lender.give_back(session.directory, session.uid, session.disk_mib)

  # -- cleaning up ---------------------------------------------------------------------------------------------------

  def _kill_everything(self) -> None:
    signal.set_wakeup_fd(-1)
    for execution, _ in self._running.values():
      self._kill(execution, "cancel")
    for session in self._sessions.values():
      self.kill_session(session)
    if self._own_table:
      return  # everything dies with this process
    self._running.clear()
    self._by_pid.clear()
    self._sessions.clear()
    self._retired.clear()
    give_up = time.monotonic() + 5.0
    while self._children is not None and time.monotonic() < give_up:
      self._kill_strays()
      with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
          continue
      if not self._children.pids():
        break
      time.sleep(0.002)
