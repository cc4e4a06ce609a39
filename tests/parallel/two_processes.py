"""One of two processes with four simulated devices each; `test_two_processes.py` starts them. Prints one JSON line."""

from __future__ import annotations

import json
import pathlib
import sys

import jax
import numpy as np

number, address, directory = int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 4 if number >= 0 else 8)
if number >= 0:
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(address, num_processes=2, process_id=number)

from agentic_rl.data import pack_sequences  # noqa: E402
from agentic_rl.parallel import MeshShape, make_mesh  # noqa: E402
from agentic_rl.policy import Policy, PolicyConfig, huggingface  # noqa: E402
from agentic_rl.train.checkpoints import Checkpoints  # noqa: E402
from agentic_rl.train.learner import Learner, LearnerConfig, policy_loss  # noqa: E402
from agentic_rl.train.optimizer import OptimizerConfig  # noqa: E402

CONFIG = PolicyConfig(
  vocab_size=64, width=16, layers=2, heads=4, kv_heads=2, head_width=4, mlp_width=16, experts=4, experts_per_token=2,
  expert_width=8, qk_norm=True,
)  # fmt: skip
SHAPES = [MeshShape(2, 2, 2), MeshShape(1, 2, 1, context=2, expert=2)]


def learner(shape: MeshShape) -> Learner:
  optimizer = OptimizerConfig(learning_rate=0.05, eps=0.1, clip_norm=1e9)
  return Learner(
    Policy(CONFIG), optimizer, policy_loss(clip_low=0.2, clip_high=0.28), LearnerConfig(8, 16), make_mesh(shape)
  )


def main() -> None:
  rng = np.random.default_rng(0)
  lengths = rng.integers(2, 17, 16)
  batch = pack_sequences(
    [rng.integers(0, 64, n).astype(np.int32) for n in lengths],
    [np.arange(n) > 0 for n in lengths],
    behaviour_logprobs=[np.full(n, -4.0, np.float32) for n in lengths],
    advantages=rng.normal(size=16).astype(np.float32),
    length_buckets=(16,),
    row_multiple=8,
  )
  said: dict[str, object] = {"devices": len(jax.devices()), "processes": jax.process_count()}
  for shape in SHAPES:
    which = learner(shape)
    _, params = huggingface.load(directory / "model", shardings=which.state_shardings.params)
    state = which.from_params(params)
    for _ in range(3):
      state, metrics = which.update(state, batch)
    logp, entropy = which.score(state.params, batch)
    said[str(shape)] = {
      "loss": float(metrics["loss"]), "grad_norm": float(metrics["grad_norm"]), "entropy": float(entropy.sum()),
      "logp": np.asarray(logp).sum(axis=1).tolist(),
    }  # fmt: skip
  checkpoints = Checkpoints(directory / f"checkpoints{min(number, 0)}")
  checkpoints.save(3, state, {"step": 3})
  checkpoints.wait()
  other = learner(SHAPES[0])  # restored onto another mesh
  restored = checkpoints.restore(3, other.abstract_state())
  said["restored"] = np.asarray(other.score(restored.params, batch)[0]).sum(axis=1).tolist()
  checkpoints.close()
  print(json.dumps(said), flush=True)


if __name__ == "__main__":
  main()
