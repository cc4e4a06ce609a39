"""Warms a parent up before it forks: the first use of a function fills caches and imports modules, once for all.

Importing is not enough. Sympy loads many modules and fills its caches at the first call, which would else be paid again
in every child. The calls are those whose second run in one process is much cheaper than the first, found by measuring
typical snippets. Nothing here leaves a file, a thread or a changed setting behind. Standard library only; what else it
runs is source text, for the modules that have been asked for.
"""

from __future__ import annotations

import ast
import decimal
import linecache
import traceback
import warnings
from collections.abc import Iterable

_PYTHON = """
import _strptime, ast, bisect, calendar, cmath, codecs, collections, copy, csv, dataclasses, datetime, decimal, enum
import fractions, functools, heapq, inspect, io, itertools, json, math, operator, pprint, random, re, statistics, string
import textwrap, time, typing
random.seed(0); random.random(); random.randint(1, 6); random.choice("ab"); random.shuffle([1, 2]); random.gauss(0, 1)
random.sample("ab", 1); random.choices("ab", k=2); random.uniform(0, 1)
fractions.Fraction(1, 3) + fractions.Fraction("0.25"); float(fractions.Fraction(1, 3)); fractions.Fraction(0.5) ** 2
decimal.Decimal("1.1") / 3; str(decimal.Decimal(2).sqrt()); decimal.Decimal("1.25").quantize(decimal.Decimal("0.1"))
re.sub(r"(\\d+)", "x", "a1"); re.findall(r"[a-z]+", "ab c"); re.match(r"(?P<n>\\d+)\\s*", "12").group("n")
json.loads(json.dumps({"a": [1, 2.5, None]})); json.dumps([1, {"b": 2}], indent=2, sort_keys=True)
statistics.mean([1, 2]); statistics.median([1, 2, 4]); statistics.stdev([1, 2, 4]); statistics.mode([1, 1])
math.gcd(4, 6); math.comb(5, 2); math.isqrt(50); math.prod([2, 3]); cmath.sqrt(-1); pow(3, -1, 7); divmod(7, 2)
collections.Counter("aab").most_common(1); collections.defaultdict(list); collections.deque([1], maxlen=2)
list(itertools.permutations("abc", 2)); list(itertools.combinations("abc", 2)); list(itertools.product("ab", "c"))
datetime.date(2024, 1, 1).isoformat(); datetime.datetime.strptime("2024-01-02", "%Y-%m-%d").strftime("%A %d %B")
calendar.monthrange(2024, 2); datetime.date(2024, 1, 1) + datetime.timedelta(3)
f"{3.14159:.2f} {10**30:,} {'a':>3}"; "%.2f" % 1.5; "{:d}".format(3); bin(5); round(2.675, 2); sum(map(int, str(2**99)))
codecs.lookup("latin-1"); copy.deepcopy({"a": [1]}); heapq.heapify([2, 1]); bisect.bisect([1, 2], 1)
functools.reduce(operator.add, [1, 2]); pprint.pformat({"a": list(range(30))}); textwrap.fill("a b " * 30, 20)
ast.literal_eval("[1, {'a': 2}]"); eval("1 + 2"); sorted([2, 1], key=functools.cmp_to_key(lambda a, b: a - b))
@functools.lru_cache
def fibonacci(n: int) -> int:
  return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
fibonacci(10)
class A:
  def __init__(self): self.x = [i for i in range(3) if i]
@dataclasses.dataclass(frozen=True, order=True)
class B:
  x: int
  y: int = 0
class C(enum.Enum):
  A = 1
class D(typing.NamedTuple):
  a: int
try:
  [*A().x][9]
except IndexError:
  pass
"""

_NUMPY = """
import numpy as np
import numpy.polynomial
a = np.arange(6.0).reshape(2, 3); s = np.array([[4.0, 1.0], [1.0, 3.0]]); i = np.array([3, 1, 2])
repr(a); str(a); str(a.astype(int)); str(a > 1); str(a + 1j); str(np.array(["a", "bc"])); str(np.array([None, 1]))
str(np.array([1e-10, 1e5])); repr(np.float64(1.5)); str(np.arange(1100)); np.array2string(a, precision=2)
a @ a.T; a.sum(axis=0); a.mean(); a.std(ddof=1); a[a > 2]; a.var(); a.tolist(); a.max(axis=1); a / 3; a**2; a.T; -a
np.linalg.solve(s, [1.0, 2.0]); np.linalg.det(s); np.linalg.eig(s); np.linalg.eigh(s); np.linalg.eigvals(s)
np.linalg.inv(s); np.linalg.norm(a); np.linalg.matrix_rank(a); np.linalg.svd(a); np.linalg.qr(s); np.linalg.cholesky(s)
np.linalg.lstsq(a, [1.0, 2.0], rcond=None); np.linalg.pinv(a); np.linalg.matrix_power(s, 3)
np.cross([1, 0, 0], [0, 1, 0]); np.dot(i, i); np.outer(i, i); np.kron(i, i); np.einsum("i,i", i, i); np.trace(s)
np.roots([1, -3, 2]); np.polyfit([0, 1, 2], [1, 2, 5], 1); np.polyval([1, 2], 3); np.poly1d([1, -3, 2]).r
np.polynomial.Polynomial([1, 2, 1]).roots(); str(np.poly1d([1, 2]) * np.poly1d([1, 3]))
np.unique([1, 1, 2], return_counts=True); np.sort([2, 1]); np.argsort(i); np.argmax(a); np.bincount(i); np.isin(i, [1])
np.random.seed(0); np.random.rand(2); np.random.randint(0, 5, 3); np.random.choice(5, 3); np.random.normal(0, 1, 2)
np.random.permutation(3); np.random.binomial(9, 0.5, 2); np.random.shuffle(np.arange(3))
r = np.random.default_rng(0); r.normal(size=2); r.integers(0, 9, 2); r.choice([1, 2], 2); r.permutation(3); r.random(2)
np.linspace(0, 1, 3); np.where(a > 1, a, 0); np.concatenate([a, a]); np.vstack([i, i]); np.hstack([i, i]); np.tile(i, 2)
np.stack([i, i]); np.cumsum(a); np.prod(a); np.isclose(1.0, 1.0); np.allclose(a, a); np.meshgrid([1], [2]); np.diag(i)
np.diff(i); np.gradient(i); np.interp(1.5, [1, 2], [3, 4]); np.convolve(i, i); np.round(a / 3, 2); np.clip(a, 1, 2)
np.gcd(4, 6); np.fft.fft([1.0, 2.0]); np.histogram([1, 2], bins=2); np.percentile([1, 2], 50); np.median(i)
np.corrcoef(i, i**2); np.cov(i, i); np.average(i, weights=i); np.any(i > 1); np.exp(a); np.log(a + 1); np.sqrt(a)
np.sin(1.0); np.vectorize(lambda v: v + 1)(i); np.setdiff1d(i, [1]); np.intersect1d(i, i); np.full(2, 7); np.eye(2)
np.triu(s); np.repeat(i, 2); np.indices((2, 2)); np.isnan(a).any(); np.apply_along_axis(sum, 0, s); np.nonzero(i)
"""

_MPMATH = """
import mpmath
mpmath.nstr(mpmath.mpf(1) / 3, 20); mpmath.sqrt(2); mpmath.quad(lambda v: v, [0, 1]); mpmath.findroot(lambda v: v - 1, 2)
str(mpmath.zeta(3)); mpmath.identify(0.5); mpmath.polyroots([1, -3, 2]); mpmath.nsum(lambda v: 1 / v**2, [1, mpmath.inf])
"""

_SYMPY = """
import sympy as sp
from sympy import *
x, y, z, a, b, c, n, k, m, t = sp.symbols("x y z a b c n k m t"); f, g = sp.Function("f"), sp.Function("g")
p, q = sp.symbols("p q", positive=True); u, v = sp.symbols("x y", real=True); i, j = sp.symbols("n k", integer=True)
w, o = sp.symbols("x y", positive=True); r, s = sp.symbols("a b", positive=True); d, e = sp.symbols("x y", integer=True)
h, l = sp.symbols("n k", integer=True, positive=True)
sp.solve([sp.Eq(2 * x + y, 5), sp.Eq(x - y, 1)], [x, y]); sp.solve([x + y + z - 4, x - z, y - 2 * z], [x, y, z])
sp.solve([a + b - 3, a - 2 * b], [a, b], dict=True); sp.solve([0.25 * x + y - 2, x - 1.5 * y], [x, y])
sp.solve(x**2 - 5 * x + 6, x); sp.solve(2 * x**2 - 3 * x - 7, x); sp.solve(x**3 - 2 * x + 1, x); sp.solve(x**2 + x + 1, x)
sp.solve(x**4 - 13 * x**2 + 36, x); sp.solve(x**3 - x - 5, x); sp.solve(z**3 - 27, z); sp.solve(x**5 - x**3 + x - 1, x)
sp.solve(u**3 - u, u); sp.solve(u**2 - 3, u); sp.solve(w**2 - 2 * w - 5, w); sp.solve(h * (h + 1) - 12, h)
sp.solve(0.5 * x**2 - 1.3 * x - 2.2, x); sp.solve(sp.Eq(x / 2 + 1, x / 3 - 4), x); sp.solve(x / (x + 2) - 3, x)
sp.solve([x**2 + y**2 - 5, x * y - 2], [x, y]); sp.solve([x**2 + y**2 - 13, x + y - 5], [x, y])
sp.solve([r * s - 6, r**2 + s**2 - 13], [r, s]); sp.solve(x**2 + y**2 - 4, y); sp.solve(r / s - 2, r)
sp.solve([x + y + z - 3, x * y + y * z + z * x - 3, x * y * z - 1], [x, y, z])
sp.solve(sp.Eq(2**x, 8), x); sp.solve(4 ** (2 * x) - 32, x); sp.solve(sp.exp(x) - 3, x); sp.solve(sp.Abs(u - 4) - 3, u)
sp.solve(sp.sqrt(x + 1) - 2, x); sp.solve(sp.sqrt(3 * x + 1) - x + 1, x); sp.solve(sp.log(w, 3) + sp.log(w + 6, 3) - 3, w)
sp.solve(sp.cos(x) - sp.Rational(1, 2), x); sp.solve(x**2 < 4, x); sp.solve_univariate_inequality(x**2 - 3 * x > 0, x)
sp.solveset(x**2 - 1, x, domain=sp.S.Reals); sp.solveset(sp.cos(x) - 1, x, sp.S.Reals); sp.solveset(x**2 > 4, x, sp.S.Reals)
sp.solveset(sp.exp(x) - 2, x, sp.S.Reals); sp.solveset(x**2 - 5 * x + 4, x)
sp.linsolve([x + y - 2, x - y], x, y); sp.linsolve(sp.Matrix([[1, 1, 3], [1, 2, 5]]), (x, y))
sp.nonlinsolve([x * y - 1, x - y], [x, y]); sp.reduce_inequalities([x > 1, x < 3], x)
sp.Matrix(3, 3, lambda i, j: i * j + sp.Integer(i == j)).det(); sp.Matrix(10, 10, lambda i, j: (i + 1) ** j % 7).det()
A = sp.Matrix([[2, 1], [1, 2]]); B = sp.Matrix([[1, 2, 0], [3, 4, 1], [0, 1, 5]]); A.inv(); A.eigenvals(); A.eigenvects()
A.diagonalize(); A**5; A.charpoly(); B.rref(); B.inv(); B.rank(); B.T * B; B.trace(); B.eigenvals(); B.LUsolve(B[:, 0])
sp.Matrix([[1, 2], [2, 4]]).nullspace(); sp.Matrix([[1, x], [y, 2]]).det(); sp.eye(2) * sp.Matrix([x, y])
sp.Matrix([[a, 1], [1, a]]).inv(); sp.Matrix([[a, 1], [1, a]]).eigenvals(); sp.Matrix([x * y, x]).jacobian([x, y])
sp.simplify((x**2 - 1) / (x - 1)); sp.simplify(sp.sin(x) ** 2 + sp.cos(x) ** 2); sp.simplify(sp.sqrt(8) + sp.sqrt(2))
sp.simplify((x**3 - y**3) / (x - y)); sp.simplify(sp.cos(x) ** 4 - sp.sin(x) ** 4); sp.simplify(sp.log(9) / sp.log(3))
sp.simplify((r**2 - 1) / (r - 1) * s); sp.simplify(sp.factorial(n + 2) / sp.factorial(n)); sp.simplify("3*x + 2*x")
sp.sqrtdenest(sp.sqrt(3 + 2 * sp.sqrt(2))); sp.nsimplify(0.5); sp.nsimplify(1.7320508, [sp.sqrt(3)]); sp.nsimplify(3.25)
sp.factor(x**3 - 3 * x**2 + 3 * x - 1); sp.factor(x**2 - y**2); sp.factor(x**4 - 81); sp.factor(8 * x**3 - y**3)
sp.expand((x + y) ** 3); sp.expand((a + b + c) ** 3).coeff(a, 2); sp.collect(sp.expand((x + a) ** 2), x); sp.expand((x + 0.5) ** 2)
sp.cancel((x**2 + x) / x); sp.apart(1 / (x**2 - 1)); sp.together(1 / x + 1 / y); sp.fraction(x / y); sp.ratsimp(1 / x + 1 / y)
sp.diff(sp.sin(x) * sp.exp(x), x); sp.diff(x**2 * sp.cos(3 * x) / sp.exp(x), x, 2).subs(x, 1).evalf(); sp.diff(sp.log(x), x)
sp.idiff(x**2 + y**2 - 4, y, x); sp.hessian(x**3 * y, (x, y)); sp.diff(x * sp.sqrt(x**2 + 1) / (x + 1), x)
sp.integrate(x**2 * sp.exp(x), x); sp.integrate(1 / (1 + x**2), (x, 0, 1)); sp.integrate(sp.sin(x), (x, 0, sp.pi))
sp.integrate(x**2 * sp.log(x), x); sp.integrate(x * sp.cos(x), (x, 0, sp.pi)); sp.integrate((x + 4) / (x**2 + 5 * x + 6), x)
sp.integrate(1 / (x**2 + 9), (x, 0, sp.oo)); sp.integrate(sp.exp(-2 * x**2), (x, -sp.oo, sp.oo)); sp.integrate(x**3, (x, 0, y))
sp.integrate(sp.sqrt(9 - x**2), (x, 0, 3)); sp.integrate(sp.Piecewise((x, x < 2), (2, True)), (x, 0, 3))
sp.limit(sp.sin(x) / x, x, 0); sp.limit((1 - sp.cos(2 * x)) / x**2, x, 0); sp.limit((1 + 2 / x) ** x, x, sp.oo)
sp.limit((x**2 - 4) / (x - 2), x, 2); sp.series(sp.exp(x), x, 0, 4); sp.series(sp.log(1 + 2 * x), x, 0, 4).removeO()
sp.summation(k**2, (k, 1, n)); sp.summation(k, (k, 1, 10)); sp.summation(1 / (k * (k + 2)), (k, 1, sp.oo))
sp.summation(sp.Rational(1, 3) ** j, (j, 0, sp.oo)); sp.Sum(1 / k**2, (k, 1, sp.oo)).doit(); sp.Sum(2**k, (k, 0, n)).doit()
sp.summation(sp.binomial(h, l) * 2**l, (l, 0, h)); sp.combsimp(sp.binomial(n + 2, k) / sp.binomial(n, k))
sp.product(k, (k, 1, 5)); sp.product(k, (k, 1, n)); sp.product(1 - 1 / k**2, (k, 2, 5))
sp.factorint(360); sp.factorint(2**10 * 10007 * 100003); sp.isprime(97); sp.isprime(10**12 + 39); sp.nextprime(100)
list(sp.primerange(1, 30)); sp.prime(5); sp.primepi(50); sp.prevprime(50); sp.divisors(28); sp.divisor_count(60)
sp.totient(12); sp.divisor_sigma(12); sp.primefactors(60); sp.mobius(6); sp.perfect_power(64); sp.integer_nthroot(64, 3)
sp.gcd(12, 18); sp.lcm(4, 6); sp.mod_inverse(3, 7); sp.igcd(4, 6); sp.jacobi_symbol(3, 7); sp.sqrt_mod(2, 7); sp.gcd(x**2 - 1, x - 1)
sp.ntheory.n_order(3, 7); sp.primitive_root(7); sp.discrete_log(7, 6, 3); sp.ntheory.is_quad_residue(2, 7)
sp.ntheory.modular.crt([3, 5], [2, 3]); sp.ntheory.modular.solve_congruence((1, 3), (2, 5)); sp.ntheory.digits(20, 3)
sp.binomial(10, 3); sp.binomial(n, 2).expand(func=True); sp.factorial(6); sp.fibonacci(10); sp.catalan(5); sp.bell(4)
sp.subfactorial(5); sp.harmonic(5); sp.bernoulli(4); sp.lucas(5); sp.gamma(sp.Rational(3, 2)); sp.zeta(2); sp.erf(1).evalf()
from sympy.functions.combinatorial.numbers import nC, nP, nT, stirling
stirling(5, 2); nC(5, 2); nP(5, 2); nT(5); sp.Permutation([1, 2, 0]).cyclic_form; sp.combinatorics.SymmetricGroup(3).order()
from sympy.utilities.iterables import multiset_permutations, partitions
list(partitions(4)); list(multiset_permutations("aab")); list(sp.subsets([1, 2, 3], 2))
sp.Rational(1, 3) + sp.Rational(1, 6); sp.Rational(2, 3) ** 2; sp.Rational("0.125"); sp.Rational(0.3).limit_denominator(10)
sp.N(sp.pi, 20); sp.pi.evalf(); float(sp.sqrt(2)); (sp.sqrt(3) + sp.E).evalf(25); sp.floor(sp.sqrt(20)); sp.ceiling(sp.log(100, 2))
round(float(sp.pi), 2); sp.floor(sp.Rational(7, 2)); sp.ceiling(2.1); sp.Mod(7, 3); sp.sqrt(50); sp.cbrt(8); sp.root(81, 4)
sp.nsolve(x**2 - 2, x, 1); sp.nsolve(sp.sin(x) - x / 2, x, 2); sp.Poly(x**3 - x - 1, x).nroots(); sp.real_roots(x**3 - 3 * x + 1)
sp.roots(x**3 - 7 * x + 6, x); P = sp.Poly(x**2 + 1, x); P.degree(); P.all_coeffs(); P.eval(2); P.factor_list(); P.count_roots()
sp.div(x**3 - 2, x - 2); sp.rem(x**4, x**2 - 2); sp.quo(x**3 - 1, x - 1); sp.discriminant(x**2 + x - 3, x)
sp.minimal_polynomial(sp.sqrt(2) + 1, x); sp.minimal_polynomial(sp.sqrt(3) + sp.sqrt(5), x); sp.resultant(x**2 - 1, x - 2, x)
sp.groebner([x**2 - y, y - 1], x, y); sp.interpolate([(0, 1), (1, 2)], x); sp.continued_fraction(sp.sqrt(3))
sp.trigsimp(2 * sp.sin(x) * sp.cos(x)); sp.expand_trig(sp.sin(x + y)); sp.radsimp(1 / (1 + sp.sqrt(2))); sp.expand_trig(sp.cos(3 * x))
sp.sin(sp.pi / 8); sp.cos(sp.pi / 10); sp.tan(sp.pi / 12); sp.asin(sp.sqrt(3) / 2); sp.atan2(1, 2); sp.trigsimp(sp.tan(x) * sp.cos(x))
sp.powsimp(x**2 * x**3); sp.logcombine(sp.log(p) + sp.log(2)); sp.expand_log(sp.log(p**2 * q)); sp.powdenest(sp.sqrt(p**4)); sp.sqrt(w**2)
sp.rsolve(f(i + 1) - 2 * f(i), f(i)); sp.rsolve(f(i + 2) - 3 * f(i + 1) + 2 * f(i), f(i), {f(0): 0, f(1): 1})
sp.dsolve(g(x).diff(x) - g(x)); sp.dsolve(g(x).diff(x, 2) + 4 * g(x), g(x)); sp.dsolve(g(x).diff(x) - 2 * x * g(x), ics={g(0): 3})
sp.Abs(x - 1).subs(x, 3); sp.Piecewise((x, x > 0), (0, True)).subs(x, 1); (x * y + x).subs({x: 1, y: 2}); sp.Max(x, 1); sp.Min(2, 3)
sp.diophantine(3 * d + 5 * e - 1); sp.diophantine(d**2 - 3 * e**2 - 1); sp.diophantine(d * e - 2 * d - 3 * e)
sp.Interval(0, 1).intersect(sp.Interval(0, 3)); sp.FiniteSet(1, 2) | sp.FiniteSet(2, 3); sp.Union(sp.Interval(0, 1), sp.Interval(2, 3))
T = sp.Triangle(sp.Point(0, 0), sp.Point(3, 0), sp.Point(1, 2)); T.area; T.circumcenter; T.perimeter; sp.Point(0, 0).distance(sp.Point(3, 4))
sp.Line((0, 0), (1, 2)).intersection(sp.Line((0, 1), (1, 0))); sp.Circle((0, 0), 2).intersection(sp.Line((0, 1), (1, 0)))
sp.re(1 + 2 * sp.I); sp.expand((1 + sp.I) ** 3); sp.conjugate(1 + sp.I); sp.arg(1 + sp.I); sp.Abs(5 + 12 * sp.I); sp.expand((2 + sp.I) ** 5)
sp.log(8, 2); sp.exp(sp.log(x)); sp.calculus.util.minimum(x**2 - 4 * x, x, sp.Interval(0, 3)); sp.calculus.util.maximum(-(x**2) + x, x)
sp.lambdify(x, x**2 + sp.sin(x))(1.0); sp.sympify("x**2 + 1"); sp.parse_expr("2*x"); sp.srepr(x); x**2 == x**2; hash(x + y)
sp.latex(x**2 / 2 + sp.sqrt(y)); str(x**2 / 2 + sp.sqrt(y)); repr(sp.Matrix([[1, x]])); sp.latex(sp.Matrix([[1, x]])); sp.pretty(x**2 / y)
from sympy.stats import Die, E as expectation, P as probability
probability(Die("X", 6) > 2); expectation(Die("X", 6))
from sympy.core.random import seed
seed(0)
"""

_SCIPY = """
import numpy as np
from scipy import constants, integrate, interpolate, linalg, optimize, sparse, spatial, special, stats
from scipy.sparse import csgraph
s = np.array([[2.0, 1.0], [1.0, 3.0]]); F = lambda v: (v[0] - 1) ** 2; G = lambda v: v**2 - 2
optimize.minimize(F, [0.0]); optimize.minimize(F, [0.0], bounds=[(0, 2)]); optimize.minimize(F, [0.0], method="Nelder-Mead")
optimize.minimize(F, [0.0], constraints={"type": "eq", "fun": lambda v: v[0] - 2})
optimize.brentq(G, 0, 3); optimize.fsolve(G, 1.0); optimize.root(G, 1.0); optimize.newton(G, 1.0); optimize.bisect(G, 0, 3)
optimize.root_scalar(G, bracket=[0, 2]); optimize.minimize_scalar(G); optimize.minimize_scalar(G, bounds=(0, 1), method="bounded")
optimize.linprog([1.0, 1.0], A_ub=[[-1.0, 0.0]], b_ub=[-1.0]); optimize.least_squares(lambda v: v - 1, [0.0])
optimize.milp([1.0], integrality=[1], bounds=optimize.Bounds(0.5, 3), constraints=optimize.LinearConstraint([[1]], 0, 2))
optimize.curve_fit(lambda v, a: a * v, [1.0, 2.0, 3.0], [2.0, 4.0, 6.1]); optimize.linear_sum_assignment([[1, 2], [2, 1]])
integrate.quad(lambda v: v**2, 0, 1); integrate.quad(lambda v: np.exp(-v * v), -np.inf, np.inf); integrate.simpson([1, 2, 3])
integrate.solve_ivp(lambda t, v: -v, (0, 1), [1.0]); integrate.odeint(lambda v, t: -v, 1.0, [0, 1]); integrate.trapezoid([1, 2])
integrate.dblquad(lambda a, b: a, 0, 1, 0, 1); integrate.dblquad(lambda a, b: a, 0, 1, 0, lambda a: a)
linalg.solve(s, [1.0, 2.0]); linalg.expm(s); linalg.lu(s); linalg.eig(s); linalg.eigh(s); linalg.null_space(s); linalg.det(s)
linalg.inv(s); linalg.sqrtm(s); linalg.logm(s); linalg.qr(s); linalg.schur(s); linalg.svd(s); linalg.cholesky(s)
special.comb(5, 2, exact=True); special.comb(5, 2); special.gamma(3.5); special.erf(0.5); special.factorial(5)
special.perm(5, 2); special.zeta(2); special.lambertw(1); special.beta(2, 3); special.factorial(5, exact=True)
stats.norm.cdf(0.0); stats.norm.ppf(0.5); stats.binom.pmf(1, 3, 0.5); stats.binom.cdf(1, 3, 0.5); stats.poisson.pmf(1, 2.0)
stats.t.ppf(0.9, 5); stats.chi2.sf(1, 2); stats.linregress([1, 2, 3], [2, 3, 5]); stats.ttest_ind([1, 2, 3], [2, 3, 4])
stats.pearsonr([1, 2, 3], [1, 2, 4]); stats.spearmanr([1, 2, 3], [1, 2, 4]); stats.describe([1, 2, 3]); stats.mode([1, 1])
stats.norm.rvs(size=2, random_state=0); stats.norm.fit([1, 2, 3]); stats.zscore([1, 2]); stats.norm.expect(lambda v: v)
stats.chisquare([9, 11]); stats.ttest_1samp([1, 2, 4], 1.5); stats.norm(0, 1).interval(0.9); stats.hypergeom.pmf(1, 9, 4, 3)
interpolate.interp1d([0, 1], [0, 1])(0.5); interpolate.CubicSpline([0, 1, 2], [0, 1, 4])(0.5)
spatial.ConvexHull([[0, 0], [1, 0], [0, 1]]); spatial.distance.cdist([[0, 0]], [[3, 4]])
csgraph.dijkstra(sparse.csr_matrix([[0, 1], [2, 0]])); csgraph.minimum_spanning_tree(sparse.csr_matrix([[0, 1], [2, 0]]))
"""

_SOURCES = {"numpy": _NUMPY, "mpmath": _MPMATH, "sympy": _SYMPY, "scipy": _SCIPY}
_BROUGHT_ALONG = {"sympy": "mpmath", "scipy": "numpy"}


def warm(modules: Iterable[str]) -> dict[str, str]:
  """Runs small calls of each module that has been preloaded, and of what every snippet touches.

  Args:
    modules: Names of the preloaded modules.

  Returns:
    For each call that failed, what went wrong.
  """
  problems: dict[str, str] = {}
  wanted = {name.split(".")[0] for name in modules}
  wanted |= {_BROUGHT_ALONG[name] for name in wanted if name in _BROUGHT_ALONG}
  with warnings.catch_warnings(), decimal.localcontext():
    warnings.simplefilter("ignore")  # which also keeps a warning from counting as given
    _run(_PYTHON, problems)
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
