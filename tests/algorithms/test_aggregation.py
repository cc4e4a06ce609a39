from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentic_rl.algorithms import AGGREGATIONS, clipped_policy_loss, token_weights
from agentic_rl.data.packing import Batch, pack_sequences
from agentic_rl.errors import UserError

MODES = sorted(AGGREGATIONS)
NORM = 40.0
VOCABULARY = 11


def by_loops(losses: np.ndarray, mask: np.ndarray, mode: str) -> float:
  """Each formula of the table for one sequence a row, by loops."""
  sums, counts = [], []
  for row, keep in zip(losses, mask, strict=True):
    chosen = [float(x) for x, k in zip(row, keep, strict=True) if k]
    if chosen:
      sums.append(sum(chosen))
      counts.append(len(chosen))
  if mode == "token_mean":
    return sum(sums) / sum(counts)
  if mode == "seq_mean_token_mean":
    return sum(s / c for s, c in zip(sums, counts, strict=True)) / len(sums)
  if mode == "seq_mean_token_sum":
    return sum(sums) / len(sums)
  assert mode == "token_sum_fixed_norm"
  return sum(s / NORM for s in sums) / len(sums)


def one_a_row(mask: np.ndarray) -> np.ndarray:
  return np.broadcast_to(np.arange(len(mask))[:, None], mask.shape)


def test_weights_by_hand() -> None:
  mask = np.array([[1, 1, 0], [0, 1, 0]], bool)
  get = partial(token_weights, mask, one_a_row(mask))
  np.testing.assert_allclose(get("token_mean"), np.array([[1, 1, 0], [0, 1, 0]]) / 3)
  np.testing.assert_allclose(get("seq_mean_token_mean"), [[0.25, 0.25, 0], [0, 0.5, 0]])
  np.testing.assert_allclose(get("seq_mean_token_sum"), [[0.5, 0.5, 0], [0, 0.5, 0]])
  np.testing.assert_allclose(get("token_sum_fixed_norm", fixed_norm=10.0), [[0.05, 0.05, 0], [0, 0.05, 0]])


@pytest.mark.parametrize("mode", MODES)
def test_against_loops(mode: str) -> None:
  rng = np.random.default_rng(0)
  losses, mask = rng.normal(size=(7, 13)), rng.random((7, 13)) < rng.random((7, 1))
  mask[3] = False
  got = np.sum(token_weights(mask, one_a_row(mask), mode, fixed_norm=NORM) * losses)
  assert got == pytest.approx(by_loops(losses, mask, mode), rel=1e-5)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_mean"])
def test_losses_of_one_have_mean_one(rows: int, mode: str) -> None:
  mask = np.random.default_rng(rows).random((rows, 50)) < 0.6
  assert np.sum(token_weights(mask, one_a_row(mask), mode)) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_fully_masked_row_changes_nothing(mode: str) -> None:
  mask = np.random.default_rng(2).random((4, 9)) < 0.5
  more = np.concatenate([mask, np.zeros((2, 9), bool)])
  alone = token_weights(mask, one_a_row(mask), mode, fixed_norm=NORM)
  np.testing.assert_array_equal(token_weights(more, one_a_row(more), mode, fixed_norm=NORM)[:4], alone)
  nothing = token_weights(np.zeros((2, 9), bool), one_a_row(more[:2]), mode, fixed_norm=NORM)
  assert np.all(nothing == 0.0)


@pytest.mark.parametrize("mode", MODES)
def test_a_group_without_signal_enlarges_the_denominator_until_it_is_dropped(mode: str) -> None:
  # Two sequences with signal and two of advantage 0, of two tokens each: kept, they halve the gradient.
  mask = np.ones((4, 2), bool)
  advantages = np.array([1.0, -1.0, 0.0, 0.0])[:, None]
  kept = token_weights(mask, one_a_row(mask), mode, fixed_norm=NORM) * advantages
  dropped = token_weights(mask[:2], one_a_row(mask[:2]), mode, fixed_norm=NORM) * advantages[:2]
  np.testing.assert_allclose(2 * kept[:2], dropped)


def ragged() -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray], np.ndarray]:
  """Eight sequences: ids, masks, behaviour log-probabilities and advantages. One of them has no trained token."""
  rng = np.random.default_rng(5)
  ids, masks, logprobs = [], [], []
  for i in range(8):
    length = int(rng.integers(2, 24))
    ids.append(rng.integers(0, VOCABULARY, length).astype(np.int32))
    mask = rng.random(length) < 0.6
    mask[0] = False
    masks.append(mask & (i != 4))
    logprobs.append(np.where(masks[-1], -np.log(VOCABULARY) + rng.normal(size=length) * 0.1, 0.0).astype(np.float32))
  return ids, masks, logprobs, rng.normal(size=8).astype(np.float32)


def build(bucket: int, row_multiple: int, mode: str) -> Batch:
  ids, masks, logprobs, advantages = ragged()
  batch = pack_sequences(
    ids,
    masks,
    behaviour_logprobs=logprobs,
    advantages=advantages,
    length_buckets=[bucket],
    row_multiple=row_multiple,
  )
  weights = token_weights(batch.loss_mask, batch.sequence_ids, mode, fixed_norm=NORM)
  return Batch(**{**vars(batch), "loss_weights": weights})


def one_row_each(mode: str) -> Batch:
  """The same sequences, unpacked: one a row."""
  ids, masks, logprobs, advantages = ragged()
  rows = [
    pack_sequences(
      ids[i : i + 1],
      masks[i : i + 1],
      behaviour_logprobs=logprobs[i : i + 1],
      advantages=advantages[i : i + 1],
      length_buckets=[24],
      row_multiple=1,
    )
    for i in range(8)
  ]
  fields = {name: np.concatenate([getattr(row, name) for row in rows]) for name in vars(rows[0])}
  fields["sequence_ids"] = np.where(fields["segment_ids"] > 0, np.arange(8, dtype=np.int32)[:, None], -1)
  fields["sequence_ids"] = fields["sequence_ids"].astype(np.int32)
  fields["loss_weights"] = token_weights(fields["loss_mask"], fields["sequence_ids"], mode, fixed_norm=NORM)
  return Batch(**fields)


Arrays = dict[str, jax.Array]


@jax.jit
def gradient(params: jax.Array, batch: Arrays) -> jax.Array:
  """Gradient of a bigram policy `params` [V, V]: its log-probability of token t reads token t - 1."""

  def loss(params: jax.Array) -> jax.Array:
    before = jnp.roll(batch["token_ids"], 1, axis=1)
    logp = jnp.take_along_axis(jax.nn.log_softmax(params[before]), batch["token_ids"][..., None], axis=-1)[..., 0]
    per_token, _ = clipped_policy_loss(
      logp, batch["behaviour_logprobs"], batch["advantages"], batch["loss_mask"], clip_low=0.2, clip_high=0.28
    )
    return jnp.sum(batch["loss_weights"] * per_token)

  return jax.grad(loss)(params)


def arrays(batch: Batch) -> Arrays:
  return {name: jnp.asarray(value) for name, value in vars(batch).items()}


def summed(params: jax.Array, parts: Sequence[Batch]) -> np.ndarray:
  return np.sum([np.asarray(gradient(params, arrays(part))) for part in parts], axis=0)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_does_not_depend_on_the_split(mode: str) -> None:
  params = jnp.asarray(np.random.default_rng(3).normal(size=(VOCABULARY, VOCABULARY)) * 0.1, jnp.float32)
  whole = one_row_each(mode)
  want = summed(params, [whole])
  assert np.max(np.abs(want)) > 1e-3
  check = partial(np.testing.assert_allclose, desired=want, atol=1e-6, rtol=0)
  check(summed(params, [whole.rows(i, i + 1) for i in range(8)]))
  check(summed(params, [whole.rows(0, 4), whole.rows(4, 8)]))
  check(summed(params, [whole.rows(i, i + 2) for i in range(0, 8, 2)]))
  packed = build(64, 2, mode)
  assert packed.shape[0] < 8
  check(summed(params, [packed]))
  check(summed(params, [packed.rows(i, i + 1) for i in range(packed.shape[0])]))


@pytest.mark.parametrize("mode", MODES)
def test_gradient_does_not_depend_on_the_number_of_devices(mode: str) -> None:
  if jax.device_count() < 8:
    pytest.skip("needs eight devices")
  params = jnp.asarray(np.random.default_rng(3).normal(size=(VOCABULARY, VOCABULARY)) * 0.1, jnp.float32)
  whole = one_row_each(mode)
  sharding = NamedSharding(Mesh(np.array(jax.devices()[:8]), ("data",)), PartitionSpec("data"))
  spread = {name: jax.device_put(value, sharding) for name, value in vars(whole).items()}
  np.testing.assert_allclose(gradient(params, spread), summed(params, [whole]), atol=1e-6, rtol=0)


def test_refusals() -> None:
  mask = np.ones((1, 2), bool)
  with pytest.raises(UserError, match="unknown aggregation 'token_maen'; did you mean 'token_mean'"):
    token_weights(mask, one_a_row(mask), "token_maen")
  with pytest.raises(UserError, match="needs a positive fixed_norm"):
    token_weights(mask, one_a_row(mask), "token_sum_fixed_norm")
  with pytest.raises(ValueError, match="1 tokens are marked as trained"):
    token_weights(mask, np.array([[0, -1]]), "token_mean")
