"""Snippets that try to harm their host, in this process at the strongest level and elsewhere at the others.

After each, the next snippet is answered, no process and no file is left, and nothing around was touched. All are
bounded, so that a failure of the interpreter does not take the machine.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator

import battery
import pytest
from snippet import LEVELS, Snippet, Turns

pytestmark = pytest.mark.hostile

Record = Callable[[str, object], None]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become someone else")


@pytest.fixture(scope="module")
def running() -> Iterator[battery.Battery]:
  running = battery.Battery("namespace")
  yield running
  if not running.finished:
    assert running.finish() == []


ALL = battery.applicable(LEVELS[-1])


@pytest.mark.parametrize(
  ("snippet", "checkpoint"),
  [(snippet, checkpoint) for _, snippet, checkpoint in ALL],
  ids=[f"{theme}: {snippet.name}" + (f" [{checkpoint}]" if checkpoint else "") for theme, snippet, checkpoint in ALL],
)
def test_hostile(running: battery.Battery, snippet: Snippet | Turns, checkpoint: str, record_property: Record):
  if not battery.applies(snippet, running.level):
    pytest.skip(f"not run at level {running.level}")
  record_property("battery level", f"{running.level} (native)")
  assert running.try_snippet(snippet, checkpoint) == []


def test_nothing_has_grown_and_nothing_is_left(running: battery.Battery):
  assert running.repeat_the_nastiest() + running.finish() == []


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS[:-1])
def test_weaker_levels(level: str, record_property: Record):
  report = battery.run_elsewhere("native", level)
  record_property("battery line", report.line())
  assert report.faults == {}


@needs_root
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no numbers of system calls")
@pytest.mark.parametrize("environment", ["user", "container", "container-user"])
def test_other_environments(environment: str, record_property: Record):
  report = battery.run_elsewhere(environment, "namespace")
  record_property("battery line", report.line())
  assert report.faults == {}
  assert report.level == "landlock" or environment == "user"


def test_there_are_enough_and_names_are_unique():
  names = [snippet.name for _, snippet in battery.all_snippets()]
  assert len(set(names)) == len(names) > 150
