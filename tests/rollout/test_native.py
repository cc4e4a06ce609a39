"""The native engine against a slow loop: same tokens, same log-probabilities, whatever else is in flight."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

import jax
import numpy as np
import pytest
from native_reference import (
  CONFIG,
  LENGTH,
  POLICY,
  TOKENIZER,
  WEIGHTS,
  check,
  on,
  reference,
  slowly,
  some_ids,
  until,
)

from agentic_rl.data.packing import pack_sequences
from agentic_rl.episode import Completion, FinishKind
from agentic_rl.parallel import MeshShape, make_mesh
from agentic_rl.rollout.engine import Sampling
from agentic_rl.rollout.native import NativeEngine
from agentic_rl.train.learner import Learner, LearnerConfig, supervised_loss
from agentic_rl.train.optimizer import OptimizerConfig


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
