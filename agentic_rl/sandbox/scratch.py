"""Directories that snippets have written to. Standard library only."""

from __future__ import annotations

import contextlib
import os
import stat
import time

_MOST_FILES_COUNTED = 4096
_MOST_COUNTING_S = 0.1


def disk_bytes(top: str) -> float:
  """Bytes on disk below a directory, links not followed; infinitely many where they cannot be counted soon.

  Files that are open but have no name any more are not seen.
  """
  total = counted = 0
  give_up = time.thread_time() + _MOST_COUNTING_S
  folders = [top]
  while folders:
    if counted > _MOST_FILES_COUNTED or time.thread_time() > give_up:  # long paths take long to walk
      return float("inf")
    try:
      with os.scandir(folders.pop()) as entries:
        for entry in entries:
          counted += 1
          facts = entry.stat(follow_symlinks=False)
          total += max(facts.st_blocks * 512, 1024)
          if entry.is_dir(follow_symlinks=False):
            folders.append(entry.path)
    except FileNotFoundError:  # gone meanwhile
      continue
    except OSError:  # closed to us, or too deep for a path
      return float("inf")
  return total


def remove_tree(top: str) -> None:
  """Removes a directory whatever depth, names and modes its content has; does not follow symbolic links.

  Nested directories are first moved up into `top`, so that no path grows long and nothing recurses.
  """
  moved = 0
  progress = True
  while progress:
    progress = False
    with contextlib.suppress(OSError):
      os.chmod(top, stat.S_IRWXU)
    for path in _entries(top):
      with contextlib.suppress(OSError):
        if os.path.islink(path) or not os.path.isdir(path):
          os.unlink(path)
        else:
          os.chmod(path, stat.S_IRWXU)
          for inner in _entries(path):
            moved += 1
            if os.path.islink(inner) or not os.path.isdir(inner):
              os.unlink(inner)
            else:
              os.chmod(inner, stat.S_IRWXU)  # a directory that changes its parent must be writable
              os.rename(inner, os.path.join(top, f"{time.monotonic_ns()}-{moved}"))
          os.rmdir(path)
        progress = True
  with contextlib.suppress(OSError):
    os.rmdir(top)


def _entries(directory: str) -> list[str]:
  try:
    return [os.path.join(directory, name) for name in os.listdir(directory)]
  except OSError:
    return []
