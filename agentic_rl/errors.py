"""The one error that is meant for the person at the command line."""

from __future__ import annotations


class UserError(Exception):
  """Something the user can put right: a contradiction in a config, a missing file, a full disk.

  The message is one clear sentence: what was wrong, where, what to do. Launch scripts print it without a traceback and
  end with exit code 2; every other exception is a fault of the program and keeps its traceback.
  """
