from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from agentic_rl.policy import token_logprobs


def naive(hidden: jax.Array, head: jax.Array, targets: jax.Array, temperature: float) -> tuple[jax.Array, jax.Array]:
  logits = (hidden.astype(jnp.float32) @ head.astype(jnp.float32).T) / temperature
  logp = jax.nn.log_softmax(logits, axis=-1)
  return logp[jnp.arange(len(targets)), targets], -(jnp.exp(logp) * logp).sum(-1)


def shapes(jaxpr: Any) -> Iterator[tuple[int, ...]]:
  """Shapes of all values of a jaxpr, those of inner jaxprs included."""
  for equation in jaxpr.eqns:
    for value in (*equation.invars, *equation.outvars):
      yield value.aval.shape
    for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
      inner = getattr(parameter, "jaxpr", parameter)
      if hasattr(inner, "eqns"):
        yield from shapes(inner)


def case(n: int, v: int, d: int, seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
  rng = np.random.default_rng(seed)
  hidden, head = rng.normal(size=(n, d)), rng.normal(size=(v, d))
  return jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32), jnp.asarray(rng.integers(0, v, n), jnp.int32)


def test_by_hand():
  # Logits 0 and ln 3: probabilities 1/4 and 3/4. At temperature 1/2 the logits double: 1/10 and 9/10.
  hidden, head = np.ones((2, 1), np.float32), np.array([[0.0], [np.log(3)]], np.float32)
  logprobs = jax.jit(token_logprobs)
  logp, entropy = logprobs(hidden, head, np.array([0, 1], np.int32))
  np.testing.assert_allclose(logp, np.log([1 / 4, 3 / 4]), rtol=1e-6)
  np.testing.assert_allclose(entropy, -(0.25 * np.log(0.25) + 0.75 * np.log(0.75)), rtol=1e-6)
  logp, entropy = logprobs(hidden, head, np.array([0, 1], np.int32), temperature=0.5)
  np.testing.assert_allclose(logp, np.log([0.1, 0.9]), rtol=1e-6)
  np.testing.assert_allclose(entropy, -(0.1 * np.log(0.1) + 0.9 * np.log(0.9)), rtol=1e-6)


@pytest.mark.parametrize(("chunk", "temperature"), [(1, 1.0), (3, 0.6), (7, 1.4), (100, 1.0)])
def test_equals_the_naive_version_in_value_and_gradient(chunk: int, temperature: float):
  hidden, head, targets = case(7, 11, 5)
  weights = jnp.asarray(np.random.default_rng(1).normal(size=(2, 7)), jnp.float32)

  def loss(function: Any, *args: jax.Array) -> jax.Array:
    logp, entropy = function(*args)
    return jnp.sum(weights[0] * logp + weights[1] * entropy)

  def chunked(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
    return token_logprobs(*args, temperature=temperature, chunk=chunk)

  def plain(*args: jax.Array) -> tuple[jax.Array, jax.Array]:
    return naive(*args, temperature)

  @functools.partial(jax.jit, static_argnums=0)
  def value_and_gradient(function: Any, h: jax.Array, w: jax.Array) -> Any:
    return function(h, w, targets), jax.grad(lambda h, w: loss(function, h, w, targets), (0, 1))(h, w)

  got, got_grad = value_and_gradient(chunked, hidden, head)
  want, want_grad = value_and_gradient(plain, hidden, head)
  assert all(x.dtype == jnp.float32 and x.shape == (7,) for x in got)
  for a, b in zip((*got, *got_grad), (*want, *want_grad), strict=True):
    np.testing.assert_allclose(a, b, atol=5e-6)


def test_logits_exist_for_one_chunk_only():
  """Neither in the program nor in its memory is there room for [N,V], forward or backward."""
  n, v, d, chunk = 2048, 1024, 4, 64
  hidden, head, targets = case(n, v, d)

  def loss(h: jax.Array, w: jax.Array, use: Any) -> jax.Array:
    logp, entropy = use(h, w, targets)
    return logp.sum() + entropy.sum()

  def largest(use: Any) -> int:
    jaxpr = jax.make_jaxpr(jax.grad(lambda h, w: loss(h, w, use), (0, 1)))(hidden, head)
    return max(int(np.prod(s)) for s in shapes(jaxpr.jaxpr))

  def chunked(h: jax.Array, w: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    return token_logprobs(h, w, t, chunk=chunk)

  assert largest(lambda *a: naive(*a, 1.0)) == n * v, "the walk sees the array when it is there"
  assert largest(chunked) == chunk * v
  compiled = jax.jit(jax.grad(lambda h, w: loss(h, w, chunked), (0, 1))).lower(hidden, head).compile()
  # Six chunks of logits (measured: 3.1), a few copies of what comes in and goes out.
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * (6 * chunk * v + 8 * (n + v) * d)


def test_gradient_of_the_head_is_summed_in_its_own_type():
  """Activations are bfloat16. A sum of 2000 chunk gradients in bfloat16 would stall at 256 times one of them."""
  hidden, head, targets = np.ones((2000, 1), jnp.bfloat16), np.zeros((4, 1), np.float32), np.zeros(2000, np.int32)
  grad = jax.jit(jax.grad(lambda w: token_logprobs(hidden, w, targets, chunk=1)[0].sum()))(head)
  assert grad.dtype == jnp.float32
  np.testing.assert_allclose(grad[:, 0], [1500.0, -500.0, -500.0, -500.0], rtol=1e-3)


def test_bfloat16_is_close_to_float32():
  hidden, head, targets = case(64, 50, 16)
  logprobs = jax.jit(token_logprobs)
  exact = logprobs(hidden / 4, head, targets)
  rough = logprobs((hidden / 4).astype(jnp.bfloat16), head, targets)
  for a, b in zip(exact, rough, strict=True):
    assert b.dtype == jnp.float32
    np.testing.assert_allclose(a, b, atol=0.05)
  assert float(rough[0].max()) <= 0.0
  served = logprobs((hidden / 4).astype(jnp.bfloat16), head.astype(jnp.bfloat16), targets)
  np.testing.assert_array_equal(served[0], rough[0], "an engine that holds the head in bfloat16 gets the same")


def test_wrong_ranks_are_refused():
  hidden, head, targets = case(4, 3, 2)
  with pytest.raises(AssertionError):
    token_logprobs(hidden[None], head, targets)
  with pytest.raises(AssertionError):
    token_logprobs(hidden, head, targets[None])
