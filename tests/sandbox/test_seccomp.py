"""What the kernel does with the filter: each case is a fresh interpreter that puts itself under it."""

from __future__ import annotations

import json
import pathlib
import platform
import signal
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from agentic_rl.sandbox import seccomp, syscalls

pytestmark = pytest.mark.skipif(bool(seccomp.unsupported()), reason=f"no filter here: {seccomp.unsupported()}")

_PRELUDE = """
import ctypes, errno, json, os, signal, socket, sys, threading, time
from agentic_rl.sandbox import seccomp, syscalls
signal.alarm(60)  # a case that hangs dies
libc = ctypes.CDLL(None, use_errno=True)
table = syscalls.TABLES[os.uname().machine]

def call(number, *arguments):
  ctypes.set_errno(0)
  words = [ctypes.c_long(word) for word in (*arguments, *[0] * 6)[:6]]
  result = libc.syscall(ctypes.c_long(number), *words)
  return errno.errorcode[ctypes.get_errno()] if result == -1 else "done"

def outcome(function, *arguments):
  try:
    function(*arguments)
  except OSError as error:
    return errno.errorcode[error.errno]
  return "done"

def tell(value):
  print(json.dumps(value), flush=True)
"""

_DENIED = """
  accept accept4 acct add_key adjtimex bind bpf capset chmod chown chroot clock_adjtime clock_settime connect
  delete_module execve execveat fanotify_init fanotify_mark fchmod fchmodat fchmodat2 fchown fchownat
  finit_module fsopen init_module inotify_add_watch inotify_init inotify_init1 io_setup
  io_uring_enter io_uring_register io_uring_setup ioprio_set kcmp kexec_file_load kexec_load keyctl landlock_add_rule
  landlock_create_ruleset landlock_restrict_self lchown listen lookup_dcookie memfd_create
  memfd_secret mknod mknodat modify_ldt mount mount_setattr move_mount mq_open mq_unlink msgctl msgget
  name_to_handle_at open_by_handle_at open_tree perf_event_open personality pidfd_getfd pidfd_open pidfd_send_signal
  pivot_root process_madvise process_mrelease process_vm_readv process_vm_writev ptrace quotactl quotactl_fd recvmmsg
  request_key rt_sigqueueinfo rt_tgsigqueueinfo sched_setaffinity sched_setattr sched_setparam
  sched_setscheduler seccomp semctl semget semop sendmmsg setdomainname setfsgid setfsuid setgid setgroups sethostname
  setns setpgid setpriority setregid setresgid setresuid setreuid setsid settimeofday setuid shmat shmctl
  shmget socket swapoff swapon syslog umount2 unshare userfaultfd utime utimensat utimes vmsplice
""".split()


def in_child(code: str, options: str = "", pid: str = "os.getpid()") -> Any:
  """What the code tells last, run in a new interpreter; `install()` in it installs the filter."""
  install = f"def install():\n  return seccomp.Filter({options}).install({pid})\n"
  done = start(install + textwrap.dedent(code))
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


def start(code: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run([sys.executable, "-c", _PRELUDE + code], capture_output=True, text=True, timeout=90)


def test_dangerous_calls_are_denied():
  found = in_child(
    f"""
    names = [name for name in {_DENIED!r} if name in table]
    install()
    tell({{name: call(table[name], -1, -1, -1, -1, -1, -1) for name in names}})
    """
  )
  assert len(found) > 100
  assert {name: why for name, why in found.items() if why != "EPERM"} == {}


@pytest.mark.parametrize(("options", "by_name"), [("", "done"), ("truncate=False", "EPERM")])
def test_files_are_shortened_by_name_only_where_that_is_governed(options: str, by_name: str, tmp_path: pathlib.Path):
  found = in_child(
    f"""
    name = {str(tmp_path / "file")!r}
    file = open(name, "wb", buffering=0)
    file.write(b"abc")
    install()
    tell([outcome(os.open, name, os.O_RDONLY | os.O_TRUNC), outcome(os.truncate, name, 0),
      outcome(os.open, name, os.O_RDWR), outcome(os.open, name, os.O_WRONLY | os.O_TRUNC), file.write(b"abc"),
      outcome(os.ftruncate, file.fileno(), 2), os.path.getsize(name)])
    """,
    options,
  )
  assert found == [by_name, by_name, "done", "done", 3, "done", 2]


def test_what_is_newer_than_the_table_does_not_exist():
  found = in_child("install(); tell([call(n, -1) for n in (table['clone3'], 470, 999, 100_000, 2**30 - 1)])")
  assert found == ["ENOSYS"] * 5


def test_no_process_but_threads():
  found = in_child(
    """
    import subprocess
    install()
    seen = []
    threads = [threading.Thread(target=seen.append, args=(i,)) for i in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    spawn = outcome(os.posix_spawn, "/bin/true", ["true"], {})
    tell([sorted(seen), outcome(os.fork), outcome(os.execv, "/bin/true", ["true"]), spawn,
      outcome(subprocess.run, ["/bin/true"])])
    """
  )
  assert found == [list(range(8)), "EPERM", "EPERM", "EPERM", "EPERM"]


def test_signals_reach_only_oneself():
  found = in_child(
    """
    install()
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    own, parent = os.getpid(), os.getppid()
    os.kill(own, signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    others = [outcome(os.kill, pid, 0) for pid in (parent, 0, -1, -own, -parent, -2, 1)]
    raw = [call(table["tkill"], parent, 0), call(table["tgkill"], parent, parent, 0)]
    high = call(table["kill"], (1 << 32) | parent, 0)
    tell([len(heard), others, raw, high])
    """
  )
  assert found == [3, ["EPERM"] * 7, ["EPERM"] * 2, "EPERM"]


def test_without_a_process_id_there_are_no_signals():
  found = in_child(
    """
    install()
    tell([outcome(os.kill, pid, 0) for pid in (os.getpid(), os.getppid(), 0, -1)]
      + [outcome(signal.pthread_kill, threading.get_ident(), 0)])
    """,
    pid="0",
  )
  assert found == ["EPERM"] * 5


def test_without_a_process_id_no_group_can_be_signalled():
  """-2 is the group of process 2: what stands in the program for "nobody" must be nobody's number."""
  found = in_child("install(); tell([call(table[n], -2, 0) for n in ('kill', 'prlimit64')])", pid="0")
  assert found == ["EPERM", "EPERM"]


def test_sockets_are_pairs_of_streams():
  found = in_child(
    """
    install()
    one, other = socket.socketpair()
    one.sendall(b"x")
    got = other.recv(1).decode()
    kinds = (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW)
    tell([got, [outcome(socket.socketpair, socket.AF_UNIX, kind) for kind in kinds],
      [outcome(socket.socket, family) for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)],
      outcome(one.sendto, b"x", "\\0nobody"), call(table["socketpair"], 2, 1, 0, 0)])
    """
  )
  assert found[:3] == ["x", ["EPERM"] * 3, ["EPERM"] * 3]
  assert found[3] in ("EISCONN", "EOPNOTSUPP") and found[4] == "EPERM"


def test_arguments_decide():
  found = in_child(
    """
    import fcntl, resource
    read, write = os.pipe()
    install()
    byte = bytearray(b"x")
    tell({
      "own limits": outcome(resource.prlimit, 0, resource.RLIMIT_CPU),
      "own limits by name": outcome(resource.prlimit, os.getpid(), resource.RLIMIT_CPU),
      "limits of the parent": outcome(resource.prlimit, os.getppid(), resource.RLIMIT_CPU),
      "type for the terminal": outcome(fcntl.ioctl, read, 0x5412, byte),
      "the same, above 32 bits": call(table["ioctl"], read, (1 << 32) | 0x5412, 0),
      "bytes to read": call(table["ioctl"], read, 0x541B, ctypes.addressof((ctypes.c_int * 1)())),
      "who gets signals": outcome(fcntl.fcntl, read, fcntl.F_SETOWN, os.getppid()),
      "flags": outcome(fcntl.fcntl, read, fcntl.F_GETFL),
      "be inspected": call(table["prctl"], 4, 1),
      "outlive the parent": call(table["prctl"], 1, 0),
      "a user namespace": call(table["clone"], 0x10000011, 0, 0, 0, 0),
      "a thread in a namespace": call(table["clone"], 0x40010000, 0, 0, 0, 0),
    })
    """
  )
  allowed = {name for name, why in found.items() if why == "done"}
  assert allowed == {"own limits", "own limits by name", "bytes to read", "flags"}
  assert {why for name, why in found.items() if name not in allowed} == {"EPERM"}


def test_modes_and_times_of_files_need_leave():
  code = """
    import tempfile
    file = tempfile.NamedTemporaryFile()
    install()
    tell([outcome(os.chmod, file.name, 0o600), outcome(os.utime, file.name), outcome(os.chown, file.name, -1, -1),
      outcome(os.getxattr, file.name, "user.x")])
    """
  assert in_child(code) == ["EPERM", "EPERM", "EPERM", "ENOTSUP"]
  assert in_child(code, "metadata=True") == ["done", "done", "EPERM", "ENOTSUP"]


def test_processes_need_leave():
  found = in_child(
    """
    import subprocess
    install()
    child = subprocess.Popen(["/bin/sleep", "60"])
    child.kill()
    said = subprocess.run(["/bin/echo", "hello"], capture_output=True, text=True).stdout
    tell([child.wait(), said, outcome(socket.socket), outcome(os.kill, os.getppid(), 0),
      call(table["clone"], 0x10000011, 0, 0, 0, 0), call(table["unshare"], 0x10000000), call(table["ptrace"], 0)])
    """,
    "processes=True",
  )
  assert found == [-signal.SIGKILL, "hello\n", "EPERM", "done", "EPERM", "EPERM", "EPERM"]


_MACHINE_CODE = """
import mmap
def execute(code):
  page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
  page.write(code)
  return ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other ways to number calls exist on x86_64 only")
@pytest.mark.parametrize(
  "way",
  [
    "execute(bytes.fromhex('b814000000cd80c3'))",  # mov eax, 20 (getpid for 32 bits); int 0x80; ret
    "call(0x40000000 | table['getpid'])",  # x32
    "call(0x40000000 | 520)",  # x32's own execve
  ],
)
def test_other_ways_to_number_calls_are_deadly(way: str):
  done = start(
    _MACHINE_CODE + f"seccomp.Filter().install(os.getpid())\nprint('in', flush=True)\n{way}\nprint('survived')"
  )
  assert (done.stdout, done.returncode) == ("in\n", -signal.SIGSYS), done.stderr


_GATE = """
def child_of_gate(work):
  ours, theirs = socket.socketpair()
  pid = os.fork()
  if not pid:
    fd = install()
    socket.send_fds(theirs, [b"x"], [fd])
    os.close(fd)
    work(theirs)
    os._exit(0)
  theirs.close()
  return pid, seccomp.ForkGate(socket.recv_fds(ours, 1, 1)[1][0]), ours

def asked(gate):
  import select
  assert select.select([gate], [], [], 30)[0]
  return gate.receive()

def fork_once():
  pid = os.fork()
  if not pid: os._exit(7)
  return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def in_gate(code: str) -> Any:
  return in_child(_GATE + textwrap.dedent(code), "fork_listener=True")


def test_the_gate_lets_one_fork_pass_and_no_other():
  found = in_gate(
    """
    def work(line):
      line.recv(1)  # until the gate has been looked at while nobody asks
      line.send(b"%d" % fork_once())
      line.send(outcome(os.fork).encode())
      line.send(str(call(table["clone"], 0x10000011, 0, 0, 0, 0)).encode())  # denied without a question
      found = []
      thread = threading.Thread(target=lambda: found.append(outcome(os.fork)))
      thread.start()
      thread.join()
      line.send(found[0].encode())

    pid, gate, line = child_of_gate(work)
    idle = gate.receive()
    line.send(b"x")
    question, asker = asked(gate)
    seen = [idle, asker == pid, gate.allow(question), line.recv(64).decode()]
    question, asker = asked(gate)
    seen += [asker == pid, gate.deny(question), line.recv(64).decode(), line.recv(64).decode()]
    question, asker = asked(gate)
    seen += [asker == pid, gate.deny(question), line.recv(64).decode(), gate.allow(question)]
    os.waitpid(pid, 0)
    seen += [gate.receive(), gate.abandoned]
    gate.close()
    tell(seen)
    """
  )
  assert found[:4] == [None, True, True, "7"]
  assert found[4:8] == [True, True, "EPERM", "EPERM"]
  assert found[8:12] == [False, True, "EPERM", False]  # a thread asks under its own number
  assert found[12:] == [None, True]


def test_a_killed_asker_does_not_hang_the_gate():
  found = in_gate(
    """
    import select
    seen = []
    for early in (True, False):
      pid, gate, line = child_of_gate(lambda line: os.fork())
      select.select([gate], [], [], 30)
      question = None if early else gate.receive()
      os.kill(pid, signal.SIGKILL)
      os.waitpid(pid, 0)
      seen += [gate.receive(), gate.abandoned]
      if question:
        seen += [gate.allow(question[0]), gate.deny(question[0])]
      gate.close()
    tell(seen)
    """
  )
  assert found == [None, True, None, True, False, False]


def test_a_fork_is_refused_when_the_gate_is_gone():
  found = in_gate(
    """
    def work(line):
      line.recv(1)
      line.send(outcome(os.fork).encode())
    pid, gate, line = child_of_gate(work)
    gate.close()
    line.send(b"x")
    tell(line.recv(64).decode())
    """
  )
  assert found == "ENOSYS"


def test_only_one_listener_is_possible():
  found = in_child(
    """
    os.close(install())
    try:
      install()
    except OSError as error:
      tell([error.errno, str(error)])
    """,
    "fork_listener=True",
  )
  assert found[1].startswith(f"[Errno {found[0]}] seccomp: ")


def test_the_standard_library_works():
  found = in_child(
    """
    import asyncio, concurrent.futures, decimal, json, queue, shutil, sqlite3, tempfile, zipfile
    install()
    seen = []
    async def main():
      await asyncio.sleep(0.001)
      return await asyncio.to_thread(sum, [1, 2])
    seen.append(asyncio.run(main()))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
      seen.append(sum(pool.map(abs, range(-3, 0))))
    with tempfile.TemporaryDirectory() as folder:
      for place in (":memory:", os.path.join(folder, "base")):
        with sqlite3.connect(place) as base:
          base.execute("create table t(x)")
          base.executemany("insert into t values (?)", [(i,) for i in range(10)])
          seen.append(base.execute("select sum(x) from t").fetchone()[0])
        base.close()
      with zipfile.ZipFile(os.path.join(folder, "z.zip"), "w") as archive:
        archive.writestr("a/b", "text")
      with zipfile.ZipFile(os.path.join(folder, "z.zip")) as archive:
        archive.extractall(folder)
      seen.append(open(os.path.join(folder, "a", "b")).read())
      shutil.copyfile(os.path.join(folder, "base"), os.path.join(folder, "copy"))
      os.rename(os.path.join(folder, "copy"), os.path.join(folder, "moved"))
      with tempfile.TemporaryFile() as file: file.write(b"x")
      seen.append(sorted(os.listdir(folder)))
    decimal.getcontext().prec = 30
    seen.append(str(decimal.Decimal(2).sqrt()))
    seen.append(os.cpu_count() > 0 and len(os.urandom(8)) == 8)
    tell(seen)
    """
  )
  names = ["a", "base", "moved", "z.zip"]
  assert found == [3, 6, 45, 45, "text", names, "1.41421356237309504880168872421", True]


def test_numerical_code_works():
  pytest.importorskip("scipy")
  pytest.importorskip("sympy")
  found = in_child(
    """
    install()
    import numpy, scipy.optimize, sympy
    matrix = numpy.random.default_rng(0).normal(size=(200, 200))
    near = float(numpy.abs(matrix @ numpy.linalg.inv(matrix) - numpy.eye(200)).max())
    root = float(scipy.optimize.brentq(lambda x: x * x - 2, 0, 2))
    x = sympy.Symbol("x")
    tell([near < 1e-8, round(root, 6), str(sympy.integrate(x * sympy.sin(x), x)), str(sympy.factor(x**2 - 1))])
    """
  )
  assert found == [True, 1.414214, "-x*cos(x) + sin(x)", "(x - 1)*(x + 1)"]


def test_a_machine_without_a_table_is_named(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(seccomp.platform, "machine", lambda: "riscv64")
  assert seccomp.unsupported() == "no table of system calls for riscv64"


def test_denied_names_are_in_the_tables():
  every = set().union(*syscalls.TABLES.values())
  assert set(_DENIED) <= every and not set(_DENIED) & syscalls.ALLOWED
