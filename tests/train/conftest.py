"""What tests of the files of a run share."""

from __future__ import annotations

import gc
import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
  """A disk of 256 KiB."""
  disk = tmp_path / "disk"
  disk.mkdir()
  command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)]
  if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
    pytest.skip("needs the right to mount a file system")
  yield disk
  gc.collect()  # futures of failed writes complain as they are freed: here, not at the end of the run
  subprocess.run(["umount", "-l", str(disk)], check=True)
