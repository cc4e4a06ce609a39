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
  return b"".join((head(header, sum(map(len, body))), *body))


def head(header: dict[str, Any], body_bytes: int) -> bytes:
  """What comes before the body of a frame."""
  data = json.dumps(header, separators=(",", ":")).encode()
  return _LENGTHS.pack(len(data), body_bytes) + data


class Inbox:
  """Collects bytes and cuts them into frames. What has been taken out is overwritten with zeros.

  The bytes lie in one buffer, which is wiped before it is given up, so that no copy stays behind in the heap.
  """

  def __init__(self, size: int = 1 << 16) -> None:
    self._size = size
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
        if len(self._buffer) > self._size:  # grown for one large frame
          self._buffer = bytearray(self._size)
      yield header, body

  def clear(self) -> None:
    """Forgets everything."""
    self._buffer[self._begin : self._end] = bytes(self._end - self._begin)
    self._begin = self._end = 0


class Pieces:
  """Bytes in pieces that are never moved, so that no copy of them stays behind in the heap when they are wiped."""

  def __init__(self) -> None:
    self.pieces: list[bytearray] = []
    self.size = 0

  def __len__(self) -> int:
    return self.size

  def add(self, data: bytes | bytearray | memoryview) -> None:
    """Appends a copy."""
    if len(data):
      self.pieces.append(bytearray(data))
      self.size += len(data)

  def first(self) -> bytes:
    """The first byte, if there is one."""
    return bytes(self.pieces[0][:1]) if self.pieces else b""

  def joined(self, start: int = 0) -> bytearray:
    """A copy of everything from a byte on, in one; to be wiped by the caller."""
    whole = bytearray(self.size)
    offset = 0
    for piece in self.pieces:
      whole[offset : offset + len(piece)] = piece
      offset += len(piece)
    rest = whole[start:]
    wipe(whole, len(whole))
    return rest

  def cut(self, start: int, count: int) -> None:
    """Removes `count` bytes from `start` on."""
    kept: list[bytearray] = []
    offset = 0
    for piece in self.pieces:
      first, last = max(0, start - offset), max(0, min(len(piece), start + count - offset))
      offset += len(piece)
      if first >= last:
        kept.append(piece)
        continue
      kept += [part for part in (piece[:first], piece[last:]) if part]
      wipe(piece, len(piece))
    self.pieces = kept
    self.size -= min(count, max(0, self.size - start))

  def insert(self, at: int, data: bytes) -> None:
    """Puts bytes between two pieces, of which the first ends at `at`."""
    offset = index = 0
    while index < len(self.pieces) and offset < at:
      offset += len(self.pieces[index])
      index += 1
    self.pieces.insert(index, bytearray(data))
    self.size += len(data)

  def wipe(self) -> None:
    """Overwrites everything with zeros and forgets it."""
    for piece in self.pieces:
      wipe(piece, len(piece))
    self.pieces.clear()
    self.size = 0


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
