"""The import order of the rooms: a room imports only the rooms above it (docs/architecture.md)."""

from __future__ import annotations

import ast
import importlib
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

PACKAGE = "agentic_rl"
GROUND = ("episode", "tokenizer", "errors", "hf_tokenizer")
ROOMS = (
  "sandbox",
  "tools",
  "rewards",
  "data",
  "parallel",
  "policy",
  "algorithms",
  "rollout",
  "train",
  "planning",
  "evaluation",
  "study",
)
# These four know each other by what their `__init__` offers and by nothing else.
CLOSED = ("sandbox", "tools", "rewards", "algorithms")
READS_CONFIGS = ("train", "planning", "evaluation", "study")
OUTSIDE = ("benchmarks", "configs", "launch", "notebooks", "tests")
ROOT = pathlib.Path(__file__).resolve().parent.parent


def imported_names(source: str, module: str, is_package: bool) -> Iterator[str]:
  """Absolute dotted names that a module imports anywhere in it, functions and `TYPE_CHECKING` blocks included.

  `from a.b import c` yields `a.b.c`, since `c` may be a module.
  """
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ""
      if node.level:
        package = module if is_package else module.rpartition(".")[0]
        parents = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*parents, base] if base else parents)
      yield from (f"{base}.{alias.name}" for alias in node.names)


def fault(module: str, name: str, is_module: bool) -> str | None:
  """What is wrong with `module` importing `name`, or None.

  Args:
    module: Importing module, e.g. `agentic_rl.tools.fenced`.
    name: Imported dotted name.
    is_module: Whether `name` is a module, not a member of one.
  """
  top, *rest = name.split(".")
  if top in OUTSIDE:
    return f"{module} imports {name}: the package stands alone"
  room = module.split(".")[1] if "." in module else ""
  if top == "ml_collections" and room not in READS_CONFIGS:
    return f"{module} imports {name}: only {' and '.join(READS_CONFIGS)} read configs, rooms take plain arguments"
  if top != PACKAGE:
    return f"{module} imports {name}: the sandbox never sees jax" if room == "sandbox" and top == "jax" else None
  other = rest[0] if rest else ""
  if other == room or (not room and other == ""):
    return None
  if room == "sandbox":
    return f"{module} imports {name}: the sandbox imports nothing else of the project"
  if room in GROUND or not room:
    return f"{module} imports {name}: ground modules import nothing of the project" if other else None
  if other in GROUND or other not in ROOMS:  # `agentic_rl.__version__` and the like
    return None
  if ROOMS.index(other) > ROOMS.index(room):
    return f"{module} imports {name}: {other} stands on {room}, not the other way round"
  inside = len(rest) > 2 or (len(rest) == 2 and is_module)
  if inside and (other == "sandbox" or (other in CLOSED and room in CLOSED)):
    return f"{module} imports {name}: import it from {PACKAGE}.{other}"
  return None


def modules() -> list[tuple[str, pathlib.Path]]:
  found = []
  for path in sorted((ROOT / PACKAGE).rglob("*.py")):
    parts = path.relative_to(ROOT).with_suffix("").parts
    found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
  return found


MODULES = modules()
NAMES = {name for name, _ in MODULES}


def test_every_part_of_the_package_is_in_the_order():
  parts = {name.split(".")[1] for name in NAMES if "." in name}
  assert parts <= {*GROUND, *ROOMS}, f"not in the import order: {sorted(parts - {*GROUND, *ROOMS})}"


@pytest.mark.parametrize(("module", "path"), MODULES, ids=[name for name, _ in MODULES])
def test_a_room_imports_only_rooms_above_it(module: str, path: pathlib.Path):
  names = imported_names(path.read_text(), module, path.name == "__init__.py")
  faults = [f for name in names if (f := fault(module, name, name in NAMES))]
  assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
  ("module", "source", "wrong"),
  [
    ("agentic_rl.tools.fenced", "from agentic_rl.rollout import engine", True),
    ("agentic_rl.tools.fenced", "def f():\n  import agentic_rl.train", True),
    ("agentic_rl.tools.fenced", "from ..rollout.engine import Engine", True),
    ("agentic_rl.tools.fenced", "from .render import render_observation", False),
    ("agentic_rl.tools.fenced", "from agentic_rl.sandbox import Interpreter", False),
    ("agentic_rl.tools.fenced", "from agentic_rl.sandbox.pool import Pool", True),
    ("agentic_rl.rewards.code", "from agentic_rl.sandbox import Interpreter", False),
    ("agentic_rl.algorithms.losses", "import agentic_rl.policy.logprobs", False),
    ("agentic_rl.algorithms.losses", "from agentic_rl.tools.fenced import FencedDialect", True),
    ("agentic_rl.train.rl", "from agentic_rl.algorithms.losses import clipped", False),
    ("agentic_rl.train.rl", "import ml_collections", False),
    ("agentic_rl.policy.decoder", "import ml_collections", True),
    ("agentic_rl.train.rl", "from agentic_rl.evaluation import evaluate", True),
    ("agentic_rl.study.figure", "from configs import zerotir_nano", True),
    ("agentic_rl.sandbox", "from agentic_rl.errors import UserError", True),
    ("agentic_rl.sandbox.pool", "import jax.numpy as jnp", True),
    ("agentic_rl.episode", "from agentic_rl.tokenizer import Tokenizer", True),
    ("agentic_rl.episode", "import dataclasses", False),
    ("agentic_rl.rollout.engine", "from agentic_rl.episode import Completion", False),
  ],
)
def test_the_check_finds_what_it_should(module: str, source: str, wrong: bool):
  names = list(imported_names(source, module, module.count(".") == 1 and module.split(".")[1] in ROOMS))
  assert names
  assert any(fault(module, name, name.rpartition(".")[0] in NAMES and name in NAMES) for name in names) == wrong


def test_sandbox_loads_nothing_heavy():
  program = "import json, sys; import agentic_rl.sandbox; print(json.dumps(sorted(sys.modules)))"
  done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
  loaded = json.loads(done.stdout)
  ours = [m for m in loaded if m.split(".")[0] == PACKAGE]
  assert "agentic_rl.sandbox" in ours
  assert [m for m in ours if m != PACKAGE and not m.startswith("agentic_rl.sandbox")] == []
  assert {m.split(".")[0] for m in loaded} & {"jax", "jaxlib", "flax", "numpy", "orbax", "tensorflow"} == set()


@pytest.mark.parametrize("module", sorted(NAMES))
def test_every_module_imports(module: str):
  try:
    importlib.import_module(module)
  except ModuleNotFoundError as error:
    is_room = module in (PACKAGE, *(f"{PACKAGE}.{room}" for room in ROOMS))
    if is_room or not error.name or error.name.split(".")[0] == PACKAGE:
      raise
    pytest.skip(f"needs {error.name}, which an extra installs; a room itself must not")
