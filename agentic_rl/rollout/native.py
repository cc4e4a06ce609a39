"""The native engine: batched generation with a key-value cache in JAX, in process.

Continuous batching over a fixed number of slots. A slot keeps the keys and values of its session between turns, so
that the next turn feeds only what is new; a short piece of new text, such as a tool's output, is fed by the very steps
that decode for other sequences. One thread owns the device; requests reach it through a queue and `asyncio` futures
carry completions back, so that hundreds of episodes wait without blocking each other.

A completion depends on its seed, its ids and the weights: each token's random number is a function of the request's
seed and the token's position. What else is in flight decides the batch size, and with it the last bits of the logits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from agentic_rl.episode import Completion, Finish, FinishKind, Publication
from agentic_rl.parallel import BATCH_AXES, parts, shardings
from agentic_rl.policy import Params, Policy
from agentic_rl.policy.decoder import KeyValueCache
from agentic_rl.rollout import sampler
from agentic_rl.rollout.engine import Sampling
from agentic_rl.rollout.stops import StopSet, StopTable
from agentic_rl.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class NativeConfig:
  """How much the engine holds and how it batches.

  Attributes:
    slots: S, sequences in flight or cached at once.
    max_length: Most tokens of a sequence, prompt included.
    decode_steps: Tokens decoded between two looks at the queue.
    gather_s: Seconds to wait for more requests while fewer sequences generate than wait for a tool: a step costs much
      the same for few rows as for many, and the tool needs the processor.
    ride_along: New tokens up to this many are fed one a decode step, beside the rows that generate; more are prefilled.
    prefill_widths: Widths to which prefilled tokens are padded; each is compiled once for each batch size.
    batch_sizes: Decode and prefill batch sizes, as fractions of `slots`; each is compiled once.
    attend_lengths: Cache lengths that a decode step reads, as fractions of `max_length`; each is compiled once.

  Raises:
    ValueError: For sizes with which nothing could be generated.
  """

  slots: int = 64
  max_length: int = 1024
  decode_steps: int = 8
  gather_s: float = 0.01
  ride_along: int = 24
  prefill_widths: tuple[int, ...] = (64, 512)
  batch_sizes: tuple[float, ...] = (0.25, 1.0)
  attend_lengths: tuple[float, ...] = (0.5, 1.0)

  def __post_init__(self) -> None:
    for name, least in (("slots", 1), ("max_length", 2), ("decode_steps", 1), ("gather_s", 0), ("ride_along", 0)):
      if getattr(self, name) < least:
        raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
    if not self.prefill_widths or min(self.prefill_widths) < 1:
      raise ValueError(f"prefill_widths must be one or more widths of at least 1, got {self.prefill_widths}")
    for name in ("batch_sizes", "attend_lengths"):
      if not all(0 < fraction <= 1 for fraction in getattr(self, name)):
        raise ValueError(f"{name} must be fractions above 0 and at most 1, got {getattr(self, name)}")

  def batches(self) -> list[int]:
    return sorted({max(1, int(self.slots * f)) for f in self.batch_sizes} | {self.slots})

  def lengths(self) -> list[int]:
    return sorted({max(1, int(self.max_length * f)) for f in self.attend_lengths} | {self.max_length})

  def widths(self) -> list[int]:
    return sorted({min(w, self.max_length) for w in self.prefill_widths})

  def compile_bound(self) -> int:
    """Most programs that generation compiles: decode for each batch and length, twice if some requests truncate their
    distribution; prefill for each batch and width.
    """
    return len(self.batches()) * (2 * len(self.lengths()) + len(self.widths()))


@dataclasses.dataclass(eq=False)
class _Request:
  ids: list[int]
  sampling: Sampling
  session: str
  done: Callable[[Completion | BaseException], None]
  new_ids: list[int] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  cached_tokens: int = 0
  cancelled: bool = False

  @property
  def stop_set(self) -> StopSet:
    return self.sampling.stop, self.sampling.stop_token_ids


@dataclasses.dataclass(eq=False)
class _Command:
  """Something to be done by the engine's thread between two decode calls."""

  run: Callable[[], None]
  done: Callable[[BaseException | None], None]


@dataclasses.dataclass(eq=False)
class _Slot:
  index: int
  session: str | None = None
  ids: list[int] = dataclasses.field(default_factory=list)
  cached: int = 0  # leading ids whose keys and values are in the cache
  request: _Request | None = None
  used: float = 0.0


class NativeEngine:
  """The engine of laptops, notebooks and tests. See `agentic_rl.rollout.engine.Engine`."""

  def __init__(
    self,
    policy: Policy,
    tokenizer: Tokenizer,
    config: NativeConfig,
    *,
    read: Callable[[Publication], Params],
    mesh: Mesh | None = None,
  ):
    """Starts the engine's thread; `load` must be awaited before the first request.

    Args:
      policy: The decoder to serve.
      tokenizer: Used to find stop strings in what was sampled.
      config: Sizes.
      read: Restores a publication's parameters.
      mesh: Where to put the weights and the cache; the default device if None.

    Raises:
      ValueError: If the devices along data x fsdp x expert do not divide the slots and every batch size.
    """
    rows = parts(mesh, "batch") if mesh is not None else 1
    if any(size % rows for size in config.batches()):
      raise ValueError(
        f"slots and batch sizes ({', '.join(map(str, config.batches()))}) must be multiples of the {rows} devices "
        f"along {' x '.join(BATCH_AXES)}"
      )
    self._policy, self._tokenizer, self._config, self._read, self._mesh = policy, tokenizer, config, read, mesh
    self._params: Params | None = None
    self._version = -1
    self._slots = [_Slot(i) for i in range(config.slots)]
    self._sessions: dict[str, _Slot] = {}
    self._waiting: list[_Request] = []
    self._commands: list[_Command] = []
    self._wake = threading.Condition()
    self._closed = False
    self._failure: BaseException | None = None
    self._cache = self._new_cache()
    self._stops = StopTable(tokenizer, policy.config.vocab_size)
    self.tokens_generated = 0
    # Donating the cache lets XLA update it in place.
    self._prefill = jax.jit(self._prefill_step, donate_argnums=(1,))
    self._unstack = jax.jit(policy.unstack)
    self._decode = jax.jit(self._decode_steps, donate_argnums=(1,), static_argnames=("attend_length", "truncated"))
    self._thread = threading.Thread(target=self._run, name="native-engine", daemon=True)
    self._thread.start()

  # ---- the Engine interface ----

  async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str) -> Completion:
    """See `Engine.generate`.

    Raises:
      ValueError: For an empty prompt, an id outside the vocabulary, an empty stop string, or a request that exceeds
        `max_length`.
      RuntimeError: If the engine is closed, failed, or has no weights yet.
    """
    ids = list(token_ids)
    if not ids:
      raise ValueError("generate needs at least one token")
    vocab_size = self._policy.config.vocab_size
    if min(ids) < 0 or max(ids) >= vocab_size:
      raise ValueError(f"a token id lies outside the vocabulary of {vocab_size}")
    for stop in sampling.stop_token_ids:
      if not 0 <= stop < vocab_size:
        raise ValueError(f"stop id {stop} lies outside the vocabulary of {vocab_size}")
    if "" in sampling.stop:
      raise ValueError("an empty stop string would stop everything")
    if len(ids) + sampling.max_new_tokens > self._config.max_length:
      raise ValueError(
        f"{len(ids)} prompt tokens and {sampling.max_new_tokens} new ones exceed the engine's max_length "
        f"{self._config.max_length}"
      )
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Completion] = loop.create_future()
    request = _Request(ids, sampling, session, functools.partial(_resolve, loop, future))
    with self._wake:
      self._check_alive()
      if self._params is None:
        raise RuntimeError("the native engine has no weights yet; await load(publication) first")
      self._waiting.append(request)
      self._wake.notify()
    try:
      return await future
    except asyncio.CancelledError:
      request.cancelled = True
      raise

  async def load(self, publication: Publication) -> None:
    """See `Engine.load`. Requests in flight go on under the new weights; their keys and values are recomputed."""
    params = await asyncio.to_thread(self._place, publication)
    await self._command(functools.partial(self._swap, params, publication.version))

  async def end_session(self, session: str) -> None:
    """See `Engine.end_session`."""
    with self._wake:
      slot = self._sessions.get(session)
      if slot is not None and slot.request is None:
        self._free(slot)

  async def close(self) -> None:
    """See `Engine.close`. Requests in flight fail with `RuntimeError`."""
    with self._wake:
      self._closed = True
      self._wake.notify()
    await asyncio.to_thread(self._thread.join)
    self._params = None
    self._cache = []

  @property
  def version(self) -> int:
    """Version of the weights in use, -1 before the first `load`."""
    return self._version

  def compile_count(self) -> int:
    """Programs compiled so far; bounded by `NativeConfig.compile_bound`."""
    programs: tuple[Any, ...] = (self._prefill, self._decode)
    return sum(int(program._cache_size()) for program in programs)

  # ---- weights ----

  def _place(self, publication: Publication) -> Params:
    params = self._read(publication)
    dtype = self._policy.config.dtype
    if self._mesh is None:
      params = jax.tree.map(lambda x: jax.device_put(jnp.asarray(x, dtype)), params)
    else:
      where = shardings(self._mesh, self._policy.logical_axes(), self._policy.abstract_params())
      params = jax.tree.map(lambda x, s: jax.device_put(jnp.asarray(x, dtype), s), params, where)
    unstacked: Params = self._unstack(params)
    return unstacked

  def _swap(self, params: Params, version: int) -> None:
    self._params, self._version = params, version
    for slot in self._slots:
      slot.cached = 0
      if slot.request is None and slot.session is not None:
        self._free(slot)

  def _new_cache(self) -> KeyValueCache:
    make = functools.partial(self._policy.init_cache, self._config.slots, self._config.max_length)
    if self._mesh is None:
      return jax.jit(make)()
    tensor = self._mesh.shape["tensor"]
    heads = "tensor" if self._policy.config.kv_heads % tensor == 0 else None
    rows = parts(self._mesh, "batch")
    slots = BATCH_AXES if self._config.slots % rows == 0 else None
    return jax.jit(make, out_shardings=NamedSharding(self._mesh, PartitionSpec(slots, None, heads, None)))()

  # ---- device programs ----

  def _prefill_step(
    self, params: Params, cache: KeyValueCache, rows: jax.Array, token_ids: jax.Array, start: jax.Array
  ) -> KeyValueCache:
    """Feeds `token_ids` [P,Q] to slots `rows` [P] after `start` [P] cached tokens; row S is a padding row."""
    part = [(k.at[rows].get(mode="clip"), v.at[rows].get(mode="clip")) for k, v in cache]
    _, part = self._policy.extend(params, token_ids, start, part)
    return [
      (k.at[rows].set(pk, mode="drop"), v.at[rows].set(pv, mode="drop"))
      for (k, v), (pk, pv) in zip(cache, part, strict=True)
    ]

  def _decode_steps(
    self,
    params: Params,
    cache: KeyValueCache,
    inputs: dict[str, jax.Array],
    stop_table: jax.Array,
    *,
    attend_length: int,
    truncated: bool,
  ) -> tuple[KeyValueCache, jax.Array, jax.Array]:
    """Runs up to `decode_steps` steps for the slots `inputs["rows"]`; returns tokens and log-probabilities [n,B].

    A row first feeds its `forced` ids [n,B] (known text that is not cached yet, -1 where there is none) and yields -1,
    then samples. It stops being active at one of its stop ids or at its limit of sampled tokens; the loop ends when no
    row is active.
    """
    n = self._config.decode_steps
    rows, b = inputs["rows"], inputs["rows"].shape[0]
    whole = b == self._config.slots
    a = attend_length

    def take(x: jax.Array) -> jax.Array:
      return x[:, :a] if whole else x.at[rows, :a].get(mode="clip")

    def put(x: jax.Array, part: jax.Array) -> jax.Array:
      return x.at[:, :a].set(part) if whole else x.at[rows, :a].set(part, mode="drop")

    def go_on(state: tuple[Any, ...]) -> jax.Array:
      step, *_, active = state
      return (step < n) & active.any()

    def step_fn(state: tuple[Any, ...]) -> tuple[Any, ...]:
      step, part, token, position, sampled, tokens, logprobs, active = state
      hidden, part = self._policy.extend(params, token[:, None], position, part)
      unembedding = self._policy.unembedding(params).astype(hidden.dtype)
      logits = jnp.einsum("bd,vd->bv", hidden[:, 0], unembedding, preferred_element_type=jnp.float32)
      u = sampler.uniform(inputs["seeds"], position + 1)
      new, logprob = sampler.sample(
        logits, u, inputs["temperature"], inputs["top_p"], inputs["top_k"], truncated=truncated
      )
      forced = inputs["forced"][step]
      feeding = forced >= 0
      tokens = tokens.at[step].set(jnp.where(active & ~feeding, new, -1))
      logprobs = logprobs.at[step].set(logprob)
      sampled = sampled + (active & ~feeding)
      still = active & (feeding | (~stop_table[inputs["stop_set"], new] & (sampled < inputs["limit"])))
      # An inactive row keeps its token and position: what it writes lies beyond its cached length.
      token = jnp.where(still, jnp.where(feeding, forced, new), token)
      position = jnp.where(still, position + 1, position)
      return step + 1, part, token, position, sampled, tokens, logprobs, still

    state = (
      jnp.int32(0),
      [(take(k), take(v)) for k, v in cache],
      inputs["token"],
      inputs["position"],
      jnp.zeros(b, jnp.int32),
      jnp.full((n, b), -1, jnp.int32),
      jnp.zeros((n, b), jnp.float32),
      inputs["limit"] > 0,
    )
    _, part, _, _, _, tokens, logprobs, _ = jax.lax.while_loop(go_on, step_fn, state)
    cache = [(put(k, pk), put(v, pv)) for (k, v), (pk, pv) in zip(cache, part, strict=True)]
    return cache, tokens, logprobs

  # ---- the engine's thread ----

  def _run(self) -> None:
    try:
      with jax.set_mesh(self._mesh) if self._mesh is not None else _nothing():
        while self._tick():
          pass
      self._fail_all(RuntimeError("the native engine was closed"))
    except Exception as error:  # reaches every waiting request and every later one
      log.exception("the native engine's thread failed")
      self._failure = error
      self._fail_all(error)

  def _tick(self) -> bool:
    with self._wake:
      while not (self._closed or self._commands or self._waiting or any(s.request for s in self._slots)):
        self._wake.wait()
      if self._closed:
        return False
      if self._config.gather_s > 0 and not self._commands:
        generating = len(self._waiting) + sum(s.request is not None for s in self._slots)
        if generating < len(self._sessions) - sum(s.request is not None for s in self._slots):
          self._wake.wait_for(lambda: self._closed or bool(self._commands), self._config.gather_s)
      while self._commands:
        command = self._commands[0]
        command.run()
        del self._commands[0]  # only now: if it fails, whoever waits for it is told with all others
        command.done(None)
      self._admit()
      running = [s for s in self._slots if s.request is not None]
    if running:
      self._feed(running)
      self._generate(running)
    return True

  def _admit(self) -> None:
    """Gives waiting requests their session's slot, a free one, or that of the session unused for longest."""
    left: list[_Request] = []
    spare = sorted((s for s in self._slots if s.request is None), key=lambda s: (s.session is not None, s.used))
    for request in self._waiting:
      if request.cancelled:
        continue
      slot = self._sessions.get(request.session)
      if slot is not None and slot.request is not None:
        left.append(request)  # a session's requests run one after another
        continue
      if slot is None:
        while spare and spare[0].request is not None:
          spare.pop(0)
        if not spare:
          left.append(request)
          continue
        slot = spare.pop(0)
        self._free(slot)
        slot.session = request.session
        self._sessions[request.session] = slot
      common = 0
      for a, b in zip(slot.ids[: slot.cached], request.ids[:-1], strict=False):
        if a != b:
          break
        common += 1
      slot.cached = request.cached_tokens = common
      slot.ids = list(request.ids)
      slot.request = request
    self._waiting = left

  def _free(self, slot: _Slot) -> None:
    if slot.session is not None:
      self._sessions.pop(slot.session, None)
    slot.session, slot.ids, slot.cached, slot.request = None, [], 0, None

  def _feed(self, running: list[_Slot]) -> None:
    """Prefills slots that are far behind, up to their last id but one (the decode step feeds the last)."""
    widths, batches = self._config.widths(), self._config.batches()
    while True:
      behind = [s for s in running if len(s.ids) - 1 - s.cached > self._config.ride_along]
      if not behind:
        return
      need = max(len(s.ids) - 1 - s.cached for s in behind)
      width = next((w for w in widths if w >= need), widths[-1])
      batch = next((b for b in batches if b >= len(behind)), batches[-1])
      behind = behind[:batch]
      rows = np.full(batch, self._config.slots, np.int32)
      tokens = np.zeros((batch, width), np.int32)
      start = np.zeros(batch, np.int32)
      for i, slot in enumerate(behind):
        new = slot.ids[slot.cached : len(slot.ids) - 1][:width]
        rows[i], start[i] = slot.index, slot.cached
        tokens[i, : len(new)] = new
        slot.cached += len(new)
      self._cache = self._prefill(self._params, self._cache, rows, tokens, start)

  def _generate(self, running: list[_Slot]) -> None:
    """One decode call for the running slots, then completions for those that ended."""
    config = self._config
    batch = next(b for b in config.batches() if b >= len(running))
    # With a full batch row i is slot i, so that the cache need not be gathered.
    place = {s.index: (s.index if batch == config.slots else i) for i, s in enumerate(running)}
    inputs: dict[str, np.ndarray] = {
      "rows": np.arange(batch, dtype=np.int32) if batch == config.slots else np.full(batch, config.slots, np.int32),
      "token": np.zeros(batch, np.int32),
      "position": np.zeros(batch, np.int32),
      "forced": np.full((config.decode_steps, batch), -1, np.int32),
      "limit": np.zeros(batch, np.int32),
      "seeds": np.zeros((batch, 2), np.uint32),
      "temperature": np.ones(batch, np.float32),
      "top_p": np.ones(batch, np.float32),
      "top_k": np.full(batch, -1, np.int32),
      "stop_set": np.zeros(batch, np.int32),
    }
    if batch == config.slots:
      for slot in self._slots:  # a parked slot's cache must not be overwritten at position 0
        inputs["position"][slot.index] = min(slot.cached, config.max_length - 1)
    self._stops.use(s.request.stop_set for s in running if s.request is not None)
    truncated, longest = False, 0
    for slot in running:
      request = slot.request
      assert request is not None
      s, i = request.sampling, place[slot.index]
      inputs["rows"][i] = slot.index
      inputs["token"][i] = slot.ids[slot.cached]
      inputs["position"][i] = slot.cached
      forced = slot.ids[slot.cached + 1 :][: config.decode_steps]
      inputs["forced"][: len(forced), i] = forced
      inputs["limit"][i] = s.max_new_tokens - len(request.new_ids)
      inputs["seeds"][i] = (s.seed >> 32) & 0xFFFFFFFF, s.seed & 0xFFFFFFFF
      inputs["temperature"][i], inputs["top_p"][i], inputs["top_k"][i] = s.temperature, s.top_p, s.top_k
      inputs["stop_set"][i] = self._stops.row(request.stop_set)
      truncated |= s.top_p < 1 or s.top_k > 0
      longest = max(longest, slot.cached + 1)
    reach = min(longest + config.decode_steps, config.max_length)
    attend = next(a for a in config.lengths() if a >= reach)
    self._cache, tokens, logprobs = self._decode(
      self._params, self._cache, inputs, self._stops.on_device(), attend_length=attend, truncated=truncated
    )
    tokens, logprobs = np.asarray(tokens), np.asarray(logprobs)
    for slot in running:
      i = place[slot.index]
      fed = int((inputs["forced"][:, i] >= 0).sum())
      slot.cached += fed
      if fed < config.decode_steps:
        self._accept(slot, tokens[fed:, i].tolist(), logprobs[fed:, i].tolist())

  def _accept(self, slot: _Slot, tokens: list[int], logprobs: list[float]) -> None:
    """Appends sampled tokens to a slot's request up to its first stop, and completes it there."""
    request = slot.request
    assert request is not None
    s = request.sampling
    finish: Finish | None = None
    before = self._tokenizer.decode(request.new_ids) if s.stop else ""
    spelled = s.stop and any(x in before + self._tokenizer.decode([t for t in tokens if t >= 0]) for x in s.stop)
    for token, logprob in zip(tokens, logprobs, strict=True):
      if token < 0:
        break
      request.new_ids.append(token)
      request.logprobs.append(min(logprob, 0.0))
      request.versions.append(self._version)
      if token in s.stop_token_ids:
        finish = Finish(FinishKind.STOP, token)
      elif spelled:
        text = self._tokenizer.decode(request.new_ids)
        finish = next((Finish(FinishKind.STOP, x) for x in s.stop if x in text), None)
      if finish is None and len(request.new_ids) >= s.max_new_tokens:
        finish = Finish(FinishKind.LENGTH)
      if finish is not None:
        break
    slot.ids = request.ids + request.new_ids
    slot.cached = len(slot.ids) - 1
    if finish is None and not request.cancelled:
      return
    slot.request, slot.used = None, time.monotonic()
    self.tokens_generated += len(request.new_ids)
    if request.cancelled:
      with self._wake:
        self._free(slot)
      return
    assert finish is not None
    request.done(
      Completion(
        tuple(request.new_ids), tuple(request.logprobs), finish, tuple(request.versions), request.cached_tokens
      )
    )

  # ---- plumbing ----

  async def _command(self, run: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    with self._wake:
      self._check_alive()
      self._commands.append(_Command(run, functools.partial(_resolve, loop, future)))
      self._wake.notify()
    await future

  def _check_alive(self) -> None:
    if self._failure is not None:
      raise RuntimeError("the native engine has failed") from self._failure
    if self._closed:
      raise RuntimeError("the native engine is closed")

  def _fail_all(self, error: BaseException) -> None:
    with self._wake:
      requests = self._waiting + [s.request for s in self._slots if s.request is not None]
      commands, self._commands, self._waiting = self._commands, [], []
      for slot in self._slots:
        slot.request = None
    for done in [r.done for r in requests] + [c.done for c in commands]:
      done(error)


class _nothing:
  def __enter__(self) -> None: ...

  def __exit__(self, *_: object) -> None: ...


def _resolve(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], value: Any) -> None:
  """Sets a future's result or exception from another thread; a future that was cancelled meanwhile is left alone."""

  def set_value() -> None:
    if future.done():
      return
    if isinstance(value, BaseException):
      future.set_exception(value)
    else:
      future.set_result(value)

  try:
    loop.call_soon_threadsafe(set_value)
  except RuntimeError:
    log.warning("a completion arrived after its event loop was closed")
