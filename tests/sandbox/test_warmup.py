from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import random, sys, threading, warnings
warnings.simplefilter("error")
random.seed(7)
from agentic_rl.sandbox import warmup
before = threading.active_count()
print(warmup.warm({modules!r}), threading.active_count() == before)
print([m for m in ("numpy", "sympy", "scipy") if m in sys.modules])
print(warmup.warm(["no module that it knows"]))
"""


@pytest.mark.parametrize("modules", [[], ["numpy"], ["numpy", "sympy"], ["scipy.optimize"]])
def test_every_call_works_and_only_what_is_asked_for_is_loaded(modules: list[str], tmp_path: Path):
  root = str(Path(__file__).parents[2])
  done = subprocess.run(
    [sys.executable, "-c", f"import sys\nsys.path.insert(0, {root!r})\n" + CODE.format(modules=modules)],
    capture_output=True, text=True, cwd=tmp_path,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  first, loaded, last = done.stdout.splitlines()
  assert (first, last) == ("{} True", "{}") and done.stderr == ""
  assert {name.split(".")[0] for name in modules} <= set(eval(loaded)) and (modules or loaded == "[]")
  assert list(tmp_path.iterdir()) == []


def test_what_fails_is_told_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch):
  from agentic_rl.sandbox import warmup

  monkeypatch.setitem(warmup._SOURCES, "broken", "x = 1\nx.nothing\ny = x + 1\ny / 0")
  assert warmup.warm(["broken"]) == {
    "x.nothing": "AttributeError: 'int' object has no attribute 'nothing'",
    "y / 0": "ZeroDivisionError: division by zero",
  }
