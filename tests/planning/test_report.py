from __future__ import annotations

import dataclasses
import json

from agentic_rl.planning import report
from agentic_rl.planning.plan import Plan
from agentic_rl.planning.topologies import parse_topology


def test_verdicts(plan: Plan, too_large: Plan):
  assert report.verdict(plan) == "fits: needs 7.00 GiB of 15.75 GiB"
  assert report.verdict(too_large) == "does not fit: needs 20.00 GiB of 15.75 GiB"
  unsaid = dataclasses.replace(too_large, needed_bytes=None)
  assert report.verdict(unsaid) == "does not fit: the compiler found no way within the 15.75 GiB of a chip"


def test_columns_are_aligned():
  assert report.columns([("Memory", "GiB"), ("parameters", "10.25"), ("a", "1.00")]) == (
    "  Memory        GiB\n  parameters  10.25\n  a            1.00"
  )


def test_the_text_names_every_assumption(plan: Plan):
  text = report.text(plan)
  for part in (
    "mesh fsdp=8",
    "2 micro-batches of 8 rows x 4096 tokens",
    "parameters (float32)                1.00    6.3%",
    "all-gather                 8     56     4.000    3.500",
    "trips read from the program: 28",
    "60% of 197 TFLOP/s bf16",
    "80% of 819 GB/s",
    "50% of 200 GB/s ICI",
    "step: the longest, compute",
    "8,000 tokens/s a chip at 45% model FLOPs utilisation",
  ):
    assert part in text, part
  assert text.splitlines()[-1] == report.verdict(plan)
  assert max(map(len, text.splitlines())) <= 160


def test_the_text_of_what_does_not_fit_ends_in_advice(too_large: Plan):
  text = report.text(too_large)
  assert text.endswith("does not fit: needs 20.00 GiB of 15.75 GiB\ntry:\n  - fewer rows\n  - more chips")
  assert "Roofline" not in text and "Collectives" not in text


def test_gpus_show_what_the_runtime_reserves(plan: Plan):
  text = report.text(dataclasses.replace(plan, topology=parse_topology("h100-16")))
  assert "reserved: arguments, temporaries, program" in text
  assert "450 GB/s NVLink, 50 GB/s between hosts" in text
  assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in text


def test_the_largest_micro_batch_is_told(plan: Plan):
  assert "that fits: 24 rows" in report.text(dataclasses.replace(plan, largest_rows=24))
  assert "not even one row a chip" in report.text(dataclasses.replace(plan, largest_rows=0))


def test_markdown_rows_have_one_cell_a_column(plan: Plan, too_large: Plan):
  for some in (plan, too_large):
    lines = report.markdown(some).splitlines()
    assert [line.count("|") for line in lines] == [len(report.MARKDOWN_COLUMNS) + 1] * 3
  assert report.markdown(plan).splitlines()[2] == (
    "| small | v5e-8 | fsdp=8 | 8 x 4096 | 3.00 | 4.00 | 7.00 | 15.75 | yes | 0.9 | compute | 8,000 |"
  )


def test_json_has_the_same_keys_whether_it_fits_or_not(plan: Plan, too_large: Plan):
  fitting, not_fitting = json.loads(report.json_line(plan)), json.loads(report.json_line(too_large))
  assert fitting.keys() == not_fitting.keys()
  assert "\n" not in report.json_line(plan)
  assert fitting["peak_bytes"] == fitting["needed_bytes"] == 7 * 2**30
  assert fitting["model_flops"] == 6e14  # of both micro-batches
  assert fitting["collectives"][1] == {
    "kind": "all-reduce",
    "group": 4,
    "count": 2,
    "bytes": 1e9,
    "sent_bytes": 1.5e9,
  }
  assert not_fitting["fits"] is False and not_fitting["peak_bytes"] is None
  assert not_fitting["advice"] == ["fewer rows", "more chips"]
