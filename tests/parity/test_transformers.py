"""The decoder against `transformers` on CPU: same weights, same logits."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from agentic_rl.policy import Policy, PolicyConfig, huggingface  # noqa: E402
from agentic_rl.policy.huggingface import table  # noqa: E402
from agentic_rl.policy.huggingface.load import lookup as table_lookup  # noqa: E402
from agentic_rl.policy.rope import RopeScaling  # noqa: E402

pytestmark = pytest.mark.slow

LLAMA = PolicyConfig(vocab_size=50, width=32, layers=3, heads=4, kv_heads=2, head_width=8, mlp_width=48)
CONFIGS = {
  "llama_tied": LLAMA,
  "llama_untied": dataclasses.replace(LLAMA, tied_embeddings=False, norm_eps=1e-5),
  "smollm2": dataclasses.replace(LLAMA, heads=3, kv_heads=1, width=24, rope_theta=1e5),
  "qwen2_tied": dataclasses.replace(LLAMA, qkv_bias=True, rope_theta=1e6),
  "qwen2_untied": dataclasses.replace(LLAMA, qkv_bias=True, rope_theta=1e6, tied_embeddings=False),
  "qwen3_tied": dataclasses.replace(LLAMA, qk_norm=True, head_width=16, rope_theta=1e6),
  "qwen3_untied": dataclasses.replace(LLAMA, qk_norm=True, head_width=4, tied_embeddings=False),
  "llama3": dataclasses.replace(LLAMA, rope_theta=5e5, rope_scaling=RopeScaling("llama3", 8.0, 12, 1.0, 4.0)),
  "linear": dataclasses.replace(LLAMA, rope_scaling=RopeScaling("linear", 2.5)),
  "yarn": dataclasses.replace(LLAMA, qkv_bias=True, rope_theta=1e6, rope_scaling=RopeScaling("yarn", 4.0, 16)),
  "yarn_attention": dataclasses.replace(
    LLAMA, qk_norm=True, head_width=16, rope_scaling=RopeScaling("yarn", 2.0, 16, beta_fast=16.0, attention_factor=0.9)
  ),
  "qwen2_sliding": dataclasses.replace(
    LLAMA, qkv_bias=True, rope_theta=1e6, sliding_window=7, sliding_layers=(False, True, True)
  ),
  "qwen3_sliding": dataclasses.replace(
    LLAMA, qk_norm=True, sliding_window=7, sliding_layers=(True, False, True), tied_embeddings=False
  ),
  "qwen3_moe": dataclasses.replace(
    LLAMA, qk_norm=True, experts=6, experts_per_token=2, expert_width=20, tied_embeddings=False
  ),
  "qwen3_moe_as_it_comes": dataclasses.replace(
    LLAMA, qk_norm=True, experts=4, experts_per_token=3, expert_width=20, normalize_experts=False
  ),
}


def random_params(config: PolicyConfig) -> dict:
  """Initial matrices, with norms and biases that differ from one and zero."""
  params = Policy(config).init(jax.random.key(0))
  rng = np.random.default_rng(1)
  return jax.tree.map(lambda x: np.asarray(x) + 0.1 * rng.standard_normal(x.shape).astype(np.float32), params)


def our_logits(config: PolicyConfig, params: dict, rows: list[list[list[int]]]) -> np.ndarray:
  """[B,T,V] of packed rows, each a list of segments."""
  token_ids = np.array([[t for segment in row for t in segment] for row in rows], np.int32)
  positions = np.array([[i for segment in row for i in range(len(segment))] for row in rows], np.int32)
  segment_ids = np.array([[n for n, s in enumerate(row, 1) for _ in s] for row in rows], np.int32)
  policy = Policy(config)
  hidden = policy.hidden(params, jnp.asarray(token_ids), jnp.asarray(positions), jnp.asarray(segment_ids))
  return np.asarray(hidden @ policy.unembedding(params).T)


def their_logits(directory: pathlib.Path, token_ids: list[list[int]]) -> np.ndarray:
  model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
  with torch.no_grad():
    return model(torch.tensor(token_ids)).logits.numpy()


@pytest.fixture(params=CONFIGS)
def exported(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> tuple[PolicyConfig, dict, pathlib.Path]:
  config = CONFIGS[request.param]
  params = random_params(config)
  return config, params, huggingface.save(tmp_path / "model", config, params, max_length=64)


def test_transformers_computes_the_same_logits_from_an_export(exported):
  config, params, path = exported
  ids = np.random.default_rng(2).integers(0, config.vocab_size, (2, 33)).tolist()
  theirs = their_logits(path, ids)
  ours = our_logits(config, params, [[row] for row in ids])
  assert np.abs(theirs).max() > 1  # else the bound below would mean nothing
  np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def test_a_packed_row_gives_the_logits_of_its_segments(exported):
  config, params, path = exported
  ids = np.random.default_rng(3).integers(0, config.vocab_size, 40).tolist()
  ours = our_logits(config, params, [[ids[:13], ids[13:]]])[0]
  np.testing.assert_allclose(ours[:13], their_logits(path, [ids[:13]])[0], atol=1e-4, rtol=0)
  np.testing.assert_allclose(ours[13:], their_logits(path, [ids[13:]])[0], atol=1e-4, rtol=0)


def test_gradients_are_the_same(exported):
  config, params, path = exported
  ids = np.random.default_rng(5).integers(0, config.vocab_size, (2, 24))
  weights = np.random.default_rng(6).standard_normal((2, 24, config.vocab_size)).astype(np.float32) / 24
  positions, segments = np.tile(np.arange(24, dtype=np.int32), (2, 1)), np.ones((2, 24), np.int32)
  policy = Policy(config)

  def ours(params):
    hidden = policy.hidden(params, jnp.asarray(ids, jnp.int32), positions, segments)
    return jnp.sum(jax.nn.log_softmax(hidden @ policy.unembedding(params).T) * weights)

  model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
  logits = model(torch.tensor(ids)).logits
  (torch.log_softmax(logits, -1) * torch.tensor(weights)).sum().backward()
  theirs = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
  got = jax.grad(ours)(jax.tree.map(jnp.asarray, params))
  compared = 0
  for leaf in table.leaves(config):
    array = np.asarray(table_lookup(got, leaf.path))
    for place, name in leaf.names(config):
      want = theirs[name] if name in theirs else fused_expert(theirs, name)
      np.testing.assert_allclose(leaf.to_theirs(array[place]), want, atol=1e-4, rtol=1e-4, err_msg=name)
      compared += want.size
  assert compared == policy.parameter_count()


def fused_expert(gradients: dict, name: str) -> np.ndarray:
  """The gradient of one expert's matrix; transformers holds those of all experts in one array."""
  layer, _, rest = name.partition(".experts.")
  number, matrix, _ = rest.split(".")
  if matrix == "down_proj":
    return gradients[f"{layer}.experts.down_proj"][int(number)]
  both = gradients[f"{layer}.experts.gate_up_proj"][int(number)]
  return np.split(both, 2)[matrix == "up_proj"]


@pytest.mark.parametrize(
  "name", ["llama_untied", "qwen2_untied", "qwen3_untied", "llama3", "yarn", "qwen3_sliding", "qwen3_moe"]
)
def test_a_directory_written_by_transformers_is_read(name: str, tmp_path: pathlib.Path):
  config = CONFIGS[name]
  values = huggingface.huggingface_config(config, max_length=64)
  torch.manual_seed(0)
  model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**values)).eval()
  model.save_pretrained(tmp_path, max_shard_size="20KB")
  assert len(list(tmp_path.glob("*.safetensors"))) > 1
  read_config, params = huggingface.load(tmp_path)
  assert read_config == config
  ids = np.random.default_rng(4).integers(0, config.vocab_size, (1, 20)).tolist()
  np.testing.assert_allclose(our_logits(config, params, [ids]), their_logits(tmp_path, ids), atol=1e-4, rtol=0)


def greedy(policy: Policy, params: dict, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
  """Greedy continuations with the key-value cache, all prompts side by side."""
  params = policy.unstack(jax.tree.map(jnp.asarray, params))
  lengths = np.array([len(p) for p in prompts], np.int32)
  width = int(lengths.max())
  rows = np.array([p + [0] * (width - len(p)) for p in prompts], np.int32)

  @jax.jit
  def step(tokens, start, cache, last):
    hidden, cache = policy.extend(params, tokens, start, cache)
    logits = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0] @ policy.unembedding(params).T
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

  start = jnp.zeros(len(prompts), jnp.int32)
  token, cache = step(jnp.asarray(rows), start, policy.init_cache(len(prompts), width + new_tokens), lengths - 1)
  out = [np.asarray(token)]
  for i in range(new_tokens - 1):
    token, cache = step(token[:, None], jnp.asarray(lengths + i), cache, jnp.zeros_like(start))
    out.append(np.asarray(token))
  return np.stack(out, axis=1).tolist()


def test_smollm2_writes_the_same_text(smollm2_directory: pathlib.Path):
  from agentic_rl.hf_tokenizer import HFTokenizer

  tokenizer = HFTokenizer.from_directory(smollm2_directory)
  questions = ["What is the capital of France?", "Write a Python function that adds two numbers.", "7 + 5 ="]
  prompts = [tokenizer.encode_prompt(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n") for q in questions]
  config, params = huggingface.load(smollm2_directory)
  ours = greedy(Policy(config), params, prompts, 32)
  model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_directory, dtype=torch.float32).eval()
  their_tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_directory)
  for question, prompt, ids in zip(questions, prompts, ours, strict=True):
    assert their_tokenizer(tokenizer.decode(prompt), add_special_tokens=False).input_ids == prompt
    inputs = torch.tensor([prompt])
    with torch.no_grad():
      # The mask is given, since it would be guessed from the padding token, which is also the end of a turn.
      out = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=32, do_sample=False, eos_token_id=None
      )
    theirs = out[0, len(prompt) :].tolist()
    assert tokenizer.decode(ids) == tokenizer.decode(theirs), question
  assert "Paris" in tokenizer.decode(ours[0])
