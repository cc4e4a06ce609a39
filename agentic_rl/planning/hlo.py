"""Collectives of a compiled program, read from its text.

A loop's body stands in the text once and runs many times; its trip count is read from the loop. A TPU program holds one
asynchronous collective in several pieces that overlap with other work: they carry one channel number and count once.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator

from agentic_rl.planning.roofline import wire_bytes

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) (ragged-)?({'|'.join(KINDS)})(-start)?\(")
_WHILE = re.compile(r" while\(.*?condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_CALLEES = re.compile(
  r"\b(?:calls|to_apply|true_computation|false_computation|(?:branch|called)_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"?known_trip_count"?:?\s*\{\s*"?n"?:\s*"?(\d+)')
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")


@dataclasses.dataclass(frozen=True)
class Collective:
  """All collectives of one kind over groups of one size, in one run of the program.

  Attributes:
    kind: One of `KINDS`.
    group: Chips that take part.
    count: How often it runs, loops multiplied out.
    payload_bytes: Sum of the whole arrays on one chip.
    sent_bytes: What one chip sends in rings.
  """

  kind: str
  group: int
  count: int
  payload_bytes: float
  sent_bytes: float


@dataclasses.dataclass(frozen=True)
class Collectives:
  """What `read_collectives` found.

  Attributes:
    found: By kind and size of the group.
    trips: Trip counts that were read from the loops around a collective.
    unread: Loops around a collective whose trip count is not in the program; it was taken as given.
    unplaced: Collectives of which the text does not tell who runs them; they were counted once.
  """

  found: tuple[Collective, ...]
  trips: tuple[int, ...]
  unread: int
  unplaced: int


@dataclasses.dataclass(frozen=True)
class _Loop:
  parent: str  # the computation that holds the loop
  trips: int | None


def read_collectives(text: str, *, devices: int, unknown_trips: int = 1) -> Collectives:
  """Collectives of an optimized HLO module.

  Args:
    text: `compiled.as_text()`.
    devices: Devices of the program, for collectives over all of them.
    unknown_trips: Iterations of a loop whose trip count is an argument of the program.
  """
  bodies = dict(_computations(text))
  loops, callers = _structure(bodies)
  entry_name = next((match[2] for line in text.splitlines() if (match := _COMPUTATION.match(line)) and match[1]), "")

  def outermost(name: str) -> str:
    while name in loops or name in callers:
      name = loops[name].parent if name in loops else callers[name]
    return name

  @functools.cache
  def loops_around(name: str) -> tuple[str, ...]:
    """Bodies of the loops around a computation, the innermost first; calls and fusions are looked through."""
    if name in loops:
      return (name, *loops_around(loops[name].parent))
    return loops_around(callers[name]) if name in callers else ()

  total: dict[tuple[str, int], list[float]] = collections.defaultdict(lambda: [0, 0.0, 0.0])
  seen: set[tuple[str, tuple[str, ...]]] = set()
  around_any: set[str] = set()
  unplaced = 0
  for name, lines in bodies.items():
    for line in lines:
      match = _INSTRUCTION.match(line)
      if not match:
        continue
      around = loops_around(name)
      channel = _CHANNEL.search(line)
      if channel:
        if (channel[1], around) in seen:
          continue
        seen.add((channel[1], around))
      around_any.update(around)
      unplaced += outermost(name) != entry_name
      kind, group = match[3], _group_size(line, devices)
      payload = _payload(kind, match[1], group, started=bool(match[4]))
      if kind == "all-reduce" and "all-reduce-scatter" in name:
        kind = "reduce-scatter"  # how the TPU compiler writes a fused one
      runs = math.prod(loops[body].trips or unknown_trips for body in around)
      entry = total[kind, group]
      entry[0] += runs
      entry[1] += runs * payload
      entry[2] += runs * wire_bytes(kind, payload, group)
  found = tuple(
    Collective(kind, group, int(count), payload, sent)
    for (kind, group), (count, payload, sent) in sorted(total.items())
  )
  known = sorted({trips for body in around_any if (trips := loops[body].trips) is not None})
  return Collectives(found, tuple(known), sum(loops[body].trips is None for body in around_any), unplaced)


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
  name = ""
  lines: list[str] = []
  for line in text.splitlines():
    if match := _COMPUTATION.match(line):
      name, lines = match[2], []
    elif name and (line == "}" or line.startswith("}, execution_thread=")):  # a kernel's own options may begin with }
      yield name, lines
      name = ""
    elif name:
      lines.append(line)


def _structure(bodies: dict[str, list[str]]) -> tuple[dict[str, _Loop], dict[str, str]]:
  """Loops by their body, and who calls each other computation (the first caller)."""
  loops: dict[str, _Loop] = {}
  callers: dict[str, str] = {}
  for name, lines in bodies.items():
    for line in lines:
      if match := _WHILE.search(line):
        known = _TRIPS.search(line)
        trips = int(known[1]) if known else _counted_trips(bodies.get(match[1], []), bodies.get(match[2], []))
        loops[match[2]] = _Loop(name, trips)
      else:
        for called in _CALLEES.findall(line):
          for callee in called.strip("{}").split(","):
            callers.setdefault(callee.strip().lstrip("%"), name)
  return loops, callers


def _counted_trips(condition: list[str], body: list[str]) -> int | None:
  """Trips of `while (i < N) i += step` from 0, with constants N and step, as loops of XLA count; None for others."""
  root = next((line for line in condition if line.lstrip().startswith("ROOT")), "")
  match = re.search(r" compare\(.*?%?([\w.\-]+), .*?%?([\w.\-]+)\), direction=LT", root)
  limit = match and _constant(condition, match[2])
  if match is None or not limit:
    return None
  counter = re.search(r"index=(\d+)", _definition(condition, match[1]))
  results = re.search(r" tuple\((.*?)\)", next((line for line in body if line.lstrip().startswith("ROOT")), ""))
  step = None
  if counter and results:
    names = re.findall(r"%([\w.\-]+)", results[1])
    last = names[int(counter[1])] if int(counter[1]) < len(names) else ""
    added = re.search(r" add\(.*?%([\w.\-]+), .*?%([\w.\-]+)\)", _definition(body, last))
    step = added and (_constant(body, added[2]) or _constant(body, added[1]))
  return -(-limit // (step or 1))


def _definition(lines: list[str], name: str) -> str:
  """The line that defines a name."""
  start = re.compile(rf"^\s*(?:ROOT )?%?{re.escape(name)} = ")
  return next((line for line in lines if start.match(line)), "")


def _constant(lines: list[str], name: str) -> int | None:
  match = re.search(r" = [su]\d+\[\]\S* constant\((\d+)\)", _definition(lines, name))
  return int(match[1]) if match else None


def _group_size(line: str, devices: int) -> int:
  """Chips of one group, from the three ways in which XLA writes `replica_groups`."""
  if match := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
    return len(match[1].split(","))
  if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line):
    return int(match[2])
  if match := re.search(r"replica_groups=\w+\[([^\]]*)\][^{]*\{([^}]*)\}", line):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
    return math.prod(int(sizes.get(axis.strip(" '").split(":")[0], 1)) for axis in match[2].split(","))
  return devices


def _payload(kind: str, result: str, group: int, *, started: bool) -> float:
  """Bytes of the whole array on one chip, from the type of the result."""
  arrays = _ARRAY.findall(re.sub(r"\{[^}]*\}", "", result))
  if started and kind == "collective-permute":
    arrays = arrays[:2]  # two numbers of the runtime follow
  size = float(sum(_array_bytes(dtype, dims) for dtype, dims in arrays))
  if started and kind == "all-gather":
    return size * group / (group + 1)  # the type of a start holds the operands beside the results
  if started and kind == "reduce-scatter":
    return size * group / (group + 1)
  if started and kind in ("collective-permute", "all-to-all"):
    return size / 2
  return size * group if kind == "reduce-scatter" else size


def _array_bytes(dtype: str, dims: str) -> int:
  bits = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype[:3]) or 32)
  return math.prod(int(d) for d in dims.split(",") if d) * bits // 8
