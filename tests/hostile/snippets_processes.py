"""Snippets that start, signal, trace or hinder processes."""

from __future__ import annotations

from snippet import DENIED_OR_ABSENT, SHORT, Snippet, denied, tries

STARTING = (
  Snippet(
    "bounded fork bomb",
    "import os, time\nfor i in range(30):\n  if os.fork() == 0:\n    os.fork()\n    time.sleep(60)\ntime.sleep(60)",
    "error",
    level="seccomp",
    weaker="timeout error",
    limits=SHORT,
  ),
  Snippet(
    "fork by the C library",
    """
import ctypes, os
n = 0
for _ in range(20):
  pid = ctypes.CDLL(None).fork()
  if pid == 0: os._exit(0)
  n += pid > 0
n
""",
    level="seccomp",
    weaker="ok",
    check="^0$",
  ),
  Snippet(
    "vfork by the C library",
    "import ctypes, os\npid = ctypes.CDLL(None).vfork()\nif pid == 0: os._exit(0)\npid",
    level="seccomp",
    check="^-1$",
  ),
  Snippet(
    "daemons in sessions of their own",
    """
import os, time
for i in range(6):
  if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(60)
    os._exit(0)
5
""",
    "error",
    level="seccomp",
    weaker="ok error",
  ),
  Snippet(
    "daemon that forks on",
    """
import os, time
if os.fork() == 0:
  os.setsid()
  for i in range(50):
    if os.fork(): os._exit(0)
    time.sleep(0.01)
  os._exit(0)
""",
    "error",
    level="seccomp",
    weaker="ok",
  ),
  Snippet(
    "grandchild holds stdout",
    "import subprocess\nsubprocess.Popen(['sleep', '60'])\nprint(5)",
    "error",
    level="seccomp",
    weaker="ok",
  ),
  Snippet(
    "grandchild floods",
    "import subprocess\nsubprocess.Popen(['yes'], start_new_session=True)\nprint(5)",
    "error",
    level="seccomp",
    weaker="ok output",
  ),
  Snippet(
    "subprocess",
    "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'echo 5'])",
    "error",
    level="seccomp",
    weaker="ok",
  ),
  Snippet("shell", "import os\nos.system('echo > @TREE@/made')", "ok error", level="seccomp", check="^(-1|32512)$"),
  Snippet("popen", "import os\nos.popen('echo > @TREE@/made').read()", "error", level="seccomp"),
  Snippet("posix_spawn", "import os\nos.posix_spawn('/bin/true', ['true'], {})", "error", level="seccomp", weaker="ok"),
  Snippet("pseudo-terminal fork", "import pty\npty.fork()", "error", level="seccomp"),
  Snippet(
    "pool of processes",
    "import multiprocessing as m\nwith m.Pool(2) as p: print(p.map(abs, [1]))",
    "error",
    level="seccomp",
  ),
  Snippet(
    "executor of processes",
    "import concurrent.futures as c\nwith c.ProcessPoolExecutor(2) as p: print(list(p.map(abs, [1])))",
    "error",
    level="seccomp",
  ),
  Snippet(
    "asyncio subprocess",
    "import asyncio\nasyncio.run(asyncio.create_subprocess_exec('/bin/true'))",
    "error",
    level="seccomp",
  ),
  Snippet(
    "becomes another program",
    "import os\nos.execv('/bin/true', ['true'])",
    "error",
    level="seccomp",
    weaker="exit",
  ),
  denied(
    "becomes another program, by the C library",
    "libc.execve(b'/bin/true', None, None)\nerrno.errorcode[ctypes.get_errno()]",
  ),
  denied(
    "runs a program from an open file",
    "fd = os.open(sys.executable, os.O_PATH)\ncall('execveat', fd, b'', 0, 0, 0x1000)",
  ),
  denied("clone3", "a = (ctypes.c_uint64 * 11)()\na[4] = 17\ncall('clone3', ctypes.byref(a), 88)", check="'ENOSYS'"),
  denied(
    "clone without the flag of a thread",
    """
found = {}
for flags in (17, 0, 0x100 | 17, 0x4100 | 17, 0x8000 | 17, 0x800000 | 17, 0x2000 | 17, 0x1000 | 17):
  result = libc.syscall(ctypes.c_long(nr['clone']), ctypes.c_ulong(flags), None, None, None, None)
  if result == 0: os._exit(7)
  if result > 0: found[flags] = result
found
""",
    check=r"^\{\}$",
  ),
  denied(
    "threads with new namespaces",
    """
found = {}
for kind in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
  answer = call('clone', 0x10000 | 0x800 | 0x100 | kind, 0, 0, 0, 0)
  if answer != 'EPERM': found[hex(kind)] = answer
found
""",
    check=r"^\{\}$",
  ),
)

_OWNER = """
import fcntl, os, socket
def aim(pid, number=9):
  # The kernel sends a signal to whoever is named as the owner when the descriptor becomes readable.
  a, b = socket.socketpair()
  try:
    fcntl.fcntl(a, fcntl.F_SETSIG, number)
    fcntl.fcntl(a, fcntl.F_SETOWN, pid)
    fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    b.send(b'x')
  except OSError: return
"""

SIGNALS = (
  denied("signal to everybody", "attempt(lambda: os.kill(-1, 9))"),
  denied("signal to the parent", "attempt(lambda: os.kill(os.getppid() or 1, 9))"),
  denied("signal to the trainer", "attempt(lambda: os.kill(@PID@, 9))"),
  denied("signal to the bystander", "attempt(lambda: os.kill(@BYSTANDER@, 9))"),
  Snippet("signal to its group", "import os\nos.killpg(0, 9)", "error", level="seccomp", weaker="crash"),
  denied(
    "signal to the trainer's group", "attempt(lambda: os.killpg(os.getpgid(os.getppid()) or 1, 9))", check="'EPERM'"
  ),
  denied(
    "scan of all processes",
    """
killed = []
for pid in range(1, 33000):
  if pid == os.getpid(): continue
  try: os.kill(pid, 9)
  except OSError: continue
  killed.append(pid)
killed
""",
    check=r"^\[\]$",
  ),
  denied(
    "scan of all threads",
    """
hit = []
for pid in range(1, 33000):
  if pid != os.getpid() and libc.syscall(ctypes.c_long(nr['tkill']), pid, 9) == 0: hit.append(pid)
hit
""",
    check=r"^\[\]$",
  ),
  denied(
    "scan of all threads by group",
    """
hit = []
for pid in range(1, 33000):
  if pid != os.getpid() and libc.syscall(ctypes.c_long(nr['tgkill']), pid, pid, 9) == 0: hit.append(pid)
hit
""",
    check=r"^\[\]$",
  ),
  denied("queued signal", "call('rt_sigqueueinfo', @BYSTANDER@, 9, bytes(128))"),
  denied("process descriptor", "attempt(lambda: os.pidfd_open(os.getppid() or 1))"),
  denied("signal by a process descriptor", "call('pidfd_send_signal', 0, 9, 0, 0)"),
  Snippet("signal to the bystander, by the owner of a descriptor", _OWNER + "aim(@BYSTANDER@)\n5", level="seccomp"),
  Snippet("signal to the trainer, by the owner of a descriptor", _OWNER + "aim(@PID@, 28)\n5", level="seccomp"),
  Snippet("signal to its parent, by the owner of a descriptor", _OWNER + "aim(os.getppid() or 1)\n5", level="seccomp"),
  Snippet(
    "signal to its neighbours, by the owner of a descriptor",
    _OWNER + "for pid in range(2, 1000):\n  if pid != os.getpid(): aim(pid)\n5",
    level="namespace",
    companion=True,
  ),
  Snippet("kills itself", "import os\nos.kill(os.getpid(), 9)", "crash"),
  Snippet("the signal of a limit, to itself", "import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)", "crash"),
  Snippet(
    "the other signal of a limit, to itself", "import os, signal\nsignal.raise_signal(signal.SIGXFSZ)", "ok crash"
  ),
  Snippet(
    "catches its own crash",
    "import ctypes, signal\nsignal.signal(signal.SIGSEGV, lambda *a: None)\nctypes.string_at(0)",
    "timeout crash",
    limits=SHORT,
  ),
)

OTHERS = (
  denied(
    "traces its parent",
    "[call('ptrace', r, os.getppid() or 1, 0, 0) for r in (16, 0x4206)]",
    check=r"\['EPERM', 'EPERM'\]",
  ),
  denied("traces the bystander", "call('ptrace', 16, @BYSTANDER@, 0, 0)"),
  denied("asks to be traced", "call('ptrace', 0, 0, 0, 0)"),
  denied("reads memory of the parent", "call('process_vm_readv', os.getppid() or 1, 0, 0, 0, 0, 0)"),
  denied("writes memory of the parent", "call('process_vm_writev', os.getppid() or 1, 0, 0, 0, 0, 0)"),
  denied("takes a descriptor of the parent", "call('pidfd_getfd', 0, 0, 0)"),
  denied(
    "advises on another's memory",
    "[call('process_madvise', 0, 0, 0, 0, 0), call('process_mrelease', 0, 0)]",
    check=r"\['EPERM', 'EPERM'\]",
  ),
  denied("compares with its parent", "call('kcmp', os.getpid(), os.getppid() or 1, 0, 0, 0)"),
  denied(
    "moves another's pages",
    "[call('move_pages', 0, 0, 0, 0, 0, 0), call('migrate_pages', 0, 0, 0, 0)]",
    check=r"\['EPERM', 'EPERM'\]",
  ),
  denied("session of its own", "attempt(os.setsid)"),
  denied("group of its own", "attempt(lambda: os.setpgid(0, os.getpgid(os.getppid() or 0)))"),
  denied("priority of the parent", "attempt(lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 19))"),
  denied("priority of the bystander", "attempt(lambda: os.setpriority(os.PRIO_PROCESS, @BYSTANDER@, 19))"),
  denied("priority of all of the user", "attempt(lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19))"),
  Snippet("raises its own priority", tries("attempt(lambda: os.nice(-19))"), check=r"'(EPERM|EACCES)'"),
  denied("real-time scheduling", "attempt(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)))"),
  denied("scheduling attributes", "call('sched_setattr', 0, bytes(48), 0)"),
  denied("binds itself to a CPU", "attempt(lambda: os.sched_setaffinity(0, {0}))"),
  denied("binds the bystander to a CPU", "attempt(lambda: os.sched_setaffinity(@BYSTANDER@, {0}))"),
  denied("disk priority", "call('ioprio_set', 1, @BYSTANDER@, 0)"),
  denied(
    "limits of the parent",
    "import resource as r\nattempt(lambda: r.prlimit(os.getppid() or 1, r.RLIMIT_NOFILE, (1, 1)))",
  ),
  denied(
    "limits of the bystander", "import resource as r\nattempt(lambda: r.prlimit(@BYSTANDER@, r.RLIMIT_CPU, (1, 1)))"
  ),
  Snippet("raises a hard limit", "import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))", "error"),
  Snippet(
    "raises every hard limit",
    tries("""
import resource as r
kinds = [k for k in dir(r) if k.startswith('RLIMIT_')]
found = {}
for kind in kinds:
  soft, hard = r.getrlimit(getattr(r, kind))
  if hard != -1 and attempt(lambda: r.setrlimit(getattr(r, kind), (hard, hard + 4096))) == 'ok': found[kind] = hard
found
"""),
    check=r"^\{\}$",
  ),
  Snippet(
    "core dump", "import os, resource as r\nprint(r.getrlimit(r.RLIMIT_CORE))\nos.abort()", "crash", printed=r"\(0, 0\)"
  ),
  denied(
    "score for the out-of-memory killer",
    "attempt(lambda: open('/proc/self/oom_score_adj', 'w').write('-1000'))",
    level="landlock",
    check=DENIED_OR_ABSENT,
  ),
  denied(
    "priority of its scheduling group",
    "attempt(lambda: open('/proc/self/autogroup', 'w').write('-20'))",
    level="landlock",
    check=DENIED_OR_ABSENT,
  ),
  denied(
    "processes of the host, listed",
    "attempt(lambda: os.listdir('/proc'))",
    level="landlock",
    check=DENIED_OR_ABSENT,
  ),
)
