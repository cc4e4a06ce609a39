"""A lower bound of the time of a step, from numbers alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Assumptions:
  """Share of each published peak that a well-tuned program reaches. Assumed, not measured here.

  Attributes:
    compute: Of the peak of matrix products.
    memory: Of the memory's bandwidth.
    links: Of the links' bandwidth: a ring uses some of a chip's links only.
  """

  compute: float = 0.6
  memory: float = 0.8
  links: float = 0.5

  def __post_init__(self) -> None:
    for name, value in dataclasses.asdict(self).items():
      if not 0 < value <= 1:
        raise ValueError(f"efficiency {name} must be above 0 and at most 1, got {value}")


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Seconds of one step, each part as if the others took no time.

  Attributes:
    compute_s, memory_s, links_s: Time of matrix products, of memory traffic, of collectives.
    step_s: The longest of them: the three overlap at best completely.
    bound: Which one that is: `compute`, `memory` or `links`.
    tokens_per_s_chip: Tokens a second and chip at `step_s`.
    mfu: FLOPs of the model at `step_s` over the peak, recomputation not counted.
  """

  compute_s: float
  memory_s: float
  links_s: float
  step_s: float
  bound: str
  tokens_per_s_chip: float
  mfu: float


def wire_bytes(kind: str, payload: float, group: int) -> float:
  """Bytes that a chip sends in a ring collective.

  Args:
    kind: `all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all`, `collective-permute` or `collective-broadcast`.
    payload: Bytes of the whole array on one chip: the result of an all-gather, the operand of a reduce-scatter.
    group: Chips that take part.
  """
  if group <= 1:
    return 0.0
  if kind in ("collective-permute", "collective-broadcast"):
    return payload
  share = (group - 1) / group
  return payload * share * (2 if kind == "all-reduce" else 1)


def roofline(
  *,
  executed_flops: float,
  model_flops: float,
  hbm_bytes: float,
  transfers: Sequence[tuple[float, float]],
  tokens: int,
  chips: int,
  peak_flops: float,
  hbm_bandwidth: float,
  assumed: Assumptions,
) -> Roofline:
  """The roofline of one step.

  Args:
    executed_flops: FLOPs of the step on one chip, recomputation included.
    model_flops: The same without recomputation.
    hbm_bytes: Memory traffic of the step on one chip.
    transfers: (bytes, bytes/s) of what a chip sends.
    tokens: Tokens of the step over all chips.
    chips: Chips.
    peak_flops: Of one chip, FLOP/s.
    hbm_bandwidth: Of one chip, bytes/s.
    assumed: Efficiencies.
  """
  compute_s = executed_flops / (peak_flops * assumed.compute)
  memory_s = hbm_bytes / (hbm_bandwidth * assumed.memory)
  links_s = sum(sent / (bandwidth * assumed.links) for sent, bandwidth in transfers)
  parts = {"compute": compute_s, "memory": memory_s, "links": links_s}
  bound = max(parts, key=lambda name: parts[name])
  step_s = parts[bound]
  return Roofline(
    compute_s=compute_s,
    memory_s=memory_s,
    links_s=links_s,
    step_s=step_s,
    bound=bound,
    tokens_per_s_chip=tokens / step_s / chips,
    mfu=model_flops / step_s / peak_flops,
  )
