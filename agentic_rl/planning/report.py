"""A plan as a report for people, a row of a Markdown table, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentic_rl.planning.plan import Plan

GIB = 2**30

MARKDOWN_COLUMNS = (
  "policy",
  "topology",
  "mesh",
  "rows x tokens",
  "state GiB",
  "temporaries GiB",
  "needed GiB",
  "HBM GiB",
  "fits",
  "step s",
  "bound",
  "tokens/s/chip",
)


def text(plan: Plan) -> str:
  """The report: aligned tables, then the verdict."""
  sections = [_head(plan), _memory(plan), _flops(plan), _collectives(plan), _roofline(plan), _verdict(plan)]
  return "\n\n".join(section for section in sections if section)


def verdict(plan: Plan) -> str:
  """One line: whether it fits."""
  available = f"{plan.topology.chip.hbm_bytes / GIB:.2f} GiB"
  if plan.needed_bytes is None:
    return f"does not fit: the compiler found no way within the {available} of a chip"
  return f"{'fits' if plan.fits else 'does not fit'}: needs {plan.needed_bytes / GIB:.2f} GiB of {available}"


def markdown(plan: Plan) -> str:
  """Header, rule and one row of a Markdown table."""
  state = plan.params_bytes + plan.optimizer_bytes
  memory, roof = plan.program and plan.program.memory, plan.roofline
  cells = (
    plan.name,
    plan.topology.name,
    _mesh(plan),
    f"{plan.rows} x {plan.length}",
    _gib(state),
    _gib(memory.temporaries) if memory else "-",
    "-" if plan.needed_bytes is None else _gib(plan.needed_bytes),
    _gib(plan.topology.chip.hbm_bytes),
    "yes" if plan.fits else "no",
    f"{roof.step_s:.3g}" if roof else "-",
    roof.bound if roof else "-",
    f"{roof.tokens_per_s_chip:,.0f}" if roof else "-",
  )
  rows = (MARKDOWN_COLUMNS, ("---",) * len(cells), cells)
  return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def json_line(plan: Plan) -> str:
  """One JSON object on one line; bytes, seconds, FLOPs."""
  return json.dumps(to_dict(plan))


def to_dict(plan: Plan) -> dict[str, Any]:
  """The plan in plain values. What is not known without a program is None."""
  program, roof, chip = plan.program, plan.roofline, plan.topology.chip
  memory = program.memory if program else None
  return {
    "policy": plan.name,
    "policy_config": plan.policy.to_dict(),
    "parameters": plan.parameters,
    "topology": plan.topology.name,
    "chips": plan.topology.chips,
    "mesh": plan.mesh,
    "rows": plan.rows,
    "length": plan.length,
    "micro_batches": plan.micro_batches,
    "fits": plan.fits,
    "verdict": verdict(plan),
    "advice": list(plan.advice),
    "largest_rows": plan.largest_rows,
    "hbm_bytes": chip.hbm_bytes,
    "needed_bytes": plan.needed_bytes,
    "params_bytes": plan.params_bytes,
    "optimizer_bytes": plan.optimizer_bytes,
    "gradient_bytes": plan.params_bytes,
    "batch_bytes": memory.batch if memory else None,
    "argument_bytes": memory.arguments if memory else None,
    "temporary_bytes": memory.temporaries if memory else None,
    "code_bytes": memory.code if memory else None,
    "peak_bytes": memory.peak if memory else None,
    "reserved_bytes": memory.reserved if memory else None,
    "model_flops": plan.work.model * plan.micro_batches,
    "attention_flops": plan.work.attention * plan.micro_batches,
    "executed_flops": plan.work.executed * plan.micro_batches,
    "compiler_flops_per_chip": program.flops if program else None,
    "compiler_bytes_per_chip": program.bytes_accessed if program else None,
    "estimated_traffic_bytes_per_chip": plan.hbm_bytes,
    "collectives": [
      {"kind": c.kind, "group": c.group, "count": c.count, "bytes": c.payload_bytes, "sent_bytes": c.sent_bytes}
      for c in (program.collectives.found if program else ())
    ],
    "compute_s": roof.compute_s if roof else None,
    "memory_s": roof.memory_s if roof else None,
    "links_s": roof.links_s if roof else None,
    "step_s": roof.step_s if roof else None,
    "bound": roof.bound if roof else None,
    "tokens_per_s_chip": roof.tokens_per_s_chip if roof else None,
    "mfu": roof.mfu if roof else None,
    "efficiency": {"compute": plan.assumed.compute, "memory": plan.assumed.memory, "links": plan.assumed.links},
    "peak_flops": chip.flops,
    "hbm_bandwidth": chip.hbm_bandwidth,
    "link_bandwidth": chip.link_bandwidth,
    "network_bandwidth": chip.network_bandwidth,
    "lower_s": program.lower_s if program else None,
    "compile_s": program.compile_s if program else None,
  }


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> str:
  """Rows of cells as aligned lines: the first `left` columns to the left, the others to the right."""
  widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(len(row) for row in rows))]
  lines = []
  for row in rows:
    cells = [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=False))]
    lines.append(("  " + "  ".join(cells)).rstrip())
  return "\n".join(lines)


def _gib(size: float) -> str:
  return f"{size / GIB:.2f}"


def _mesh(plan: Plan) -> str:
  named = [f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1]
  return " ".join(named) or "one chip"


def _head(plan: Plan) -> str:
  c = plan.policy
  attention = getattr(c, "attention", "")
  how = ", ".join(filter(None, (c.dtype, f"remat={c.remat}", attention and f"attention={attention}")))
  lines = [
    f"{plan.name} ({plan.parameters / 1e9:.2f} B parameters; {how})",
    f"on {plan.topology.name}: {plan.topology.chips} x {plan.topology.chip.title}, mesh {_mesh(plan)}",
    f"a step is {plan.micro_batches} micro-batches of {plan.rows} rows x {plan.length} tokens over all chips",
  ]
  if plan.program:
    lines.append(f"lowered in {plan.program.lower_s:.1f} s, compiled in {plan.program.compile_s:.1f} s")
  return "\n".join(lines)


def _memory(plan: Plan) -> str:
  rows: list[tuple[str, float]] = [
    ("parameters (float32)", plan.params_bytes),
    ("optimizer state", plan.optimizer_bytes),
  ]
  if plan.program:
    memory = plan.program.memory
    rows += [
      ("batch", memory.batch),
      ("arguments: the three above", memory.arguments),
      ("temporaries, gradients among them", memory.temporaries),
      ("  of these gradients (float32)", plan.params_bytes),
      ("program", memory.code),
      ("peak, by the compiler", memory.peak),
    ]
    if plan.topology.chip.platform == "gpu":
      rows.append(("reserved: arguments, temporaries, program", memory.reserved))
  hbm = plan.topology.chip.hbm_bytes
  table = [("Memory of a chip", "GiB", "of HBM")]
  table += [(name, _gib(size), f"{size / hbm:.1%}") for name, size in rows]
  table.append(("HBM that a program may use", _gib(hbm), ""))
  return columns(table)


def _flops(plan: Plan) -> str:
  work, steps, chips = plan.work, plan.micro_batches, plan.topology.chips
  table = [
    ("Work of a step", "all chips", "a chip"),
    *(
      (name, f"{value * steps / 1e12:.2f} TFLOP", f"{value * steps / chips / 1e12:.2f} TFLOP")
      for name, value in (
        (f"weights, 6 x {work.matrices / 1e9:.2f} B x tokens", work.model - work.attention),
        ("attention, causal", work.attention),
        ("executed, recomputation included", work.executed),
      )
    ),
    ("memory traffic, estimated", "", f"{plan.hbm_bytes / 1e9:.1f} GB"),
  ]
  program = plan.program
  if program and program.flops is not None:
    table.append(("compiler's count, each loop's body once", "", f"{program.flops / 1e12:.2f} TFLOP"))
  if program and program.bytes_accessed is not None:
    table.append(("compiler's traffic, each loop's body once", "", f"{program.bytes_accessed / 1e9:.1f} GB"))
  return columns(table)


def _collectives(plan: Plan) -> str:
  if not plan.program:
    return ""
  collectives = plan.program.collectives
  if not collectives.found:
    return "  No collectives."
  table = [("Collectives of a step", "chips", "count", "array GB", "sent GB")]
  table += [
    (c.kind, str(c.group), str(c.count), f"{c.payload_bytes / 1e9:.3f}", f"{c.sent_bytes / 1e9:.3f}")
    for c in collectives.found
  ]
  trips = ", ".join(str(n) for n in collectives.trips)
  note = f"  Those in loops are counted once a trip; trips read from the program: {trips or 'none'}"
  if collectives.unread:
    note += f"; loops over micro-batches, or without a readable count, taken as {plan.micro_batches}"
  if collectives.unplaced:
    note += f"; {collectives.unplaced} whose loops could not be told, counted once"
  return f"{columns(table)}\n{note}."


def _roofline(plan: Plan) -> str:
  roof, chip, assumed = plan.roofline, plan.topology.chip, plan.assumed
  if not roof:
    return ""
  table = [
    ("Roofline of a step", "s", "assumed"),
    ("compute", f"{roof.compute_s:.4f}", f"{assumed.compute:.0%} of {chip.flops / 1e12:.0f} TFLOP/s bf16"),
    ("memory", f"{roof.memory_s:.4f}", f"{assumed.memory:.0%} of {chip.hbm_bandwidth / 1e9:.0f} GB/s"),
    ("links", f"{roof.links_s:.4f}", f"{assumed.links:.0%} of {_links(plan)}"),
    (f"step: the longest, {roof.bound}", f"{roof.step_s:.4f}", ""),
  ]
  rate = f"  {roof.tokens_per_s_chip:,.0f} tokens/s a chip at {roof.mfu:.0%} model FLOPs utilisation, at best:"
  return f"{columns(table)}\n{rate} nothing else takes time, and the three overlap completely."


def _links(plan: Plan) -> str:
  chip = plan.topology.chip
  kind = "ICI" if chip.platform == "tpu" else "NVLink"
  own = f"{chip.link_bandwidth / 1e9:.0f} GB/s {kind}"
  crosses = any(plan.topology.bandwidth(size) != chip.link_bandwidth for size in (plan.topology.chips,))
  return f"{own}, {chip.network_bandwidth / 1e9:.0f} GB/s between hosts" if crosses else own


def _verdict(plan: Plan) -> str:
  lines = [verdict(plan)]
  if plan.advice:
    lines.append("try:")
    lines += [f"  - {advice}" for advice in plan.advice]
  if plan.largest_rows is not None:
    largest = f"{plan.largest_rows} rows" if plan.largest_rows else "none: not even one row a chip"
    lines.append(f"largest micro-batch that fits: {largest}")
  if plan.topology.chip.platform == "gpu" and plan.fits:
    lines.append("JAX takes 75 % of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise, e.g. 0.95")
  return "\n".join(lines)
