"""A Hugging Face tokenizer (`tokenizer.json`) behind the project's `Tokenizer` protocol."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path


class HFTokenizer:
  """Wraps the Rust `tokenizers` library; needs neither `transformers` nor a network.

  `encode` never turns text into a special token, so that a tool's output cannot forge the end of a turn: `<|im_end|>`
  in it becomes the ordinary pieces `<`, `|`, `im`, ... Only `encode_prompt`, meant for rendered prompt templates, reads
  special tokens out of text.

  Attributes:
    vocab_size: One more than the largest id; a model's embedding may have more rows (padding), never fewer.
    pad_id, eos_id: May be the same id; padding is told by segment ids, never by token ids.
  """

  def __init__(self, serialized: str, *, eos: str, pad: str | None = None):
    """Builds from the text of a `tokenizer.json`.

    Args:
      serialized: JSON as in `tokenizer.json`.
      eos: Token that ends a sequence (a chat model's end of turn).
      pad: Padding token; `eos` where there is none.

    Raises:
      ValueError: `serialized` is no tokenizer, or a named token is not in the vocabulary.
    """
    import tokenizers  # An optional extra; the study's own tokenizer does without.

    try:
      self._special = tokenizers.Tokenizer.from_str(serialized)
      self._plain = tokenizers.Tokenizer.from_str(serialized)
    except Exception as error:  # The library raises bare `Exception` for malformed JSON.
      raise ValueError(f"not a tokenizer.json: {error}") from error
    # A second object, since the switch is state of the tokenizer and encoding runs on many threads.
    self._plain.encode_special_tokens = True
    for tokenizer in (self._special, self._plain):
      tokenizer.no_truncation()
      tokenizer.no_padding()
    self.eos_id = self._id(eos)
    self.pad_id = self.eos_id if pad is None else self._id(pad)
    self.vocab_size = max(self._special.get_vocab(with_added_tokens=True).values()) + 1
    # The canonical form, so that white space in the file does not change the fingerprint.
    blob = json.dumps([self._special.to_str(), self.eos_id, self.pad_id])
    self._fingerprint = hashlib.sha256(blob.encode()).hexdigest()[:16]

  @classmethod
  def from_directory(cls, directory: str | os.PathLike[str], *, eos: str | None = None) -> HFTokenizer:
    """Reads `tokenizer.json` and the special tokens that `tokenizer_config.json` names.

    Args:
      directory: A Hugging Face model or tokenizer directory.
      eos: Overrides the end token, for a base model whose prompt ends with another one.

    Raises:
      FileNotFoundError: There is no `tokenizer.json`.
      ValueError: No end token is named, or the file is damaged.
    """
    root = Path(directory)
    path = root / "tokenizer.json"
    if not path.is_file():
      raise FileNotFoundError(f"no tokenizer.json in {root}; a slow (sentencepiece) tokenizer must be converted first")
    config_path = root / "tokenizer_config.json"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
    end = eos or _content(config.get("eos_token"))
    if end is None:
      raise ValueError(f"{config_path} names no eos_token; pass eos=")
    return cls(path.read_text(encoding="utf-8"), eos=end, pad=_content(config.get("pad_token")))

  def encode(self, text: str) -> list[int]:
    """Ids of `text` as plain text: special tokens in it are not recognised, none are added."""
    return list(self._plain.encode(text, add_special_tokens=False).ids)

  def encode_prompt(self, text: str) -> list[int]:
    """Ids of a rendered template: special tokens in `text` are recognised, none are added."""
    return list(self._special.encode(text, add_special_tokens=False).ids)

  def decode(self, token_ids: Iterable[int]) -> str:
    """Text of ids, special tokens as their own text; bytes that are not UTF-8 yet become U+FFFD.

    Raises:
      ValueError: An id lies outside the vocabulary (a model's padded embedding row).
    """
    ids = list(token_ids)
    for token in ids:
      if not 0 <= token < self.vocab_size:
        raise ValueError(f"token id {token} lies outside the vocabulary of {self.vocab_size}")
    return self._special.decode(ids, skip_special_tokens=False)

  @property
  def fingerprint(self) -> str:
    return self._fingerprint

  def _id(self, token: str) -> int:
    found = self._special.token_to_id(token)
    if found is None:
      raise ValueError(f"the token {token!r} is not in the vocabulary")
    return found


def _content(token: str | dict[str, object] | None) -> str | None:
  """Text of a special token, which files give as a string or as an object with `content`."""
  if isinstance(token, dict):
    return str(token["content"])
  return token
