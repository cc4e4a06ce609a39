from __future__ import annotations

import dataclasses
import math

import pytest

from agentic_rl.sandbox import ExecResult, InterpreterConfig, Limits, LimitsError


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("wall_s", 0),
    ("wall_s", math.nan),
    ("wall_s", math.inf),
    ("wall_s", "5"),
    ("cpu_s", -1),
    ("cpu_s", True),
    ("memory_mib", 1),
    ("memory_mib", 512.5),
    ("file_mib", -1),
    ("open_files", 3),
    ("processes", -1),
    ("output_bytes", 0),
    ("output_bytes", 1 << 40),
    ("flood_mib", 0),
  ],
)
def test_limits_out_of_range_are_refused_by_name(field: str, value: object):
  with pytest.raises(LimitsError, match=rf"Limits\.{field} must"):
    Limits(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
  ("field", "value"),
  [("slots", -1), ("nice", 20), ("stall_s", 0), ("preload", ("numpy",)), ("min_isolation", "high"), ("queue", -1)],
)
def test_config_out_of_range_is_refused_by_name(field: str, value: object):
  with pytest.raises(LimitsError, match=rf"InterpreterConfig\.{field} must"):
    InterpreterConfig(**{field: value})  # type: ignore[arg-type]


def test_an_unknown_option_is_refused():
  with pytest.raises(TypeError, match="walls_s"):
    Limits(walls_s=3)  # type: ignore[call-arg]


def test_slots_default_to_at_least_four():
  assert InterpreterConfig().resolved_slots() >= 4
  assert InterpreterConfig(slots=3).resolved_slots() == 3


def test_result_is_frozen_and_names_what_was_truncated():
  result = ExecResult("ok", stdout="a", stdout_dropped=3, error_dropped=1)
  assert result.ok and result.truncated == ("stdout", "error")
  with pytest.raises(dataclasses.FrozenInstanceError):
    result.status = "error"  # type: ignore[misc]
