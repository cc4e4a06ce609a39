"""Engines that the tests of the native engine share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from native_reference import LENGTH, OTHER_CONFIG, start

from agentic_rl.rollout.native import NativeConfig, NativeEngine


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
