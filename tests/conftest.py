"""Settings of the whole test run. They are made here because JAX reads them once, when it is first used."""

from __future__ import annotations

import os
import pathlib
import signal

SIMULATED_DEVICES = 8

# On a CPU unless the caller says otherwise: `JAX_PLATFORMS=cuda pytest -m gpu`.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight devices, so that sharded code meets a real mesh.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
  flag = f"--xla_force_host_platform_device_count={SIMULATED_DEVICES}"
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
# Adding `[T]` to `[B, T]` is more often a lost axis than a wish.
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
# Figures without a display.
os.environ.setdefault("MPLBACKEND", "agg")

import pytest  # noqa: E402

# A run in the background of a script, or under `nohup`, starts with these ignored, and so would all its children: the
# tests that stop processes would wait for what never comes.
for _number, _handler in (
  (signal.SIGINT, signal.default_int_handler),
  (signal.SIGHUP, signal.SIG_DFL),
  (signal.SIGTERM, signal.SIG_DFL),
):
  if signal.getsignal(_number) is signal.SIG_IGN:
    signal.signal(_number, _handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
  if item.get_closest_marker("gpu"):
    import jax

    if jax.default_backend() not in ("gpu", "tpu"):
      pytest.skip("needs an accelerator; start with JAX_PLATFORMS=cuda")


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
  """Root of the checkout."""
  return pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def workdir(tmp_path: pathlib.Path) -> pathlib.Path:
  """Path of a run directory that does not exist yet, as a launch script is given it."""
  return tmp_path / "run"
