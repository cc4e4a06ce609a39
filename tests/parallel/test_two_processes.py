"""Two processes of `jax.distributed` on one machine do what one process does."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

import jax
import numpy as np

from agentic_rl.policy import Policy, PolicyConfig, huggingface

SCRIPT = pathlib.Path(__file__).with_name("two_processes.py")
ROOT = SCRIPT.parent.parent.parent
CONFIG = PolicyConfig(
  vocab_size=64,
  width=16,
  layers=2,
  heads=4,
  kv_heads=2,
  head_width=4,
  mlp_width=16,
  experts=4,
  experts_per_token=2,
  expert_width=8,
  qk_norm=True,
)


def start(number: int, port: int, directory: pathlib.Path) -> subprocess.Popen[str]:
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
  command = [sys.executable, str(SCRIPT), str(number), f"127.0.0.1:{port}", str(directory)]
  return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
  out, err = process.communicate(timeout=280)
  assert process.returncode == 0, err[-3000:]
  return json.loads(out.splitlines()[-1])


def test_two_processes_do_what_one_does(tmp_path: pathlib.Path):
  """Import of weights, three steps, scores, and a checkpoint that is restored onto another mesh."""
  rng = np.random.default_rng(1)
  params = jax.tree.map(lambda x: (0.4 * rng.normal(size=x.shape)).astype(np.float32), Policy(CONFIG).abstract_params())
  huggingface.save(tmp_path / "model", CONFIG, params, max_length=16)
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  alone = said(start(-1, port, tmp_path))
  both = [start(number, port, tmp_path) for number in (0, 1)]
  found = [said(process) for process in both]
  assert alone["devices"] == 8 and alone["processes"] == 1
  for one in found:
    assert one["devices"] == 8 and one["processes"] == 2
    for name, value in alone.items():
      if isinstance(value, dict):
        for key in value:
          np.testing.assert_allclose(one[name][key], value[key], atol=2e-5, rtol=1e-5, err_msg=f"{name} {key}")
    np.testing.assert_allclose(one["restored"], alone["restored"], atol=2e-5, rtol=1e-5)
