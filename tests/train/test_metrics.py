"""Metrics: one documented name each, nothing lost by a kill, a resume or a full disk."""

from __future__ import annotations

import io
import json
import math
import pathlib
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from agentic_rl.errors import UserError
from agentic_rl.train import metric_guide
from agentic_rl.train.metrics import FILE_NAME, MetricWriter, read_metrics
from agentic_rl.train.progress import Progress

ROOT = pathlib.Path(__file__).resolve().parents[2]


def steps_of(workdir: pathlib.Path) -> list[int]:
  return [json.loads(line)["step"] for line in (workdir / FILE_NAME).read_text().splitlines()]


def events_of(workdir: pathlib.Path) -> list[Event]:
  """Reads event files by their framing: u64 length, u32 checksum, record, u32 checksum."""
  events = []
  for path in sorted((workdir / "tensorboard").iterdir(), key=lambda p: p.stat().st_mtime_ns):
    data = path.read_bytes()
    while data:
      length = int.from_bytes(data[:8], "little")
      events.append(Event.FromString(data[12 : 12 + length]))
      data = data[16 + length :]
  return events


def write(workdir: pathlib.Path, steps: range, resume_step: int | None = None) -> None:
  with MetricWriter(workdir, resume_step) as writer:
    for step in steps:
      writer.write(step, {"reward/mean": step / 10})


def test_written_values_are_read_back_and_each_line_is_on_disk_at_once(tmp_path: pathlib.Path) -> None:
  writer = MetricWriter(tmp_path)
  writer.write(0, {"reward/mean": 0.25, "eval/hard/accuracy": 0.5})
  writer.write(1, {"reward/mean": np.float32(0.5), "rollout/code_in_correct": math.nan})
  writer.write(2, {"reward/mean": math.inf})
  assert steps_of(tmp_path) == [0, 1, 2]  # Before close: every line is flushed.
  columns = read_metrics(tmp_path)
  np.testing.assert_array_equal(columns["step"], [0, 1, 2])
  np.testing.assert_array_equal(columns["reward/mean"], [0.25, 0.5, math.inf])
  np.testing.assert_array_equal(columns["eval/hard/accuracy"], [0.5, math.nan, math.nan])
  np.testing.assert_array_equal(columns["rollout/code_in_correct"], [math.nan] * 3)
  writer.close()


def test_lines_are_strict_json(tmp_path: pathlib.Path) -> None:
  with MetricWriter(tmp_path) as writer:
    writer.write(0, {"reward/mean": math.nan, "loss/policy": -math.inf})

  def refuse(constant: str) -> None:
    raise AssertionError(constant)

  record = json.loads((tmp_path / FILE_NAME).read_text(), parse_constant=refuse)
  assert record["reward/mean"] is None and record["loss/policy"] == "-inf" and record["time"] > 1e9


def test_two_lines_of_a_step_are_read_as_one_and_steps_do_not_go_back(tmp_path: pathlib.Path) -> None:
  with MetricWriter(tmp_path) as writer:
    writer.write(3, {"reward/mean": 0.1})
    writer.write(3, {"eval/easy/accuracy": 0.7})
    with pytest.raises(ValueError, match="step 2 come after those of step 3"):
      writer.write(2, {"reward/mean": 0.1})
  columns = read_metrics(tmp_path)
  assert columns["step"].tolist() == [3] and columns["eval/easy/accuracy"].tolist() == [0.7]


def test_unknown_name_is_refused_with_the_nearest(tmp_path: pathlib.Path) -> None:
  with MetricWriter(tmp_path) as writer:
    with pytest.raises(ValueError, match="did you mean 'rollout/code_proportion'"):
      writer.write(0, {"rollout/code_propotion": 0.1})
    with pytest.raises(ValueError, match="did you mean 'eval/hard/accuracy'"):
      writer.write(0, {"eval/hard/acuracy": 0.1})
    with pytest.raises(ValueError, match="must be a number, got ndarray of shape"):
      writer.write(0, {"reward/mean": np.zeros(3)})
  assert steps_of(tmp_path) == []


def test_resume_leaves_what_an_uninterrupted_run_would_have(tmp_path: pathlib.Path) -> None:
  write(tmp_path, range(6))
  with open(tmp_path / FILE_NAME, "a") as file:
    file.write('{"step": 6, "time": 1.0, "rewa')  # Killed while writing.
  write(tmp_path, range(4, 8), resume_step=3)
  assert steps_of(tmp_path) == list(range(8))
  np.testing.assert_allclose(read_metrics(tmp_path)["reward/mean"], np.arange(8) / 10)


def test_resume_after_a_half_written_line_of_a_kept_step(tmp_path: pathlib.Path) -> None:
  write(tmp_path, range(2))
  with open(tmp_path / FILE_NAME, "a") as file:
    file.write('{"step": 2, "time": 1.0}')  # Whole JSON, but its newline never came: it is written again.
  write(tmp_path, range(2, 4), resume_step=2)
  assert steps_of(tmp_path) == [0, 1, 2, 3]


def test_half_written_last_line_is_left_out_and_a_broken_middle_is_an_error(tmp_path: pathlib.Path) -> None:
  path = tmp_path / FILE_NAME
  path.write_text('{"step": 0, "reward/mean": 1}\n{"step": 1, "rew')
  assert read_metrics(tmp_path)["step"].tolist() == [0]
  path.write_text('{"step": 0, "rew\n{"step": 1, "reward/mean": 1}\n')
  with pytest.raises(UserError, match="line 1, is not a metrics record"):
    read_metrics(tmp_path)
  with pytest.raises(UserError, match="does not exist"):
    read_metrics(tmp_path / "elsewhere")


def test_new_run_keeps_the_older_record_aside(tmp_path: pathlib.Path) -> None:
  write(tmp_path, range(3))
  write(tmp_path, range(1))
  assert steps_of(tmp_path) == [0]
  assert len((tmp_path / (FILE_NAME + ".previous")).read_text().splitlines()) == 3


def test_event_files_hold_the_same_scalars_and_resume_purges(tmp_path: pathlib.Path) -> None:
  write(tmp_path, range(3))
  write(tmp_path, range(2, 4), resume_step=1)  # Within the same second: the older file must not be overwritten.
  events = events_of(tmp_path)
  scalars = [(e.step, e.summary.value[0].tag, e.summary.value[0].simple_value) for e in events if e.summary.value]
  assert [s[0] for s in scalars] == [0, 1, 2, 2, 3]
  assert {s[1] for s in scalars} == {"reward/mean"}
  assert scalars[2][2] == pytest.approx(0.2)
  starts = [e.step for e in events if e.session_log.status == 1]
  assert starts == [2]


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
  """Files cannot grow beyond `limit` bytes: the write that crosses it is cut short, the next one refused."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_one_clear_message_and_loses_nothing(tmp_path: pathlib.Path) -> None:
  write(tmp_path, range(3))
  before = (tmp_path / FILE_NAME).read_bytes()
  writer = MetricWriter(tmp_path, resume_step=2)
  with full_disk(len(before) + 10), pytest.raises(UserError, match=r"cannot write metrics to .*make room"):
    writer.write(3, {"reward/mean": 0.3})
  assert (tmp_path / FILE_NAME).read_bytes() == before  # The partial line is gone.
  writer.write(3, {"reward/mean": 0.3})  # Room again.
  assert steps_of(tmp_path) == [0, 1, 2, 3]
  writer.close()


def test_full_disk_while_resuming_keeps_the_old_file(tmp_path: pathlib.Path) -> None:
  write(tmp_path, range(5))
  before = (tmp_path / FILE_NAME).read_bytes()
  with full_disk(20), pytest.raises(UserError, match="make room"):
    MetricWriter(tmp_path, resume_step=3)
  assert (tmp_path / FILE_NAME).read_bytes() == before


def test_docs_page_is_generated_from_the_guide() -> None:
  page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
  assert page == metric_guide.to_markdown(), "run: python -m agentic_rl.train.metric_guide docs/metrics.md"


def test_every_row_of_the_guide_is_complete_and_single() -> None:
  patterns = [metric.pattern for metric in metric_guide.METRICS]
  assert len(set(patterns)) == len(patterns)
  assert all(all(field.strip() for field in metric) for metric in metric_guide.METRICS)
  assert metric_guide.find_metric("eval/aime_24/pass_at_k") is not None
  assert metric_guide.find_metric("eval/a/b/accuracy") is None


def test_the_guide_has_the_names_that_the_package_writes_and_no_others() -> None:
  source = "".join(
    path.read_text(encoding="utf-8")
    for path in (ROOT / "agentic_rl").rglob("*.py")
    if path.parent.name in ("train", "rollout", "algorithms", "evaluation") and path.name != "metric_guide.py"
  )
  heads = {metric.pattern.split("/")[0] for metric in metric_guide.METRICS}
  written = {n for n in re.findall(r'"([a-z]+/[a-z_]+)"', source) if n.split("/")[0] in heads}
  metric_guide.check_names(written)
  # Names of times and of evaluations are put together while running.
  listed = {m.pattern for m in metric_guide.METRICS if not m.pattern.startswith(("time/", "eval/"))}
  assert listed <= written, f"never written: {sorted(listed - written)}"


class Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


def test_progress_without_a_terminal_is_a_plain_line_now_and_then() -> None:
  stream, now = io.StringIO(), [0.0]
  with Progress(100, initial=20, stream=stream, interval_s=5, clock=lambda: now[0]) as progress:
    for done in range(21, 101):
      now[0] += 1.0
      progress.update(
        done, {"reward/mean": 0.5, "rollout/code_proportion": 0.25, "throughput/rollout_tokens_per_s": 1234.0}
      )
  lines = stream.getvalue().splitlines()
  assert lines[0] == "train 21/100  reward 0.50, code 25%, tok/s 1,234  0:01 gone, 1:19 left"
  assert len(lines) == 1 + 15 + 1  # First, every fifth second, the last.
  assert lines[-1].startswith("train 100/100")
  assert "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_progress_on_a_terminal_is_a_bar_with_reward_code_and_speed() -> None:
  stream = Terminal()
  with Progress(4, stream=stream) as progress:
    for done in range(1, 5):
      progress.update(done, {"reward/mean": done / 10, "rollout/code_proportion": 0.5})
  assert "4/4" in stream.getvalue() and "reward 0.40, code 50%" in stream.getvalue()
