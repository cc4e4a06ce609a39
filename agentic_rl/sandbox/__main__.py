"""`python -m agentic_rl.sandbox --capabilities` prints what isolation is in force here."""

from __future__ import annotations

import argparse
import asyncio
import sys

from agentic_rl.sandbox import Interpreter


async def _capabilities() -> str:
  async with await Interpreter.start() as interpreter:
    facts = interpreter.capabilities()
  lines = [f"{facts.pop('level')}: {facts.pop('text')}"]
  facts |= {f"limit {name}": value for name, value in facts.pop("limits").items()}
  lines += [f"  {name.replace('_', ' ')}: {value}" for name, value in facts.items() if name != "pid"]
  return "\n".join(lines) + "\n"


def main() -> None:
  """Parses the command line."""
  parser = argparse.ArgumentParser(prog="python -m agentic_rl.sandbox", description=__doc__)
  parser.add_argument("--capabilities", action="store_true", required=True, help="print what is in force")
  parser.parse_args()
  sys.stdout.write(asyncio.run(_capabilities()))


if __name__ == "__main__":
  main()
