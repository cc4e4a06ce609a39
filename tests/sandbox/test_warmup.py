"""The warm-up: fills what a first snippet would pay for, changes no answer, and stays small for the bare parent."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentic_rl.sandbox import warmup

_RUNNER = Path(__file__).with_name("warmup_runner.py")
_ENVIRONMENT = {
  "PATH": os.environ["PATH"],
  "PYTHONHASHSEED": "0",
  "OMP_NUM_THREADS": "1",
  "OPENBLAS_NUM_THREADS": "1",
  "SYMPY_CACHE_SIZE": "5000",
}
_PREAMBLE = "from sympy import *\nimport numpy as np\nx, y, z, n, k, a, b = symbols('x y z n k a b')\n"
_SNIPPETS = """
print(solve([Eq(3*a + 2*b, 12), Eq(a - b, -1)], [a, b]), solve(x**2 + x + 1, x), solve(x**4 - 5*x**2 + 4, x))
print(solve([x**2 + y**2 - 25, x + y - 7], [x, y]), solve(log(x, 2) - 3, x), solve(exp(2*x) - 3*exp(x) + 2, x))
print(solve(sin(x) - Rational(1, 2), x), solveset(sin(x) - 1, x, domain=S.Reals), solveset(x**3 - x, x, S.Reals))
print(solve((x - 1)/(x + 2) >= 0, x), reduce_inequalities([x**2 < 9, x > 0], x), solve(Abs(x - 3) - 5, x))
print(simplify((sin(x)**4 - cos(x)**4)/(sin(x)**2 - cos(x)**2)), simplify(sqrt(3 + 2*sqrt(2))), factor(x**6 - 1))
print(diff(x**3*log(x), x, 2), integrate(x*cos(x), x), integrate(exp(-x**2), (x, -oo, oo)), integrate(1/(x**3 + 1), x))
print(limit((1 + 1/x)**x, x, oo), series(log(1 + x), x, 0, 5), summation(1/(k*(k + 1)), (k, 1, oo)))
print(product(1 - 1/k**2, (k, 2, n)), summation(k**3, (k, 1, n)).factor(), nsolve(cos(x) - x, x, 1))
M = Matrix([[2, 1, 0], [1, 3, 1], [0, 1, 4]]); print(M.det(), M.inv(), M.eigenvals(), M.charpoly(x)); pprint(M)
print(factorint(2**32 + 1), prime(1000), totient(100), n_order(2, 101), primitive_root(101), binomial(20, 7))
from sympy.solvers.diophantine import diophantine; print(diophantine(x**2 - 2*y**2 - 1), diophantine(3*x + 4*y - 12))
print(nsimplify(0.333333333, rational=True), N(sqrt(2), 50), Poly(x**5 - x - 1, x).nroots(n=20))
print(real_roots(x**3 - 3*x + 1))
p = symbols("p", positive=True, integer=True); print(sqrt(p**2), sqrt(x**2), x.is_positive, p.is_real, a.is_integer)
p, m, r, t, c = symbols("p m r t c"); print(sqrt(p**2), sqrt(r**2), m.is_integer, simplify((-1)**(2*m)), log(p**2))
T = Triangle(Point(0, 0), Point(4, 0), Point(0, 3)); print(T.area, T.circumcenter, T.incircle.radius)
print(Dummy("d").name, Dummy("e") == Dummy("e"), simplify((2 + 3*I)*(1 - I)), cos(pi/5), arg(1 + I))
print(lambdify(x, x**2 + sin(x))(2.0), lambdify(x, x**2, "numpy")(np.array([1.0, 2.0])), latex(x/2 + sqrt(y)))
f = Function("f"); print(dsolve(f(x).diff(x, 2) + 4*f(x), f(x)), rsolve(f(n + 1) - 3*f(n), f(n), {f(0): 2}))
print(np.linalg.solve([[2.0, 1.0], [1.0, 3.0]], [1.0, 2.0]), np.roots([1, -6, 11, -6]))
print(np.arange(6.0).reshape(2, 3) / 7)
from sympy.core.random import rng; import random; rng.seed(3); random.seed(3); print(rng.random(), random.random())
import warnings; warnings.warn("old"); print(np.array([1.0]) / 0, np.get_printoptions()["precision"])
def f(v): return 1 // v\\nf(0)
""".strip().splitlines()
SNIPPETS = [_PREAMBLE + line.replace("\\n", "\n") for line in _SNIPPETS]


def _measure(modules: list[str], warm: bool, snippets: list[str] | None = None) -> dict[str, Any]:
  words = [sys.executable, str(_RUNNER), str(warmup.__file__), json.dumps(modules), "warm" if warm else "cold"]
  done = subprocess.run(
    words, input=json.dumps(snippets or []), env=_ENVIRONMENT, capture_output=True, text=True, check=False, timeout=120
  )
  assert done.returncode == 0, done.stderr
  assert done.stderr == ""
  lines = done.stdout.splitlines()
  assert len(lines) == 1, "the warm-up printed something"
  return dict(json.loads(lines[0]))


def test_bare_parent_stays_small():
  facts = _measure([], warm=True)["facts"]
  assert facts["problems"] == {}
  assert facts["grown"] < 3 << 20
  assert facts["threads"] == [1, 1]
  assert facts["new_files"] == []


def test_bare_parent_loads_no_third_party_module():
  (run,) = _measure(
    [], warm=True, snippets=["import sys\nprint(sorted({'numpy', 'sympy', 'scipy'} & set(sys.modules)))"]
  )["runs"]
  assert run["output"] == "[]\n"


def test_typical_modules_of_a_bare_snippet_are_loaded():
  source = "import math, random, re, json, itertools, collections, fractions, decimal, statistics, datetime, heapq\n"
  (run,) = _measure([], warm=True, snippets=[source + "import functools, bisect, string, time, typing, copy, cmath"])[
    "runs"
  ]
  assert run["output"] == ""
  assert run["modules"] == []


def test_numpy():
  pytest.importorskip("numpy")
  result = _measure(
    ["numpy"], warm=True, snippets=["import numpy as np\nprint(np.unique(np.linalg.svd(np.eye(2))[1]))"]
  )
  assert result["facts"]["problems"] == {}
  assert result["facts"]["threads"] == [1, 1]
  assert result["runs"][0]["output"] == "[1.]\n"
  assert result["runs"][0]["modules"] == []


def test_scipy():
  pytest.importorskip("scipy")
  result = _measure(["numpy", "scipy.optimize"], warm=True)
  assert result["facts"]["problems"] == {}
  assert result["facts"]["threads"] == [1, 1]


def test_answers_are_those_of_a_cold_interpreter_and_load_nothing_more_of_sympy():
  pytest.importorskip("numpy")
  pytest.importorskip("sympy")
  cold = _measure(["numpy", "sympy"], warm=False, snippets=SNIPPETS)
  warm = _measure(["numpy", "sympy"], warm=True, snippets=SNIPPETS)
  assert warm["facts"]["problems"] == {}
  assert warm["facts"]["threads"] == [1, 1]
  assert warm["facts"]["new_files"] == []
  for source, expected, found in zip(_SNIPPETS, cold["runs"], warm["runs"], strict=True):
    assert found["output"] == expected["output"], source
    assert not [name for name in found["modules"] if name.startswith("sympy.")], source


def test_random_states_end_at_a_seed():
  pytest.importorskip("sympy")
  source = "import numpy, sympy.core.random as r\nprint(numpy.random.rand(), r.rng.random())"
  first, second = (_measure(["numpy", "sympy"], warm=True, snippets=[source])["runs"][0]["output"] for _ in range(2))
  assert first == second


def test_a_call_that_fails_is_reported_and_the_rest_runs(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(warmup, "_PYTHON", "import math\nmath.no_such_function(1)\nran = [].append\nran(2)\n1 / 0\n")
  problems = warmup.warm(())
  assert list(problems) == ["math.no_such_function(1)", "1 / 0"]
  assert problems["1 / 0"] == "ZeroDivisionError: division by zero"


def test_unknown_modules_are_left_alone():
  assert warmup.warm(["no_such_module_anywhere"]) == {}


def test_the_measured_cells_are_not_answered_beforehand():
  """A benchmark whose expressions the warm-up holds would read its answers from sympy's caches."""
  from benchmarks import sandbox

  calls = [call for cell in (sandbox.SCIENCE, sandbox.SYMBOLIC) for call in _calls(cell)]
  held = _calls(warmup._SYMPY.replace("sp.", ""))
  assert len(calls) == 4 and len(held) > 40
  assert not set(calls) & set(held)


def _calls(source: str) -> list[str]:
  """Calls with an argument that is more than a name or a number, spelled in one way."""
  tree = ast.parse(source.replace("sp.", ""))
  calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
  return [ast.unparse(node) for node in calls if node.func.id in _SOLVERS]


_SOLVERS = ("solve", "simplify", "factor", "integrate", "expand", "diff", "limit", "series", "summation", "nsolve")
