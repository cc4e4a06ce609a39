"""What each level closes, what the host's part is, and how the interpreter says so."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from pathlib import Path

import pytest
from sandbox_runner import Runner

from agentic_rl.sandbox import (
  LEVELS,
  Interpreter,
  InterpreterConfig,
  Limits,
  LimitsError,
  SandboxStartError,
  canaries,
  cgroup,
  isolation,
  landlock,
  seccomp,
  syscalls,
)


def at_least(runner: Runner, level: str) -> bool:
  return LEVELS.index(runner.level) >= LEVELS.index(level)


def errno_of(runner: Runner, code: str) -> str:
  """Name of the exception, or what was printed."""
  result = runner.run(code)
  return (
    result.error.strip().splitlines()[-1 if "Note: " not in result.error else -2] if result.error else result.stdout
  )


def test_files_of_the_host_are_out_of_reach(runner: Runner, tmp_path: Path):
  secret = tmp_path / "secret"
  secret.write_text("hunter2")
  for folder in (*tmp_path.parents, tmp_path):
    if str(folder).startswith("/tmp/"):
      os.chmod(folder, 0o755)
  secret.chmod(0o666)
  read = errno_of(runner, f"print(open({str(secret)!r}).read())")
  write = errno_of(runner, f"open({str(tmp_path / 'new')!r}, 'w')")
  if at_least(runner, "landlock"):
    expected = "FileNotFoundError" if runner.level == "namespace" else "PermissionError"
    assert read.startswith(expected) and re.match(expected + "|OSError", write)
  else:
    assert read == "hunter2\n"
  assert secret.read_text() == "hunter2"


def test_the_namespace_has_a_root_of_its_own(runner: Runner):
  if runner.level != "namespace":
    pytest.skip("another level")
  listing = runner.run("import os\nprint(os.path.exists('/proc'), os.path.exists('/sys'), sorted(os.listdir('/dev')))")
  assert listing.stdout == "False False ['full', 'null', 'random', 'urandom', 'zero']\n"
  assert runner.run("import os\nos.uname().nodename").value == "'sandbox'"
  uid = runner.run("import os\nos.getuid()").value
  assert (int(uid) != 0 and uid != runner.run("import os\nos.getuid()").value) or os.getuid() != 0


@pytest.mark.parametrize(
  "code",
  [
    "import os\nos.fork()",
    "import os\nos.execv('/bin/true', ['true'])",
    "import subprocess\nsubprocess.run(['true'])",
    "import socket\nsocket.socket()",
    "import socket\nsocket.socketpair(type=socket.SOCK_DGRAM)",
    "import os\nos.kill(os.getppid() or 1, 0)",
    "import os\nos.setsid()",
    "import os\nos.setuid(0) or os.setuid(1)",
    "import os\nos.memfd_create('x')",
    "import os\nos.setpriority(os.PRIO_PROCESS, 0, 19)",
    "import os\nos.pidfd_open(1)",
    "import os\nos.chown('.', 0, 0)",
  ],
)
def test_system_calls_that_are_denied(runner: Runner, code: str):
  if not at_least(runner, "seccomp"):
    pytest.skip("no filter at this level")
  result = runner.run(code)
  assert result.status == "error" and "PermissionError" in result.error, result
  assert result.error.endswith("opens no files but its own.\n")


@pytest.mark.parametrize(
  ("code", "value"),
  [
    ("import threading\nt = threading.Thread(target=print, args=('in thread',))\nt.start()\nt.join()\n1", "1"),
    ("import concurrent.futures as f\nwith f.ThreadPoolExecutor(4) as p: r = list(p.map(abs, [-1, 2]))\nr", "[1, 2]"),
    ("import asyncio\nasync def f(): await asyncio.sleep(0); return 7\nasyncio.run(f())", "7"),
    ("import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'a'); f.seek(0); r = f.read()\nr", "b'a'"),
    ("import sqlite3\nsqlite3.connect('f.db').execute('select 1 + 1').fetchone()", "(2,)"),
    ("import zipfile as z\nwith z.ZipFile('z', 'w') as f: f.writestr('a', 'b')\nz.ZipFile('z').read('a')", "b'b'"),
    ("import os, signal\ngot = []\nsignal.signal(signal.SIGUSR1, lambda *a: got.append(1))\n"
     "os.kill(os.getpid(), signal.SIGUSR1)\ngot", "[1]"),
    ("import signal, time\nsignal.signal(signal.SIGALRM, lambda *a: 1/0)\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\n"
     "try: time.sleep(2)\nexcept ZeroDivisionError: r = 'rang'\nr", "'rang'"),
    ("import pathlib, shutil\npathlib.Path('a/b').mkdir(parents=True)\nshutil.copyfile('/dev/null', 'a/c')\n"
     "shutil.rmtree('a')\npathlib.Path('a').exists()", "False"),
    ("import zoneinfo\nstr(zoneinfo.ZoneInfo('Europe/Berlin'))", "'Europe/Berlin'"),
    ("import numpy as np\nfloat(np.linalg.det(np.eye(3)))", "1.0"),
    ("import scipy.optimize\nround(scipy.optimize.brentq(lambda x: x * x - 2, 0, 2), 6)", "1.414214"),
    ("import glob, html, colorsys, encodings.idna, wave, bisect\n'late imports'", "'late imports'"),
  ],
)  # fmt: skip
def test_ordinary_programs_run_at_every_level(runner: Runner, code: str, value: str):
  if "zoneinfo" in code and not os.path.isdir("/usr/share/zoneinfo"):
    pytest.skip("no time zones on this host")
  result = runner.run(code)
  assert (result.status, result.value) == ("ok", value), result


def test_files_and_input_go_in_and_files_come_out(runner: Runner):
  code = "import os\nos.makedirs('out')\nopen('out/x', 'wb').write(open('a/b', 'rb').read() * 2)\ninput() + input()"
  result = runner.run(code, stdin="é\n2\n", files={"a/b": b"\0\xff"}, fetch=["out/x", "nothing", "a/b"])
  assert result.value == "'é2'", result
  assert result.files == {"out/x": b"\0\xff" * 2, "a/b": b"\0\xff"}
  large = runner.run("print(len(input()), len(open('f').read()))", stdin="x" * 3_000_000, files={"f": b"y" * 3_000_000})
  assert large.stdout == "3000000 3000000\n"
  assert runner.run("import os\nos.symlink('/etc/hostname', 'link')", fetch=["link"]).status == "ok"
  assert runner.leftovers() == []


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../b", "a//b", ".", "a\0b", "x" * 300, "a\nb", 7])
def test_file_names_stay_inside(runner: Runner, name: object):
  for options in ({"files": {name: b""}}, {"fetch": [name]}):
    with pytest.raises(LimitsError, match="file name"):
      runner.run("1", **options)  # type: ignore[arg-type]


def test_nothing_of_the_input_is_left_for_the_next(runner: Runner):
  mark = (
    "import fcntl, os\n"
    "fcntl.fcntl(0, fcntl.F_SETFL, os.O_APPEND | os.O_NONBLOCK)\nfcntl.flock(0, fcntl.LOCK_EX | fcntl.LOCK_NB)"
  )
  look = (
    "import fcntl, os\n"
    "fcntl.flock(0, fcntl.LOCK_EX | fcntl.LOCK_NB)\nfcntl.fcntl(0, fcntl.F_GETFL) & (os.O_APPEND | os.O_NONBLOCK)"
  )
  for _ in range(3):
    assert runner.run(mark).status == "ok"
    assert runner.run(look).value == "0"


def test_files_that_are_too_large_are_refused(runner: Runner):
  for limits, why in ((Limits(file_mib=1), "file_mib"), (Limits(disk_mib=1), "disk_mib")):
    with pytest.raises(LimitsError, match=why):
      runner.run("1", limits, files={"f": bytes(2 << 20)})


def test_disk_space_is_limited(runner: Runner):
  code = "for i in range(100): open(str(i), 'wb').write(bytes(1 << 20))\nimport time\ntime.sleep(5)"
  result = runner.run(code, Limits(disk_mib=4, wall_s=8))
  if runner.level == "namespace":
    assert result.status == "error" and "No space left on device" in result.error
  else:
    assert (result.status, result.limit) == ("disk", "disk")
  assert runner.leftovers() == []


def test_threads_are_limited(runner: Runner):
  code = (
    "import threading, time\nn = 0\ntry:\n"
    "  while n < 500: threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); n += 1\n"
    "except RuntimeError: pass\nn"
  )
  result = runner.run(code, Limits(threads=20, wall_s=8))
  if runner.interpreter.capabilities()["facts"]["user"].startswith("one to each"):
    assert int(result.value) == 20
  else:
    assert int(result.value) < 500  # memory ends it: each has a stack


def test_processes_are_allowed_by_a_limit_where_they_can_be_kept_apart(runner: Runner):
  code = "import subprocess\nprint(subprocess.run(['echo', 'child'], capture_output=True, text=True).stdout)"
  result = runner.run(code, Limits(processes=4))
  if runner.level in ("process", "namespace"):
    assert result.stdout == "child\n\n", result
  else:
    assert result.status == "refused" and "cannot keep processes apart" in result.error
  assert runner.leftovers() == []


def test_level_below_the_minimum_is_refused(tmp_path: Path):
  with pytest.raises(LimitsError, match="above max_isolation"):
    InterpreterConfig(min_isolation="namespace", max_isolation="seccomp")

  async def body() -> None:
    config = InterpreterConfig(min_isolation="namespace", scratch_dir=str(tmp_path))
    await (await Interpreter.start(config)).close()

  if os.getuid() == 0 and Path("/usr/bin/unshare").exists():
    # In a user namespace whose limit on further namespaces is 0, as in many containers.
    import sys

    code = (
      "import asyncio\nfrom agentic_rl.sandbox import *\n"
      "open('/proc/sys/user/max_mnt_namespaces', 'w').write('0')\n"
      "async def main():\n"
      "  try: await Interpreter.start(InterpreterConfig(min_isolation='namespace'))\n"
      "  except SandboxStartError as error: print(error)\n"
      "  async with await Interpreter.start(InterpreterConfig(min_isolation='seccomp')) as i: print(i.level)\n"
      "asyncio.run(main())"
    )
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    first, last = done.stdout.splitlines()
    assert "weaker than min_isolation 'namespace'" in first and "min_isolation='" in first, done
    assert last in ("landlock", "seccomp")
  else:
    asyncio.run(body())


def test_a_level_that_does_not_hold_is_an_error(monkeypatch: pytest.MonkeyPatch):
  async def leaky(_: Interpreter) -> list[str]:
    return ["read the trainer's file"]

  monkeypatch.setattr(canaries, "find_open", leaky)
  with pytest.raises(SandboxStartError, match="a snippet could read the trainer's file"):
    asyncio.run(Interpreter.start(InterpreterConfig()))


def test_the_canaries_sing_where_nothing_is_closed(runner: Runner, monkeypatch: pytest.MonkeyPatch):
  """Under another level's name the weakest one is found out, so that the test can fail."""
  if runner.level != "process":
    assert runner.loop.run_until_complete(canaries.find_open(runner.interpreter)) == []
    return
  monkeypatch.setitem(runner.interpreter._facts, "level", "namespace")
  found = runner.loop.run_until_complete(canaries.find_open(runner.interpreter))
  assert {"start a process", "open a network connection", "see the trainer's file"} <= set(found)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to make a control group")
def test_total_memory_is_limited_by_a_control_group():
  group = cgroup.Group.make(64)
  if not group.path:
    pytest.skip(group.text)
  group.remove()
  assert not os.path.exists(group.path)

  async def body() -> tuple[str, str, str]:
    config = InterpreterConfig(total_memory_mib=200, limits=Limits(memory_mib=2000))
    async with await Interpreter.start(config) as interpreter:
      big = await interpreter.run("x = bytearray(600 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1")
      small = await interpreter.run("1 + 1")
      return big.status, small.value, interpreter.capabilities()["facts"]["control group"]

  assert asyncio.run(body()) == ("crash", "2", "memory of all snippets at most 200 MiB")
  assert not [name for name in os.listdir("/sys/fs/cgroup") if name.startswith("agentic_rl")]


def header_numbers(path: str, pattern: str) -> dict[str, int]:
  if not os.path.exists(path):
    pytest.skip(f"{path} is not installed")
  return {m[1]: int(m[2]) for m in re.finditer(pattern, Path(path).read_text())}


def test_call_numbers_are_those_of_the_kernels_headers():
  found = header_numbers("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", r"#define __NR_(\w+)\s+(\d+)")
  table = syscalls.TABLES["x86_64"]
  assert {name: table[name] for name in found if name in table} == {n: v for n, v in found.items() if n in table}
  assert len(found.keys() & table.keys()) > 300
  generic = header_numbers("/usr/include/asm-generic/unistd.h", r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b")
  table = syscalls.TABLES["aarch64"]
  both = (generic.keys() & table.keys()) - {"fstatat"}
  assert len(both) > 250 and {n: generic[n] for n in both} == {n: table[n] for n in both}
  assert table["newfstatat"] == generic["fstatat"]


def test_every_named_call_is_in_a_table():
  names = syscalls.ALLOWED | syscalls.PROCESSES | syscalls.METADATA
  assert names <= syscalls.TABLES["x86_64"].keys() | syscalls.TABLES["aarch64"].keys()
  assert not syscalls.ALLOWED & {"socket", "connect", "execve", "fork", "ptrace", "mount", "io_uring_setup", "chmod"}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize(
  "options", [{}, {"processes": True}, {"metadata": True}, {"fork_listener": True}, {"truncate": False}]
)
def test_the_program_decides_each_call_as_the_tables_say(
  machine: str, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch
):
  """Runs the filter's own instructions here, for every number there is and some that there are not."""
  monkeypatch.setattr(seccomp.platform, "machine", lambda: machine)
  program = seccomp.Filter(**options)._pieces  # type: ignore[arg-type]
  code = [seccomp._INSTRUCTION.unpack_from(program, i) for i in range(0, len(program), 8)]
  assert len(code) < 600

  def decide(number: int, arguments: tuple[int, ...] = (0,) * 6, audit: int = syscalls.AUDIT[machine]) -> int:
    data = seccomp.struct.pack("=iIQ6Q", number, audit, 0, *arguments)
    counter, word = 0, 0
    while True:
      operation, yes, no, value = code[counter]
      counter += 1
      if operation == seccomp._RETURN:
        return value
      if operation == seccomp._LOAD:
        word = int.from_bytes(data[value : value + 4], "little")
      elif operation == seccomp._AND:
        word &= value
      elif operation == seccomp._JUMP:
        counter += value
      else:
        holds = {
          seccomp._JUMP_EQUAL: word == value,
          seccomp._JUMP_GREATER_EQUAL: word >= value,
          seccomp._JUMP_ANY_BIT: word & value != 0,
        }[operation]
        counter += yes if holds else no

  allowed = set(syscalls.ALLOWED)
  allowed |= syscalls.PROCESSES if options.get("processes") else set()
  allowed |= syscalls.METADATA if options.get("metadata") else set()
  allowed -= set() if options.get("truncate", True) else {"truncate"}
  allowed |= set(seccomp._OF_PROCESSES) if options.get("processes") else set()
  special = {"clone", "socketpair", "ioctl", "fcntl", "prctl", "prlimit64", "clone3"}
  special |= set() if options.get("processes") else set(seccomp._OF_PROCESSES)
  table = syscalls.TABLES[machine]
  for name in table.keys() - special:
    denied = seccomp._UNSUPPORTED if "xattr" in name else seccomp._DENY
    assert decide(table[name]) == (seccomp._ALLOW if name in allowed else denied), name
  assert decide(table["clone3"]) == seccomp._UNKNOWN
  for number in set(range(1200)) - set(table.values()):
    assert decide(number) == seccomp._UNKNOWN
  assert decide(table["read"], audit=0x40000003) == seccomp._KILL_PROCESS
  if machine == "x86_64":
    assert decide(table["read"] | 0x40000000) == seccomp._KILL_PROCESS
  fork = {"processes": seccomp._ALLOW, "fork_listener": seccomp._USER_NOTIFY}
  on_fork = next((fork[name] for name in options if name in fork), seccomp._DENY)
  assert decide(table["clone"], (0x01200011, 0, 0, 0, 0, 0)) == on_fork
  assert decide(table["clone"], (0x003D0F00, 0, 0, 0, 0, 0)) == seccomp._ALLOW  # a thread
  assert decide(table["clone"], (0x10000011, 0, 0, 0, 0, 0)) == seccomp._DENY  # a user namespace
  assert decide(table["socketpair"], (1, 0x80001, 0, 0, 0, 0)) == seccomp._ALLOW
  assert (
    decide(table["socketpair"], (1, 2, 0, 0, 0, 0)) == decide(table["socketpair"], (2, 1, 0, 0, 0, 0)) == seccomp._DENY
  )
  assert decide(table["ioctl"], (0, 0x5412, 0, 0, 0, 0)) == seccomp._DENY  # TIOCSTI
  assert decide(table["fcntl"], (0, 1030, 0, 0, 0, 0)) == seccomp._ALLOW
  assert {decide(table["fcntl"], (0, command, 0, 0, 0, 0)) for command in (8, 10, 15, 1024, 1026)} == {seccomp._DENY}
  assert decide(table["prlimit64"], (0, 0, 0, 0, 0, 0)) == seccomp._ALLOW
  assert decide(table["prlimit64"], (77, 0, 0, 0, 0, 0)) == seccomp._DENY
  others = seccomp._ALLOW if options.get("processes") else seccomp._DENY  # with a process table of one's own
  for name in ("getpgid", "getsid", "sched_getaffinity"):
    assert decide(table[name], (77, 0, 0, 0, 0, 0)) == others and decide(table[name]) == seccomp._ALLOW
  assert decide(table["getpriority"], (0, 77, 0, 0, 0, 0)) == others
  clocks = {0: True, 3: True, 11: True, -6: True, -2: True, (~77 << 3) | 2: False, -9: False, 1 << 31: False}
  for clock, fine in clocks.items():
    verdict = decide(table["clock_gettime"], (clock & 0xFFFFFFFF, 0, 0, 0, 0, 0))
    assert verdict == (seccomp._ALLOW if fine else seccomp._DENY), clock
  flags = {os.O_RDWR | os.O_TRUNC: True, os.O_RDONLY | os.O_TRUNC: options.get("truncate", True), 3: False}
  for flag, fine in (flags | {os.O_RDWR | os.O_CREAT: True, 3 | os.O_TRUNC: False}).items():
    verdict = decide(table["openat"], (0, 0, flag, 0, 0, 0))
    assert verdict == (seccomp._ALLOW if fine else seccomp._DENY), flag


def test_the_plan_reports_every_kind():
  plan = isolation.Plan()
  assert not plan.at_least("seccomp") and plan.at_least("process")
  assert landlock.abi() >= 0
  for level in LEVELS:
    assert isolation.gaps(isolation.Plan(level, first_uid=5))


def test_self_test_and_levels_as_the_command_line_prints_them():
  import sys

  for level in LEVELS:
    command = [sys.executable, "-m", "agentic_rl.sandbox", "--capabilities", f"--max_isolation={level}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert all(len(line) <= 120 for line in done.stdout.splitlines())
    for word in ("seccomp", "landlock", "namespaces", "user", "control group", "left open"):
      assert re.search(rf"^{word}  ", done.stdout, re.M), done.stdout
