"""The native engine while weights change, requests fail, and devices are many."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import jax
import numpy as np
import pytest
from native_reference import (
  CONFIG,
  LENGTH,
  OTHER_CONFIG,
  TOKENIZER,
  WEIGHTS,
  check,
  on,
  publication,
  reference,
  slowly,
  some_ids,
  start,
  until,
)

from agentic_rl.episode import Completion
from agentic_rl.parallel import MeshShape, make_mesh
from agentic_rl.rollout.engine import Sampling
from agentic_rl.rollout.native import NativeConfig, NativeEngine


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
