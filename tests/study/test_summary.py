"""The summary of a study: the keys that are promised, values worked by hand, the table, the figure."""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from matplotlib.image import imread

from agentic_rl.errors import UserError
from agentic_rl.study import plots, summary


def run(reward: list[float], code: list[float], hard: list[float]) -> dict[str, np.ndarray]:
  return {
    "step": np.arange(len(reward), dtype=np.float64),
    "time": np.arange(len(reward), dtype=np.float64),
    "reward/mean": np.array(reward),
    "rollout/code_proportion": np.array(code),
    "eval/hard/accuracy": np.array(hard),
  }


def test_values_by_hand() -> None:
  nan = math.nan
  runs = [
    summary.SeedRuns(
      3,
      run([0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4], [0.1, nan, 0.5, 0.6]),
      run([0, 0, 0, 0], [0, 0, 0, 0], [0.1, nan, 0.2, 0.3]),
    ),
    summary.SeedRuns(7, run([3, 2, 1, 0], [0.2, 0.4, 0.6, 0.8], [0.3, nan, 0.4, 0.8]), {}),
  ]
  result = summary.summarise(runs, 12.34, {"base": 1.26, "tool": 3.0, "control": math.nan})
  assert result["seconds_by_arm"] == {"base": 1.3, "tool": 3.0, "control": None}
  assert result["seeds"] == [3, 7] and result["seconds"] == 12.3 and result["steps"] == 3
  code = result["code_proportion"]
  assert code["per_seed"]["3"]["first"] == pytest.approx(0.2) and code["per_seed"]["7"]["first"] == pytest.approx(0.4)
  assert code["first"] == pytest.approx(0.3)
  hard = result["accuracy_hard"]
  assert hard["first"] == pytest.approx(0.2) and hard["last"] == pytest.approx((0.4 + 0.5) / 2)
  # The control of one seed is missing: the mean is over those that are there.
  assert hard["control_first"] == pytest.approx(0.1) and hard["control_last"] == pytest.approx(0.2)
  assert hard["per_seed"]["7"]["control_last"] is None
  assert result["spearman"]["per_seed"] == {"3": {"rho": 1.0, "p": 0.0}, "7": {"rho": -1.0, "p": 0.0}}
  assert result["pearson"]["per_seed"]["7"]["r"] == pytest.approx(-1.0)
  assert result["spearman"]["pairs"] == 8 and -1 < result["spearman"]["rho"] < 1
  assert result["entropy"]["first"] is None  # Never written: no value, and valid JSON.


def test_peak_shows_a_seed_that_falls_back() -> None:
  runs = [summary.SeedRuns(0, run([0] * 7, [0] * 7, [0.1, 0.5, 0.9, 0.9, 0.9, 0.3, 0.3]), {})]
  hard = summary.summarise(runs, 0, {})["accuracy_hard"]
  assert hard["peak"] == pytest.approx(0.9) and hard["last"] == pytest.approx(0.5)


def test_a_study_on_disk_gives_the_promised_summary_table_and_figure(
  study: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
  assert summary.main([str(study)]) == 0
  written = json.loads((study / "summary.json").read_text())
  assert written["seeds"] == [0, 1, 2] and written["seconds"] == pytest.approx(6 * 61 * 2.0)
  assert written["seconds_by_arm"] == {"base": None, "tool": 61 * 2.0, "control": 61 * 2.0}
  for name in ("code_proportion", "response_length", "accuracy_easy"):
    assert {"first", "last"} <= set(written[name])
  assert {"first", "last", "control_last"} <= set(written["accuracy_hard"])
  assert written["code_proportion"]["first"] < 0.25 and written["code_proportion"]["last"] > 0.8
  assert written["accuracy_hard"]["last"] > 0.75 > written["accuracy_hard"]["control_last"]
  assert written["spearman"]["rho"] > 0.8 and written["spearman"]["p"] < 1e-6
  assert set(written["pearson"]) >= {"r", "p", "per_seed"}
  table = capsys.readouterr().out
  assert [line.split()[0] for line in table.splitlines()[2:6]] == ["0", "1", "2", "all"]
  assert str(study / "study.png") in table
  image = imread(study / "study.png")
  assert image.shape[0] > 900 and image.shape[1] > 1600
  assert len(np.unique(image[..., :3].reshape(-1, 3), axis=0)) > 100  # Drawn on, not blank.


def timed(directory: pathlib.Path, *rows: dict[str, float]) -> None:
  directory.mkdir(parents=True)
  (directory / "metrics.jsonl").write_text("".join(json.dumps({"step": i, **r}) + "\n" for i, r in enumerate(rows)))


def test_computing_time_leaves_out_pauses_and_other_seeds(tmp_path: pathlib.Path) -> None:
  # Killed after step 1 and begun again an hour later: the clock goes on, the time spent does not.
  timed(
    tmp_path / "seed_0" / "tool",
    {"time": 1000.0, "time/iteration_s": 5.0},
    {"time": 1003.0, "time/iteration_s": 3.0},
    {"time": 4600.0, "time/iteration_s": 4.0},
    {"time": 4601.0},  # A line without the metric.
  )
  timed(tmp_path / "seed_0" / "base", {"time": 900.0, "time/iteration_s": 20.0})
  timed(tmp_path / "seed_1" / "base", {"time": 900.0, "time/iteration_s": 30.0})
  timed(tmp_path / "seed_1" / "tool", {"time": 900.0, "time/iteration_s": 14.0})
  timed(tmp_path / "seed_1" / "control", {"time": 900.0, "time/iteration_s": 7.0})
  timed(tmp_path / "seed_2" / "tool", {"time": 900.0, "time/iteration_s": 1e6})
  timed(tmp_path / "seed_1" / "other", {"time": 900.0, "time/iteration_s": 1e6})

  found = summary.run_directories(tmp_path, [0, 1])
  parts = [("seed_0", "base"), ("seed_0", "tool"), ("seed_1", "base"), ("seed_1", "tool"), ("seed_1", "control")]
  assert found == [tmp_path / seed / part for seed, part in parts]  # What is missing is left out.
  assert summary.computing_seconds(found) == 20 + 12 + 30 + 14 + 7
  assert summary.computing_seconds([tmp_path / "seed_0" / "tool"]) == 12
  assert summary.arm_seconds(found) == {"base": 25, "tool": 13, "control": 7}  # Of the seeds that have one.
  assert math.isnan(summary.arm_seconds(found[:2])["control"])


def test_a_run_that_never_wrote_times_counts_nothing(tmp_path: pathlib.Path) -> None:
  timed(tmp_path / "seed_0" / "tool", {"time": 1.0}, {"time": 9.0})
  assert summary.computing_seconds([tmp_path / "seed_0" / "tool"]) == 0


def test_the_control_is_drawn_in_the_entropy_panel(study: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  drawn = []
  curves = plots._curves

  def spy(axes, runs, name, color, label, **options) -> None:
    before = len(axes.get_lines())
    curves(axes, runs, name, color, label, **options)
    drawn.extend((name, label, line) for line in axes.get_lines()[before:] if line.get_label() == label)

  monkeypatch.setattr(plots, "_curves", spy)
  runs = summary.load_study(study)
  plots.plot_study(runs, study / "study.png")
  entropy = {label: line for name, label, line in drawn if name == "policy/entropy"}
  assert set(entropy) == {"interpreter", "control"}
  steps, values = entropy["control"].get_data()
  assert list(steps) == list(range(61))
  first, last = (np.mean([r.control["policy/entropy"][i] for r in runs]) for i in (0, -1))
  assert values[0] == pytest.approx(first) and values[-1] == pytest.approx(last)


def test_figure_of_one_seed_without_control_or_evaluation(tmp_path: pathlib.Path) -> None:
  metrics = {"step": np.arange(4.0), "reward/mean": np.zeros(4), "rollout/code_proportion": np.zeros(4)}
  path = plots.plot_study([summary.SeedRuns(0, metrics, {})], tmp_path / "deep" / "study.png")
  assert path.stat().st_size > 10_000


def test_an_unfinished_study_is_read_as_far_as_it_is(study: pathlib.Path) -> None:
  (study / "seed_2" / "control" / "metrics.jsonl").unlink()
  (study / "seed_1" / "tool" / "metrics.jsonl").unlink()
  runs = summary.load_study(study)
  assert [r.seed for r in runs] == [0, 2] and not runs[1].control


def test_no_runs_is_one_clear_message(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  with pytest.raises(UserError, match="run the study first"):
    summary.load_study(tmp_path)
  assert summary.main([str(tmp_path)]) == 2
  assert capsys.readouterr().err.startswith("error: no runs under")


def test_sweep_figure_with_a_missing_measure(tmp_path: pathlib.Path, run_writer: Callable[..., None]) -> None:
  metrics = run([0, 1, 2], [0, 1, 1], [0.1, 0.2, 0.3])
  path = plots.plot_sweep("budget", {0: [metrics], 2: [metrics, metrics]}, tmp_path / "sweep.png")
  assert path.stat().st_size > 10_000
