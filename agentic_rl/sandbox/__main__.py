"""`python -m agentic_rl.sandbox --capabilities` prints what isolation is in force here."""

from __future__ import annotations

import argparse
import asyncio
import sys
import textwrap

from agentic_rl.sandbox import LEVELS, Interpreter, InterpreterConfig


async def _capabilities(strongest: str) -> str:
  config = InterpreterConfig(min_isolation="process", max_isolation=strongest)
  async with await Interpreter.start(config) as interpreter:
    facts = interpreter.capabilities()
  rows: list[tuple[str, str]] = [("isolation", f"{facts['level']} (weakest to strongest: {', '.join(LEVELS)})")]
  rows += [(name, _text(value)) for name, value in facts["facts"].items()]
  rows += [("left open" if i == 0 else "", gap) for i, gap in enumerate(facts["gaps"])]
  rows.append(("sessions", "fork before each turn" if facts["fork_checkpoint"] else "turns are replayed after a kill"))
  rows.append(("processes", "may be allowed by a limit" if facts["processes"] else "cannot be allowed at this level"))
  rows.append(("python", facts["python"]))
  rows += [("preload" if i == 0 else "", ", ".join(g) or "nothing") for i, g in enumerate(facts["groups"])]
  rows += [(name, str(value)) for name, value in (("slots", facts["slots"]), *facts["limits"].items())]
  width = max(len(name) for name, _ in rows) + 2
  return "".join(
    textwrap.fill(text, 120, initial_indent=name.ljust(width), subsequent_indent=" " * width) + "\n"
    for name, text in rows
  )


def _text(value: object) -> str:
  return {True: "set", False: "cannot be set"}[value] if isinstance(value, bool) else str(value)


def main() -> None:
  """Parses the command line."""
  parser = argparse.ArgumentParser(prog="python -m agentic_rl.sandbox", description=__doc__)
  parser.add_argument("--capabilities", action="store_true", required=True, help="print what is in force")
  parser.add_argument("--max_isolation", choices=LEVELS, default=LEVELS[-1], help="the strongest level to use")
  arguments = parser.parse_args()
  sys.stdout.write(asyncio.run(_capabilities(arguments.max_isolation)))


if __name__ == "__main__":
  main()
