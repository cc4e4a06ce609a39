"""One parent process as the pool sees it: started, talked to, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from agentic_rl.sandbox import framing, lowlevel, scratch
from agentic_rl.sandbox.limits import ExecResult, InterpreterConfig, SandboxStartError

if TYPE_CHECKING:
  from agentic_rl.sandbox.session import Session

_MARK = "AGENTIC_RL_SANDBOX"
_PACKAGE_DIR = os.path.dirname(os.path.abspath(__file__))

# Imports the launcher without running the packages' own __init__ modules: it stays small and free of jax.
_BOOT = """
import sys, types
directory = sys.argv.pop(1)
for name in ("agentic_rl", "agentic_rl.sandbox"):
  sys.modules[name] = types.ModuleType(name)
  sys.modules[name].__path__ = [directory] if "." in name else []
from agentic_rl.sandbox import launcher
launcher.main(sys.argv[1:])
"""

_ENVIRONMENT = {
  "PATH": "/usr/local/bin:/usr/bin:/bin",
  "LANG": "C.UTF-8",
  "LC_ALL": "C.UTF-8",
  "TZ": "UTC",
  "PYTHONHASHSEED": "0",
  "PYTHONDONTWRITEBYTECODE": "1",
  "MALLOC_ARENA_MAX": "1",  # else a few threads reserve the whole address space
  "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1",
  "MKL_NUM_THREADS": "1",
  "MPLBACKEND": "Agg",
  "JAX_PLATFORMS": "cpu",
  "SYMPY_CACHE_SIZE": "5000",  # the default, 1000, does not hold what the warm-up has filled
}


@dataclasses.dataclass(eq=False)
class Request:
  """One snippet that has not been answered yet.

  Attributes:
    header: What the parent is told, less the number.
    body: Source, input, names of files, and their contents.
    group: Index of the preload group.
    owner: On whose behalf, for fairness.
    future: Gets the result.
    queued: When it was asked for, by the loop's clock.
    fetch: Names of the files to bring back.
    waited_s: Seconds in the queue until it was sent.
    parent: Where it runs, or where it has to run.
    attempt: How often it has been sent.
    session: Whose turn it is, or None.
  """

  header: dict[str, Any]
  body: tuple[bytes, ...]
  group: int
  owner: str
  future: asyncio.Future[ExecResult]
  queued: float
  fetch: Sequence[str] = ()
  waited_s: float = 0.0
  parent: Parent | None = None
  attempt: int = 0
  session: Session | None = None


class Owner(Protocol):
  """Who is told of what a parent says."""

  config: InterpreterConfig

  def on_done(self, parent: Parent, header: dict[str, Any], body: bytearray) -> None:
    """A snippet has ended."""

  def on_ended(self, parent: Parent, number: int) -> None:
    """A snippet that was cancelled has ended."""

  def on_gone(self, parent: Parent, sessions: Sequence[str]) -> None:
    """Sessions have died between two turns."""

  def on_lost(self, parent: Parent) -> None:
    """The parent has died."""


class Parent(asyncio.Protocol):
  """A launcher with its zygote, and the socket to it.

  Attributes:
    facts: What it said of itself when it was ready.
    running: Snippets that it has been sent and has not answered, by number.
    sessions: Names of the sessions that live in it.
    retiring: Whether it gets no new snippets.
    answered: Whether it has answered the last ping.
  """

  def __init__(
    self, owner: Owner, process: subprocess.Popen[bytes], directory: str, mark: str, stderr: IO[bytes]
  ) -> None:
    self.facts: dict[str, Any] = {}
    self.running: dict[int, Request] = {}
    self.sessions: set[str] = set()
    self.retiring = False
    self.answered = True
    self.missed = 0
    self.pid = process.pid
    self._owner = owner
    self._process = process
    self._directory = directory
    self._mark = mark
    self._stderr = stderr
    self._inbox = framing.Inbox()
    self._first_bytes = 0
    self._last_words = ""
    self._dead = False
    self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    self._transport: asyncio.Transport | None = None

  @classmethod
  async def start(cls, owner: Owner, preload: Sequence[str]) -> Parent:
    """Starts one and waits until it can fork; raises SandboxStartError if it does not get there in time."""
    try:
      ours, theirs = socket.socketpair()
      try:
        stderr = tempfile.TemporaryFile(dir=owner.config.scratch_dir or None)
      except OSError:
        ours.close()
        theirs.close()
        raise
    except OSError as error:
      raise SandboxStartError(f"the sandbox's parent process cannot be started: {error}") from error
    mark = os.urandom(12).hex()
    with theirs:
      try:
        process, directory = _spawn(owner.config, theirs, mark, preload, stderr)
      except OSError as error:
        ours.close()
        stderr.close()
        raise SandboxStartError(f"the sandbox's interpreter {owner.config.python!r} cannot be run: {error}") from error
    self = cls(owner, process, directory, mark, stderr)
    loop = asyncio.get_running_loop()
    try:
      await loop.create_unix_connection(lambda: self, sock=ours)
      await asyncio.wait_for(self._hello, owner.config.start_timeout_s)
    except (TimeoutError, ConnectionError) as error:
      await self.shut()
      text = self.last_words
      what = f"with {', '.join(preload)} " if preload else ""
      raise SandboxStartError(
        f"the sandbox's parent process {what}did not start ({type(error).__name__}): {text}"
      ) from error
    except BaseException:  # a cancellation above all: nothing of a start that fails is left
      await self.shut()
      raise
    return self

  # -- the socket ----------------------------------------------------------------------------------------------------

  def connection_made(self, transport: asyncio.BaseTransport) -> None:
    self._transport = cast(asyncio.Transport, transport)

  def data_received(self, data: bytes) -> None:
    self._inbox.feed(data)
    for header, body in self._inbox.frames():
      if "done" in header:
        self._owner.on_done(self, header["done"], body)
      elif "pong" in header:
        self.answered = True
        size = header["anonymous_bytes"]
        self._first_bytes = self._first_bytes or size
        if not self.running and size - self._first_bytes > self._owner.config.recycle_growth_mib << 20:
          self.retiring = True
      elif "ended" in header:
        self._owner.on_ended(self, header["ended"])
      elif "gone" in header:
        self._owner.on_gone(self, header["gone"])
      elif "hello" in header:
        self.facts = header["hello"]
        self._hello.set_result(None)
        self.ping()  # tells the size to compare with
      elif not self._hello.done():
        self._hello.set_exception(SandboxStartError(header["refused"]))

  def connection_lost(self, _: Exception | None) -> None:
    if not self._hello.done():
      self._hello.set_exception(ConnectionResetError("it ended early"))
    elif self.facts and not self._dead:
      self._dead = True
      self._owner.on_lost(self)

  def send(self, header: dict[str, Any], body: Sequence[bytes] = ()) -> None:
    """Sends one frame; silently dropped if the parent is gone, as `connection_lost` follows."""
    if self._transport is not None and not self._transport.is_closing():
      self._transport.write(framing.pack(header, body))

  def ping(self) -> None:
    """Asks for a sign of life."""
    self.answered = False
    self.send({"ping": 1})

  # -- the end -------------------------------------------------------------------------------------------------------

  def kill(self) -> None:
    """Ends it at once; `on_lost` follows."""
    self._process.kill()
    if self._transport is not None:
      self._transport.abort()

  @property
  def last_words(self) -> str:
    """End of what it wrote to its stderr, known after `shut`."""
    return self._last_words or "it said nothing"

  async def shut(self) -> None:
    """Closes the socket, at which the zygote kills all its descendants; returns when nothing is left."""
    self._dead = True
    if self._transport is not None:
      ours = self._transport.get_extra_info("socket")
      with contextlib.suppress(OSError):  # also where a fork of the trainer holds a copy
        ours.shutdown(socket.SHUT_RDWR)
      self._transport.abort()
    await asyncio.to_thread(self._bury)

  def _bury(self) -> None:
    if self._process.stdin is not None:
      self._process.stdin.close()
    try:
      self._process.wait(8.0)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    if self._process.returncode != 0:  # it could not clean up itself
      lowlevel.kill_everywhere(self._process.pid, f"{_MARK}={self._mark}".encode())
      scratch.remove_tree(self._directory)
    if not self._stderr.closed:
      self._stderr.seek(0)
      self._last_words = self._stderr.read()[-2000:].decode("utf-8", "replace").strip()
      self._stderr.close()


def _spawn(
  config: InterpreterConfig, control: socket.socket, mark: str, preload: Sequence[str], stderr: IO[bytes]
) -> tuple[subprocess.Popen[bytes], str]:
  """Starts the launcher without running any Python between fork and exec, so that it is safe beside threads."""
  directory = tempfile.mkdtemp(prefix="agentic_rl-sandbox-", dir=config.scratch_dir or None)
  fd = control.fileno()
  settings = {
    "nice": config.nice,
    "preload": list(preload),
    "min_isolation": config.min_isolation,
    "max_isolation": config.max_isolation,
    "total_memory_mib": config.total_memory_mib,
  }
  environment = _ENVIRONMENT | dict(config.environment) | {"HOME": directory, "TMPDIR": directory, _MARK: mark}
  arguments = [_PACKAGE_DIR, str(fd), directory, f"{_MARK}={mark}", json.dumps(settings)]
  try:
    process = subprocess.Popen(
      [config.python, "-s", "-P", "-c", _BOOT, *arguments],
      pass_fds=[fd],
      env=environment,
      cwd=directory,
      stdin=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      stderr=stderr,
      start_new_session=True,
    )
  except OSError:
    scratch.remove_tree(directory)
    raise
  return process, directory
