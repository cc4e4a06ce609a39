"""How a parent's heap is laid out before it forks; each in a process of its own, since it cannot be undone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agentic_rl.sandbox import heap

HOLES = """
import sys
from agentic_rl.sandbox import heap
kept = [bytes(31 + i % 50) for i in range(200_000)]
del kept[::200]
def pages_of_new_objects(size):
  new = [bytes(size) for _ in range(200)]
  return len({id(item) >> 12 for item in new})
before = pages_of_new_objects(31)
heap.settle()
print(before, pages_of_new_objects(31), sum(map(sys.getsizeof, heap._FILLERS)) >> 20)
"""

IMMORTAL = """
import gc, sys
from agentic_rl.sandbox import heap
class Thing: pass
def function(x): return [x, "name", 12345.5]
thing, cycle = Thing(), []
cycle.append(cycle)
count = heap.settle()
before = sys.getrefcount(thing), sys.getrefcount(function.__code__), sys.getrefcount(function.__code__.co_consts)
more = [thing] * 1000
after = sys.getrefcount(thing), sys.getrefcount(function.__code__), sys.getrefcount(function.__code__.co_consts)
del more, thing, cycle
assert function(1) == [1, "name", 12345.5]
assert (lambda text: text + "d")("abc") == "abcd" and eval("[i for i in range(3)]") == [0, 1, 2]
new = Thing()
assert sys.getrefcount(new) == 2
gc.collect()
print(count, before == after)
"""


def printed(source: str) -> list[str]:
  done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
  assert done.returncode == 0, done.stderr
  return done.stdout.split()


def test_what_comes_after_lies_together():
  before, after, filled_mib = map(int, printed(HOLES))
  assert before >= 2 * after and after <= 200 * 64 // 4096 + 2
  assert filled_mib < 16


def test_references_are_counted_no_more_where_python_can_do_that():
  count, same = printed(IMMORTAL)
  if heap._can_be_immortal():
    assert int(count) > 10_000 and same == "True"
  else:
    assert count == "0" and same == "False"


@pytest.mark.parametrize(("addresses", "longest"), [([0], 1), ([0, 8, 16], 3), ([0, 8, 32, 40, 48, 9], 3), ([9, 1], 1)])
def test_longest_run(addresses: list[int], longest: int):
  assert heap._longest_run(addresses, 8) == longest
