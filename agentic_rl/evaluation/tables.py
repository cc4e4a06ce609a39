"""Tables of figures, aligned for a terminal or as Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

Cell = str | int | float | None


def format_cell(value: Cell, digits: int = 3) -> str:
  """A cell as text: floats with `digits` decimals, no value (None or NaN) as a dash."""
  if value is None or (isinstance(value, float) and math.isnan(value)):
    return "-"
  return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def text_table(rows: Sequence[Mapping[str, Cell]], digits: int = 3) -> str:
  """Rows as an aligned table with one header line; the columns are the keys in order of first appearance."""
  header, cells, numeric = _layout(rows, digits)
  widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
  lines = [header, ["-" * width for width in widths], *cells]
  return "\n".join(_line(line, widths, numeric, "  ").rstrip() for line in lines)


def markdown_table(rows: Sequence[Mapping[str, Cell]], digits: int = 3) -> str:
  """Rows as a Markdown table, columns as in `text_table`, numbers to the right."""
  header, cells, numeric = _layout(rows, digits)
  header = [cell.replace("|", "\\|") for cell in header]
  cells = [[cell.replace("|", "\\|") for cell in line] for line in cells]
  widths = [max(3, *(len(line[i]) for line in [header, *cells])) for i in range(len(header))]
  rule = ["-" * (width - 1) + (":" if right else "-") for width, right in zip(widths, numeric, strict=True)]
  return "\n".join(f"| {_line(line, widths, numeric, ' | ')} |" for line in [header, rule, *cells])


def _layout(rows: Sequence[Mapping[str, Cell]], digits: int) -> tuple[list[str], list[list[str]], list[bool]]:
  header = list(dict.fromkeys(key for row in rows for key in row))
  if not header:
    raise ValueError("there is no row to make a table of")
  numeric = [all(not isinstance(row.get(key), str) for row in rows) for key in header]
  return header, [[format_cell(row.get(key), digits) for key in header] for row in rows], numeric


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool], between: str) -> str:
  return between.join(
    cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(cells, widths, numeric, strict=True)
  )
