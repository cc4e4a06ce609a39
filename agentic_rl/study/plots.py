"""Figures of a study and of a sweep: thin lines are seeds, bold ones their mean."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from agentic_rl.study import scaling
from agentic_rl.study.summary import CODE, REWARD, Metrics, SeedRuns, column

# Okabe and Ito: told apart with every common form of colour blindness, and in grey by their lightness.
BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9"
GREY = "#6E6E6E"
_Color = str | tuple[float, float, float, float]

_STYLE: dict[str, Any] = {
  "font.family": "DejaVu Sans",
  "font.size": 8.5,
  "axes.titlesize": 9.5,
  "axes.titleweight": "bold",
  "axes.titlelocation": "left",
  "axes.labelsize": 8.5,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.linewidth": 0.7,
  "axes.edgecolor": "#444444",
  "axes.grid": True,
  "grid.color": "#E4E4E4",
  "grid.linewidth": 0.6,
  "xtick.color": "#444444",
  "ytick.color": "#444444",
  "xtick.major.width": 0.7,
  "ytick.major.width": 0.7,
  "legend.frameon": True,
  "legend.framealpha": 0.85,
  "legend.edgecolor": "none",
  "legend.fancybox": False,
  "legend.fontsize": 8,
  "legend.handlelength": 1.6,
  "legend.borderaxespad": 0.2,
  "figure.constrained_layout.use": True,
  "figure.constrained_layout.w_pad": 0.08,
  "figure.constrained_layout.h_pad": 0.08,
}


@contextmanager
def _figure(path: pathlib.Path, rows: int, columns: int, width: float, height: float) -> Iterator[NDArray[Any]]:
  """Axes [rows, columns] of a figure that is written to `path` at the end. Needs no display and no global state."""
  with matplotlib.rc_context(rc=_STYLE):  # type: ignore[arg-type]
    figure = Figure(figsize=(width, height))
    yield figure.subplots(rows, columns, squeeze=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200, facecolor="white")


def plot_study(runs: Sequence[SeedRuns], path: str | pathlib.Path) -> pathlib.Path:
  """The six panels of the study (Figs. 1, 4 and 7 of Agent RL Scaling Law), written as an image.

  Args:
    runs: One entry a seed.
    path: File to write, e.g. `<root>/study.png`.

  Returns:
    `path`.
  """
  path = pathlib.Path(path)
  tools, controls = [run.tool for run in runs], [run.control for run in runs if len(run.control)]
  with _figure(path, 2, 3, 10.6, 5.8) as axes:
    code, length, accuracy, entropy, errors, scatter = axes.flat
    _curves(code, tools, CODE, BLUE, "all responses", window=5)
    _curves(code, tools, "rollout/code_in_correct", ORANGE, "correct responses", window=5)
    _finish(code, "a  Code use", "share that executed code", share=True)

    _curves(length, tools, "rollout/response_length", BLUE, "interpreter", window=5)
    _curves(length, controls, "rollout/response_length", GREY, "control", window=5)
    _finish(length, "b  Response length", "policy tokens a response")
    length.set_ylim(bottom=0)

    _curves(accuracy, tools, "eval/hard/accuracy", BLUE, "hard")
    _curves(accuracy, controls, "eval/hard/accuracy", GREY, "hard, control")
    _curves(accuracy, tools, "eval/easy/accuracy", SKY, "easy", dashed=True)
    _curves(accuracy, controls, "eval/easy/accuracy", "#8E8E8E", "easy, control", dashed=True)
    _finish(accuracy, "c  Accuracy", "accuracy", share=True)
    _label_ends(accuracy)

    _curves(entropy, tools, "policy/entropy", BLUE, "interpreter", window=5)
    _curves(entropy, controls, "policy/entropy", GREY, "control", window=5)
    _finish(entropy, "d  Policy entropy", "nats a token")
    entropy.set_ylim(bottom=0)

    _curves(errors, tools, "tool/error_frac", VERMILION, "", window=5)
    _finish(errors, "e  Tool errors", "share of calls that failed", share=True)
    errors.set_ylim(0, max(0.1, _top(tools, "tool/error_frac")))

    _reward_against_code(scatter, runs)
    _note(scatter, f"{_lines(len(runs))} Training curves (a, b, d, e) are moving averages over 5 steps.")
  return path


def _lines(seeds: int) -> str:
  return "One seed." if seeds == 1 else f"Thin lines: {seeds} seeds; bold: their mean."


def _note(axes: Axes, text: str) -> None:
  """A small line under the whole figure."""
  figure = axes.get_figure(root=True)
  if figure is not None:
    figure.supxlabel(text, fontsize=7.5, color="#555555", x=0.01, ha="left")


def _curves(
  axes: Axes, runs: Sequence[Metrics], name: str, color: _Color, label: str, window: int = 1, dashed: bool = False
) -> None:
  """A thin line a seed, a bold one for the mean; nothing where no run has the metric."""
  steps, values = [], []
  for run in runs:
    value = column(run, name)
    seen = np.isfinite(value)
    if seen.any():
      steps.append(column(run, "step")[seen])
      values.append(scaling.smooth(value[seen], window))
  if not steps:
    return
  style = (0, (3, 1.6)) if dashed else "-"
  if len(steps) > 1:
    for step, value in zip(steps, values, strict=True):
      axes.plot(step, value, color=color, linewidth=0.7, alpha=0.35, zorder=2, solid_capstyle="round")
  mean_step, mean = scaling.mean_curve(steps, values)
  axes.plot(mean_step, mean, color=color, linewidth=2.0, linestyle=style, label=label or None, zorder=3)


def _label_ends(axes: Axes) -> None:
  """Replaces the legend by names at the right ends of the lines, moved apart where lines meet."""
  lines = sorted(
    (line for line in axes.get_lines() if not str(line.get_label()).startswith("_")),
    key=lambda line: float(np.asarray(line.get_ydata())[-1]),
  )
  if not lines:
    return
  low, high = axes.get_ylim()
  gap, places = 0.075 * (high - low), [float(np.asarray(line.get_ydata())[-1]) for line in lines]
  for _ in range(20):  # Neighbours that are too close share the push.
    for i in range(len(places) - 1):
      push = max(0.0, gap - (places[i + 1] - places[i])) / 2
      places[i], places[i + 1] = places[i] - push, places[i + 1] + push
  right = max(float(np.asarray(line.get_xdata())[-1]) for line in lines)
  for line, y in zip(lines, places, strict=True):
    axes.annotate(
      str(line.get_label()),
      (right, y),
      xytext=(6, 0),
      textcoords="offset points",
      va="center",
      fontsize=8,
      color=line.get_color(),
      annotation_clip=False,
    )
  legend = axes.get_legend()
  if legend is not None:
    legend.remove()


def _top(runs: Sequence[Metrics], name: str) -> float:
  values = np.concatenate([np.zeros(1), *(scaling.smooth(column(run, name), 5) for run in runs)])
  return float(np.nanmax(values)) * 1.1


def _finish(axes: Axes, title: str, y_label: str, share: bool = False, x_label: str = "training step") -> None:
  axes.set_title(title)
  axes.set_xlabel(x_label)
  axes.set_ylabel(y_label)
  axes.margins(x=0.02)
  axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
  if share:
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(0, 1.02)
  if axes.get_legend_handles_labels()[1]:
    axes.legend(loc="best").set_zorder(4)


def _reward_against_code(axes: Axes, runs: Sequence[SeedRuns]) -> None:
  """Each point is a training step of one seed, its shade the step."""
  points = None
  last = max((float(column(run.tool, "step").max(initial=1)) for run in runs), default=1.0)
  for run in runs:
    points = axes.scatter(
      column(run.tool, CODE),
      column(run.tool, REWARD),
      c=column(run.tool, "step"),
      cmap="viridis_r",
      vmin=0,
      vmax=last,
      s=11,
      alpha=0.75,
      linewidths=0,
      zorder=3,
    )
  pooled = scaling.pool([(column(run.tool, CODE), column(run.tool, REWARD)) for run in runs])
  if math.isfinite(pooled.rho):
    text = (
      f"Spearman ρ = {pooled.rho:.2f} (p {_p_text(pooled.rho_p)})\nPearson r = {pooled.r:.2f} (p {_p_text(pooled.r_p)})"
    )
    low, high = axes.get_ylim()
    axes.set_ylim(low - 0.16 * (high - low), high)  # Room for the text below the points.
    axes.text(0.97, 0.03, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=8, color="#222222")
  _finish(axes, "f  Reward against code use", "mean reward", x_label="share that executed code")
  axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
  axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
  figure = axes.get_figure()
  if points is not None and figure is not None:
    bar = figure.colorbar(points, cax=axes.inset_axes((1.03, 0.0, 0.035, 1.0)))
    bar.set_label("training step")
    bar.ax.grid(False)
    bar.outline.set_visible(False)
    if bar.solids is not None:
      bar.solids.set_alpha(1.0)


def _p_text(p: float) -> str:
  if p < 1e-99:
    return "< $10^{-99}$"
  return f"= {p:.2f}" if p >= 0.01 else f"< $10^{{{math.ceil(math.log10(p))}}}$"


def plot_sweep(name: str, cells: Mapping[Any, Sequence[Metrics]], path: str | pathlib.Path) -> pathlib.Path:
  """Figure of a sweep: how the end of a run, and its way there, depend on one field.

  Args:
    name: What the field is called on the axes, e.g. `interaction budget`.
    cells: Value of the field, in order, to the runs (seeds) that had it.
    path: File to write.

  Returns:
    `path`.
  """
  path = pathlib.Path(path)
  values = list(cells)
  with _figure(path, 1, 3, 10.2, 3.1) as axes:
    final, course, code = axes.flat
    for metric, color, label in (("eval/hard/accuracy", BLUE, "hard"), ("eval/easy/accuracy", ORANGE, "easy")):
      lasts = [[scaling.evaluation_ends(column(run, metric)).last for run in cells[value]] for value in values]
      _points(final, lasts, color, label)
    _finish(final, "a  Accuracy at the end", "accuracy", share=True, x_label=name)
    final.set_xticks(range(len(values)), [str(value) for value in values])
    final.margins(x=0.08)
    for i, value in enumerate(values):
      shade = matplotlib.colormaps["viridis_r"](0.12 + 0.83 * i / max(1, len(values) - 1))
      _curves(course, cells[value], "eval/hard/accuracy", shade, f"{value}")
      _curves(code, cells[value], "rollout/code_count", shade, f"{value}", window=5)
    _finish(course, f"b  Hard accuracy by {name}", "accuracy", share=True)
    _finish(code, f"c  Executions by {name}", "executions a response")
    code.set_ylim(bottom=0)
    for panel in (course, code):
      _label_ends(panel)
    _note(final, _lines(max(len(runs) for runs in cells.values())).replace("Thin lines", "Dots and thin lines"))
  return path


def _points(axes: Axes, groups: Sequence[Sequence[float]], color: str, label: str) -> None:
  """A small dot a seed and a line through the means, at 0, 1, 2, … ."""
  means = [float(np.nanmean(g)) if np.isfinite(g).any() else math.nan for g in groups]
  if not np.isfinite(means).any():
    return
  axes.plot(range(len(groups)), means, color=color, linewidth=2.0, label=label, zorder=2)
  for i, group in enumerate(groups):
    axes.scatter([i] * len(group), group, color=color, s=22, edgecolors="white", linewidths=0.6, zorder=3)
