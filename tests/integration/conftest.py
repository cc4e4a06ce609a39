"""Launch scripts under test, and a recipe and problems so small that a run takes seconds."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Problems and documents share their form, and an answer is right by chance: after a few steps a tiny model writes
# well-formed answers and calls, half of them right, so that there is something to learn from.
PROBLEMS = [{"id": f"problem {n}", "prompt": f"{n}+{n}", "answer": str(1 + n % 2)} for n in range(1, 10)]
DOCUMENTS = [
  {"runs": [[f"{n}+{n}\n", False], *runs]}
  for n in range(1, 10)
  for a in (1, 2)
  for runs in (
    [[f"\\boxed{{{a}}}", True]],
    [[f"```python\nprint({a})\n```\n", True], [f"```output\n{a}\n```\n", False], [f"\\boxed{{{a}}}", True]],
  )
]

_RECIPE = """
import runpy
from ml_collections import ConfigDict


def get_config():
  config = runpy.run_path({nano!r})["get_config"]().unlock()
  config.policy.update(width=32, layers=2, heads=2, kv_heads=1, head_width=16, mlp_width=64)
  columns = dict(uid="id", prompt="prompt", answer="answer")
  problems = dict(kind="jsonl", options=dict(path={problems!r}, columns=columns))
  config.data.train = ConfigDict(problems)
  config.data.evaluation = ConfigDict(dict(easy=problems))
  config.cpu_devices = 1
  config.interpreter.slots = 2
  config.rollout.update(slots=16, max_tokens=64, problems=4, samples=4)
  config.rollout.native.update(prefill_widths=(16,), batch_sizes=(1.0,), attend_lengths=(1.0,))
  config.optimizer.update(learning_rate=1e-3)
  config.train.update(iterations=4, minibatches=2, microbatch_rows=8, length_buckets=(64,))
  config.evaluation.update(every=2)
  config.sft.update(steps=60, rows=8, checkpoint_every=40, corpus={corpus!r})
  config.sft.optimizer.update(learning_rate=1e-2, warmup_steps=5)
  return config.lock()
"""


@dataclasses.dataclass
class Ended:
  code: int
  seconds: float
  left: int
  output: str

  @property
  def lines(self) -> list[str]:
    return self.output.splitlines()


@dataclasses.dataclass
class Running:
  """A launch script that has been started."""

  pid: int
  log: pathlib.Path
  read: Callable[[], str]
  ended: bool = False

  def until(self, condition: Callable[[], bool]) -> None:
    """Waits while the script runs."""
    deadline = time.monotonic() + 120
    while not condition():
      with contextlib.suppress(ProcessLookupError):
        os.kill(self.pid, 0)
        assert time.monotonic() < deadline, f"it did not come to what the test waits for: {self.log.read_text()}"
        time.sleep(0.002)
        continue
      raise AssertionError(f"the script ended before what the test waits for: {self.log.read_text()}")

  def signal(self, number: int) -> None:
    os.kill(self.pid, number)

  def end(self) -> Ended:
    """Waits for its end."""
    self.ended = True
    return Ended(**json.loads(self.read()), output=self.log.read_text())


@dataclasses.dataclass
class Launcher:
  """Starts launch scripts; see launcher.py."""

  process: subprocess.Popen[str]
  directory: pathlib.Path
  count: int = 0
  last: Running | None = None

  def start(self, script: str, *args: str) -> Running:
    assert self.process.stdin is not None and self.process.stdout is not None
    if self.last is not None and not self.last.ended:  # of a test that failed
      with contextlib.suppress(ProcessLookupError):
        self.last.signal(signal.SIGKILL)
      self.last.end()
    self.count += 1
    log = self.directory / f"{self.count}.log"
    log.touch()
    request = {"script": str(ROOT / "launch" / script), "args": list(args), "log": str(log)}
    self.process.stdin.write(json.dumps(request) + "\n")
    self.process.stdin.flush()
    self.last = Running(int(self.process.stdout.readline()), log, self.process.stdout.readline)
    return self.last

  def run(self, script: str, *args: str) -> Ended:
    return self.start(script, *args).end()


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
  directory = tmp_path_factory.mktemp("launcher")
  # One device, as most users have it. Scripts that follow find the programs that those before them compiled.
  environment = os.environ | {
    "PYTHONPATH": str(ROOT),
    "XLA_FLAGS": "--xla_backend_optimization_level=0",  # compiles faster
    "JAX_COMPILATION_CACHE_DIR": str(directory / "compiled"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
  }
  with subprocess.Popen(
    [sys.executable, str(pathlib.Path(__file__).with_name("launcher.py"))],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env=environment,
  ) as process:
    yield Launcher(process, directory)
    assert process.stdin is not None
    process.stdin.close()


def write_lines(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A config file derived from the nano study's."""
  directory = tmp_path_factory.mktemp("recipe")
  text = _RECIPE.format(
    nano=str(ROOT / "configs" / "zerotir_nano.py"),
    problems=str(write_lines(directory / "problems.jsonl", PROBLEMS)),
    corpus=str(write_lines(directory / "corpus.jsonl", DOCUMENTS)),
  )
  (directory / "tiny.py").write_text(text)
  return directory / "tiny.py"


@pytest.fixture(scope="session")
def base(launcher: Launcher, recipe: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A run directory of the supervised stage."""
  workdir = tmp_path_factory.mktemp("base")
  ended = launcher.run("train_sft.py", f"--config={recipe}", f"--workdir={workdir}")
  assert ended.code == 0, ended.output
  return workdir


ITERATIONS = 10


def command(recipe: pathlib.Path, base: pathlib.Path, workdir: pathlib.Path) -> tuple[str, ...]:
  """Arguments of a run from the base model."""
  return (
    f"--config={recipe}",
    f"--workdir={workdir}",
    f"--config.init_from={base}/publications/000000",
    f"--config.train.iterations={ITERATIONS}",
    "--config.train.checkpoint_every=3",
  )


@pytest.fixture(scope="session")
def whole(
  launcher: Launcher, recipe: pathlib.Path, base: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
  """Run directory of a run that nothing disturbed."""
  workdir = tmp_path_factory.mktemp("rl") / "whole"
  ended = launcher.run("train_rl.py", *command(recipe, base, workdir))
  assert ended.code == 0 and ended.left == 0, ended.output
  assert "in the last iteration" in ended.output and "Traceback" not in ended.output
  assert "orbax" not in ended.output.lower()
  return workdir
