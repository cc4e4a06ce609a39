from __future__ import annotations

import collections

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
  """Says by level how many snippets behaved; the reports carry it, so that it also holds for tests in workers."""
  counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
  lines = []
  for outcome in ("passed", "failed"):
    for report in terminalreporter.stats.get(outcome, []):
      properties = dict(getattr(report, "user_properties", ()))
      if "battery level" in properties:
        count = counts[properties["battery level"]]
        count[0] += outcome == "passed"
        count[1] += 1
      if "battery line" in properties:
        lines.append(properties["battery line"])
  lines += [f"level {level}: {behaved} of {ran} behaved" for level, (behaved, ran) in counts.items()]
  if lines:
    terminalreporter.section("hostile battery")
    for line in sorted(lines):
      terminalreporter.write_line(line)
