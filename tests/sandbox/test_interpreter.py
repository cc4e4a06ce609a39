from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sandbox_runner import Runner

import agentic_rl.sandbox
from agentic_rl.sandbox import (
  MAX_SOURCE_BYTES,
  ExecResult,
  Interpreter,
  InterpreterConfig,
  Limits,
  SandboxStartError,
  SourceTypeError,
)

Run = Callable[..., ExecResult]
ROOT = Path(__file__).parents[2]


# -- what a snippet means ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("code", "stdout", "value"),
  [
    ("print(347*29)", "10063\n", ""),
    ("347*29", "", "10063"),
    ("x = 3\nx + 1", "", "4"),
    ("x = 3", "", ""),
    ("None", "", ""),
    ("", "", ""),
    ("# from the table", "", ""),
    ('s = """a\nb"""\nprint(s)\nprint(\'\'\'c"d\'\'\')', 'a\nb\nc"d\n', ""),
    (r"print('a\\b\n', end='')", "a\\b\n", ""),
    ("x = 1\r\nprint(x)\r\n", "1\n", ""),
    ("isinstance(1, int)", "", "True"),
    ("if __name__ == '__main__':\n  print('main')", "main\n", ""),
    ("def f(n):\n  return n * f(n - 1) if n else 1\nf(5)", "", "120"),
    ("from __future__ import annotations\nx: Unknown = 1\nx", "", "1"),
    ("class A:\n  pass\nimport pickle\ntype(pickle.loads(pickle.dumps(A()))) is A", "", "True"),
    ("import os\nos.write(1, b'raw')\nNone", "raw", ""),
    ("import ctypes\nctypes.CDLL(None).puts(b'from C')\nctypes.CDLL(None).fflush(None)\nNone", "from C\n", ""),
    ("print('\\ud800', chr(0), 'é')", "\\ud800 \0 é\n", ""),
    ("import sys\nsys.stdout.buffer.write(b'\\xff\\n')\nNone", "\ufffd\n", ""),
    ("import asyncio\nasync def f():\n  return 7\nasyncio.run(f())", "", "7"),
  ],
)
def test_ok(run: Run, level: str, code: str, stdout: str, value: str):
  result = run(code)
  assert (result.status, result.stdout, result.value, result.error) == ("ok", stdout, value, "")
  assert result.stderr == "" and result.limit == "" and result.attempt == 1 and result.level == level


def test_stderr_is_no_failure(run: Run):
  result = run("import warnings\nwarnings.warn('old', DeprecationWarning)\nprint(5)")
  assert (result.status, result.stdout) == ("ok", "5\n")
  assert "DeprecationWarning: old" in result.stderr


def test_error_shows_the_snippets_frames_only(run: Run):
  result = run("import json\ndef f(text):\n  return json.loads(text)\nprint('before')\nf('{')")
  assert (result.status, result.stdout, result.value) == ("error", "before\n", "")
  assert result.error.startswith('Traceback (most recent call last):\n  File "<snippet>", line 5, in <module>\n')
  assert "return json.loads(text)" in result.error and "json.decoder.JSONDecodeError: " in result.error
  assert "harness" not in result.error and ".py" not in result.error


@pytest.mark.parametrize(
  ("code", "last_line"),
  [
    ("1/0", "ZeroDivisionError: division by zero"),
    ("print(1", "SyntaxError: '(' was never closed"),
    ("await x", "SyntaxError: 'await' outside function"),
    ("input()", "EOFError: EOF when reading a line"),
    ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ("raise GeneratorExit", "GeneratorExit"),
    ("class E(Exception):\n  def __str__(self): raise E\nraise E", "E: <exception str() failed>"),
    ("class A:\n  def __repr__(self): return 1/0\nA()", "ZeroDivisionError: division by zero"),
    ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    ("import sys\nsys.stdout = None\nimport os\nos.nothing", "AttributeError: module 'os' has no attribute 'nothing'"),
  ],
)
def test_error(run: Run, code: str, last_line: str):
  result = run(code)
  assert result.status == "error"
  assert result.error.rstrip("\n").splitlines()[-1] == last_line


@pytest.mark.parametrize(
  ("code", "exit_code", "stderr"),
  [
    ("import sys\nprint('x')\nsys.exit(3)", 3, ""),
    ("raise SystemExit", 0, ""),
    ("import sys\nprint('x')\nsys.exit('why')", 1, "why\n"),
    ("import os\nos._exit(5)", 5, ""),
    ("import os\nos.close(3)", 1, ""),
  ],
)
def test_exit(run: Run, code: str, exit_code: int, stderr: str):
  result = run(code)
  assert (result.status, result.exit_code, result.stderr) == ("exit", exit_code, stderr)
  assert result.stdout == ("x\n" if "print" in code else "")


@pytest.mark.parametrize(
  ("code", "number"),
  [
    ("import ctypes\nctypes.string_at(0)", signal.SIGSEGV),
    ("import os\nos.abort()", signal.SIGABRT),
    ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", signal.SIGKILL),
  ],
)
def test_crash(run: Run, code: str, number: int):
  result = run(code)
  assert (result.status, result.signal) == ("crash", number)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_wall_limit_keeps_the_output_so_far(run: Run):
  begin = time.monotonic()
  result = run("import time\nprint('going')\ntime.sleep(60)", Limits(wall_s=0.3))
  assert (result.status, result.limit, result.stdout) == ("timeout", "wall", "going\n")
  assert 0.3 <= result.wall_s < 2.3 and time.monotonic() - begin < 4 and "0.3 s" in result.error


def test_cpu_limit(run: Run):
  result = run("print('going')\nsum(range(10**13))", Limits(cpu_s=1, wall_s=60))
  assert (result.status, result.limit, result.stdout) == ("cpu", "cpu", "going\n")
  assert 0.8 < result.cpu_s < 2.5


def test_memory_limit(run: Run):
  result = run("x = bytearray(400 << 20)")
  assert (result.status, result.limit) == ("memory", "memory")
  assert result.error.endswith("MemoryError\n")
  assert run("x = bytearray(100 << 20)\nlen(x)").value == str(100 << 20)


def test_output_cap_drops_and_counts(run: Run):
  result = run("print('a' * 100_000)\n'b' * 30_000", Limits(output_bytes=1000))
  assert result.status == "ok" and result.stdout == "a" * 1000 and result.stdout_dropped == 99_001
  assert len(result.value) == 1000 and result.value_dropped == 29_002
  assert result.truncated == ("stdout", "value")


@pytest.mark.parametrize("count", [10, 1000, 60_000])
def test_output_keeps_the_part_that_is_asked_for(run: Run, count: int):
  code = f"import sys\nfor i in range({count}): print(i)\nprint('error', file=sys.stderr)"
  text = "".join(f"{i}\n" for i in range(count))
  tail = run(code, Limits(output_bytes=100, output_keep="tail"))
  assert tail.stdout == text[-100:] and tail.stdout_dropped == max(0, len(text) - 100) and tail.stderr == "error\n"
  middle = run(code, Limits(output_bytes=100, output_keep="middle"))
  dropped = max(0, len(text) - 100)
  assert middle.stdout_dropped == dropped
  assert middle.stdout == (text[:50] + f"\n[... {dropped} bytes left out ...]\n" + text[-50:] if dropped else text)


def test_flood_is_ended_as_output_not_as_timeout(run: Run):
  result = run("while True: print('x' * 1000)", Limits(flood_mib=2, wall_s=30, cpu_s=20))
  assert (result.status, result.limit) == ("output", "output")
  assert result.stdout.startswith("xxx")


def test_file_limits(run: Run):
  big = run("open('big', 'wb').write(bytes(3 << 20))", Limits(file_mib=2))
  assert big.status == "error" and "File too large" in big.error
  many = run("files = [open('f', 'w') for _ in range(100)]", Limits(open_files=20))
  assert many.status == "error" and "Too many open files" in many.error
  core = run("import resource\nresource.getrlimit(resource.RLIMIT_CORE)")
  assert core.value == "(0, 0)"


def test_limits_cannot_be_raised(run: Run):
  result = run("import resource as r\nr.setrlimit(r.RLIMIT_CPU, (100, 100))")
  assert result.status == "error" and "not allowed to raise maximum limit" in result.error


def test_limits_are_per_snippet(run: Run):
  assert run("import time\ntime.sleep(0.5)\n1", Limits(wall_s=0.1)).status == "timeout"
  assert run("import time\ntime.sleep(0.5)\n1").value == "1"


# -- what a snippet sees -----------------------------------------------------------------------------------------------


def test_nothing_of_the_trainer_is_inherited(run: Run, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setenv("TRAINER_SECRET", "hunter2")  # set before nothing forks; the zygote's own start is tested below
  result = run(
    "import os, sys, gc\n"
    "fds = []\n"
    "for fd in range(100):\n"
    "  try: os.fstat(fd)\n"
    "  except OSError: continue\n"
    "  fds.append(fd)\n"
    "print(fds)\n"
    "print([m for m in sys.modules if m.split('.')[0] in ('agentic_rl', 'jax', 'num' 'py', 'asyncio')])\n"
    "print(sorted(os.environ))"
  )
  fds, modules, environment = result.stdout.splitlines()
  assert fds == "[0, 1, 2, 3]"  # 3: its result
  assert modules == "[]"
  allowed = {"PATH", "LANG", "LC_ALL", "TZ", "HOME", "TMPDIR", "MPLBACKEND", "JAX_PLATFORMS", "MALLOC_ARENA_MAX"}
  allowed |= {"PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "SYMPY_CACHE_SIZE", "AGENTIC_RL_SANDBOX"}
  allowed |= {name + "_NUM_THREADS" for name in ("OMP", "OPENBLAS", "MKL")}
  assert set(eval(environment)) == allowed


def test_secrets_in_the_environment_stay_out(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setenv("TRAINER_SECRET", "hunter2")

  async def body() -> ExecResult:
    async with await Interpreter.start(InterpreterConfig(environment={"ADDED": "yes"})) as interpreter:
      return await interpreter.run("import os\nos.environ.get('TRAINER_SECRET'), os.environ['ADDED']")

  assert asyncio.run(body()).value == "(None, 'yes')"


@pytest.mark.skipif(os.getuid() != 0, reason="only under root do capabilities protect the trainer's environment")
def test_root_cannot_read_the_trainers_environment(run: Run, level: str):
  result = run(f"open('/proc/{os.getpid()}/environ').read()")
  expected = "FileNotFoundError" if level == "namespace" else "PermissionError"
  assert result.status == "error" and expected in result.error


def test_working_directory_is_private_and_removed(runner: Runner):
  code = "import os\nassert os.listdir() == []\nopen('f', 'w').write('x')\nos.makedirs('a/b')\nprint(os.getcwd())"
  first, second = runner.run(code), runner.run(code)
  assert first.ok and second.ok, (first, second)
  assert runner.leftovers() == []


def test_seed_decides_random_and_hash(run: Run):
  code = "import random\nrandom.random(), hash('a'), list({'x', 'y', 'z'})"
  assert run(code, seed=1).value == run(code, seed=1).value != run(code, seed=2).value
  assert run("import random\nrandom.random()", seed=5).value == repr(random.Random(5).random())


def test_the_trainer_is_untouched(run: Run):
  before = (os.getcwd(), sys.getrecursionlimit(), random.getstate(), dict(os.environ))
  for code in (
    "import os\nos.chdir('/')",
    "import sys\nsys.setrecursionlimit(77)",
    "import random\nrandom.seed(0)",
    "import os\nos.environ['PWNED'] = '1'",
    "import builtins\ndel builtins.print, builtins.len",
    "import os\nos._exit(1)",
  ):
    run(code)
    assert run("import os\nprint(len('ab'), 'PWNED' in os.environ)").stdout == "2 False\n"
  assert (os.getcwd(), sys.getrecursionlimit(), random.getstate(), dict(os.environ)) == before


def test_other_requests_cannot_be_seen():
  spy = (
    "import gc, sys\nseen, frame = [], sys._getframe()\n"
    "while frame:\n"
    "  seen += [repr(v) + repr(getattr(v, '__dict__', '')) for v in frame.f_locals.values()]\n"
    "  frame = frame.f_back\n"
    "seen += [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple, bytearray))]\n"
    "len(seen) > 50, ''.join(['HID', 'DEN']) in ''.join(seen)"
  )

  async def body() -> list[ExecResult]:
    async with await Interpreter.start(InterpreterConfig(slots=2)) as interpreter:
      hidden = [interpreter.run(f"import time\ntime.sleep(0.2)\n'HIDDEN {i}'") for i in range(4)]
      return await asyncio.gather(hidden[0], interpreter.run(spy), *hidden[1:])

  results = asyncio.run(body())
  assert results[1].value == "(True, False)", results[1]
  assert sum(r.value.startswith("'HIDDEN") for r in results) == 4


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("code", "why"),
  [
    ("a\0b", "null bytes"),
    ("x = '\ud800'", "lone surrogate at position 5"),
    ("#" * (MAX_SOURCE_BYTES + 1), "1000001 bytes"),
  ],
)
def test_refused(run: Run, code: str, why: str):
  result = run(code)
  assert result.status == "refused" and why in result.error


def test_longest_source_runs(run: Run):
  assert run("#" * (MAX_SOURCE_BYTES - 6) + "\n1 + 1").value == "2"


@pytest.mark.parametrize("code", [None, b"1", 7, ["1"]])
def test_source_of_another_type_raises(run: Run, code: object):
  with pytest.raises(SourceTypeError, match=type(code).__name__):
    run(code)


@pytest.mark.parametrize(
  ("config", "why"),
  [
    (InterpreterConfig(python="/no/such/python"), "/no/such/python"),
    (InterpreterConfig(preload=(("no_such_module",),)), "No module named 'no_such_module'"),
    (InterpreterConfig(preload=(("faulthandler", "this_one_too"),), start_timeout_s=30), "this_one_too"),
  ],
)
def test_a_failing_start_says_why(config: InterpreterConfig, why: str, tmp_path: Path):
  config = InterpreterConfig(**{**vars(config), "scratch_dir": str(tmp_path)})

  async def body() -> None:
    async with await Interpreter.start(config) as interpreter:
      await interpreter.warm()

  with pytest.raises(SandboxStartError, match=why):
    asyncio.run(body())
  assert list(tmp_path.iterdir()) == []


def test_preloaded_modules_are_there_and_the_rest_of_the_house_is_not():
  async def body() -> ExecResult:
    async with await Interpreter.start(InterpreterConfig(preload=(("colorsys",),))) as interpreter:
      plain = await interpreter.run("import sys\n''.join(['color', 'sys']) in sys.modules")
      assert plain.value == "False" and interpreter.stats()["parents"] == 1
      result = await interpreter.run("import sys\n'colorsys' in sys.modules, 'jax' in sys.modules")
      assert interpreter.stats()["parents"] == 2
      return result

  assert asyncio.run(body()).value == "(True, False)"


def test_the_package_imports_nothing_else():
  ours = "('agentic_rl', 'jax', 'numpy')"
  code = f"import sys, agentic_rl.sandbox\nprint([m for m in sys.modules if m.split('.')[0] in {ours}])"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
  names = eval(done.stdout)
  assert all(name == "agentic_rl" or name.startswith("agentic_rl.sandbox") for name in names)
  for file in Path(agentic_rl.sandbox.__file__).parent.glob("*.py"):
    assert "preexec_fn" not in file.read_text()  # it would fork this process, which may hold JAX's threads


def test_command_line_prints_what_is_in_force():
  command = [sys.executable, "-m", "agentic_rl.sandbox", "--capabilities"]
  done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
  assert done.stdout.startswith("isolation")
  assert "left open" in done.stdout and "cpu_s" in done.stdout and "5.0" in done.stdout
