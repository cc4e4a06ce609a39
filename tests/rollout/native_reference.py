"""The native engine against a slow loop: a tiny policy, its engines, and the loop that says what they must return."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from agentic_rl.episode import Completion, FinishKind, Publication
from agentic_rl.policy import Policy, PolicyConfig
from agentic_rl.rollout import sampler
from agentic_rl.rollout.engine import Sampling
from agentic_rl.rollout.native import NativeConfig, NativeEngine
from agentic_rl.tokenizer import PieceTokenizer

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
