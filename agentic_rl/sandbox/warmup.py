"""Warms a parent up before it forks: the first use of a function fills caches and imports modules, once for all.

Importing is not enough. Sympy loads many modules and fills its caches at the first call, which would else be paid again
in every child. Nothing here leaves a file, a thread or a changed setting behind. Standard library only; what else it
runs is source text, for the modules that have been asked for.
"""

from __future__ import annotations

import ast
import linecache
import traceback
from collections.abc import Iterable

_PYTHON = """
import ast, codecs, collections, dataclasses, datetime, decimal, fractions, functools, itertools, json, math, operator
import random, re, statistics, string, typing
random.seed(0); random.random(); random.randint(1, 6); random.choice("ab"); random.shuffle([1, 2])
random.sample("ab", 1)
random.seed(0); random.gauss(0, 1)
fractions.Fraction(1, 3) + fractions.Fraction("0.25"); decimal.Decimal("1.1") / 3; str(decimal.Decimal(2).sqrt())
re.sub(r"(\\d+)", "x", "a1"); json.loads(json.dumps({"a": [1, 2.5, None]})); statistics.mean([1, 2]); math.gcd(4, 6)
collections.Counter("aab").most_common(); collections.defaultdict(list); list(itertools.permutations("abc", 2))
datetime.date(2024, 1, 1).isoformat(); f"{3.14159:.2f} {10**30:,} {'a':>3}"; codecs.lookup("latin-1")
codecs.lookup("idna")
@functools.lru_cache
def fibonacci(n: int) -> int:
  return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
fibonacci(10)
class A:
  def __init__(self): self.x = [i for i in range(3) if i]
try:
  [*A().x][9]
except IndexError:
  pass
"""

_NUMPY = """
import numpy as np
a = np.arange(6.0).reshape(2, 3); repr(a); str(a); repr(a.astype(int)); a @ a.T; a.sum(axis=0); a.mean(); a.std()
a[a > 2]
np.linalg.solve([[2.0, 1.0], [1.0, 3.0]], [1.0, 2.0]); np.linalg.det(np.eye(3)); np.linalg.eig(np.eye(2))
np.linalg.inv(np.eye(2))
np.linalg.norm(a); np.linalg.matrix_rank(a); np.linalg.svd(a); np.linalg.lstsq(a, [1.0, 2.0], rcond=None)
np.cross([1, 0, 0], [0, 1, 0])
np.roots([1, -3, 2]); np.polyfit([0, 1, 2], [1, 2, 5], 1); np.polyval([1, 2], 3); np.unique([1, 1, 2])
np.sort([2, 1]); np.argmax(a)
np.random.seed(0); np.random.rand(2); np.random.randint(0, 5, 3); np.random.default_rng(0).normal(size=2)
np.linspace(0, 1, 3)
np.where(a > 1, a, 0); np.concatenate([a, a]); np.cumsum(a); np.prod(a); np.isclose(1.0, 1.0); np.meshgrid([1], [2])
np.diff([1, 2])
np.array2string(a, precision=2); np.float64(1.5); np.gcd(4, 6); np.fft.fft([1.0, 2.0]); np.histogram([1, 2])
np.percentile([1, 2], 50)
"""

_SYMPY = """
import sympy as sp
from sympy import *
x, y, z, n, k, t = sp.symbols("x y z n k t"); p = sp.Symbol("p", positive=True); m = sp.Symbol("m", integer=True)
sp.solve([sp.Eq(2 * x + y, 5), sp.Eq(x - y, 1)], [x, y]); sp.solve(x**2 - 5 * x + 6, x)
sp.solve(x**3 - 2 * x + 1, x)
sp.solve([x**2 + y**2 - 5, x * y - 2], [x, y]); sp.solve(sp.Eq(2**x, 8), x); sp.solve(sp.sqrt(x + 1) - 2, x)
sp.solve(x**2 < 4, x)
sp.solveset(x**2 - 1, x, domain=sp.S.Reals); sp.linsolve([x + y - 2, x - y], x, y)
sp.nonlinsolve([x * y - 1, x - y], [x, y])
sp.Matrix(3, 3, lambda i, j: i * j + sp.Integer(i == j)).det()
sp.Matrix(10, 10, lambda i, j: (i + 1) ** j % 7).det()
sp.Matrix([[1, 2], [3, 4]]).inv(); sp.Matrix([[2, 1], [1, 2]]).eigenvals(); sp.Matrix([[1, 2], [3, 4]]).rref()
sp.eye(2) * sp.Matrix([x, y])
sp.Matrix([[1, 2], [2, 4]]).nullspace(); sp.Matrix([[1, x], [y, 2]]).det(); sp.Matrix([[2, 1], [1, 2]]).eigenvects()
sp.simplify((x**2 - 1) / (x - 1)); sp.simplify(sp.sin(x) ** 2 + sp.cos(x) ** 2)
sp.simplify(sp.sqrt(8) + sp.sqrt(2)); sp.simplify((x**3 - y**3) / (x - y))
sp.factor(x**3 - 3 * x**2 + 3 * x - 1); sp.factor(x**2 - y**2); sp.expand((x + y) ** 3); sp.cancel((x**2 + x) / x)
sp.apart(1 / (x**2 - 1)); sp.together(1 / x + 1 / y)
sp.diff(sp.sin(x) * sp.exp(x), x); sp.integrate(x**2 * sp.exp(x), x); sp.integrate(1 / (1 + x**2), (x, 0, 1))
sp.integrate(sp.sin(x), (x, 0, sp.pi))
sp.limit(sp.sin(x) / x, x, 0); sp.series(sp.exp(x), x, 0, 4); sp.summation(k**2, (k, 1, n))
sp.summation(k, (k, 1, 10)); sp.product(k, (k, 1, 5))
sp.factorint(360); sp.isprime(97); sp.nextprime(100); list(sp.primerange(1, 30)); sp.divisors(28); sp.totient(12)
sp.gcd(12, 18); sp.lcm(4, 6); sp.mod_inverse(3, 7)
sp.binomial(10, 3); sp.factorial(6); sp.fibonacci(10); sp.Rational(1, 3) + sp.Rational(1, 6); sp.nsimplify(0.5)
sp.sqrt(50); sp.Rational("0.125"); sp.prime(5)
sp.N(sp.pi, 20); sp.pi.evalf(); float(sp.sqrt(2)); sp.nsolve(x**2 - 2, x, 1); sp.Poly(x**3 - x - 1, x).nroots()
sp.real_roots(x**2 - 2); sp.Poly(x**2 + 1, x).degree()
sp.trigsimp(2 * sp.sin(x) * sp.cos(x)); sp.expand_trig(sp.sin(x + y)); sp.radsimp(1 / (1 + sp.sqrt(2)))
sp.powsimp(x**2 * x**3); sp.logcombine(sp.log(p) + sp.log(2))
sp.rsolve(sp.Function("f")(m + 1) - 2 * sp.Function("f")(m), sp.Function("f")(m))
sp.dsolve(sp.Function("g")(x).diff(x) - sp.Function("g")(x))
sp.ntheory.modular.crt([3, 5], [2, 3]); sp.Abs(x - 1).subs(x, 3); sp.Piecewise((x, x > 0), (0, True)).subs(x, 1)
sp.floor(sp.Rational(7, 2)); sp.ceiling(2.1); sp.Mod(7, 3)
sp.diophantine(3 * x + 5 * y - 1); sp.reduce_inequalities([x > 1, x < 3], x); sp.Interval(0, 1); sp.FiniteSet(1, 2)
sp.Point(0, 0).distance(sp.Point(3, 4))
sp.lambdify(x, x**2 + sp.sin(x))(1.0); sp.latex(x**2 / 2); str(x**2 / 2 + sp.sqrt(y)); repr(sp.Matrix([[1, x]]))
sp.pretty(x**2); sp.sympify("x**2 + 1"); sp.parse_expr("2*x")
sp.re(1 + 2 * sp.I); sp.expand((1 + sp.I) ** 3); sp.conjugate(1 + sp.I); sp.arg(1 + sp.I); sp.log(8, 2)
sp.exp(sp.log(x)); sp.Sum(1 / k**2, (k, 1, sp.oo)).doit(); sp.zeta(2)
sp.minimal_polynomial(sp.sqrt(2) + 1, x); sp.resultant(x**2 - 1, x - 2, x); sp.groebner([x**2 - y, y - 1], x, y)
sp.interpolate([(0, 1), (1, 2)], x); sp.continued_fraction(sp.Rational(7, 3))
"""

_SCIPY = """
import numpy as np
from scipy import integrate, linalg, optimize, special, stats
optimize.minimize(lambda v: (v[0] - 1) ** 2, [0.0]); optimize.brentq(lambda v: v - 1, 0, 3)
optimize.fsolve(lambda v: v**2 - 2, 1.0)
optimize.linprog([1.0, 1.0], A_ub=[[-1.0, 0.0]], b_ub=[-1.0])
optimize.curve_fit(lambda v, a: a * v, [1.0, 2.0], [2.0, 4.0])
optimize.root_scalar(lambda v: v - 1, bracket=[0, 2])
optimize.minimize_scalar(lambda v: (v - 1) ** 2); integrate.quad(lambda v: v**2, 0, 1)
integrate.solve_ivp(lambda t, v: -v, (0, 1), [1.0]); integrate.dblquad(lambda a, b: a, 0, 1, 0, 1)
linalg.solve(np.eye(2), [1.0, 2.0]); linalg.expm(np.eye(2)); linalg.lu(np.eye(2)); special.comb(5, 2, exact=True)
special.gamma(3.5); special.erf(0.5)
stats.norm.cdf(0.0); stats.norm.ppf(0.5); stats.binom.pmf(1, 3, 0.5); stats.ttest_ind([1, 2, 3], [2, 3, 4])
stats.pearsonr([1, 2, 3], [1, 2, 4]); stats.describe([1, 2, 3])
"""

_SOURCES = {"": _PYTHON, "numpy": _NUMPY, "sympy": _SYMPY, "scipy": _SCIPY}


def warm(modules: Iterable[str]) -> dict[str, str]:
  """Runs a few dozen small calls of each module that has been preloaded, and of what every snippet touches.

  Args:
    modules: Names of the preloaded modules.

  Returns:
    For each call that failed, what went wrong.
  """
  problems: dict[str, str] = {}
  wanted = {"", *(name.split(".")[0] for name in modules)}
  for name, source in _SOURCES.items():
    if name in wanted:
      _run(source, problems)
  try:
    compile("def broken(:\n", "<warm>", "exec")
  except SyntaxError as error:
    "".join(traceback.TracebackException.from_exception(error).format())
  linecache.clearcache()
  return problems


def _run(source: str, problems: dict[str, str]) -> None:
  """Executes statement by statement, so that one that this version of a module lacks does not stop the rest."""
  namespace: dict[str, object] = {"__name__": "__warm__"}
  for node in ast.parse(source).body:
    text = ast.unparse(node)
    try:
      exec(compile(text, "<warm>", "exec"), namespace)
    except Exception as error:
      problems[text] = f"{type(error).__name__}: {error}"
