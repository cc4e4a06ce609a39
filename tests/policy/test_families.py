from __future__ import annotations

import pytest

from agentic_rl.errors import UserError
from agentic_rl.policy import Policy
from agentic_rl.policy.families import FAMILIES, named

# Of the model cards and of the checkpoints' safetensors metadata.
PARAMETERS = {
  "qwen2_5_0p5b": 494_032_768,
  "qwen2_5_1p5b": 1_543_714_304,
  "qwen2_5_7b": 7_615_616_512,
  "qwen2_5_32b": 32_763_876_352,
  "qwen3_0p6b": 596_049_920,
  "qwen3_4b": 4_022_468_096,
  "qwen3_8b": 8_190_735_360,
  "qwen3_32b": 32_762_123_264,
  "qwen3_30b_a3b": 30_532_122_624,
  "llama3_2_1b": 1_235_814_400,
  "llama3_1_8b": 8_030_261_248,
  "smollm2_135m": 134_515_008,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_models_have_their_number_of_parameters(name: str):
  assert Policy(named(name)).parameter_count() == PARAMETERS[name]


def test_options_of_the_computation_are_taken():
  config = named("qwen3_4b", dtype="bfloat16", remat="layer")
  assert (config.dtype, config.remat) == ("bfloat16", "layer")
  assert config.architecture() == FAMILIES["qwen3_4b"].config.architecture()


def test_an_unknown_name_lists_those_that_are_known():
  with pytest.raises(UserError, match=r"policy 'qwen9' is unknown; known: .*qwen3_30b_a3b.* Hugging Face directory"):
    named("qwen9")
