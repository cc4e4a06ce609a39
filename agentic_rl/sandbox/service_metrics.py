"""What the service counts, in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agentic_rl.sandbox.limits import ExecResult

_PREFIX = "agentic_rl_sandbox_"
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_LOAD = {
  "in_flight": "Requests that run or wait.",
  "queued": "Requests that wait.",
  "sessions": "Open sessions.",
}


class Metrics:
  """Counters and histograms of one service, in a registry of their own.

  Args:
    level: Name of the isolation in force.
    load: Tells the present `in_flight`, `queued` and `sessions`.

  Attributes:
    content_type: Of `text`.
  """

  content_type = CONTENT_TYPE_LATEST

  def __init__(self, level: str, load: Callable[[], dict[str, int]]) -> None:
    self._registry = CollectorRegistry()
    self._executions = Counter(
      _PREFIX + "executions", "Executions by endpoint and status.", ("kind", "status"), registry=self._registry
    )
    self._rejected = Counter(
      _PREFIX + "rejected", "Requests that were refused, by reason.", ("reason",), registry=self._registry
    )
    self._seconds = {
      name: Histogram(_PREFIX + name + "_seconds", text, buckets=_BUCKETS, registry=self._registry)
      for name, text in (
        ("wall", "Wall time of executions."),
        ("cpu", "CPU time of executions."),
        ("queue", "Time that executions waited for a slot."),
      )
    }
    Gauge(_PREFIX + "level", "The isolation in force.", ("level",), registry=self._registry).labels(level).set(1)
    self._registry.register(_Load(load))

  def executed(self, kind: str, result: ExecResult) -> None:
    """Counts an execution."""
    self._executions.labels(kind, result.status).inc()
    self._seconds["wall"].observe(result.wall_s)
    self._seconds["cpu"].observe(result.cpu_s)
    self._seconds["queue"].observe(result.queue_s)

  def rejected(self, reason: str) -> None:
    """Counts a refusal."""
    self._rejected.labels(reason).inc()

  def text(self) -> bytes:
    """All of it."""
    return generate_latest(self._registry)


class _Load(Collector):
  """Read when it is asked for, instead of kept up to date."""

  def __init__(self, load: Callable[[], dict[str, int]]) -> None:
    self._load = load

  def collect(self) -> Iterator[Metric]:
    for name, value in self._load().items():
      yield GaugeMetricFamily(_PREFIX + name, _LOAD[name], value)
