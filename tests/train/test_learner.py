from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from agentic_rl.algorithms.aggregation import token_weights
from agentic_rl.data import Batch, pack_sequences
from agentic_rl.errors import UserError
from agentic_rl.parallel import MeshShape, make_mesh
from agentic_rl.policy import Params, Policy, PolicyConfig
from agentic_rl.train import sft
from agentic_rl.train.learner import Learner, LearnerConfig, LearnerState, TokenLoss, policy_loss, supervised_loss
from agentic_rl.train.optimizer import OptimizerConfig

VOCABULARY = 1012  # towers over all other sizes: what is as large as all logits is all logits
TINY = PolicyConfig(vocab_size=VOCABULARY, width=16, layers=2, heads=4, kv_heads=2, head_width=4, mlp_width=16)
# A large epsilon keeps Adam's step proportional to the gradient: with a small one the sign of float noise would count.
OPTIMIZER = OptimizerConfig(learning_rate=0.05, eps=0.1, weight_decay=0.1, clip_norm=1e9)
LENGTH = 16
ROWS = 8
CHUNK = 16
MOST = {"max_rows": 2 * ROWS}  # of all batches, so that each learner compiles one program


def one_device() -> jax.sharding.Mesh:
  return make_mesh(MeshShape(), jax.devices()[:1])


def clipped() -> TokenLoss:
  return policy_loss(clip_low=0.2, clip_high=0.28)


@functools.cache
def learner(microbatch_rows: int = ROWS, shape: tuple[int, ...] | None = None) -> Learner:
  """A learner of the tiny policy; cached, so that its programs are compiled once for the whole file."""
  mesh = one_device() if shape is None else make_mesh(MeshShape(*shape))
  return Learner(Policy(TINY), OPTIMIZER, clipped(), LearnerConfig(microbatch_rows, CHUNK), mesh)


@functools.cache
def params() -> Params:
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: (0.4 * rng.normal(size=x.shape)).astype(np.float32), Policy(TINY).abstract_params())


def sequences(count: int, seed: int = 0, longest: int = LENGTH) -> dict[str, list[np.ndarray]]:
  """Ragged sequences of policy and tool tokens, with behaviour log-probabilities and an advantage for each token."""
  rng = np.random.default_rng(seed)
  lengths = rng.integers(2, longest + 1, count)
  masks = [rng.random(n) < 0.6 for n in lengths]
  for mask in masks:
    mask[0], mask[-1] = False, True
  return {
    "token_ids": [rng.integers(0, TINY.vocab_size, n).astype(np.int32) for n in lengths],
    "loss_mask": masks,
    "behaviour_logprobs": [np.where(m, rng.normal(-7, 1, len(m)), 0).astype(np.float32) for m in masks],
    "advantages": [np.where(m, rng.normal(size=len(m)), 0).astype(np.float32) for m in masks],
  }


def packed(data: dict[str, list[np.ndarray]], length: int = LENGTH, row_multiple: int = ROWS) -> Batch:
  return pack_sequences(**data, length_buckets=(length,), row_multiple=row_multiple)


def one_to_a_row(data: dict[str, list[np.ndarray]], order: list[int]) -> Batch:
  """Not packed: a row for each sequence, in any order, filled up to `ROWS`."""
  rows = -(-len(order) // ROWS) * ROWS
  fields = {name: np.zeros((rows, LENGTH), dtype) for name, dtype in learner_dtypes().items()}
  fields["sequence_ids"][:] = -1
  for row, index in enumerate(order):
    n = len(data["token_ids"][index])
    for name in ("token_ids", "loss_mask", "behaviour_logprobs", "advantages"):
      fields[name][row, :n] = data[name][index]
    fields["positions"][row, :n], fields["segment_ids"][row, :n] = np.arange(n), 1
    fields["sequence_ids"][row, :n] = index
  return Batch(**fields)


def learner_dtypes() -> dict[str, type]:
  whole = dict.fromkeys(("token_ids", "positions", "segment_ids", "sequence_ids"), np.int32)
  return (
    whole | {"loss_mask": np.bool_} | dict.fromkeys(("behaviour_logprobs", "advantages", "loss_weights"), np.float32)
  )


def weighted(batch: Batch, mode: str = "token_mean") -> Batch:
  weights = token_weights(batch.loss_mask, batch.sequence_ids, mode, fixed_norm=10.0)
  return dataclasses.replace(batch, loss_weights=weights)


def steps(which: Learner, batch: Batch, count: int = 1) -> tuple[LearnerState, dict[str, float]]:
  state = which.from_params(params())
  for _ in range(count):
    state, metrics = which.update(state, batch, **MOST)
  return jax.device_get(state), {name: float(x) for name, x in metrics.items()}


def assert_close(a: Any, b: Any, atol: float = 1e-5) -> None:
  for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_allclose(x, y, atol=atol, rtol=0, err_msg=jax.tree_util.keystr(path))


def assert_equal(a: Any, b: Any) -> None:
  for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
    np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


# ---- the step against a plain one ----


@jax.jit
def plain_sequence(p: Params, ids: jax.Array, weights: jax.Array, temperature: float) -> tuple[jax.Array, ...]:
  """One sequence alone, all of its logits at once; padded on the right, where nothing is looked at.

  Returns:
    [T - 1] log-probabilities of tokens 1, 2, ..., [T - 1] entropies, and the gradient of sum(weights * logp).
  """

  def logp_of(p: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    policy, n = Policy(TINY), len(ids)
    hidden = policy.hidden(p, ids[None], jnp.arange(n)[None], jnp.ones((1, n), jnp.int32))[0]
    distribution = jax.nn.log_softmax(hidden[:-1] @ policy.unembedding(p).T / temperature, axis=-1)
    logp = jnp.take_along_axis(distribution, ids[1:, None], axis=-1)[:, 0]
    return jnp.sum(weights * logp), (logp, -(jnp.exp(distribution) * distribution).sum(-1))

  gradient, (logp, entropy) = jax.grad(logp_of, has_aux=True)(p)
  return logp, entropy, gradient


def plain(ids: np.ndarray, weights: np.ndarray | None = None, temperature: float = 1.0) -> tuple[Any, ...]:
  """`plain_sequence` of unpadded arrays; [T] values, 0 for the first token."""
  n = len(ids)
  padded = np.zeros(LENGTH - 1, np.float32)
  if weights is not None:
    padded[: n - 1] = weights[1:]
  filled = np.pad(ids, (0, LENGTH - n))
  logp, entropy, gradient = jax.device_get(plain_sequence(params(), filled, padded, temperature))
  return np.pad(logp[: n - 1], (1, 0)), np.pad(entropy[: n - 1], (1, 0)), gradient


def test_step_equals_a_plain_one():
  """No packing, no shift of whole rows, no chunks, no micro-batches; losses and their derivatives written out."""
  data = sequences(5, seed=5)
  trained = sum(int(m.sum()) for m in data["loss_mask"])
  total = {"loss": 0.0, "entropy": 0.0, "ratio": 0.0, "clip_low": 0.0, "clip_high": 0.0}
  gradients = []
  for index, ids in enumerate(data["token_ids"]):
    mask, advantage = data["loss_mask"][index], data["advantages"][index]
    logp, entropy, _ = plain(ids)
    ratio = np.exp(logp - data["behaviour_logprobs"][index])
    low, high = (advantage < 0) & (ratio < 0.8), (advantage > 0) & (ratio > 1.28)
    loss = -advantage * np.where(low, 0.8, np.where(high, 1.28, ratio))
    # d(-A ratio)/d logp = -A ratio, and 0 where it is clipped.
    weights = np.where(mask & ~low & ~high, -advantage * ratio, 0) / trained
    gradients.append(plain(ids, weights)[2])
    values = {"loss": loss, "entropy": entropy, "ratio": ratio, "clip_low": low, "clip_high": high}
    for name, value in values.items():
      total[name] += float(value[mask].sum()) / trained
  assert total["clip_low"] > 0 and total["clip_high"] > 0
  gradient = jax.tree.map(lambda *g: sum(g), *gradients)

  @jax.jit
  def plain_update(gradient: Params, p: Params) -> tuple[jax.Array, Params]:
    optimizer = OPTIMIZER.build()
    updates, _ = optimizer.update(gradient, optimizer.init(p), p)
    return optax.tree.norm(gradient), optax.apply_updates(p, updates)

  norm, want = jax.device_get(plain_update(gradient, params()))
  state, metrics = steps(learner(), packed(data))
  for name, value in total.items():
    assert metrics[name] == pytest.approx(value, abs=1e-5), name
  assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
  assert metrics["learning_rate"] == pytest.approx(0.05)
  assert int(state.step) == 1
  assert_close(state.params, want)


def test_supervised_loss_by_hand():
  logp, mask = np.array([[-1.0, -2.0, np.nan]], np.float32), np.array([[True, True, False]])
  loss, statistics = supervised_loss(logp, {"loss_mask": mask})
  np.testing.assert_array_equal(loss, [[1.0, 2.0, 0.0]])
  assert statistics == {}


# ---- how a batch is cut, packed and sharded does not matter ----

MODES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_fixed_norm")


@pytest.mark.parametrize("mode", MODES)
def test_packing_and_micro_batches_change_no_gradient(mode: str):
  """One batch of 8 rows, 4 micro-batches of 2, and single sequences in another order make the same step."""
  data = sequences(8)
  batch = weighted(packed(data), mode)
  alone = weighted(one_to_a_row(data, [3, 1, 7, 0, 2, 6, 5, 4]), mode)
  assert (batch.segment_ids > 1).any() and not (alone.segment_ids > 1).any()
  want_state, want = steps(learner(), batch)
  assert want["grad_norm"] > 1e-2
  for which, other in ((learner(microbatch_rows=2), batch), (learner(), alone)):
    state, metrics = steps(which, other)
    assert metrics == pytest.approx(want, rel=1e-4, abs=2e-6)
    assert_close(state.params, want_state.params, atol=2e-6)


def every_mesh() -> list[Any]:
  """Every way to lay eight devices out as data x fsdp x tensor x context; a few of them in the fast tests."""
  fast = {(1, 8, 1, 1), (2, 2, 2, 1), (1, 2, 2, 2), (1, 1, 1, 8)}
  shapes = [s for s in itertools.product((1, 2, 4, 8), repeat=4) if np.prod(s) == 8 and TINY.kv_heads % s[2] == 0]
  return [pytest.param(s, marks=() if s in fast else pytest.mark.slow) for s in shapes]


@pytest.mark.parametrize("shape", every_mesh())
def test_eight_devices_do_what_one_does(shape: tuple[int, ...]):
  batch = weighted(packed(sequences(16)))
  want_state, want = steps(learner(), batch, count=3)
  state, metrics = steps(learner(shape=shape), batch, count=3)
  assert metrics == pytest.approx(want, rel=1e-4, abs=1e-5)
  assert_close(state, want_state, atol=1e-5)
  start = params()
  moved = max(
    float(np.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (start, want_state.params)), strict=True)
  )
  assert moved > 1e-3, "three steps that move nothing would prove nothing"


def test_state_lies_where_it_should():
  which = learner(shape=(2, 2, 2))
  state = which.from_params(params())
  assert state.params["embed"]["table"].sharding.shard_shape((1012, 16)) == (506, 8)
  abstract = which.abstract_state()
  assert jax.tree.structure(abstract) == jax.tree.structure(state)
  for x, a in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
    assert (x.shape, x.dtype) == (a.shape, a.dtype) and x.sharding.is_equivalent_to(a.sharding, x.ndim)
  moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == (1012, 16)]
  assert len(moments) == 2 and all(m.sharding.shard_shape(m.shape) == (506, 8) for m in moments)


def test_parameters_are_float32_in_the_learner():
  half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params())
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(learner().from_params(half).params))


# ---- what must not matter ----


def test_masked_tokens_and_padding_affect_nothing():
  """Not their log-probabilities, advantages and weights, be they NaN, nor the ids that fill the padding."""
  batch = weighted(packed(sequences(6)))
  hidden, padding = ~batch.loss_mask, batch.segment_ids == 0
  assert padding.any() and (hidden & ~padding).any()
  noise = {name: np.where(hidden, np.nan, getattr(batch, name)) for name in ("behaviour_logprobs", "advantages")}
  noise["loss_weights"] = np.where(hidden, np.inf, batch.loss_weights)
  noisy = dataclasses.replace(
    batch,
    token_ids=np.where(padding, 9, batch.token_ids).astype(np.int32),
    **{name: x.astype(np.float32) for name, x in noise.items()},
  )
  want_state, want = steps(learner(), batch)
  state, metrics = steps(learner(), noisy)
  assert metrics == want
  assert_equal(state, want_state)


def test_a_batch_without_trained_tokens_stays_finite():
  batch = packed(sequences(4))
  batch = weighted(dataclasses.replace(batch, loss_mask=np.zeros_like(batch.loss_mask)))
  state, metrics = steps(learner(), batch)
  assert metrics["loss"] == metrics["grad_norm"] == metrics["entropy"] == 0.0
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


# ---- log-probabilities ----


def test_first_step_has_ratio_one():
  """Scored and updated with the same weights, every ratio is 1 within float noise, and the loss is the mean of -A."""
  which, batch = learner(), weighted(packed(sequences(8)))
  logp, _ = which.score(params(), batch)
  again, _ = which.score(params(), batch)
  np.testing.assert_array_equal(logp, again, "the same program gives the same bits")
  other, _ = learner(microbatch_rows=2).score(params(), batch)
  assert np.abs(other - logp).max() < 1e-5, "the noise floor between shapes"
  assert logp[batch.loss_mask].max() < 0 and not logp[~batch.loss_mask].any()

  _, metrics = steps(which, dataclasses.replace(batch, behaviour_logprobs=logp))
  assert metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
  assert metrics["kl_behaviour"] == pytest.approx(0.0, abs=1e-7)
  assert metrics["clip_low"] == metrics["clip_high"] == 0.0
  mean = float(batch.advantages[batch.loss_mask].mean())
  assert metrics["loss"] == pytest.approx(-mean, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_temperature_applies_to_the_learner(temperature: float):
  data = sequences(4)
  batch = packed(data)
  config = LearnerConfig(ROWS, CHUNK, temperature)
  logp, entropy = Learner(Policy(TINY), OPTIMIZER, clipped(), config, one_device()).score(params(), batch)
  for index, ids in enumerate(data["token_ids"]):
    own, mask = batch.sequence_ids == index, data["loss_mask"][index]
    want_logp, want_entropy, _ = plain(ids, temperature=temperature)
    np.testing.assert_allclose(logp[own], np.where(mask, want_logp, 0), atol=1e-5)
    np.testing.assert_allclose(entropy[own], np.where(mask, want_entropy, 0), atol=1e-5)


def test_supervised_stage_ignores_the_rollout_temperature(
  repository: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
  class Made(Exception):
    pass

  def record(self: Learner, *args: Any) -> None:
    raise Made(args[2], args[3].temperature)

  spec = importlib.util.spec_from_file_location("nano", repository / "configs" / "zerotir_nano.py")
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = module.get_config()
  config.rollout.temperature = 0.6
  monkeypatch.setattr(Learner, "__init__", record)
  with pytest.raises(Made) as made:
    sft.train(config, tmp_path)
  assert made.value.args == (supervised_loss, 1.0)


# ---- programs and memory ----


def test_one_program_for_each_row_length():
  """Twenty ragged batches of two row lengths: two programs."""
  which = learner(microbatch_rows=2)
  state, before = which.from_params(params()), which.compile_count()
  seen = set()
  for i in range(20):
    length = 8 if i % 2 else LENGTH
    batch = packed(sequences(1 + i % 7, seed=i, longest=length), length, row_multiple=2)
    seen.add(batch.shape)
    state, _ = which.update(state, batch, **MOST)
  assert len(seen) > 4
  assert 1 <= which.compile_count() - before <= 2  # the longer one may have been compiled by a test before
  assert int(state.step) == 20


def test_the_state_is_donated():
  which = learner()
  old = which.from_params(params())
  leaves = jax.tree.leaves(old)
  which.update(old, weighted(packed(sequences(8))), **MOST)
  assert all(x.is_deleted() for x in leaves)


def shapes(jaxpr: Any) -> Iterator[tuple[int, ...]]:
  """Shapes of all values of a jaxpr, those of inner jaxprs included."""
  for equation in jaxpr.eqns:
    for value in (*equation.invars, *equation.outvars):
      yield value.aval.shape
    for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
      inner = getattr(parameter, "jaxpr", parameter)
      if hasattr(inner, "eqns"):
        yield from shapes(inner)


def program(which: Learner) -> tuple[Any, Any]:
  """The step that all tests of this learner run: (what is traced, what is compiled)."""
  arrays, count = which._micro_batches(packed(sequences(8)), **MOST)
  with jax.set_mesh(which.mesh):
    traced = which._step.trace(which.abstract_state(), arrays, np.int32(count))
    return traced.jaxpr, traced.lower().compile()


def test_no_array_of_all_logits():
  """No [B,T,V] in the program, and no room for it in the memory of the compiled one."""
  jaxpr, compiled = program(learner())
  with_vocabulary = [s for s in shapes(jaxpr.jaxpr) if VOCABULARY in s]
  assert (CHUNK, VOCABULARY) in with_vocabulary, "the walk sees the logits of a chunk"
  assert max(int(np.prod(s)) for s in with_vocabulary) == VOCABULARY * max(CHUNK, TINY.width)
  # In units of all logits: 1.4 measured, mostly gradients; 5.1 where they are computed at once.
  assert compiled.memory_analysis().temp_size_in_bytes < 2 * 4 * ROWS * LENGTH * VOCABULARY


def test_each_device_computes_its_own_logits():
  """On eight devices no logits travel, none are computed twice, and a chunk is a chunk of each device's rows.

  The table that is both embedding and head is gathered once.
  """
  jaxpr, compiled = program(learner(shape=(1, 8, 1)))
  assert (8, CHUNK, VOCABULARY) in set(shapes(jaxpr.jaxpr)), "one chunk of each device's rows at a time"
  text = compiled.as_text()
  logits = rf"\[(?:1,)?{CHUNK},{VOCABULARY}\]"
  assert re.search(logits, text), "the search sees the logits of one device"
  assert not re.findall(rf"= [^=]*{logits}[^=]* (?:all-reduce|all-gather|all-to-all)(?:-start)?\(", text)
  assert len(re.findall(rf"= f32\[{VOCABULARY},{TINY.width}\]\S* all-gather(?:-start)?\(", text)) == 1
  largest = max(
    int(np.prod([int(n) for n in dimensions.split(",")]))
    for dimensions in re.findall(r"\b(?:f32|bf16)\[([0-9,]+)\]", text)
    if str(VOCABULARY) in dimensions.split(",")
  )
  assert largest <= VOCABULARY * max(CHUNK, TINY.width)


def test_the_lowered_program_is_that_of_an_update():
  """Lowered without arrays, it takes the arrays of an update and returns the same numbers."""
  which = learner(shape=(1, 8, 1))
  batch = weighted(packed(sequences(8)))
  arrays, count = which._micro_batches(batch, **MOST)
  compiled = which.lower(2 * ROWS, LENGTH).compile()
  _, metrics = compiled(which.from_params(params()), arrays, jnp.int32(count))
  _, expected = which.update(which.from_params(params()), batch, **MOST)
  assert {k: float(v) for k, v in metrics.items()} == {k: float(v) for k, v in expected.items()}
  with pytest.raises(ValueError, match=r"12 rows are not a multiple of microbatch_rows \(8\)"):
    which.lower(12, LENGTH)


# ---- refusals ----


def test_what_cannot_be_divided_is_refused():
  policy = Policy(TINY)
  with pytest.raises(
    ValueError, match=r"microbatch_rows \(4\) must be a multiple of the 8 devices along data x fsdp x expert"
  ):
    Learner(policy, OPTIMIZER, supervised_loss, LearnerConfig(microbatch_rows=4), make_mesh(MeshShape()))
  with pytest.raises(ValueError, match="'kv_heads' of size 2 of parameter layers/attention/k"):
    Learner(policy, OPTIMIZER, supervised_loss, LearnerConfig(), make_mesh(MeshShape(1, 2, 4)))
  with pytest.raises(ValueError, match=r"a batch of 3 rows is not a multiple of microbatch_rows \(8\)"):
    learner().score(params(), packed(sequences(8), row_multiple=1).rows(0, 3))


@pytest.mark.parametrize("bad", [{"temperature": 0.0}, {"microbatch_rows": 0}, {"logprob_chunk": 0}])
def test_impossible_settings_are_refused(bad: dict[str, Any]):
  with pytest.raises(ValueError, match=next(iter(bad))):
    LearnerConfig(**bad)


def test_an_unknown_loss_is_refused():
  with pytest.raises(UserError, match="did you mean 'clipped_policy_loss'"):
    policy_loss("clipped_loss")
