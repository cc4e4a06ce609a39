"""Snippets that reach for files: content, metadata, links, disk space."""

from __future__ import annotations

import dataclasses

from snippet import DENIED_OR_ABSENT, NORMAL, Snippet, denied, tries

_SEARCH = """
import ctypes, os, re
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_long
found = set()
r, w = os.pipe()
os.set_blocking(w, False)  # where many pipes are open, a new one is short
def look(low, high):
  tail, address = b'', low
  while address < high:
    count = libc.write(w, ctypes.c_void_p(address), ctypes.c_size_t(32768))
    address += count if count > 0 else 4096
    if count <= 0:
      tail = b''
      continue
    data = tail + os.read(r, count)
    found.update(re.findall(b'nee' + b'dle-[0-9a-f]{16}', data))
    tail = data[-64:]
top = libc.sbrk(0) // 4096 * 4096
look(top - (64 << 20), top)
middle = id([]) // 4096 * 4096
look(middle - (48 << 20), middle + (16 << 20))
print(sorted(found))
"""
"""Reads its own memory, also where nothing points to any more. The kernel says which pages there are."""

CONTENT = (
  Snippet("the trainer's file", "open('@SECRET@').read()", "error", level="landlock"),
  Snippet("password file", "open('/etc/shadow').read()", "error", level="landlock"),
  Snippet("the trainer's directory", "import glob\nglob.glob('@FOLDER@/*')", level="landlock", check=r"^\[\]$"),
  Snippet(
    "directories of the host",
    """
import glob, sys
patterns = ('/root/*', '/home/*', '/var/*', '/run/*', '/proc/*', '/sys/*', '/opt/*', '/mnt/*')
[g for p in patterns for g in glob.glob(p) if not (sys.prefix + '/').startswith(g + '/')]
""",
    level="landlock",
    check=r"^\[\]$",
  ),
  Snippet(
    "environment of the parent",
    "import os\nopen(f'/proc/{os.getppid() or 1}/environ', 'rb').read()",
    "error",
    level="landlock",
  ),
  Snippet(
    "environment of everybody",
    """
import os
found = []
for pid in [*range(1, 3000), @PID@, @BYSTANDER@]:
  try:
    with open(f'/proc/{pid}/environ', 'rb') as f: found.append(f.read())
  except OSError: continue
found
""",
    level="landlock",
    check=r"^\[\]$",
  ),
  Snippet("memory of the parent", "import os\nopen(f'/proc/{os.getppid() or 1}/mem', 'r+b')", "error", level="seccomp"),
  Snippet("command line of the trainer", "open('/proc/@PID@/cmdline').read()", "error", level="landlock"),
  Snippet("its own environment", "import os\nsorted(os.environ)", check="HOME"),
  Snippet(
    "its own environment, from where the process began",
    "import ctypes\nctypes.string_at(ctypes.c_char_p.in_dll(ctypes.CDLL(None), 'program_invocation_name'), 4096)",
    "ok crash",
  ),
  Snippet("its own memory", _SEARCH, companion=True, printed=r"^\[\]$"),
  Snippet(
    "its own memory as a file",
    "import re\nd = open('/proc/self/mem', 'rb')\nprint(open('/proc/self/maps').read()[:9])",
    "error",
    level="landlock",
  ),
  Snippet(
    "objects of others",
    """
import gc
found = [o for o in gc.get_objects() if isinstance(o, (str, bytes, bytearray)) and 'nee' + 'dle-' in str(o)]
found += [v for o in gc.get_objects() if isinstance(o, dict) for v in o.values()
          if isinstance(v, (str, bytes)) and 'nee' + 'dle-' in str(v)]
print(found)
""",
    companion=True,
    printed=r"^\[\]$",
  ),
  Snippet(
    "working directories of others",
    """
import glob, os
found = []
for path in [*glob.glob('../*/needle'), *glob.glob('../../*/*/needle'), *(f'../{i}/needle' for i in range(2000))]:
  try: found.append(open(path).read())
  except OSError: continue
found
""",
    level="landlock",
    companion=True,
    check=r"^\[\]$",
  ),
  Snippet("up and out", "open('../' * 40 + '@SECRET@').read()", "error", level="landlock"),
  Snippet("through the process table", "open('/proc/self/root@SECRET@').read()", "error", level="landlock"),
  Snippet("through the first process", "open('/proc/1/root@SECRET@').read()", "error", level="landlock"),
  Snippet("through the old root", "import os\nos.listdir('/.old')", "error"),
  Snippet(
    "inherited descriptors",
    """
import os
found = []
for fd in range(4, 4096):
  try: os.fstat(fd)
  except OSError: continue
  found.append(fd)
found
""",
    check=r"^\[\]$",
  ),
  Snippet(
    "through the descriptors it has",
    tries("sorted({attempt(lambda: os.open('@SECRET@', os.O_RDONLY, dir_fd=fd)) for fd in range(0, 4)} - {'ok'})"),
    level="landlock",
    check="'(EACCES|ENOENT|ENOTDIR)'",
  ),
  denied(
    "file by its handle",
    "[call('name_to_handle_at', -100, b'/', bytes(200), bytes(8), 0), call('open_by_handle_at', 3, bytes(200), 0)]",
    check=r"\['EPERM', 'EPERM'\]",
  ),
  Snippet(
    "devices",
    """
import os
found = []
for name in ('sda', 'vda', 'nvme0n1', 'mem', 'kmem', 'port', 'kvm', 'fuse', 'net/tun', 'tty', 'ptmx', 'console',
             'kmsg', 'userfaultfd', 'vhost-net', 'loop-control', 'loop0', 'nvidia0', 'nvidiactl', 'accel0', 'vfio/0',
             'snapshot'):
  for mode in (os.O_RDONLY, os.O_WRONLY):
    try: os.open('/dev/' + name, mode | os.O_NONBLOCK)
    except OSError: continue
    found.append(name)
found
""",
    level="landlock",
    check=r"^\[\]$",
  ),
)

WRITING = (
  Snippet("writes beside the trainer's file", "open('@FOLDER@/new', 'w')", "error", level="landlock"),
  Snippet("writes into the trainer's tree", "open('@TREE@/new', 'w')", "error", level="landlock"),
  Snippet("overwrites the trainer's file", "open('@FILE@', 'w').write('x')", "error", level="landlock"),
  Snippet("appends to the trainer's file", "open('@FILE@', 'a').write('x')", "error", level="landlock"),
  Snippet("removes the trainer's file", "import os\nos.unlink('@FILE@')", "error", level="landlock"),
  Snippet("renames the trainer's file", "import os\nos.rename('@FILE@', '@FILE@.old')", "error", level="landlock"),
  Snippet("moves the trainer's file here", "import os\nos.rename('@FILE@', 'mine')", "error", level="landlock"),
  Snippet(
    "replaces the trainer's file", "import os\nopen('x', 'w')\nos.replace('x', '@FILE@')", "error", level="landlock"
  ),
  Snippet("links the trainer's file here", "import os\nos.link('@FILE@', 'mine')", "error", level="landlock"),
  Snippet(
    "links a library here and writes",
    "import os\nos.link(os.__file__, 'mine')\nopen('mine', 'a').write('x')",
    "error",
    level="landlock",
  ),
  Snippet(
    "symbolic link to the trainer's file",
    "import os\nos.symlink('@SECRET@', 'l')\nopen('l').read()",
    "error",
    level="landlock",
  ),
  Snippet(
    "symbolic link to the trainer's file, written",
    "import os\nos.symlink('@FILE@', 'l')\nopen('l', 'w').write('x')",
    "error",
    level="landlock",
  ),
  Snippet(
    "symbolic link under the name of a result",
    "import os\nos.symlink('@SECRET@', 'out')",
    level="landlock",
    fetch=("out",),
  ),
  Snippet("directory under the name of a result", "import os\nos.mkdir('out')", fetch=("out",)),
  Snippet(
    "endless device under the name of a result",
    "import os\nos.symlink('/dev/zero', 'out')",
    "ok error memory exit",
    fetch=("out",),
  ),
  Snippet(
    "large results",
    "for n in 'abc': open(n, 'wb').write(bytes(10 << 20))",
    fetch=("a", "b", "c"),
    limits=dataclasses.replace(NORMAL, file_mib=16, disk_mib=64),
  ),
  Snippet(
    "pipe under the name of a result",
    tries("attempt(lambda: os.mkfifo('out'))"),
    "ok",
    level="seccomp",
    fetch=("out",),
    check="'EPERM'",
  ),
  Snippet(
    "writes to temporary storage of the host", tries("open('/tmp/battery-was-here', 'w')"), "ok error", level="landlock"
  ),
  Snippet(
    "writes to system directories",
    tries(
      """
places = ('/usr/lib', '/etc', '/', '/bin', '/dev', '/var/tmp', '/root')
[attempt(lambda: open(place + '/battery', 'w')) for place in places].count('ok')
"""
    ),
    level="landlock",
    check="^0$",
  ),
  Snippet(
    "writes to the interpreter",
    tries(
      """
import sysconfig
places = [sysconfig.get_path(kind) for kind in ('purelib', 'stdlib', 'scripts')]
[attempt(lambda: open(place + '/battery.pth', 'w')) for place in places].count('ok')
"""
    ),
    level="landlock",
    check="^0$",
  ),
  Snippet("changes a library", "import os\nopen(os.__file__, 'r+')", "error", level="landlock"),
  denied("makes a device", "attempt(lambda: os.mknod('mem', 0o20666, os.makedev(1, 1)))"),
  denied("makes a device beside the trainer", "attempt(lambda: os.mknod('@TREE@/mem', 0o20666, os.makedev(1, 1)))"),
  Snippet(
    "control group",
    tries("[attempt(lambda: os.mkdir(d + '/battery')) for d in ('/sys/fs/cgroup', '/sys/fs/cgroup/memory')]"),
    level="landlock",
    check="'(EACCES|ENOENT|EROFS|EPERM)', '(EACCES|ENOENT|EROFS|EPERM)'",
  ),
  Snippet(
    "kernel settings",
    tries(
      """
paths = ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/sys/kernel/uevent_helper')
[attempt(lambda: open(path, 'w').write('x')) for path in paths].count('ok')
"""
    ),
    level="landlock",
    check="^0$",
  ),
)

SPACE = (
  Snippet(
    "fills the disk",
    "import time\nfor i in range(12): open(str(i), 'wb').write(bytes(8 << 20))\ntime.sleep(3)",
    "error",
    level="namespace",
    weaker="disk",
  ),
  Snippet(
    "fills the disk and deletes the names",
    """
import os, time
kept = []
for i in range(12):
  kept.append(open('x', 'wb'))
  kept[-1].write(bytes(8 << 20))
  os.unlink('x')
""",
    "error",
    level="namespace",
    weaker="ok disk error",
  ),
  Snippet(
    "many small files", "for i in range(3000): open(str(i), 'w').close()", "error", level="namespace", weaker="ok disk"
  ),
  Snippet(
    "many directories",
    "import os\nfor i in range(3000): os.mkdir(str(i))",
    "error",
    level="namespace",
    weaker="ok disk",
  ),
  Snippet(
    "many names of one file", "import os\nopen('x', 'w')\nfor i in range(3000): os.link('x', str(i))", "ok error disk"
  ),
  Snippet("large file", "open('f', 'wb').write(bytes(30 << 20))", "error"),
  Snippet("sparse terabyte", "open('f', 'wb').truncate(10**12)", "error"),
  Snippet(
    "allocated terabyte", "import os\nos.posix_fallocate(os.open('f', os.O_CREAT | os.O_RDWR), 0, 10**12)", "error"
  ),
  Snippet("descriptors", "import os\nx = [os.open('.', os.O_RDONLY) for _ in range(10**5)]", "error"),
  Snippet("names too deep for a path", "import os\nfor i in range(120):\n  os.mkdir('d' * 50)\n  os.chdir('d' * 50)"),
  Snippet(
    "directories nobody may open",
    tries(
      """
os.makedirs('a/b/c')
[attempt(lambda: os.chmod('a/b', 0)), attempt(lambda: os.chmod('a', 0)), attempt(lambda: os.mkdir('z', 0))]
"""
    ),
  ),
  Snippet("links outwards", "import os\nos.symlink('/', 'root')\nos.symlink('@TREE@', 'tree')\nos.symlink('..', 'up')"),
  Snippet(
    "names that are no text",
    "import os\nfor n in (b'\\xff\\xfe', b'-rf', b' ', b'\\n', b'*', b'x' * 255): open(n, 'w')",
  ),
  Snippet(
    "removes its directory", tries("attempt(lambda: os.rmdir(os.getcwd()))"), level="landlock", weaker="ok", check="'E"
  ),
  Snippet(
    "renames its directory",
    tries("attempt(lambda: os.rename(os.getcwd(), os.getcwd() + '2'))"),
    level="landlock",
    check="'E",
  ),
  Snippet(
    "leaves its directory", "import os\nos.chdir('/usr')\nopen('out', 'w')", "error", level="landlock", fetch=("out",)
  ),
  Snippet("set-user-id file", tries("open('s', 'w').write('#!/bin/sh')\nattempt(lambda: os.chmod('s', 0o6777))")),
  Snippet(
    "nameless file that gets a name",
    tries(
      "fd = os.open('.', os.O_TMPFILE | os.O_RDWR)\nattempt(lambda: os.link(f'/proc/self/fd/{fd}', '@TREE@/named'))"
    ),
    "ok error",
    level="landlock",
  ),
)

METADATA = (
  denied("mode of the trainer's file", "attempt(lambda: os.chmod('@FILE@', 0))", check=DENIED_OR_ABSENT),
  denied("mode by the newer call", "call('fchmodat2', -100, b'@FILE@', 0, 0)", check=DENIED_OR_ABSENT),
  denied("times of the trainer's file", "attempt(lambda: os.utime('@FILE@', (1, 1)))", check=DENIED_OR_ABSENT),
  denied(
    "attribute of the trainer's file", "attempt(lambda: os.setxattr('@FILE@', 'user.x', b'1'))", check=DENIED_OR_ABSENT
  ),
  denied("removes an attribute", "attempt(lambda: os.removexattr('@FILE@', 'user.battery'))", check=DENIED_OR_ABSENT),
  denied("owner of the trainer's file", "attempt(lambda: os.chown('@FILE@', 12345, 12345))", check=DENIED_OR_ABSENT),
  denied(
    "owner of its own file", "open('f', 'w')\nattempt(lambda: os.chown('f', 12345, 12345))", check=DENIED_OR_ABSENT
  ),
  Snippet("length of the trainer's file", "import os\nos.truncate('@FILE@', 0)", "error", level="landlock"),
  denied(
    "notification of changes", "[call('inotify_init1', 0), call('fanotify_init', 0, 0)]", check=r"\['EPERM', 'EPERM'\]"
  ),
  Snippet(
    "notification by a signal",
    "import fcntl, os\nfcntl.fcntl(os.open('@TREE@', 0), fcntl.F_NOTIFY, 0x80000000 | 63)",
    "error",
    level="landlock",
  ),
  Snippet("existence of the trainer's file", "import os\nos.stat('@SECRET@')", "error", level="namespace"),
  Snippet("into the trainer's directory", "import os\nos.chdir('@FOLDER@')", "error", level="namespace"),
  Snippet("asks for access", "import os\nos.access('@SECRET@', os.F_OK)", level="namespace", check="False"),
  Snippet("target of the trainer's link", "import os\nos.readlink('@TREE@/link')", "error", level="namespace"),
  Snippet("lock on a library", "import fcntl, os\nfcntl.flock(open(os.__file__), fcntl.LOCK_EX | fcntl.LOCK_NB)"),
  Snippet(
    "lease on a library",
    tries("import fcntl\nattempt(lambda: fcntl.fcntl(os.open(os.__file__, 0), fcntl.F_SETLEASE, fcntl.F_RDLCK))"),
  ),
)
