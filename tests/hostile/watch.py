"""What must stay as it is while hostile code runs: things around the interpreter, and its own processes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Canaries:
  """Set up around the interpreter, as if they were the trainer's.

  Attributes:
    token: A secret, in a file and in the runner's environment; must not appear in any output.
    names: What stands for `@NAME@` in a snippet.
  """

  def __init__(self) -> None:
    self.token = "canary-" + secrets.token_hex(12)
    self._folder = Path(tempfile.mkdtemp(prefix="agentic_rl-battery-"))
    self._folder.chmod(0o755)
    self.scratch = self._folder / "scratch"
    self.scratch.mkdir()
    home = self._folder / "trainer"
    home.mkdir()
    self._secret = home / "secret"
    self._secret.write_text(self.token)
    self._tree = home / "tree"
    (self._tree / "inner").mkdir(parents=True)
    (self._tree / "inner" / "file").write_text("kept")
    (self._tree / "link").symlink_to("inner")
    self._file = home / "file"
    self._file.write_text("kept")
    with contextlib.suppress(OSError):
      os.setxattr(self._file, "user.battery", b"kept")
    self._listener = socket.create_server(("127.0.0.1", 0))
    abstract = "battery-" + secrets.token_hex(8)
    self._abstract = socket.socket(socket.AF_UNIX)
    self._abstract.bind("\0" + abstract)
    self._unix = socket.socket(socket.AF_UNIX)
    self._unix.bind(str(home / "socket"))
    for listener in (self._listener, self._abstract, self._unix):
      listener.listen(64)
      listener.setblocking(False)
    os.environ["BATTERY_SECRET"] = self.token
    self.names = {
      "SECRET": str(self._secret),
      "FOLDER": str(home),
      "TREE": str(self._tree),
      "FILE": str(self._file),
      "PORT": str(self._listener.getsockname()[1]),
      "ABSTRACT": abstract,
      "UNIX": str(home / "socket"),
      "PID": str(os.getpid()),
    }
    self._home = home
    self._start_bystander()
    self._before = self._look()

  def _start_bystander(self) -> None:
    self._bystander = subprocess.Popen(
      [sys.executable, "-c", "print(flush=True)\nwhile True: __import__('time').sleep(3600)"], stdout=subprocess.PIPE
    )
    self._bystander.stdout.readline()  # type: ignore[union-attr]
    self.names["BYSTANDER"] = str(self._bystander.pid)

  def fill_in(self, code: str) -> str:
    """Replaces the names of canaries in a snippet."""
    return re.sub("@([A-Z]+)@", lambda match: self.names.get(match[1], match[0]), code)

  def _look(self) -> dict[str, object]:
    seen: dict[str, object] = {}
    for path in [self._home, *sorted(self._home.rglob("*"))]:
      found = path.lstat()
      seen[f"{path.name} status"] = (
        found.st_mode, found.st_uid, found.st_gid, found.st_nlink, found.st_size, found.st_mtime_ns, found.st_ctime_ns
      )  # fmt: skip
    seen["content"] = self._file.read_text() + self._secret.read_text()
    seen["attributes"] = sorted(os.listxattr(self._file))
    pid = self._bystander.pid
    for name, process in (("bystander", pid), ("runner", os.getpid())):
      seen[name] = (
        os.getpriority(os.PRIO_PROCESS, process),
        os.sched_getaffinity(process),
        os.sched_getscheduler(process),
        resource.prlimit(process, resource.RLIMIT_NOFILE),
        resource.prlimit(process, resource.RLIMIT_CPU),
        Path(f"/proc/{process}/oom_score_adj").read_text(),
      )
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    seen["bystander is stopped or traced"] = state in "TtZX"
    return seen

  def harmed(self) -> list[str]:
    """What has been touched since the start."""
    if self._bystander.poll() is not None:
      status = self._bystander.returncode
      self._start_bystander()
      self._before = self._look()
      return [f"the bystander was killed ({status})"]
    now = self._look()
    names = sorted(self._before.keys() | now.keys())
    pairs = [(name, self._before.get(name), now.get(name)) for name in names]
    found = [f"{name}: {before} became {after}" for name, before, after in pairs if before != after]
    for name, listener in (("port", self._listener), ("abstract socket", self._abstract), ("socket file", self._unix)):
      with contextlib.suppress(BlockingIOError):
        listener.accept()[0].close()
        found.append(f"{name} was connected to")
    self._before = now  # so that one harm is told once
    return found

  def close(self) -> None:
    """Takes all away again."""
    self._bystander.kill()
    self._bystander.communicate()
    for listener in (self._listener, self._abstract, self._unix):
      listener.close()
    del os.environ["BATTERY_SECRET"]
    shutil.rmtree(self._folder, ignore_errors=True)


@dataclasses.dataclass
class _Process:
  parent: int
  session: int
  name: str
  state: str


def _processes() -> dict[int, _Process]:
  found = {}
  for name in os.listdir("/proc"):
    if name.isdigit():
      with contextlib.suppress(OSError, ValueError, IndexError):
        before, _, after = Path(f"/proc/{name}/stat").read_text().rpartition(")")
        words = after.split()
        found[int(name)] = _Process(int(words[1]), int(words[3]), before.partition("(")[2], words[0])
  return found


class Watch:
  """Looks at the processes, descriptors, memory and files of an interpreter.

  Args:
    scratch: Directory where it keeps its files.
  """

  def __init__(self, scratch: Path) -> None:
    self._scratch = scratch
    self._mounts = _mounts()
    self._first: dict[int, tuple[int, int]] = {}  # anonymous bytes and descriptors by zygote

  def zygotes(self, launchers: list[int]) -> list[int]:
    """The one child that each launcher keeps."""
    return [pid for pid, process in _processes().items() if process.parent in launchers]

  def leftovers(self, launchers: list[int], patience_s: float = 10.0) -> list[str]:
    """Processes below the interpreter that should have ended, and files that should be gone."""
    deadline = time.monotonic() + patience_s
    while True:
      left = self._left(launchers)
      if not left or time.monotonic() > deadline:
        return left
      time.sleep(0.01)

  def _left(self, launchers: list[int]) -> list[str]:
    table = _processes()
    zygotes = [pid for pid, process in table.items() if process.parent in launchers]
    own = {*launchers, *zygotes}
    left = []
    below = set(own)
    grown = True
    while grown:
      more = {pid for pid, p in table.items() if p.parent in below or p.session in launchers} - below
      grown = bool(more)
      below |= more
    left += [f"process {pid} ({table[pid].name}, {table[pid].state})" for pid in sorted(below - own)]
    for directory in self._scratch.iterdir():
      with contextlib.suppress(OSError):
        left += [f"file {directory.name}/{name}" for name in os.listdir(directory) if name not in ("root", "stderr")]
    return left

  def measure(self, launchers: list[int], room_bytes: int) -> list[str]:
    """Zygotes that have grown since they were first seen, or that hold more descriptors."""
    found = []
    for pid in self.zygotes(launchers):
      words = Path(f"/proc/{pid}/statm").read_text().split()
      size = (int(words[1]) - int(words[2])) * _PAGE
      try:
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
      except PermissionError:  # without privileges they cannot be seen
        descriptors = 0
      first = self._first.setdefault(pid, (size, descriptors))
      if size - first[0] > room_bytes:
        found.append(f"zygote {pid} has grown by {(size - first[0]) / (1 << 20):.1f} MiB")
      if descriptors > first[1]:
        found.append(f"zygote {pid} holds {descriptors} descriptors, {first[1]} at first")
    return found

  def after_close(self, launchers: list[int]) -> list[str]:
    """What is left when the interpreter is closed."""
    found = []
    deadline = time.monotonic() + 8.0
    while time.monotonic() < deadline:
      table = _processes()
      left = [pid for pid, p in table.items() if pid in launchers or p.parent in launchers or p.session in launchers]
      files = sorted(os.listdir(self._scratch))
      found = [f"process {pid} after close" for pid in left] + [f"file {name} after close" for name in files]
      if not found:
        break
      time.sleep(0.02)
    if _mounts() != self._mounts:
      found.append("mounts are left")
    return found


def _mounts() -> list[str]:
  return sorted(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
