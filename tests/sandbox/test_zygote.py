from __future__ import annotations

import os
import random
from pathlib import Path

from agentic_rl.sandbox import harness, zygote


def frame(status: int, code: int, value: bytes, error: bytes, magic: bytes = harness.MAGIC) -> bytes:
  return harness.HEADER.pack(magic, status, code, len(value), 1, len(error), 2) + value + error


def test_frame_round_trip():
  parsed = zygote._parse_frame(frame(3, 7, b"v\xff", "é".encode()))
  assert parsed == {
    "status": "exit",
    "limit": "",
    "exit_code": 7,
    "value": "v\ufffd",
    "value_dropped": 1,
    "error": "é",
    "error_dropped": 2,
  }


def test_anything_but_one_exact_frame_is_rejected():
  good = frame(0, 0, b"12", b"")
  assert zygote._parse_frame(good) is not None
  bad = [b"", good[:-1], good + b"x", frame(4, 0, b"", b""), frame(255, 0, b"", b""), frame(0, 0, b"", b"", b"AGS0")]
  assert [zygote._parse_frame(data) for data in bad] == [None] * len(bad)
  rng = random.Random(0)
  for _ in range(2000):
    data = bytearray(good)
    data[rng.randrange(4)] ^= 1 + rng.randrange(255)
    assert zygote._parse_frame(bytes(data)) is None


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
  zygote.remove_tree(str(top))
  assert not top.exists()
  assert (outside / "kept").read_text() == "x"
