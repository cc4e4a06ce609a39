"""Snippets that misuse the numerical libraries."""

from __future__ import annotations

import dataclasses

from snippet import BRIEF_CPU, NORMAL, Snippet

_NUMPY, _SYMPY, _SCIPY = ("numpy",), ("sympy",), ("scipy",)
_SHORT = dataclasses.replace(NORMAL, wall_s=1.0)

NUMERIC = (
  Snippet(
    "factors of a huge number",
    "import sympy\nsympy.factorint((10**61 + 7) * (10**67 + 33))",
    "timeout",
    limits=_SHORT,
    needs=_SYMPY,
  ),
  Snippet(
    "integral of nested roots",
    """
import sympy as s
x = s.symbols('x')
s.integrate(s.sqrt(1 + s.sqrt(1 + s.sqrt(x))) * s.exp(x**2) * s.log(s.sin(x)), x)
""",
    "timeout ok error cpu",
    limits=_SHORT,
    needs=_SYMPY,
  ),
  Snippet(
    "expansion",
    "import sympy as s\nx, y, z, w = s.symbols('x y z w')\ns.expand((x + y + z + w)**200)",
    "timeout cpu memory",
    limits=_SHORT,
    needs=_SYMPY,
  ),
  Snippet("digits of pi", "import sympy\nsympy.pi.evalf(10**8)", "timeout cpu memory", limits=_SHORT, needs=_SYMPY),
  Snippet(
    "factorial by sympy", "import sympy\nsympy.factorial(10**8)", "timeout cpu memory", limits=_SHORT, needs=_SYMPY
  ),
  Snippet("next prime", "import sympy\nsympy.nextprime(10**6000)", "timeout cpu", limits=_SHORT, needs=_SYMPY),
  Snippet(
    "determinant of symbols",
    "import sympy as s\ns.Matrix(9, 9, lambda i, j: s.Symbol(f'a{i}{j}')).det()",
    "timeout cpu memory",
    limits=_SHORT,
    needs=_SYMPY,
  ),
  Snippet(
    "text that sympy evaluates",
    "import sympy\nsympy.sympify(\"__import__('os').system('echo > @TREE@/made')\")",
    "ok error",
    level="seccomp",
    needs=_SYMPY,
  ),
  Snippet(
    "sympy without limits of recursion",
    "import sympy, sys\nsys.setrecursionlimit(10**8)\nx = sympy.Symbol('x')\nfor _ in range(10**5): x = sympy.sin(x)",
    "timeout crash error memory cpu",
    limits=_SHORT,
    needs=_SYMPY,
  ),
  Snippet("matrix of 300 GB", "import numpy as np\nnp.ones((200_000, 200_000))", "memory", needs=_NUMPY),
  Snippet("zeros that cost nothing yet", "import numpy as np\nnp.zeros(10**11)", "memory", needs=_NUMPY),
  Snippet("range of a trillion", "import numpy as np\nnp.arange(10**12)", "memory", needs=_NUMPY),
  Snippet("outer product", "import numpy as np\nx = np.ones(10**5)\nnp.outer(x, x)", "memory", needs=_NUMPY),
  Snippet(
    "broadcast that becomes real",
    "import numpy as np\nnp.broadcast_to(1.0, (10**6, 10**6)).copy()",
    "memory",
    needs=_NUMPY,
  ),
  Snippet(
    "array beyond its memory",
    "import numpy as np\nnp.lib.stride_tricks.as_strided(np.zeros(1), (1 << 40,), (8,))[1 << 36]",
    "crash",
    needs=_NUMPY,
  ),
  Snippet(
    "sorting without end",
    "import numpy as np\nx = np.random.rand(10**6)\nwhile True: np.sort(x)",
    "cpu",
    limits=BRIEF_CPU,
    needs=_NUMPY,
  ),
  Snippet(
    "products on all cores",
    "import numpy as np\nx = np.random.rand(500, 500)\nwhile True: x @ x",
    "cpu",
    limits=BRIEF_CPU,
    needs=_NUMPY,
  ),
  Snippet(
    "long array as value",
    "import numpy as np\nnp.set_printoptions(threshold=10**9)\nnp.zeros(20_000)",
    "ok",
    check=r"^array\(\[0",
    needs=_NUMPY,
  ),
  Snippet(
    "array of a hostile object",
    """
import numpy as np
class A:
  __array__ = property(lambda s: 1 / 0)
  def __len__(self): return 1 << 60
  def __getitem__(self, i): return self
np.array(A())
""",
    "error memory ok crash cpu",
    needs=_NUMPY,
  ),
  Snippet(
    "numpy's pickles",
    "import numpy as np, io\nnp.load(io.BytesIO(b'\\x80\\x04cposix\\nsystem\\n.'), allow_pickle=True)",
    "error ok",
    needs=_NUMPY,
  ),
  Snippet(
    "numpy's files", "import numpy as np\nnp.save('@TREE@/x.npy', np.zeros(1))", "error", level="landlock", needs=_NUMPY
  ),
  Snippet(
    "numpy's maps", "import numpy as np\nnp.memmap('x', mode='w+', shape=(1 << 40,))", "error memory", needs=_NUMPY
  ),
  Snippet(
    "numpy without functions",
    "import numpy as np\nfor n in dir(np): setattr(np, n, None)\n5",
    "ok",
    check="5",
    needs=_NUMPY,
  ),
  Snippet(
    "numpy's error handler",
    "import numpy as np\nnp.seterrcall(lambda *a: 1 / 0)\nnp.seterr(all='call')\nnp.float64(1) / 0",
    "error",
    needs=_NUMPY,
  ),
  Snippet(
    "integration that never converges",
    "import scipy.integrate as i\nwhile True: i.quad(lambda x: 1 / x if x else 0, -1, 1, limit=10**4)",
    "timeout cpu",
    limits=_SHORT,
    needs=_SCIPY,
  ),
  Snippet(
    "solver of a hostile function",
    "import scipy.optimize as o\ndef f(x): raise SystemExit(3)\no.minimize(f, [1.0])",
    "exit",
    needs=_SCIPY,
  ),
  Snippet(
    "random numbers repeat",
    "import numpy as np, random\n(random.random(), np.random.rand())",
    check=r"\(0.844\d+, .*0.5488",
    needs=_NUMPY,
  ),
)
