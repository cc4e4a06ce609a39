"""Checkpoints of a run: everything that it needs to go on as if it had not been stopped."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp

from agentic_rl.errors import UserError
from agentic_rl.policy import PolicyConfig
from agentic_rl.train.learner import LearnerState
from agentic_rl.train.publication import is_disk_full


class Checkpoints:
  """Orbax checkpoints of the learner state and a record of plain values, one a step, written in the background.

  The order of the data and all randomness are functions of the seed and the iteration, so the step number is all that
  has to be remembered of them; the record holds the fingerprints by which a changed data set or model is noticed.
  """

  def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2):
    """Args:
    directory: Where checkpoints lie.
    keep: Newest checkpoints to keep.
    """
    self.directory = pathlib.Path(directory).absolute()
    # Left by a writer that was killed. Orbax would clear it away in a thread that may outlive a run that is refused.
    for half in self.directory.glob("*.orbax-checkpoint-tmp*"):
      shutil.rmtree(half)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False)
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True),
      item_handlers={"state": handler, "record": ocp.JsonCheckpointHandler()},
    )

  def save(self, step: int, state: LearnerState, record: Mapping[str, Any]) -> None:
    """Starts to write a checkpoint; waits only for the one before. Raises `UserError` if the disk is full."""
    try:
      self._manager.save(
        step,
        args=ocp.args.Composite(state=ocp.args.PyTreeSave(state), record=ocp.args.JsonSave(dict(record))),
      )
    except Exception as error:
      raise self._explain(error) from error

  def latest_step(self) -> int | None:
    """Step of the newest complete checkpoint, None if there is none."""
    return self._manager.latest_step()

  def record(self, step: int) -> dict[str, Any]:
    """The record of a checkpoint."""
    return dict(self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"])

  def restore(self, step: int, abstract: LearnerState) -> LearnerState:
    """Restores a learner state into the shapes and shardings of `abstract`, which may be those of another mesh."""
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    args = ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args)
    restored: LearnerState = self._manager.restore(step, args=ocp.args.Composite(state=args))["state"]
    return restored

  def wait(self) -> None:
    """Waits until what was saved is on disk. Raises `UserError` if the disk is full."""
    try:
      self._manager.wait_until_finished()
    except Exception as error:
      raise self._explain(error) from error

  def close(self) -> None:
    self.wait()
    self._manager.close()

  def _explain(self, error: Exception) -> Exception:
    if is_disk_full(error):
      return UserError(
        f"the disk of {self.directory} is full: the checkpoint could not be written; make room and start again "
        f"(the run goes on from the checkpoint before)"
      )
    return error


def check_record(record: Mapping[str, Any], expected: Mapping[str, Any], where: object) -> None:
  """Compares what a checkpoint was written under with what the config says now.

  Raises:
    UserError: Names the first value that differs.
  """
  for name, value in expected.items():
    if name == "policy":
      stored = PolicyConfig.from_dict(record["policy"]).architecture()
      for option, now in PolicyConfig.from_dict(value).architecture().items():
        if stored[option] != now:
          raise UserError(
            f"the checkpoint in {where} was written with policy.{option}={stored[option]!r}, the config says {now!r}; "
            f"use the same config, or another --workdir"
          )
    elif json.loads(json.dumps(record.get(name))) != json.loads(json.dumps(value)):
      raise UserError(
        f"the checkpoint in {where} was written with {name} {record.get(name)!r}, now it is {value!r}; "
        f"use the same data and config, or another --workdir"
      )
