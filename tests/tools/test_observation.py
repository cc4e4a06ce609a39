from __future__ import annotations

import asyncio

import pytest

from agentic_rl.sandbox import ExecResult, Interpreter, InterpreterConfig
from agentic_rl.tools import InterpreterTool, render_observation


def result(status="ok", stdout="", value="", error="", stdout_dropped=0):
  return ExecResult(
    status, stdout, value=value, error=error, stdout_dropped=stdout_dropped, wall_s=0.5, cpu_s=0.25, queue_s=1.0
  )


TRACEBACK = (
  'Traceback (most recent call last):\n  File "<code>", line 1, in <module>\nZeroDivisionError: division by zero\n'
)


@pytest.mark.parametrize(
  ("got", "want"),
  [
    (result(stdout="4\n"), "4"),
    (result(stdout="4\n", value="5"), "4"),  # what was printed goes before the value
    (result(value="5"), "5"),
    (result(), ""),
    (result(stdout="\n \n\n"), "\n "),  # only line ends at the end go
    (result("error", error=TRACEBACK), "ZeroDivisionError: division by zero"),
    (result("error", stdout="1\n", error=TRACEBACK), "1\nZeroDivisionError: division by zero"),
    (result("timeout", stdout="1\n"), "1\nTimeoutError: the code ran longer than its time limit"),
    (result("cpu"), "TimeoutError: the code used more CPU time than its limit"),
    (result("memory"), "MemoryError: the code used more memory than its limit"),
    (result("output", stdout="xx"), "xx\nThe output was cut off at its limit"),
    (result(stdout="xx", stdout_dropped=9), "xx\nThe output was cut off at its limit"),
    (result("exit", stdout="1\n"), "1"),
    (result("crash"), "The Python process crashed"),
    (result("refused"), "The code was not accepted"),
  ],
)
def test_what_the_policy_sees(got, want):
  assert render_observation(got) == want


def test_more_lines_of_an_error():
  assert render_observation(result("error", error=TRACEBACK), error_lines=2).splitlines() == [
    '  File "<code>", line 1, in <module>',
    "ZeroDivisionError: division by zero",
  ]


def test_adapter_passes_limits_and_times():
  class Interpreter:
    async def run(self, code, limits=None, *, owner):
      assert (code, limits, owner) == ("1+1", "limits", "a/0")
      return result(value="2")

  outcome = asyncio.run(InterpreterTool(Interpreter(), "limits").run("1+1", session="a/0"))
  assert (outcome.text, outcome.status, outcome.wall_s, outcome.cpu_s) == ("2", "ok", 1.5, 0.25)
  with pytest.raises(ValueError, match="error_lines"):
    InterpreterTool(Interpreter(), error_lines=0)


def test_calls_of_an_episode_share_variables_where_that_is_wanted():
  async def body() -> list[str]:
    config = InterpreterConfig(min_isolation="process", slots=2)
    async with await Interpreter.start(config) as interpreter:
      tool = InterpreterTool(interpreter, stateful=True)
      texts = [(await tool.run(code, session=name)).text for code, name in (("x = 5", "a"), ("x = 7", "b"), ("x", "a"))]
      assert interpreter.stats()["sessions"] == 2
      await tool.end("a")
      await tool.end("a")
      texts.append((await tool.run("x", session="a")).text)
      for name in ("a", "b", "never there"):
        await tool.end(name)
      assert interpreter.stats()["sessions"] == 0
      fresh = InterpreterTool(interpreter)
      await fresh.run("x = 1", session="a")
      texts.append((await fresh.run("x", session="a")).text)
      return texts

  assert asyncio.run(body()) == ["", "", "5", *["NameError: name 'x' is not defined"] * 2]
