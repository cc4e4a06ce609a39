from __future__ import annotations

import os
import random
from pathlib import Path

from agentic_rl.sandbox import execution, framing, harness, scratch


def frame(status: int, code: int, value: bytes, error: bytes, magic: bytes = harness.MAGIC) -> bytearray:
  body = harness.FIELD.pack(harness.VALUE, len(value), 1) + value + harness.FIELD.pack(harness.ERROR, len(error), 2)
  return bytearray(harness.HEADER.pack(magic, status, code, 5, len(body) + len(error)) + body + error)


def test_frame_round_trip():
  data = frame(3, 7, b"v\xff", "é".encode())
  assert execution.frame_length(data + b"more") == len(data)
  assert execution.frame_length(data[:3]) == 0 and execution.frame_length(b"AGX") == -1
  assert execution.parse_frame(data) == (
    {
      "status": "exit",
      "limit": "",
      "exit_code": 7,
      "max_rss_bytes": 5,
      "value_dropped": 1,
      "error_dropped": 2,
    },
    [b"v\xff", "é".encode()],
  )


def test_pool_frames_in_any_pieces_and_nothing_stays_behind():
  data = framing.pack({"a": 1}, [b"xy", bytearray(b"z")]) + framing.pack({"b": "é"}) + framing.pack({}, [b"q" * 999])
  for size in (1, 2, 7, 100, 5000):
    inbox = framing.Inbox()
    found = []
    for i in range(0, len(data), size):
      inbox.feed(data[i : i + size])
      found += inbox.frames()
    assert found == [({"a": 1}, b"xyz"), ({"b": "é"}, b""), ({}, b"q" * 999)]
    assert not any(inbox._buffer)


def test_anything_but_one_exact_frame_is_rejected():
  good = frame(0, 0, b"12", b"")
  assert execution.parse_frame(good) is not None
  bad = [
    bytearray(),
    good[:-1],
    good + b"x",
    frame(4, 0, b"", b""),
    frame(255, 0, b"", b""),
    frame(0, 0, b"", b"", b"AGS0"),
  ]
  assert [execution.parse_frame(data) for data in bad] == [None] * len(bad)
  rng = random.Random(0)
  for _ in range(2000):
    data = bytearray(good)
    data[rng.randrange(4)] ^= 1 + rng.randrange(255)
    assert execution.parse_frame(data) is None


def test_no_frame_can_claim_an_infra_error():
  assert "infra_error" not in harness.STATUSES


def test_remove_tree_takes_depth_modes_and_links(tmp_path: Path):
  outside = tmp_path / "outside"
  outside.mkdir()
  (outside / "kept").write_text("x")
  top = tmp_path / "top"
  top.mkdir()
  (top / "link").symlink_to(outside)
  here = os.getcwd()
  os.chdir(top)
  try:
    for _ in range(150):  # far deeper than a path may be long
      os.mkdir("d" * 50)
      os.chdir("d" * 50)
    os.symlink(outside, "link")
    Path("file").write_text("x")
  finally:
    os.chdir(here)
  os.chmod(top / ("d" * 50), 0)
  scratch.remove_tree(str(top))
  assert not top.exists()
  assert (outside / "kept").read_text() == "x"
