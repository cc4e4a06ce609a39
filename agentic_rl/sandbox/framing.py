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
  """Collects bytes and cuts them into frames. What has been taken out is overwritten with zeros.

  The bytes lie in one buffer, which is wiped before it is given up, so that no copy stays behind in the heap.
  """

  def __init__(self, size: int = 1 << 16) -> None:
    self._buffer = bytearray(size)
    self._begin = self._end = 0

  def free(self) -> memoryview:
    """Room to receive into; say `received` how much came."""
    if self._end == len(self._buffer):
      held = self._end - self._begin
      old, self._buffer = self._buffer, bytearray(max(len(self._buffer), 2 * held))
      self._buffer[:held] = memoryview(old)[self._begin : self._end]
      wipe(old, len(old))
      self._begin, self._end = 0, held
    return memoryview(self._buffer)[self._end :]

  def received(self, count: int) -> None:
    """Bytes have been put into `free`."""
    self._end += count

  def feed(self, data: bytes) -> None:
    """Takes in bytes."""
    offset = 0
    while offset < len(data):
      with self.free() as room:
        count = min(len(room), len(data) - offset)
        room[:count] = data[offset : offset + count]
      self.received(count)
      offset += count

  def frames(self) -> Iterator[tuple[dict[str, Any], bytearray]]:
    """Yields the header and the body of each complete frame."""
    while self._end - self._begin >= _LENGTHS.size:
      header_bytes, body_bytes = _LENGTHS.unpack_from(self._buffer, self._begin)
      start = self._begin + _LENGTHS.size
      middle, end = start + header_bytes, start + header_bytes + body_bytes
      if self._end < end:
        return
      header, body = json.loads(self._buffer[start:middle]), self._buffer[middle:end]
      self._buffer[self._begin : end] = bytes(end - self._begin)
      self._begin = end
      if self._begin == self._end:
        self._begin = self._end = 0
      yield header, body

  def clear(self) -> None:
    """Forgets everything."""
    self._buffer[self._begin : self._end] = bytes(self._end - self._begin)
    self._begin = self._end = 0


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
