"""The native engine against a slow loop: same tokens, same log-probabilities, whatever else is in flight."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.data.packing import pack_sequences
from agentic_rl.episode import Completion, FinishKind, Publication
from agentic_rl.parallel import MeshShape, make_mesh
from agentic_rl.policy import Policy, PolicyConfig
from agentic_rl.rollout import sampler
from agentic_rl.rollout.engine import Sampling
from agentic_rl.rollout.native import NativeConfig, NativeEngine
from agentic_rl.tokenizer import PieceTokenizer
from agentic_rl.train.learner import Learner, LearnerConfig, supervised_loss
from agentic_rl.train.optimizer import OptimizerConfig

TOKENIZER = PieceTokenizer([*"abcdefgh", "ab", "cd;e", ";", ";;"])
LENGTH = 48
POLICY = Policy(
  PolicyConfig(
    vocab_size=TOKENIZER.vocab_size,
    width=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_width=4,
    mlp_width=32,
    qk_norm=True,
    tied_embeddings=False,
  )
)
# Part of the slots or all of them, one cache length, all that is new is prefilled.
CONFIG = NativeConfig(
  slots=4,
  max_length=LENGTH,
  decode_steps=4,
  gather_s=0.0,
  ride_along=0,
  prefill_widths=(8,),
  batch_sizes=(0.5, 1.0),
  attend_lengths=(1.0,),
)
# Always all slots, two cache lengths and two widths, a little that is new rides along.
OTHER_CONFIG = NativeConfig(
  slots=3,
  max_length=LENGTH,
  decode_steps=3,
  gather_s=0.001,
  ride_along=5,
  prefill_widths=(4, 16),
  batch_sizes=(1.0,),
  attend_lengths=(0.3, 1.0),
)


def _params(seed: int) -> Any:
  # A large head makes peaked distributions: a wrong key or position then changes tokens, not only digits.
  params = POLICY.init(jax.random.key(seed))
  return params | {"final_norm": 3.0 * params["final_norm"]}


WEIGHTS = {1: _params(1), 2: _params(2)}


def publication(version: int) -> Publication:
  return Publication(version, f"weights {version}", "", {})


def start(config: NativeConfig = CONFIG, weights: dict[int, Any] = WEIGHTS, **options: Any) -> NativeEngine:
  return NativeEngine(POLICY, TOKENIZER, config, read=lambda p: weights[p.version], **options)


def on(engine: NativeEngine, work: Callable[[NativeEngine], Awaitable[Any]], version: int = 1) -> Any:
  """Runs `work` on an engine that serves `version`; a hang is a failure."""

  async def run() -> Any:
    async with asyncio.timeout(120):
      if engine.version != version:
        await engine.load(publication(version))
      return await work(engine)

  return asyncio.run(run())


@pytest.fixture(scope="module")
def engine() -> Iterator[NativeEngine]:
  """One engine for all tests that leave it whole."""
  made = start()
  yield made
  asyncio.run(made.close())


@pytest.fixture(scope="module")
def other_engine() -> Iterator[NativeEngine]:
  """The same weights in other sizes."""
  made = start(OTHER_CONFIG)
  yield made
  asyncio.run(made.close())


@pytest.fixture
def own() -> Iterator[NativeEngine]:
  """An engine that the test may break. It decodes nothing real: every token is a 2, every log-probability -1."""
  made = start(NativeConfig(slots=2, max_length=LENGTH, decode_steps=2, gather_s=0.0, ride_along=0, batch_sizes=()))
  made._prefill = lambda params, cache, *_: cache  # type: ignore[assignment]
  made._decode = lambda params, cache, inputs, *_, **__: (  # type: ignore[assignment]
    cache,
    np.where(np.arange(2)[:, None] < inputs["limit"], 2, -1),
    np.full((2, 2), -1.0),
  )
  yield made
  asyncio.run(made.close())


@jax.jit
def _hidden_logits(params: Any, ids: jax.Array) -> jax.Array:
  positions = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), ids.shape)
  return POLICY.hidden(params, ids, positions, jnp.ones_like(ids)) @ POLICY.unembedding(params).T


def logits_of(params: Any, ids: Sequence[int]) -> np.ndarray:
  """[len(ids),V] logits after each token, without a cache."""
  padded = np.zeros((1, LENGTH), np.int32)
  padded[0, : len(ids)] = ids
  return np.asarray(_hidden_logits(params, padded), np.float64)[0, : len(ids)]


def log_softmax(x: np.ndarray) -> np.ndarray:
  return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))


_uniform = jax.jit(sampler.uniform)


def choose(logits: np.ndarray, sampling: Sampling, u: float) -> int:
  """The token that the engine's documentation promises, in float64."""
  if sampling.temperature == 0:
    return int(np.argmax(logits))
  p = np.exp(log_softmax(logits / sampling.temperature))
  order = np.argsort(-p, kind="stable")
  rank, before = np.argsort(order), np.zeros(len(p))
  before[order] = np.cumsum(p[order]) - p[order]
  keep = (before < sampling.top_p) & (rank < (sampling.top_k if sampling.top_k > 0 else len(p)))
  p = np.where(keep, p, 0.0)
  return int(np.flatnonzero(np.cumsum(p) > u * p.sum())[0])


def reference(params: Any, prompt: Sequence[int], sampling: Sampling) -> tuple[list[int], list[float], object]:
  """Ids, log-probabilities and what ended them, one token at a time from the whole sequence."""
  ids, logprobs = list(prompt), []
  seed = np.array([[sampling.seed >> 32, sampling.seed & 0xFFFFFFFF]], np.uint32)
  for _ in range(sampling.max_new_tokens):
    logits = logits_of(params, ids)[-1]
    token = choose(logits, sampling, float(_uniform(seed, np.array([len(ids)], np.int32))[0]))
    ids.append(token)
    logprobs.append(float(log_softmax(logits / (sampling.temperature or 1.0))[token]))
    new = ids[len(prompt) :]
    if token in sampling.stop_token_ids:
      return new, logprobs, token
    found = [s for s in sampling.stop if s in TOKENIZER.decode(new)]
    if found:
      return new, logprobs, found[0]
  return ids[len(prompt) :], logprobs, None


def check(completion: Completion, params: Any, prompt: Sequence[int], sampling: Sampling) -> None:
  ids, logprobs, matched = reference(params, prompt, sampling)
  assert list(completion.token_ids) == ids
  np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-5)
  assert completion.finish.matched == matched
  assert completion.finish.kind is (FinishKind.LENGTH if matched is None else FinishKind.STOP)


def some_ids(rng: np.random.Generator, length: int) -> list[int]:
  return rng.integers(0, TOKENIZER.vocab_size, length).tolist()


# ---- one distribution ----


def test_log_probabilities_are_the_learners(engine: NativeEngine) -> None:
  mesh = make_mesh(MeshShape(), jax.devices()[:1])
  rng = np.random.default_rng(0)
  prompts = [some_ids(rng, n) for n in (1, 3, 9, 20)]
  for temperature in (0.6, 1.0, 1.4):

    async def work(engine: NativeEngine, temperature: float = temperature) -> list[Completion]:
      sampling = Sampling(20, temperature, seed=7)
      return await asyncio.gather(*(engine.generate(p, sampling, session=f"{len(p)}/{temperature}") for p in prompts))

    completions = on(engine, work)
    sequences = [np.array([*p, *c.token_ids], np.int32) for p, c in zip(prompts, completions, strict=True)]
    masks = [np.arange(len(s)) >= len(p) for p, s in zip(prompts, sequences, strict=True)]
    sampled = [np.array([*[0.0] * len(p), *c.logprobs], np.float32) for p, c in zip(prompts, completions, strict=True)]
    batch = pack_sequences(sequences, masks, behaviour_logprobs=sampled, length_buckets=(LENGTH,), row_multiple=4)
    learner = Learner(POLICY, OptimizerConfig(), supervised_loss, LearnerConfig(4, temperature=temperature), mesh)
    scored, _ = learner.score(WEIGHTS[1], batch)
    assert batch.loss_mask.sum() == 80
    np.testing.assert_allclose(scored[batch.loss_mask], batch.behaviour_logprobs[batch.loss_mask], atol=1e-5)
    other, _ = learner.score(WEIGHTS[2], batch)
    assert np.abs(other - batch.behaviour_logprobs)[batch.loss_mask].mean() > 0.1  # The check can fail.


def test_greedy_is_the_argmax_of_every_step(engine: NativeEngine) -> None:
  for prompt in ([5], [2, 3, 4, 5, 6], some_ids(np.random.default_rng(1), 30)):
    sampling = Sampling(18, temperature=0, seed=3)
    completion = on(engine, lambda e, p=prompt, s=sampling: e.generate(p, s, session="greedy"))
    check(completion, WEIGHTS[1], prompt, sampling)


def test_a_completion_depends_on_seed_ids_and_weights_alone(engine: NativeEngine, other_engine: NativeEngine) -> None:
  rng = np.random.default_rng(2)
  prompt = some_ids(rng, 11)
  mine = Sampling(20, seed=2**62 + 12345)

  async def alone(engine: NativeEngine) -> Completion:
    return await engine.generate(prompt, mine, session="mine")

  async def crowded(engine: NativeEngine) -> Completion:
    others = [
      asyncio.create_task(
        engine.generate(some_ids(rng, 1 + i % 17), Sampling(1 + 3 * (i % 7), seed=i, top_p=0.5), session=str(i))
      )
      for i in range(12)
    ]
    await asyncio.sleep(0)
    completion = await engine.generate(prompt, mine, session="mine again")
    await asyncio.gather(*others)
    return completion

  first = on(engine, alone)
  check(first, WEIGHTS[1], prompt, mine)
  for again in (on(engine, crowded), on(other_engine, alone)):
    assert again.token_ids == first.token_ids and again.finish == first.finish
    np.testing.assert_allclose(again.logprobs, first.logprobs, atol=1e-5)
  for seed in (mine.seed - 1, mine.seed + 2**32):  # Both halves of a seed count.
    sampling = dataclasses.replace(mine, seed=seed)
    assert on(engine, lambda e, s=sampling: e.generate(prompt, s, session="x")).token_ids != first.token_ids


# ---- how a request ends ----


def find(sampling: Sampling, wanted: Callable[[str], bool]) -> tuple[list[int], Sampling, str]:
  """A prompt and seed whose free continuation is wanted."""
  for seed in range(400):
    prompt = some_ids(np.random.default_rng(seed), 3)
    tried = dataclasses.replace(sampling, seed=seed)
    text = TOKENIZER.decode(reference(WEIGHTS[1], prompt, tried)[0])
    if wanted(text):
      return prompt, tried, text
  raise AssertionError("no seed gives what the test needs")


def test_stop_ids_end_on_the_device_and_are_returned(engine: NativeEngine) -> None:
  prompt, sampling, _ = find(Sampling(12), lambda text: True)
  free = on(engine, lambda e: e.generate(prompt, sampling, session="s"))
  for position in (0, 2, 7, 11):
    stop = free.token_ids[position]
    first = free.token_ids.index(stop)
    limited = dataclasses.replace(sampling, stop_token_ids=(stop,))
    completion = on(engine, lambda e, s=limited: e.generate(prompt, s, session="s"))
    assert completion.token_ids == free.token_ids[: first + 1]
    assert completion.finish.kind is FinishKind.STOP and completion.finish.matched == stop
    assert completion.logprobs == pytest.approx(free.logprobs[: first + 1], abs=1e-5)


def test_a_stop_string_over_several_tokens_and_decode_calls(engine: NativeEngine) -> None:
  # Ten tokens are three decode calls, so that some stops begin in one and end in the next.
  prompt, sampling, _ = find(Sampling(10, 1.4), lambda text: len(set(text)) > 5)
  free = on(engine, lambda e: e.generate(prompt, sampling, session="s"))
  pieces = [TOKENIZER.decode([t]) for t in free.token_ids]
  for begin in range(8):
    stop = "".join(pieces[begin : begin + 3])
    end = next(n for n in range(1, 11) if stop in "".join(pieces[:n]))
    limited = dataclasses.replace(sampling, stop=("no such text", stop))
    completion = on(engine, lambda e, s=limited: e.generate(prompt, s, session="s"))
    assert completion.token_ids == free.token_ids[:end]
    assert completion.finish.kind is FinishKind.STOP and completion.finish.matched == stop


def test_a_stop_string_inside_one_token_keeps_the_whole_token(engine: NativeEngine) -> None:
  prompt, sampling, text = find(Sampling(10, 1.4), lambda text: "cd;e" in text and ";" not in text.split("cd;e")[0])
  limited = dataclasses.replace(sampling, stop=("d;",))
  completion = on(engine, lambda e: e.generate(prompt, limited, session="s"))
  check(completion, WEIGHTS[1], prompt, limited)
  assert TOKENIZER.decode(completion.token_ids) == text[: text.index("cd;e") + 4]


def test_a_prompt_does_not_stop_its_own_completion(engine: NativeEngine) -> None:
  sampling = Sampling(6, stop=("ab",), stop_token_ids=(TOKENIZER.encode("h")[0],), seed=5)
  prompt = TOKENIZER.encode("hhabha")
  completion = on(engine, lambda e: e.generate(prompt, sampling, session="s"))
  check(completion, WEIGHTS[1], prompt, sampling)


def test_one_token_and_a_full_context(engine: NativeEngine) -> None:
  rng = np.random.default_rng(4)
  for length, new in ((1, 1), (17, 1), (1, LENGTH - 1), (LENGTH - 1, 1), (LENGTH - 9, 9)):
    prompt, sampling = some_ids(rng, length), Sampling(new, seed=length)
    completion = on(engine, lambda e, p=prompt, s=sampling: e.generate(p, s, session=f"{len(p)}"))
    assert len(completion.token_ids) == new
    check(completion, WEIGHTS[1], prompt, sampling)


@pytest.mark.parametrize(
  ("ids", "sampling", "message"),
  [
    ([], Sampling(1), "at least one token"),
    ([TOKENIZER.vocab_size], Sampling(1), "outside the vocabulary"),
    ([-1], Sampling(1), "outside the vocabulary"),
    ([1] * 40, Sampling(9), "exceed the engine's max_length 48"),
    ([1], Sampling(1, stop_token_ids=(TOKENIZER.vocab_size,)), "stop id .* outside the vocabulary"),
    ([1], Sampling(1, stop_token_ids=(-1,)), "stop id .* outside the vocabulary"),
    ([1], Sampling(1, stop=("a", "")), "empty stop string"),
  ],
)
def test_a_bad_request_is_refused_and_harms_no_other(
  engine: NativeEngine, ids: list[int], sampling: Sampling, message: str
) -> None:
  with pytest.raises(ValueError, match=message):
    on(engine, lambda e: e.generate(ids, sampling, session="s"))
  assert len(on(engine, lambda e: e.generate([3, 4], Sampling(2), session="s")).token_ids) == 2


def test_more_stop_sets_than_the_device_holds_end_the_same(engine: NativeEngine) -> None:
  prompt, sampling, _ = find(Sampling(10, 1.4), lambda text: len(set(text)) > 5)
  free = on(engine, lambda e: e.generate(prompt, sampling, session="s"))

  async def work(engine: NativeEngine) -> list[Completion]:
    return await asyncio.gather(
      *(
        engine.generate(
          prompt,
          dataclasses.replace(sampling, stop=(f"never {i}",), stop_token_ids=(free.token_ids[i % 10],)),
          session=f"set {i}",
        )
        for i in range(80)
      )
    )

  for i, completion in enumerate(on(engine, work)):
    assert completion.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[i % 10]) + 1]
  assert engine.compile_count() <= engine._config.compile_bound()


# ---- sessions ----


def test_a_later_turn_reuses_the_cache_and_changes_nothing(engine: NativeEngine) -> None:
  rng = np.random.default_rng(5)

  async def work(engine: NativeEngine) -> None:
    ids, sampling = some_ids(rng, 6), Sampling(7, seed=1, stop=(";",))
    cached = 0
    for turn in range(3):
      sampling = dataclasses.replace(sampling, seed=turn)
      completion = await engine.generate(ids, sampling, session="turns")
      check(completion, WEIGHTS[1], ids, sampling)
      assert completion.cached_tokens == cached
      cached = len(ids) + len(completion.token_ids) - 1  # The last sampled token was never fed.
      ids = [*ids, *completion.token_ids, *some_ids(rng, 3)]
    # A prompt that leaves the cached one in the middle, one that is a part of it, and one that shares nothing.
    for prompt, shared in ((ids[:5] + [(ids[5] + 1) % 14] + ids[6:9], 5), (ids[:4], 3), ([(ids[0] + 1) % 14, 2], 0)):
      sampling = Sampling(5, seed=9)
      completion = await engine.generate(prompt, sampling, session="turns")
      check(completion, WEIGHTS[1], prompt, sampling)
      assert completion.cached_tokens == shared
    await engine.end_session("turns")
    await engine.end_session("never seen")
    assert (await engine.generate(prompt, sampling, session="turns")).cached_tokens == 0

  on(engine, work)


def test_sessions_that_need_more_than_all_slots_are_evicted_and_right(engine: NativeEngine) -> None:
  rng = np.random.default_rng(6)
  prompts = {f"session {i}": some_ids(rng, 8) for i in range(3 * CONFIG.slots)}

  async def work(engine: NativeEngine) -> None:
    for turn in range(2):
      sampling = Sampling(6, seed=turn)
      completions = await asyncio.gather(*(engine.generate(p, sampling, session=s) for s, p in prompts.items()))
      for (session, prompt), completion in zip(prompts.items(), completions, strict=True):
        check(completion, WEIGHTS[1], prompt, sampling)
        prompts[session] = [*prompt, *completion.token_ids, *some_ids(rng, 2)]

  on(engine, work)


def test_two_requests_of_one_session_run_one_after_another(engine: NativeEngine) -> None:
  prompt = [3, 4, 5, 6, 7]

  async def work(engine: NativeEngine) -> list[Completion]:
    return await asyncio.gather(
      *(engine.generate(prompt + [2] * i, Sampling(9, seed=i), session="one") for i in range(4))
    )

  for i, completion in enumerate(on(engine, work)):
    check(completion, WEIGHTS[1], prompt + [2] * i, Sampling(9, seed=i))
    assert completion.cached_tokens == (0 if i == 0 else len(prompt) + i - 1 if i == 1 else completion.cached_tokens)


def test_a_cancelled_request_gives_its_slot_back(own: NativeEngine) -> None:
  async def work(engine: NativeEngine) -> None:
    slowly(engine, 0.01)
    long = [asyncio.create_task(engine.generate([2, 3], Sampling(46), session=f"long {i}")) for i in range(8)]
    await until(lambda: all(s.request is not None for s in engine._slots))
    for task in long:
      task.cancel()
    assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*long, return_exceptions=True))
    began = engine.tokens_generated
    completion = await engine.generate([4, 5], Sampling(6), session="next")
    assert completion.token_ids == (2,) * 6
    assert engine.tokens_generated - began < 2 * 46  # The two that ran were cut off, the six that waited never ran.
    await until(lambda: all(s.request is None for s in engine._slots))
    assert [s.session for s in engine._slots if s.session is not None] == ["next"]

  on(own, work)


# ---- weights ----


def slowly(engine: NativeEngine, seconds: float) -> None:
  """Makes each decode call take at least so long, so that a test can act in the middle of a request."""
  generate = engine._generate

  def slow(*args: Any) -> None:
    time.sleep(seconds)
    generate(*args)

  engine._generate = slow  # type: ignore[method-assign]


async def until(condition: Callable[[], bool]) -> None:
  async with asyncio.timeout(60):
    while not condition():
      await asyncio.sleep(0.001)


def test_a_load_in_the_middle_of_requests_splits_them_exactly(
  other_engine: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
  prompts = {"a": [3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5], "b": [9], "c": [7, 7], "waits": [4, 4]}
  generate = other_engine._generate

  def until_the_load_is_there(running: list[Any]) -> None:
    if other_engine.version == 1 and any(len(slot.request.new_ids) >= 6 for slot in running):
      while not other_engine._commands:
        time.sleep(0.001)
    generate(running)

  monkeypatch.setattr(other_engine, "_generate", until_the_load_is_there)

  async def work(engine: NativeEngine) -> list[Completion]:
    tasks = [
      asyncio.create_task(engine.generate(p, Sampling(30, 1.4, seed=i), session=s))
      for i, (s, p) in enumerate(prompts.items())
    ]
    await until(lambda: any(len(slot.request.new_ids) >= 6 for slot in engine._slots if slot.request is not None))
    await engine.load(publication(2))
    assert engine.version == 2
    return list(await asyncio.gather(*tasks))

  completions = on(other_engine, work)
  for i, (prompt, completion) in enumerate(zip(prompts.values(), completions, strict=True)):
    cut = completion.versions.count(1)
    assert completion.versions == (1,) * cut + (2,) * (30 - cut)
    assert 0 < cut < 30 if i < 3 else cut == 0
    old, new = Sampling(cut, 1.4, seed=i) if cut else None, Sampling(30 - cut, 1.4, seed=i)
    if old is not None:
      assert list(completion.token_ids[:cut]) == reference(WEIGHTS[1], prompt, old)[0]
    # The random number of a token depends on its position, so a fresh request after the prefix draws the same.
    ids, logprobs, _ = reference(WEIGHTS[2], [*prompt, *completion.token_ids[:cut]], new)
    assert list(completion.token_ids[cut:]) == ids
    np.testing.assert_allclose(completion.logprobs[cut:], logprobs, atol=1e-5)


def test_no_key_or_value_of_older_weights_outlives_a_load(engine: NativeEngine) -> None:
  prompt, sampling = [3, 4, 5, 6, 7, 8], Sampling(8, seed=1)

  async def work(engine: NativeEngine) -> None:
    await engine.generate(prompt, sampling, session="s")
    assert (await engine.generate(prompt, sampling, session="s")).cached_tokens == 5
    await engine.load(publication(2))
    after = await engine.generate(prompt, sampling, session="s")
    assert after.cached_tokens == 0 and set(after.versions) == {2}
    check(after, WEIGHTS[2], prompt, sampling)

  on(engine, work)


def test_loading_the_same_weights_again_is_bit_identical(engine: NativeEngine) -> None:
  async def work(engine: NativeEngine) -> list[Completion]:
    found = []
    for _ in range(2):
      await engine.load(publication(1))
      for temperature in (0.0, 1.0):
        found.append(await engine.generate([4, 2, 7, 5], Sampling(30, temperature, seed=3), session="s"))
    return found

  greedy, sampled, greedy_again, sampled_again = on(engine, work)
  assert greedy == greedy_again and sampled == sampled_again


def test_one_changed_leaf_moves_the_log_probabilities(engine: NativeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
  # The crossing of every leaf is seen: none is left behind.
  leaves, structure = jax.tree.flatten(WEIGHTS[1])
  for i, leaf in enumerate(leaves):
    # A gradient-like direction: a norm's scale may not be moved by the same amount everywhere.
    step = 1e-2 * np.random.default_rng(i).choice([-1.0, 1.0], leaf.shape).astype(np.float32)
    monkeypatch.setitem(WEIGHTS, 100 + i, jax.tree.unflatten(structure, [*leaves[:i], leaf + step, *leaves[i + 1 :]]))
  prompt = [3, 4, 5, 6, 7, 8, 9, 10]

  async def probe(engine: NativeEngine, version: int) -> tuple[float, ...]:
    await engine.load(publication(version))
    return (await engine.generate(prompt, Sampling(1, temperature=0), session="probe")).logprobs

  async def work(engine: NativeEngine) -> None:
    before = await probe(engine, 1)
    for i, (path, _) in enumerate(jax.tree_util.tree_flatten_with_path(WEIGHTS[1])[0]):
      assert np.abs(np.subtract(await probe(engine, 100 + i), before)).max() > 1e-5, jax.tree_util.keystr(path)
    assert await probe(engine, 1) == before

  on(engine, work)


# ---- failure and end ----


def test_a_failure_reaches_every_request_and_every_later_one(own: NativeEngine) -> None:
  async def work(engine: NativeEngine) -> None:
    await engine.generate([2], Sampling(1), session="fine")

    def broken(*_: Any, **__: Any) -> None:
      time.sleep(0.05)  # Until all requests and the load are there.
      raise FloatingPointError("the device is gone")

    engine._decode = broken  # type: ignore[assignment]
    requests = [engine.generate([2, 3], Sampling(4), session=f"{i}") for i in range(9)]
    answers = await asyncio.gather(*requests, engine.load(publication(2)), return_exceptions=True)
    assert all(isinstance(a, FloatingPointError | RuntimeError) for a in answers[:-1]), answers
    assert sum("the device is gone" in str(a) for a in answers[:-1]) == 9
    for later in (engine.generate([2], Sampling(1), session="later"), engine.load(publication(2))):
      with pytest.raises(RuntimeError, match="has failed") as caught:
        await later
      assert "the device is gone" in str(caught.value.__cause__)

  on(own, work)


def test_a_load_that_fails_leaves_the_old_weights_in_use(engine: NativeEngine) -> None:
  async def work(engine: NativeEngine) -> Completion:
    with pytest.raises(KeyError):
      await engine.load(publication(99))
    return await engine.generate([3, 4], Sampling(3), session="s")

  assert set(on(engine, work).versions) == {1}


def test_closing_fails_what_is_in_flight_and_what_waits(own: NativeEngine) -> None:
  async def work(engine: NativeEngine) -> None:
    slowly(engine, 0.02)
    tasks = [asyncio.create_task(engine.generate([2], Sampling(40), session=f"{i}")) for i in range(5)]
    await until(lambda: all(s.request is not None for s in engine._slots))
    tasks.append(asyncio.create_task(engine.load(publication(2))))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await engine.close()
    for answer in await asyncio.gather(*tasks, return_exceptions=True):
      assert isinstance(answer, RuntimeError) and "closed" in str(answer), answer
    await engine.close()  # A second time is harmless.
    for later in (engine.generate([2], Sampling(1), session="later"), engine.load(publication(2))):
      with pytest.raises(RuntimeError, match="closed"):
        await later

  on(own, work)


def test_a_request_before_the_first_load_is_refused(own: NativeEngine) -> None:
  with pytest.raises(RuntimeError, match="no weights yet"):
    asyncio.run(own.generate([2], Sampling(1), session="s"))


# ---- sizes and shapes ----


@pytest.mark.parametrize(
  "values",
  [
    {"slots": 0},
    {"max_length": 1},
    {"decode_steps": 0},
    {"ride_along": -1},
    {"gather_s": -0.1},
    {"prefill_widths": ()},
    {"prefill_widths": (0,)},
    {"batch_sizes": (0.0,)},
    {"batch_sizes": (1.5,)},
    {"attend_lengths": (-0.5,)},
  ],
)
def test_sizes_with_which_nothing_would_be_generated_are_refused(values: dict[str, Any]) -> None:
  with pytest.raises(ValueError, match=next(iter(values))):
    NativeConfig(**values)


def test_compile_bound_by_hand() -> None:
  assert CONFIG.compile_bound() == 2 * (2 * 1 + 1)  # batches 2 and 4; one length, with and without truncation; a width
  assert OTHER_CONFIG.compile_bound() == 1 * (2 * 2 + 2)


def test_engine_on_a_mesh_agrees_with_one_device(engine: NativeEngine) -> None:
  mesh = make_mesh(MeshShape(2, 2, 2), jax.devices()[:8])
  config = dataclasses.replace(CONFIG, decode_steps=8, prefill_widths=(16,), batch_sizes=(), ride_along=2)
  prompts = [some_ids(np.random.default_rng(i), 4 + 2 * i) for i in range(6)]

  async def work(engine: NativeEngine) -> list[Completion]:
    first = await asyncio.gather(
      *(engine.generate(p, Sampling(8, seed=i), session=f"{i}") for i, p in enumerate(prompts))
    )
    again = [[*p, *c.token_ids, 5] for p, c in zip(prompts, first, strict=True)]
    return [
      *first,
      *await asyncio.gather(*(engine.generate(p, Sampling(8, seed=i), session=f"{i}") for i, p in enumerate(again))),
    ]

  sharded = start(config, mesh=mesh)
  try:
    for one, many in zip(on(engine, work), on(sharded, work), strict=True):
      assert one.token_ids == many.token_ids and one.finish == many.finish
      np.testing.assert_allclose(one.logprobs, many.logprobs, atol=1e-5)
    assert sharded.compile_count() <= config.compile_bound()
    assert not sharded._params["layers"][0]["mlp"]["gate"].sharding.is_fully_replicated  # type: ignore[index]
  finally:
    asyncio.run(sharded.close())


def test_a_mesh_that_does_not_divide_the_slots_is_refused_at_once() -> None:
  mesh = make_mesh(MeshShape(2, 4, 1), jax.devices()[:8])
  with pytest.raises(ValueError, match=r"slots .* 8 devices"):
    start(CONFIG, mesh=mesh)


# ---- everything at once ----


@pytest.mark.parametrize(("which", "episodes", "truncate"), [("engine", 120, 0.15), ("other_engine", 40, 0.0)])
def test_random_interleaving_of_requests_equals_the_slow_loop(
  request: pytest.FixtureRequest, which: str, episodes: int, truncate: float
) -> None:
  engine: NativeEngine = request.getfixturevalue(which)
  rng = np.random.default_rng(11)
  stops = ((), ("a",), ("ab", "h"), (";;",), ("cd", "g;"), ("fgh",))

  def draw(prompt: list[int]) -> Sampling:
    truncated = rng.random() < truncate
    return Sampling(
      max_new_tokens=int(rng.integers(1, min(14, LENGTH - len(prompt)) + 1)),
      temperature=float(rng.choice([0.0, 0.6, 1.0, 1.4])),
      stop=stops[rng.integers(len(stops))],
      stop_token_ids=tuple(rng.integers(0, TOKENIZER.vocab_size, rng.integers(0, 3)).tolist()),
      top_p=0.7 if truncated else 1.0,
      top_k=4 if truncated and rng.random() < 0.5 else -1,
      seed=int(rng.integers(2**63)),
    )

  done: list[tuple[list[int], Sampling, Completion]] = []

  async def episode(engine: NativeEngine, number: int) -> None:
    ids = some_ids(rng, int(rng.integers(1, 20)))
    for _ in range(3):
      if len(ids) >= LENGTH:
        break
      sampling, prompt = draw(ids), list(ids)
      task = asyncio.create_task(engine.generate(prompt, sampling, session=f"{number % 60}"))
      if rng.random() < 0.08:
        await asyncio.sleep(float(rng.random()) * 0.01)
        task.cancel()
      try:
        completion = await task
      except asyncio.CancelledError:
        break
      done.append((prompt, sampling, completion))
      ids = [*ids, *completion.token_ids, *some_ids(rng, int(rng.integers(0, 4)))]
      if rng.random() < 0.3:
        await asyncio.sleep(float(rng.random()) * 0.01)
    if rng.random() < 0.5:
      await engine.end_session(f"{number % 60}")

  async def work(engine: NativeEngine) -> None:
    # Somewhat more than there are slots: some later turns find their cache, others have lost it.
    at_once = asyncio.Semaphore(engine._config.slots + 2)

    async def one(number: int) -> None:
      async with at_once:
        await episode(engine, number)

    await asyncio.gather(*(one(i) for i in range(episodes)))

  on(engine, work)
  assert len(done) > 1.8 * episodes
  for prompt, sampling, completion in done:
    check(completion, WEIGHTS[1], prompt, sampling)
  reused = [c.cached_tokens > 0 for prompt, _, c in done if len(prompt) > 20]
  assert any(reused) and not all(reused) and len({c.finish.kind for *_, c in done}) == 2
  assert engine.compile_count() <= engine._config.compile_bound()
