"""Frames on the socket between the pool and a parent process: a JSON header and a body of raw bytes.

The body carries what comes from outside (source, input, files, output), which therefore is copied once and neither
escaped nor decoded on the way. Standard library only.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

_LENGTHS = struct.Struct(">II")


def pack(header: dict[str, Any], body: Sequence[bytes | bytearray] = ()) -> bytes:
  """One frame; the body is the concatenation of its parts."""
  data = json.dumps(header, separators=(",", ":")).encode()
  return b"".join((_LENGTHS.pack(len(data), sum(map(len, body))), data, *body))


class Inbox:
  """Collects bytes and cuts them into frames. What has been taken out is overwritten with zeros."""

  def __init__(self) -> None:
    self._data = bytearray()

  def frames(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytearray]]:
    """Takes in bytes; yields the header and the body of each frame that is now complete."""
    self._data += data
    offset = 0
    while len(self._data) - offset >= _LENGTHS.size:
      header_bytes, body_bytes = _LENGTHS.unpack_from(self._data, offset)
      middle = offset + _LENGTHS.size + header_bytes
      end = middle + body_bytes
      if len(self._data) < end:
        break
      header = json.loads(self._data[offset + _LENGTHS.size : middle])
      yield header, self._data[middle:end]
      offset = end
    wipe(self._data, offset)
    del self._data[:offset]

  def clear(self) -> None:
    """Forgets everything."""
    wipe(self._data, len(self._data))
    self._data.clear()


def wipe(data: bytearray, count: int) -> None:
  """Overwrites the first bytes with zeros, so that a later fork does not hand them on."""
  data[:count] = bytes(count)


def split(body: bytearray, sizes: Sequence[int]) -> list[bytearray]:
  """Cuts a body into parts of these sizes."""
  parts = []
  offset = 0
  for size in sizes:
    parts.append(body[offset : offset + size])
    offset += size
  return parts
