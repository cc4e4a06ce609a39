"""A checkpoint is everything that a run needs to go on, on whatever mesh that is."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from agentic_rl.errors import UserError
from agentic_rl.parallel import MeshShape, make_mesh
from agentic_rl.policy import Policy, PolicyConfig
from agentic_rl.train.checkpoints import Checkpoints, check_record
from agentic_rl.train.learner import Learner, LearnerConfig, LearnerState, supervised_loss
from agentic_rl.train.optimizer import OptimizerConfig

CONFIG = PolicyConfig(vocab_size=32, width=16, layers=2, heads=4, kv_heads=2, head_width=8, mlp_width=32)
RECORD = {"policy": CONFIG.to_dict(), "data": "0123", "tokenizer": "4567", "seed": 3}


@functools.cache
def learner(*shape: int) -> Learner:
  mesh = make_mesh(MeshShape(*shape), jax.devices()[: int(np.prod(shape))])
  return Learner(Policy(CONFIG), OptimizerConfig(1e-2), supervised_loss, LearnerConfig(4), mesh)


def leaves(state: Any) -> list[np.ndarray]:
  return [np.asarray(x) for x in jax.tree.leaves(state)]


@pytest.fixture(scope="module")
def state() -> LearnerState:
  """A state on one device in which no two numbers are alike; nothing is computed for it."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: jax.device_put((1000 * rng.random(x.shape)).astype(x.dtype), x.sharding),
    learner(1, 1, 1).abstract_state(),
  )


@pytest.fixture(scope="module")
def saved(
  state: LearnerState, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Checkpoints, list[np.ndarray]]]:
  checkpoints = Checkpoints(tmp_path_factory.mktemp("checkpoints"))
  checkpoints.save(5, jax.device_put(state, learner(1, 4, 2).state_shardings), RECORD)
  checkpoints.wait()
  yield checkpoints, leaves(state)
  checkpoints.close()


@pytest.mark.parametrize("shape", [(1, 4, 2), (1, 1, 1), (2, 2, 2), (4, 1, 2), (1, 4, 1)])
def test_it_is_restored_bit_for_bit_onto_any_mesh(
  saved: tuple[Checkpoints, list[np.ndarray]], shape: tuple[int, int, int]
) -> None:
  checkpoints, before = saved
  other = learner(*shape)
  state = checkpoints.restore(5, other.abstract_state())
  assert isinstance(state, LearnerState)
  after = leaves(state)
  assert [x.dtype for x in after] == [x.dtype for x in before]
  assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
  assert all(
    x.sharding.is_equivalent_to(s, x.ndim)
    for x, s in zip(jax.tree.leaves(state), jax.tree.leaves(other.state_shardings), strict=True)
  )


def test_the_record_comes_back(saved: tuple[Checkpoints, list[np.ndarray]]) -> None:
  record = saved[0].record(5)
  assert record == RECORD
  check_record(record, RECORD, "here")


def test_the_newest_are_kept_and_found(state: LearnerState, tmp_path: pathlib.Path) -> None:
  checkpoints = Checkpoints(tmp_path, keep=2)
  assert checkpoints.latest_step() is None
  for step in (1, 2, 10):
    checkpoints.save(step, state, {"step": step})
  checkpoints.close()
  again = Checkpoints(tmp_path)
  assert again.latest_step() == 10 and again.record(10) == {"step": 10} and again.record(2) == {"step": 2}
  assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "2"]
  again.close()


def test_what_a_killed_writer_left_is_cleared_away(state: LearnerState, tmp_path: pathlib.Path) -> None:
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(1, state, {})
  checkpoints.close()
  half = tmp_path / "2.orbax-checkpoint-tmp"
  half.mkdir()
  (half / "state").write_text("half")
  again = Checkpoints(tmp_path)
  assert again.latest_step() == 1 and not half.exists()
  again.save(2, state, {})
  again.close()
  assert Checkpoints(tmp_path).latest_step() == 2


def test_a_full_disk_is_a_user_error_and_the_checkpoint_before_is_whole(
  state: LearnerState, small_disk: pathlib.Path
) -> None:
  one = learner(1, 1, 1)
  checkpoints = Checkpoints(small_disk, keep=100)
  with pytest.raises(UserError, match="is full: the checkpoint could not be written") as caught:
    for step in range(1, 30):
      checkpoints.save(step, state, {"step": step})
      checkpoints.wait()
  assert "\n" not in str(caught.value)
  again = Checkpoints(small_disk, keep=100)
  last = again.latest_step()
  assert last is not None and again.record(last) == {"step": last}
  restored = again.restore(last, one.abstract_state())
  assert all(np.array_equal(a, b) for a, b in zip(leaves(state), leaves(restored), strict=True))
  again.close()


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"policy": CONFIG.to_dict() | {"width": 32, "mlp_width": 64}}, "policy.width=16, the config says 32"),
    ({"data": "other"}, "with data '0123', now it is 'other'"),
    ({"tokenizer": "other"}, "with tokenizer '4567', now it is 'other'"),
    ({"seed": 4}, "with seed 3, now it is 4"),
    ({"new": 1}, "with new None, now it is 1"),
  ],
)
def test_a_run_under_other_terms_is_refused(change: dict[str, Any], message: str) -> None:
  with pytest.raises(UserError, match=message) as caught:
    check_record(RECORD, RECORD | change, "runs/x")
  assert "runs/x" in str(caught.value) and "--workdir" in str(caught.value)


def test_how_it_is_computed_may_change_between_two_starts() -> None:
  check_record(RECORD, RECORD | {"policy": dataclasses.replace(CONFIG, remat="layer").to_dict()}, "runs/x")
  check_record({"pair": [1, 2]}, {"pair": (1, 2)}, "runs/x")  # A record went through JSON.
