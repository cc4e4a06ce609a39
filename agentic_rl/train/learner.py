"""The learner: one jitted, donated, sharded step from a packed batch to new weights.

A batch is cut into micro-batches of `microbatch_rows` rows. Their gradients are summed in a loop on the device, with
token weights that were computed for the whole batch beforehand: the result does not depend on how the batch was cut.
The number of micro-batches is an argument of the compiled program, so one program per row length serves every batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentic_rl.algorithms import POLICY_LOSSES, nll_loss
from agentic_rl.data import Batch
from agentic_rl.parallel import BATCH_AXES, constrain, partition_spec, parts, shardings
from agentic_rl.policy import Params, Policy, token_logprobs
from agentic_rl.train.optimizer import OptimizerConfig

Arrays = Mapping[str, jax.Array]

_FIELDS = {
  "token_ids": np.int32,
  "positions": np.int32,
  "segment_ids": np.int32,
  "loss_mask": np.bool_,
  "behaviour_logprobs": np.float32,
  "advantages": np.float32,
  "loss_weights": np.float32,
}
"""What of a `Batch` the step reads, and its types."""


class LearnerState(NamedTuple):
  """What a step changes: parameters (float32), optimizer state, and the number of optimizer steps taken."""

  params: Params
  opt_state: Any
  step: jax.Array


Metrics = dict[str, jax.Array]
"""Numbers of one step by name: scalar arrays that are still on the device."""

TokenLoss = Callable[[jax.Array, Arrays], tuple[jax.Array, dict[str, jax.Array]]]
"""`(logp [B,T], micro-batch) -> (loss of each token [B,T], statistics of each token [B,T])`."""


def supervised_loss(logp: jax.Array, micro: Arrays) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Negative log-likelihood of the trained tokens."""
  return nll_loss(logp, micro["loss_mask"]), {}


def policy_loss(name: str = "clipped_policy_loss", **options: Any) -> TokenLoss:
  """A policy loss of `agentic_rl.algorithms` by name, with its options bound."""
  loss = functools.partial(POLICY_LOSSES[name], **options)

  def token_loss(logp: jax.Array, micro: Arrays) -> tuple[jax.Array, dict[str, jax.Array]]:
    return loss(logp, micro["behaviour_logprobs"], micro["advantages"], micro["loss_mask"])

  return token_loss


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
  """How a step is computed.

  Attributes:
    microbatch_rows: Rows whose activations are in memory at once; a multiple of the devices along data x fsdp x expert.
    logprob_chunk: Tokens whose logits are in memory at once, on each of the devices along rows and context.
    temperature: Softmax temperature of the policy, the one that rollouts are sampled with.
  """

  microbatch_rows: int = 8
  logprob_chunk: int = 1024
  temperature: float = 1.0

  def __post_init__(self) -> None:
    if self.microbatch_rows < 1 or self.logprob_chunk < 1:
      raise ValueError(
        f"microbatch_rows ({self.microbatch_rows}) and logprob_chunk ({self.logprob_chunk}) must be at least 1"
      )
    if not self.temperature > 0:
      raise ValueError(f"the temperature of a trained policy must be above 0, got {self.temperature}")


class Learner:
  """Owns the compiled step of one policy on one mesh; the state is passed in and out."""

  def __init__(
    self,
    policy: Policy,
    optimizer: OptimizerConfig,
    token_loss: TokenLoss,
    config: LearnerConfig,
    mesh: Mesh,
  ):
    """Prepares shardings and compiled functions.

    Raises:
      ValueError: If the mesh does not divide the parameters or the rows of a micro-batch.
    """
    self.policy, self.mesh, self.config = policy, mesh, config
    self._token_loss = token_loss
    self._rate = optimizer.rate()
    self._optimizer = optimizer.build()
    self._parts, self._pieces = parts(mesh, "batch"), parts(mesh, "length")
    if config.microbatch_rows % self._parts:
      raise ValueError(
        f"microbatch_rows ({config.microbatch_rows}) must be a multiple of the {self._parts} devices along "
        f"{' x '.join(BATCH_AXES)}"
      )
    params = policy.abstract_params()
    where = shardings(mesh, policy.logical_axes(), params)
    replicated = NamedSharding(mesh, PartitionSpec())
    abstract_opt = jax.eval_shape(self._optimizer.init, params)
    opt_where = optax.tree.map_params(
      self._optimizer, lambda _, s: s, abstract_opt, where, transform_non_params=lambda _: replicated
    )
    self.state_shardings = LearnerState(where, opt_where, replicated)  # type: ignore[arg-type]  # a tree of shardings
    self._rows = NamedSharding(mesh, PartitionSpec(None, *partition_spec(("batch", "length"))))
    self._init = jax.jit(self._init_fn, out_shardings=self.state_shardings)
    self._from_params = jax.jit(self._from_params_fn, out_shardings=self.state_shardings)
    self._step: Any = jax.jit(self._step_fn, donate_argnums=0, out_shardings=(self.state_shardings, replicated))
    self._score: Any = jax.jit(self._score_fn, out_shardings=replicated)

  # ---- state ----

  def init(self, key: jax.Array) -> LearnerState:
    """A fresh state, built in place on the mesh."""
    with jax.set_mesh(self.mesh):
      return self._init(key)

  def from_params(self, params: Params) -> LearnerState:
    """A state with given parameters and a fresh optimizer."""
    with jax.set_mesh(self.mesh):
      return self._from_params(jax.device_put(params, self.state_shardings.params))

  def abstract_state(self) -> LearnerState:
    """Shapes, dtypes and shardings of the state: what a checkpoint is restored into."""
    shapes = jax.eval_shape(self._init_fn, jax.ShapeDtypeStruct((), jax.random.key(0).dtype))
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.state_shardings)

  def _init_fn(self, key: jax.Array) -> LearnerState:
    return self._from_params_fn(self.policy.init(key))

  def _from_params_fn(self, params: Params) -> LearnerState:
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    return LearnerState(params, self._optimizer.init(params), jnp.int32(0))

  # ---- the step ----

  def update(self, state: LearnerState, batch: Batch, *, max_rows: int | None = None) -> tuple[LearnerState, Metrics]:
    """One optimizer step on a packed batch. `state` is donated: use the one that is returned.

    Args:
      state: The learner state.
      batch: Rows, a multiple of `microbatch_rows` of them.
      max_rows: Most rows that any batch of this row length will have; all batches are padded to it, so that one program
        serves them. Default: the rows of this batch.

    Returns:
      The new state, and metrics: `loss`, `entropy` (nats a token), `grad_norm`, `learning_rate`, and the mean over
      trained tokens of the loss's statistics.
    """
    arrays, micro_batches = self._micro_batches(batch, max_rows)
    with jax.set_mesh(self.mesh):
      return self._step(state, arrays, np.int32(micro_batches))

  def lower(self, rows: int, length: int) -> jax.stages.Lowered:
    """The program of `update` for batches of `rows` rows of `length` tokens, lowered without arrays.

    Serves ahead-of-time compilation: the devices of the mesh may be those of a topology that is only described.

    Raises:
      ValueError: If `rows` is not a multiple of `microbatch_rows`.
    """
    size = self.config.microbatch_rows
    if rows % size:
      raise ValueError(f"{rows} rows are not a multiple of microbatch_rows ({size})")
    shape = (rows // size, size, length)
    arrays = {n: jax.ShapeDtypeStruct(shape, dtype, sharding=self._rows) for n, dtype in _FIELDS.items()}
    state, count = self.abstract_state(), jax.ShapeDtypeStruct((), jnp.int32)
    with jax.set_mesh(self.mesh):
      return self._step.lower(state, arrays, count)

  def score(self, params: Params, batch: Batch, *, max_rows: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and entropies of a batch's tokens under the policy, float32[rows, T], 0 where not trained."""
    arrays, micro_batches = self._micro_batches(batch, max_rows)
    with jax.set_mesh(self.mesh):
      logp, entropy = self._score(params, arrays, np.int32(micro_batches))
    rows, length = batch.shape
    return np.asarray(logp).reshape(-1, length)[:rows], np.asarray(entropy).reshape(-1, length)[:rows]

  def compile_count(self) -> int:
    """Programs compiled for `update` and `score` so far."""
    return int(self._step._cache_size() + self._score._cache_size())

  def _micro_batches(self, batch: Batch, max_rows: int | None) -> tuple[dict[str, jax.Array], int]:
    rows, length = batch.shape
    size = self.config.microbatch_rows
    if length % self._pieces:
      raise ValueError(f"rows of {length} tokens are not divided by the {self._pieces} devices along context")
    if rows % size:
      raise ValueError(f"a batch of {rows} rows is not a multiple of microbatch_rows ({size})")
    most = -(-max(rows, max_rows or 0) // size)

    def place(x: np.ndarray) -> jax.Array:
      padded = np.zeros((most * size, length), x.dtype)
      padded[:rows] = x
      return jax.device_put(padded.reshape(most, size, length), self._rows)

    return {name: place(getattr(batch, name)) for name in _FIELDS}, rows // size

  def _logprobs(self, params: Params, micro: Arrays) -> tuple[jax.Array, jax.Array]:
    """[B,T] log-probability and entropy of the policy where each token was sampled."""
    hidden = self.policy.hidden(params, micro["token_ids"], micro["positions"], micro["segment_ids"])
    b, t, d = hidden.shape
    # Token t is predicted by position t - 1 of its segment. Position 0 is never trained: it gets any value.
    previous = jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1)
    # The head is gathered along D here, once, as the embedding is: otherwise every chunk would gather it again.
    head = constrain(self.policy.unembedding(params), "vocab", None)
    chunked = functools.partial(token_logprobs, temperature=self.config.temperature, chunk=self.config.logprob_chunk)
    if self._parts * self._pieces == 1:
      logp, entropy = chunked(previous.reshape(b * t, d), head, micro["token_ids"].reshape(-1))
      return logp.reshape(b, t), entropy.reshape(b, t)
    # Each device goes through its own tokens: a chunk cut from all of them would lie on one device, and the others
    # would repeat its work.
    rows, pieces = self._parts, self._pieces

    def own(x: jax.Array) -> jax.Array:
      """[B,T,...] -> [devices, tokens of a device, ...]."""
      split = x.reshape(rows, b // rows, pieces, t // pieces, *x.shape[2:]).swapaxes(1, 2)
      return constrain(split.reshape(rows * pieces, -1, *x.shape[2:]), "tokens", *[None] * (x.ndim - 1))

    values = jax.vmap(chunked, in_axes=(0, None, 0))(own(previous), head, own(micro["token_ids"]))
    logp, entropy = (v.reshape(rows, pieces, b // rows, t // pieces).swapaxes(1, 2) for v in values)
    return logp.reshape(b, t), entropy.reshape(b, t)

  def _loss_fn(self, params: Params, micro: Arrays) -> tuple[jax.Array, dict[str, jax.Array]]:
    logp, entropy = self._logprobs(params, micro)
    loss, statistics = self._token_loss(logp, micro)
    mask = micro["loss_mask"]
    total = jnp.sum(jnp.where(mask, loss * micro["loss_weights"], 0.0))
    sums = {name: jnp.sum(jnp.where(mask, value, 0.0)) for name, value in {**statistics, "entropy": entropy}.items()}
    return total, jax.lax.stop_gradient(sums)

  def _step_fn(self, state: LearnerState, arrays: Arrays, micro_batches: jax.Array) -> tuple[LearnerState, Metrics]:
    value_and_grad = jax.value_and_grad(self._loss_fn, has_aux=True)

    def micro(i: jax.Array) -> dict[str, jax.Array]:
      return {name: jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for name, x in arrays.items()}

    shapes = jax.eval_shape(value_and_grad, state.params, micro(jnp.int32(0)))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def add(i: jax.Array, total: Any) -> Any:
      return jax.tree.map(jnp.add, total, value_and_grad(state.params, micro(i)))

    (loss, sums), grads = jax.lax.fori_loop(0, micro_batches, add, zeros)
    tokens = jnp.maximum(jnp.sum(arrays["loss_mask"]), 1)
    updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
    metrics = {name: value / tokens for name, value in sums.items()}
    metrics |= {
      "loss": loss,
      "grad_norm": optax.tree.norm(grads),
      "learning_rate": jnp.asarray(self._rate(state.step), jnp.float32),
    }
    return LearnerState(optax.apply_updates(state.params, updates), opt_state, state.step + 1), metrics

  def _score_fn(self, params: Params, arrays: Arrays, micro_batches: jax.Array) -> tuple[jax.Array, jax.Array]:
    def fill(i: jax.Array, out: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
      micro = {name: jax.lax.dynamic_index_in_dim(x, i, keepdims=False) for name, x in arrays.items()}
      values = self._logprobs(params, micro)
      masked = (jnp.where(micro["loss_mask"], v, 0.0) for v in values)
      return tuple(jax.lax.dynamic_update_index_in_dim(o, v, i, 0) for o, v in zip(out, masked, strict=True))

    zeros = jnp.zeros(arrays["token_ids"].shape, jnp.float32)
    return jax.lax.fori_loop(0, micro_batches, fill, (zeros, zeros))
