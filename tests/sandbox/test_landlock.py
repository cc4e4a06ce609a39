"""What the kernel does with the rules: each case is a fresh interpreter that gives up all but its trees."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from agentic_rl.sandbox import landlock

_ABI = landlock.abi()
needs_landlock = pytest.mark.skipif(not _ABI, reason="this kernel has no Landlock, or it is off")

_PRELUDE = """
import ctypes, errno, json, os, signal, socket, sys
from agentic_rl.sandbox import isolation, landlock
signal.alarm(60)  # a case that hangs dies
libc = ctypes.CDLL(None, use_errno=True)
scratch, outside = sys.argv[1:]

def restrict():
  rules = landlock.Rules([*isolation.interpreter_homes(), "/does/not/exist"])
  ruleset = rules.prepare()
  rules.close()
  landlock.restrict(ruleset, scratch)
  return ruleset

def outcome(function, *arguments):
  try:
    function(*arguments)
  except OSError as error:
    return errno.errorcode[error.errno]
  return "done"

def write(path, text="x"):
  with open(path, "w") as file: file.write(text)

def tell(value):
  print(json.dumps(value), flush=True)
"""


class Case:
  """A directory to work in, one out of reach, and code that runs between them."""

  def __init__(self, folder: Path) -> None:
    self.scratch, self.outside = folder / "scratch", folder / "outside"
    for path in (self.scratch, self.outside):
      path.mkdir()
    (self.outside / "secret").write_text("hunter2")

  def run(self, code: str) -> Any:
    program = [sys.executable, "-c", _PRELUDE + textwrap.dedent(code), str(self.scratch), str(self.outside)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def case(tmp_path: Path) -> Case:
  return Case(tmp_path)


@needs_landlock
def test_only_the_readable_trees_can_be_read(case: Case):
  found = case.run(
    """
    restrict()
    import colorsys  # not loaded yet
    secret = os.path.join(outside, "secret")
    tell([len(os.listdir("/usr")) > 0, outcome(write, "/usr/new"), outcome(open, secret), outcome(os.listdir, outside),
      outcome(open, "/etc/passwd"), outcome(os.listdir, "/"), outcome(open, "/proc/self/environ"),
      outcome(os.open, secret, os.O_WRONLY)])
    """
  )
  assert found[0] is True
  assert found[1] in ("EACCES", "EROFS")
  assert found[2:] == ["EACCES"] * 6


@needs_landlock
def test_the_scratch_directory_is_for_files(case: Case):
  found = case.run(
    """
    restrict()
    os.chdir(scratch)
    os.mkdir("a")
    write("a/file", "text")
    os.rename("a/file", "file")
    os.symlink("file", "link")
    os.mkfifo("pipe")
    os.truncate("file", 2)
    seen = [open("link").read(), sorted(os.listdir(".")), outcome(os.mknod, "device", 0o20600, os.makedev(1, 3))]
    bound = socket.socket(socket.AF_UNIX)
    seen.append(outcome(bound.bind, "socket"))
    for name in ("pipe", "link", "file"): os.unlink(name)
    os.rmdir("a")
    write("program", "#!/bin/sh\\nexit 0\\n")
    os.chmod("program", 0o700)
    seen.append(outcome(os.execv, "./program", ["program"]))
    tell(seen)
    """
  )
  assert found[:2] == ["te", ["a", "file", "link", "pipe"]]
  assert found[2] in ("EACCES", "EPERM")
  assert found[3:] == ["EACCES", "EACCES"]


@needs_landlock
def test_nothing_changes_outside(case: Case):
  found = case.run(
    """
    restrict()
    secret, new = os.path.join(outside, "secret"), os.path.join(outside, "new")
    own = os.path.join(scratch, "own")
    write(own)
    os.symlink(secret, os.path.join(scratch, "way"))
    tell([outcome(write, new), outcome(os.mkdir, new), outcome(os.unlink, secret), outcome(os.symlink, own, new),
      outcome(os.mkfifo, new), outcome(open, os.path.join(scratch, "way")),
      outcome(open, os.path.join(scratch, "..", "outside", "secret")),
      [outcome(os.rename, own, new), outcome(os.rename, secret, own), outcome(os.link, own, new),
       outcome(os.link, secret, os.path.join(scratch, "linked"))]])
    """
  )
  assert found[:7] == ["EACCES"] * 7
  assert set(found[7]) <= {"EACCES", "EXDEV"}
  assert [path.name for path in case.outside.iterdir()] == ["secret"]
  assert (case.outside / "secret").read_text() == "hunter2"


@needs_landlock
@pytest.mark.skipif(_ABI < 3, reason="truncation came with ABI 3")
def test_files_outside_cannot_be_cut(case: Case):
  found = case.run(
    "restrict(); tell([outcome(os.truncate, outside + '/secret', 0), outcome(open, outside + '/secret', 'w')])"
  )
  assert found == ["EACCES", "EACCES"]
  assert (case.outside / "secret").read_text() == "hunter2"


@needs_landlock
def test_devices_stay(case: Case):
  found = case.run(
    """
    restrict()
    write("/dev/null")
    tell([len(open("/dev/urandom", "rb").read(4)), len(open("/dev/zero", "rb").read(4)), outcome(write, "/dev/full"),
      outcome(open, "/dev/tty"), outcome(os.listdir, "/dev")])
    """
  )
  assert found[:3] == [4, 4, "ENOSPC"]
  assert found[3] in ("EACCES", "ENXIO", "ENOENT") and found[4] == "EACCES"


@needs_landlock
def test_descriptors_are_closed_and_open_files_stay(case: Case):
  found = case.run(
    """
    file = open(os.path.join(outside, "secret"))
    before = os.dup(0)
    os.close(before)
    ruleset = restrict()
    after = os.dup(0)
    tell([outcome(os.fstat, ruleset), before == after, file.read()])
    """
  )
  assert found == ["EBADF", True, "hunter2"]


@needs_landlock
@pytest.mark.skipif(_ABI < 4, reason="TCP came with ABI 4")
def test_no_tcp(case: Case):
  found = case.run(
    """
    listener = socket.create_server(("127.0.0.1", 0))
    restrict()
    other = socket.socket()
    tell([outcome(socket.socket().bind, ("127.0.0.1", 0)), outcome(other.connect, listener.getsockname())])
    """
  )
  assert found == ["EACCES", "EACCES"]


@needs_landlock
@pytest.mark.skipif(_ABI < 6, reason="scopes came with ABI 6")
def test_abstract_sockets_and_signals_stay_among_themselves(case: Case):
  found = case.run(
    """
    name = f"\\0sandbox-test-{os.getpid()}"
    outer = socket.socket(socket.AF_UNIX)
    outer.bind(name)
    outer.listen()
    restrict()
    inner = socket.socket(socket.AF_UNIX)
    inner.bind(name + "-inner")
    inner.listen()
    tell([outcome(socket.socket(socket.AF_UNIX).connect, name),
      outcome(socket.socket(socket.AF_UNIX).connect, name + "-inner"),
      outcome(os.kill, os.getppid(), 0), outcome(os.kill, os.getpid(), 0)])
    """
  )
  assert found == ["EPERM", "done", "EPERM", "done"]


@needs_landlock
def test_children_inherit_it(case: Case):
  found = case.run(
    """
    restrict()
    read, write_end = os.pipe()
    if not os.fork():
      os.write(write_end, outcome(open, os.path.join(outside, "secret")).encode())
      os._exit(0)
    os.wait()
    tell(os.read(read, 64).decode())
    """
  )
  assert found == "EACCES"


@needs_landlock
@pytest.mark.parametrize("version", range(1, _ABI + 1))
def test_each_version_is_asked_for_what_it_has(version: int, case: Case, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(landlock, "abi", lambda: version)
  rules = landlock.Rules(["/usr", str(case.outside / "secret")])
  os.close(rules.prepare())
  files, tcp, scopes = (int.from_bytes(rules._request[i : i + 8], "little") for i in (0, 8, 16))
  assert len(rules._request) == (8 if version < 4 else 16 if version < 6 else 24)
  assert files.bit_length() == {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
  assert (tcp != 0, scopes != 0) == (version >= 4, version >= 6)
  assert landlock._scratch_rights() & ~files == 0
  rules.close()
  found = case.run(
    f"landlock.abi = lambda: {version}; restrict(); tell([outcome(write, scratch + '/a'), "
    "outcome(open, outside + '/secret'), outcome(write, outside + '/b')])"
  )
  assert found == ["done", "EACCES", "EACCES"]


@needs_landlock
def test_failures_name_the_call(case: Case):
  with open(case.outside / "secret") as file, pytest.raises(OSError, match="landlock_add_rule: ") as caught:
    landlock.restrict(file.fileno(), str(case.scratch))  # not a ruleset
  assert caught.value.errno in (errno.EBADF, errno.EBADFD)
  with pytest.raises(FileNotFoundError, match="nowhere"):
    landlock.restrict(-1, str(case.scratch / "nowhere"))


def test_without_landlock_the_version_is_zero(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(landlock, "_CREATE_RULESET", 100_000)
  assert landlock.abi() == 0
