"""Warms a parent up before it forks: the first use of a function fills caches and imports modules, once for all.

Importing is not enough. Sympy loads many modules and fills its caches at the first call, which would else be paid again
in every child. The calls were chosen by the difference between the first and the second run of typical snippets in a
child. Nothing here leaves a file, a thread or a changed setting behind. Standard library only; what else it runs is
source text, for the modules that have been asked for.
"""

from __future__ import annotations

import ast
import decimal
import linecache
import traceback
import warnings
from collections.abc import Iterable

_PYTHON = """
import ast, bisect, cmath, codecs, collections, copy, dataclasses, datetime, decimal, enum, fractions, functools, heapq
import itertools, json, math, operator, random, re, statistics, string, time, typing
random.seed(0); random.random(); random.randint(1, 6); random.choice("ab"); random.shuffle([1, 2])
random.sample("ab", 1); random.gauss(0, 1); random.seed(0)
fractions.Fraction(1, 3) + fractions.Fraction("0.25"); decimal.Decimal("1.1") / 3; str(decimal.Decimal(2).sqrt())
re.sub(r"(\\d+)", "x", "a1"); json.loads(json.dumps({"a": [1, 2.5, None]})); statistics.mean([1, 2]); math.gcd(4, 6)
collections.Counter("aab").most_common(); collections.defaultdict(list); list(itertools.permutations("abc", 2))
collections.namedtuple("N", "a b")(1, 2)
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
a[a > 2]; repr(a > 2); repr(a * 1j); repr(np.float64(0.5)); repr(a * 1e9)
np.linalg.solve([[2.0, 1.0], [1.0, 3.0]], [1.0, 2.0]); np.linalg.det(np.eye(3)); np.linalg.eig(np.eye(2))
np.linalg.inv(np.eye(2)); np.linalg.eigvals([[0.0, 1.0], [-1.0, 0.0]]); np.linalg.matrix_power(np.eye(2), 3)
np.linalg.norm(a); np.linalg.matrix_rank(a); np.linalg.svd(a); np.linalg.lstsq(a, [1.0, 2.0], rcond=None)
np.cross([1, 0, 0], [0, 1, 0]); np.linalg.qr(a); np.linalg.eigh(np.eye(2))
np.roots([1, -3, 2]); np.polyfit([0, 1, 2], [1, 2, 5], 1); np.polyval([1, 2], 3); np.unique([1, 1, 2])
repr(np.poly1d([1, 2])); np.sort([2, 1]); np.argmax(a); np.vectorize(abs)([1, -1]); np.array([1, 2], dtype=object).sum()
np.random.seed(0); np.random.rand(2); np.random.randint(0, 5, 3); np.random.default_rng(0).normal(size=2)
np.random.choice(3, 2); np.random.normal(size=2); np.random.permutation(3); np.linspace(0, 1, 3)
np.where(a > 1, a, 0); np.concatenate([a, a]); np.cumsum(a); np.prod(a); np.isclose(1.0, 1.0); np.meshgrid([1], [2])
np.diff([1, 2]); np.allclose(a, a); np.vstack([a, a]); np.round(a, 2); np.dot(a, a.T); np.median(a); np.bincount([1, 1])
np.array2string(a, precision=2); np.float64(1.5); np.gcd(4, 6); np.fft.fft([1.0, 2.0]); np.histogram([1, 2])
np.percentile([1, 2], 50); np.trapezoid([1, 2]) if hasattr(np, "trapezoid") else None; np.interp(0.5, [0, 1], [0, 1])
np.random.seed(0)
"""

_SYMPY = """
import sympy as sp
from sympy import *
x, y, z, n, k, t = sp.symbols("x y z n k t"); p = sp.Symbol("p", positive=True); m = sp.Symbol("m", integer=True)
a, b, c = sp.symbols("a b c"); r = sp.Symbol("r", real=True); f = sp.Function("f")
sp.solve([sp.Eq(3 * x - y, 4), sp.Eq(x + 5 * y, 2)], [x, y])
sp.solve([a + b + c - 6, a - b, c - 3], [a, b, c], dict=True)
sp.solve(x**2 - 5 * x + 6, x); sp.solve(x**2 + x + 3, x); sp.solve(x**3 - 2 * x + 1, x)
sp.solve(2 * x**4 - 3 * x**2 + 1)
sp.solve([x**2 + y**2 - 5, x * y - 2], [x, y]); sp.solve(sp.Eq(2**x, 8), x); sp.solve(sp.sqrt(x + 1) - 2, x)
sp.solve(sp.log(x, 3) - 2, x); sp.solve(sp.Abs(r - 2) - 5, r); sp.solve(x**2 < 4, x); sp.solve(m**2 - 4, m)
sp.solve(sp.cos(x) - sp.Rational(1, 2), x); sp.solve([p**2 - 4, p - x], [p, x])
sp.solveset(x**2 - 1, x, domain=sp.S.Reals); sp.linsolve([x + y - 2, x - y], x, y)
sp.solveset(sp.cos(x) - 1, x, sp.S.Reals)
sp.nonlinsolve([x * y - 1, x - y], [x, y]); sp.solve_univariate_inequality((x - 2) / (x + 3) > 0, x, relational=False)
sp.Matrix(3, 3, lambda i, j: i * j + sp.Integer(i == j)).det()
sp.Matrix(6, 6, lambda i, j: (i + 1) ** j % 7).det()
sp.Matrix([[1, 2], [3, 4]]).inv(); sp.Matrix([[2, 1], [1, 2]]).eigenvals(); sp.Matrix([[1, 2], [3, 4]]).rref()
sp.eye(2) * sp.Matrix([x, y]); sp.Matrix([[2, 1], [1, 2]]).charpoly(x); sp.Matrix([[3, 1], [0, 3]]).jordan_form()
sp.Matrix([[1, 2], [2, 4]]).nullspace(); sp.Matrix([[1, x], [y, 2]]).det(); sp.Matrix([[2, 1], [1, 2]]).eigenvects()
sp.Matrix([[2, 1], [1, 2]]).diagonalize(); sp.Matrix([[1, 1], [1, 0]]) ** 6; sp.Matrix([1, 2]).norm()
sp.simplify((t**2 - 9) / (t - 3)); sp.simplify(sp.sin(t) ** 2 + sp.cos(t) ** 2); sp.simplify(sp.tan(x) * sp.cos(x))
sp.simplify(sp.sqrt(8) + sp.sqrt(2)); sp.simplify((x**3 - y**3) / (x - y)); sp.sqrtdenest(sp.sqrt(5 + 2 * sp.sqrt(6)))
sp.factor(x**3 - 3 * x**2 + 3 * x - 1); sp.factor(x**2 - y**2); sp.expand((x + y) ** 3); sp.cancel((x**2 + x) / x)
sp.factor(x**4 - 5 * x**2 + 4); sp.factor_list(x**2 - 1); sp.collect(sp.expand((x + a) ** 2), x)
sp.apart(1 / (x**2 - 1)); sp.together(1 / x + 1 / y); sp.div(x**3 + 1, x + 2); sp.Poly((x + 1) ** 3).all_coeffs()
sp.diff(sp.sin(x) * sp.exp(x), x); sp.diff(sp.log(x) / x, x, 2); sp.diff(sp.tan(x) + sp.atan(x) + sp.sqrt(x), x)
sp.integrate(x**2 * sp.exp(x), x); sp.integrate(1 / (1 + x**2), (x, 0, 1)); sp.integrate(sp.log(x), x)
sp.integrate(sp.sin(x), (x, 0, sp.pi)); sp.integrate(sp.exp(-(x**2) / 2), (x, -sp.oo, sp.oo))
sp.integrate(x * sp.sin(x))
sp.integrate(sp.sqrt(4 - x**2), (x, 0, 2)); sp.integrate(x * y, (x, 0, 1), (y, 0, 2))
sp.limit(sp.sin(x) / x, x, 0); sp.limit((1 + 3 / x) ** x, x, sp.oo); sp.limit((x**2 + 1) / (2 * x**2), x, sp.oo)
sp.series(sp.exp(x), x, 0, 4); sp.series(sp.cos(x), x, 0, 4); sp.summation(k**2, (k, 1, n)); sp.product(k, (k, 1, 5))
sp.summation(k, (k, 1, 10)); sp.summation(1 / (k * (k + 2)), (k, 1, sp.oo)); sp.Sum(1 / 3**k, (k, 0, sp.oo)).doit()
sp.summation(sp.binomial(n, k), (k, 0, n)); sp.Sum(1 / k**2, (k, 1, sp.oo)).doit()
sp.factorint(360); sp.isprime(97); sp.nextprime(100); list(sp.primerange(1, 30)); sp.divisors(28); sp.totient(12)
sp.factorint(1000003 * 1000033); sp.isprime(2**61 - 1); sp.primepi(100); sp.divisor_sigma(12); sp.primefactors(30)
sp.gcd(12, 18); sp.lcm(4, 6); sp.mod_inverse(3, 7); sp.n_order(2, 7); sp.primitive_root(7); sp.discrete_log(7, 2, 3)
sp.binomial(10, 3); sp.factorial(6); sp.fibonacci(10); sp.catalan(4); sp.Rational(1, 3) + sp.Rational(1, 6)
sp.nsimplify(0.5); sp.nsimplify(2.2360679775, [sp.sqrt(5)]); sp.sqrt(50); sp.Rational("0.125"); sp.prime(5)
sp.N(sp.pi, 20); sp.pi.evalf(); float(sp.sqrt(2)); sp.nsolve(x**2 - 2, x, 1); sp.Poly(x**3 - x - 1, x).nroots()
sp.nsolve([x + y - 2, x - y], [x, y], [1, 1]); sp.cos(sp.pi / 7).evalf(); sp.E.n(15); sp.Integer(2) ** 0.5
sp.real_roots(x**2 - 2); sp.real_roots(x**3 - 3 * x + 1)[0].evalf(); sp.Poly(x**2 + 1, x).degree(); sp.roots(x**2 - 3)
sp.trigsimp(2 * sp.sin(x) * sp.cos(x)); sp.expand_trig(sp.sin(x + y)); sp.radsimp(1 / (1 + sp.sqrt(2)))
sp.sin(sp.pi / 12); sp.simplify(sp.cos(2 * sp.pi / 5)); sp.acos(sp.Rational(1, 2)); sp.expand_log(sp.log(p**2))
sp.powsimp(x**2 * x**3); sp.logcombine(sp.log(p) + sp.log(2)); sp.simplify(sp.log(p**3)); sp.sqrt(p**2); sp.sqrt(r**2)
sp.rsolve(f(m + 1) - 2 * f(m), f(m)); sp.dsolve(f(x).diff(x) - f(x)); sp.dsolve(f(x).diff(x, 2) + 4 * f(x), f(x))
sp.ntheory.modular.crt([3, 5], [2, 3]); sp.Abs(x - 1).subs(x, 3); sp.Piecewise((x, x > 0), (0, True)).subs(x, 1)
sp.floor(sp.Rational(7, 2)); sp.ceiling(2.1); sp.Mod(7, 3); sp.Max(1, x); sp.real_root(-8, 3); sp.sign(-3)
sp.diophantine(3 * x + 5 * y - 1); sp.diophantine(x**2 - 3 * y**2 - 1); sp.diophantine(x**2 + y**2 - 13)
sp.reduce_inequalities([x > 1, x < 3], x); sp.Interval(0, 1).intersect(sp.Interval(sp.S.Half, 2)); sp.FiniteSet(1, 2)
sp.maximum(x * (2 - x), x, sp.Interval(0, 2)); sp.calculus.util.continuous_domain(1 / x, x, sp.S.Reals)
sp.Point(0, 0).distance(sp.Point(3, 4)); sp.Triangle((0, 0), (4, 0), (0, 3)).circumcenter
sp.Circle((0, 0), 2).intersection(sp.Line((0, 0), (1, 1))); sp.Polygon((0, 0), (1, 0), (1, 1), (0, 1)).area
sp.lambdify(x, x**2 + sp.sin(x))(1.0); sp.latex(x**2 / 2); str(x**2 / 2 + sp.sqrt(y)); repr(sp.Matrix([[1, x]]))
sp.pretty(x**2 / 3); sp.sympify("x**2 + 1"); sp.parse_expr("2*x"); sp.latex(sp.Matrix([[1, x]])); str(1.5 * x - y)
sp.re(1 + 2 * sp.I); sp.expand((1 + sp.I) ** 3); sp.conjugate(1 + sp.I); sp.arg(1 + sp.I); sp.log(8, 2)
sp.simplify((1 + sp.I) / (1 - sp.I)); sp.Abs(3 + 4 * sp.I); sp.expand_complex(sp.exp(sp.I * sp.pi / 3))
sp.exp(sp.log(x)); sp.zeta(2); sp.gamma(sp.S.Half); sp.simplify_logic((x > 1) & (x > 1)); sp.satisfiable(a & ~b)
sp.minimal_polynomial(sp.sqrt(2) + 1, x); sp.resultant(x**2 - 1, x - 2, x); sp.groebner([x**2 - y, y - 1], x, y)
sp.interpolate([(0, 1), (1, 2)], x); sp.continued_fraction(sp.Rational(7, 3)); sp.discriminant(x**2 + a * x + b, x)
sp.core.random.seed(0)
"""

_SCIPY = {
  "integrate": """
from scipy import integrate
integrate.quad(lambda v: v**2, 0, 1); integrate.dblquad(lambda a, b: a, 0, 1, 0, 1)
integrate.solve_ivp(lambda t, v: -v, (0, 1), [1.0]); integrate.odeint(lambda v, t: -v, 1.0, [0, 1])
""",
  "linalg": """
from scipy import linalg
linalg.solve([[2.0, 0.0], [0.0, 1.0]], [1.0, 2.0]); linalg.expm([[0.0, 1.0], [0.0, 0.0]]); linalg.lu([[1.0]])
linalg.eigh([[1.0]]); linalg.det([[1.0]]); linalg.inv([[1.0]]); linalg.null_space([[1.0, 1.0]])
""",
  "optimize": """
from scipy import optimize
optimize.minimize(lambda v: (v[0] - 1) ** 2, [0.0]); optimize.brentq(lambda v: v - 1, 0, 3)
optimize.minimize(lambda v: (v[0] - 1) ** 2, [0.5], bounds=[(0, 2)], constraints={"type": "eq", "fun": lambda v: v - 1})
optimize.minimize(lambda v: (v[0] - 1) ** 2, [0.0], method="Nelder-Mead")
optimize.fsolve(lambda v: v**2 - 2, 1.0); optimize.root(lambda v: v**2 - 2, 1.0)
optimize.linprog([1.0, 1.0], A_ub=[[-1.0, 0.0]], b_ub=[-1.0])
optimize.curve_fit(lambda v, a: a * v, [1.0, 2.0, 3.0], [2.0, 4.0, 6.1])
optimize.linear_sum_assignment([[1, 2], [2, 1]])
optimize.root_scalar(lambda v: v - 1, bracket=[0, 2]); optimize.newton(lambda v: v**2 - 2, 1.0)
optimize.minimize_scalar(lambda v: (v - 1) ** 2); optimize.minimize_scalar(abs, bounds=(-1, 2), method="bounded")
""",
  "special": """
from scipy import special
special.comb(5, 2, exact=True); special.factorial(5, exact=True); special.gamma(3.5); special.erf(0.5)
special.jv(0, 1.0)
""",
  "stats": """
from scipy import stats
stats.norm.cdf(0.0); stats.norm.ppf(0.5); stats.norm(0, 1).pdf(0.0); stats.binom.pmf(1, 3, 0.5); stats.poisson.cdf(1, 2)
stats.ttest_ind([1, 2, 3], [2, 3, 4]); stats.pearsonr([1, 2, 3], [1, 2, 4]); stats.describe([1, 2, 3])
stats.linregress([1, 2, 3], [1, 2, 4]); stats.t.ppf(0.9, 5); stats.chi2.sf(1.0, 2)
stats.norm.rvs(size=2, random_state=0)
""",
}

_BROKEN = "def broken(items):\n  return items[0] / items[1]\n\nbroken([1, 0])\n"


def warm(modules: Iterable[str]) -> dict[str, str]:
  """Runs some dozens of small calls of each module that has been preloaded, and of what every snippet touches.

  Args:
    modules: Names of the preloaded modules; of `scipy` all usual parts, of `scipy.stats` and the like that one.

  Returns:
    For each call that failed, what went wrong.
  """
  names = set(modules)
  roots = {"", *(name.partition(".")[0] for name in names)}
  sources = [source for root, source in (("", _PYTHON), ("numpy", _NUMPY), ("sympy", _SYMPY)) if root in roots]
  sources += [source for part, source in _SCIPY.items() if names & {"scipy", f"scipy.{part}"}]
  problems: dict[str, str] = {}
  with warnings.catch_warnings(), decimal.localcontext():  # the flags of a context are kept as well
    warnings.simplefilter("ignore")  # a snippet is to see the warnings of its own calls
    for source in sources:
      _run(source, problems)
  _describe_errors()
  return problems


def _run(source: str, problems: dict[str, str]) -> None:
  """Executes statement by statement, so that one that this version of a module lacks does not stop the rest."""
  namespace: dict[str, object] = {"__name__": "__warm__"}
  for node in ast.parse(source).body:
    try:
      exec(compile(ast.Module([node], []), "<warm>", "exec"), namespace)
    except Exception as error:
      problems[ast.unparse(node)] = f"{type(error).__name__}: {error}"


def _describe_errors() -> None:
  """Formats a traceback with its source lines, and a syntax error."""
  linecache.cache["<warm>"] = (len(_BROKEN), None, _BROKEN.splitlines(keepends=True), "<warm>")
  for source in (_BROKEN, "def broken(:\n"):
    try:
      exec(compile(source, "<warm>", "exec"), {})
    except (ArithmeticError, SyntaxError) as error:
      "".join(traceback.TracebackException.from_exception(error).format())
  linecache.clearcache()
