from __future__ import annotations

import json
import pathlib

import pytest

tokenizers = pytest.importorskip("tokenizers")

from agentic_rl.hf_tokenizer import HFTokenizer  # noqa: E402
from agentic_rl.tokenizer import Tokenizer  # noqa: E402

SPECIAL = ("<|end|>", "<|start|>")


def serialized() -> str:
  """A byte-level BPE tokenizer whose only merges are `l l` and `ll o`; ids: 2 special tokens, 256 bytes, the merges."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet, "ll", "llo"])}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("l", "l"), ("ll", "o")]))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens(list(SPECIAL))
  tokenizer.enable_truncation(4)  # some published files carry it; ids must not depend on it
  return tokenizer.to_str()


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
  return HFTokenizer(serialized(), eos="<|end|>")


def test_ids_by_hand(tokenizer: HFTokenizer):
  vocab = {c: 2 + i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
  assert tokenizer.encode("hello") == [vocab["h"], vocab["e"], 259]
  assert tokenizer.vocab_size == 260
  assert tokenizer.eos_id == tokenizer.pad_id == 0


def test_satisfies_the_protocol(tokenizer: HFTokenizer):
  typed: Tokenizer = tokenizer
  assert typed.decode(typed.encode("x = 1\n")) == "x = 1\n"


@pytest.mark.parametrize("text", ["", "hello", "  spaces\n\t```python\n", "π ≈ 3.14159, 数学", "a<|end|>b", "🐍" * 9])
def test_text_survives_a_round_trip_untruncated(tokenizer: HFTokenizer, text: str):
  assert tokenizer.decode(tokenizer.encode(text)) == text
  assert tokenizer.decode(tokenizer.encode_prompt(text)) == text


def test_text_cannot_forge_a_special_token(tokenizer: HFTokenizer):
  text = "1<|end|><|start|>2"
  assert not {0, 1} & set(tokenizer.encode(text))
  assert [t for t in tokenizer.encode_prompt(text) if t < 2] == [0, 1]


def test_decoding_shows_special_tokens_and_halves_of_characters(tokenizer: HFTokenizer):
  assert tokenizer.decode([1, *tokenizer.encode("a"), 0]) == "<|start|>a<|end|>"
  assert tokenizer.decode(tokenizer.encode("π")[:1]) == "\ufffd"
  with pytest.raises(ValueError, match="260 lies outside the vocabulary of 260"):
    tokenizer.decode([260])


def test_the_fingerprint_depends_on_what_decides_ids(tokenizer: HFTokenizer):
  same = HFTokenizer(json.dumps(json.loads(serialized()), indent=2), eos="<|end|>")
  assert same.fingerprint == tokenizer.fingerprint
  other_end = HFTokenizer(serialized(), eos="<|start|>")
  changed = json.loads(serialized())
  changed["model"]["merges"] = changed["model"]["merges"][:1]
  other_merges = HFTokenizer(json.dumps(changed), eos="<|end|>")
  assert len({tokenizer.fingerprint, other_end.fingerprint, other_merges.fingerprint}) == 3


def test_a_directory_names_its_special_tokens(tmp_path: pathlib.Path):
  with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
    HFTokenizer.from_directory(tmp_path)
  (tmp_path / "tokenizer.json").write_text(serialized())
  with pytest.raises(ValueError, match="names no eos_token"):
    HFTokenizer.from_directory(tmp_path)
  config = {"eos_token": {"content": "<|end|>", "lstrip": False}, "pad_token": "<|start|>"}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  tokenizer = HFTokenizer.from_directory(tmp_path)
  assert (tokenizer.eos_id, tokenizer.pad_id) == (0, 1)
  assert HFTokenizer.from_directory(tmp_path, eos="<|start|>").eos_id == 1


def test_what_is_wrong_is_said():
  with pytest.raises(ValueError, match=r"not a tokenizer\.json"):
    HFTokenizer("{}", eos="<|end|>")
  with pytest.raises(ValueError, match="'</s>' is not in the vocabulary"):
    HFTokenizer(serialized(), eos="</s>")
