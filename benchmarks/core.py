"""Speed of the learner, the native engine, publication and the interpreter, each beside its limit in the same run.

  python -m benchmarks.core            about three minutes on two cores; the last line is JSON

The limit of learner and engine is the machine's own matrix product (float32, 1024 x 1024 x 1024), timed before and
after each measurement: `share` is the achieved floating-point rate over the best of those. The interpreter is measured
against a cold `python -I -c`; `benchmarks.sandbox` looks closer. Absolute times depend on the machine; the ratios are
what to compare.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from agentic_rl.data import arithmetic, pack_sequences
from agentic_rl.parallel import MeshShape, make_mesh
from agentic_rl.policy import Policy, PolicyConfig
from agentic_rl.rollout.engine import Sampling
from agentic_rl.rollout.native import NativeConfig, NativeEngine
from agentic_rl.tokenizer import PieceTokenizer
from agentic_rl.train.learner import Learner, LearnerConfig, policy_loss
from agentic_rl.train.optimizer import OptimizerConfig
from agentic_rl.train.publication import Publisher, read_params
from benchmarks import sandbox
from configs.zerotir_nano import get_config

MODELS = {
  "nano": PolicyConfig.from_dict({**get_config().policy.to_dict(), "vocab_size": arithmetic.tokenizer().vocab_size}),
  "20m": PolicyConfig(
    vocab_size=8192,
    width=384,
    layers=10,
    heads=6,
    kv_heads=2,
    head_width=64,
    mlp_width=1024,
    qk_norm=True,
    unroll_layers=True,
  ),
}
ROWS, MICRO_ROWS, LENGTH = {"nano": 32, "20m": 8}, {"nano": 8, "20m": 4}, {"nano": 128, "20m": 256}
DEVICES = {"nano": 2, "20m": 1}  # of the learner, simulated on the CPU; the study uses two
SLOTS, PROMPT, NEW = {"nano": 192, "20m": 32}, 16, {"nano": 48, "20m": 48}


def best_seconds(run: Callable[[], object], seconds: float = 3.0) -> float:
  """Least time of one call, over at least three calls and about `seconds`."""
  times: list[float] = []
  while len(times) < 3 or sum(times) < seconds:
    start = time.perf_counter()
    jax.block_until_ready(run())
    times.append(time.perf_counter() - start)
  return min(times)


def matmul_peak() -> float:
  """Floating-point operations a second of the matrix product."""
  n = 1024
  x = jnp.asarray(np.random.default_rng(0).standard_normal((n, n)), jnp.float32)
  product = jax.jit(lambda a: a @ a)
  jax.block_until_ready(product(x))
  return 2 * n**3 / best_seconds(lambda: product(x), 1.0)


def forward_flops(policy: Policy, context: float) -> float:
  """Floating-point operations of one token's forward pass that attends to `context` tokens."""
  c = policy.config
  return 2 * policy.parameter_count() + 4 * c.layers * c.heads * c.head_width * context


def measure_learner(name: str) -> dict[str, float]:
  """Tokens a second of one optimizer step on full rows, and the share of the peak."""
  policy = Policy(MODELS[name])
  config = LearnerConfig(microbatch_rows=MICRO_ROWS[name])
  loss = policy_loss(clip_low=0.2, clip_high=0.28)
  mesh = make_mesh(MeshShape(data=-1, fsdp=1), jax.devices()[: DEVICES[name]])
  learner = Learner(policy, OptimizerConfig(), loss, config, mesh)
  rng = np.random.default_rng(0)
  rows, length = ROWS[name], LENGTH[name]
  documents = [rng.integers(2, policy.config.vocab_size, length // 4) for _ in range(4 * rows)]
  masks = [np.arange(length // 4) >= 8 for _ in documents]
  batch = pack_sequences(
    documents,
    masks,
    behaviour_logprobs=[np.full(length // 4, -1.0, np.float32) for _ in documents],
    advantages=rng.standard_normal(len(documents)).astype(np.float32),
    length_buckets=(length,),
    row_multiple=rows,
  )
  state = learner.init(jax.random.key(0))

  def step() -> object:
    nonlocal state
    state, metrics = learner.update(state, batch)
    return metrics["loss"]

  peak = matmul_peak()
  jax.block_until_ready(step())
  seconds = best_seconds(step, 8.0)
  peak = max(peak, matmul_peak())
  tokens = rows * length
  # Attention is counted as computed: a query block sees the whole prefix of its row, half of it on average.
  flops = 3 * forward_flops(policy, length / 2) * tokens
  return {
    "tokens_per_s": tokens / seconds,
    "share_of_peak": flops / seconds / peak,
    "parameters": policy.parameter_count(),
  }


def measure_engine(name: str) -> dict[str, float]:
  """Generated tokens a second with all slots busy, prompts included in the time, and the share of the peak."""
  policy = Policy(MODELS[name])
  pieces = [f"<{i}>" for i in range(policy.config.vocab_size - 2)]
  tokenizer = arithmetic.tokenizer() if name == "nano" else PieceTokenizer(pieces)
  slots, new = SLOTS[name], NEW[name]
  config = NativeConfig(slots=slots, max_length=128, prefill_widths=(32,), attend_lengths=(0.5, 1.0))
  rng = np.random.default_rng(0)
  prompts = [rng.integers(2, policy.config.vocab_size, PROMPT).tolist() for _ in range(slots)]

  async def run() -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as directory:
      publisher = Publisher(directory, policy.config, tokenizer.fingerprint)
      publication = publisher.publish(0, jax.jit(policy.init)(jax.random.key(0)))
      engine = NativeEngine(policy, tokenizer, config, read=read_params)
      await engine.load(publication)

      async def batch(seed: int) -> float:
        sampling = Sampling(max_new_tokens=new, seed=seed)
        start = time.perf_counter()
        await asyncio.gather(*(engine.generate(p, sampling, session=f"{seed}/{i}") for i, p in enumerate(prompts)))
        return time.perf_counter() - start

      peak = matmul_peak()
      await batch(0)
      seconds = min([await batch(i) for i in range(1, 5)])
      peak = max(peak, matmul_peak())
      await engine.close()
      return seconds, peak

  seconds, peak = asyncio.run(run())
  tokens = slots * new
  flops = tokens * forward_flops(policy, PROMPT + new / 2) + slots * PROMPT * forward_flops(policy, PROMPT / 2)
  return {"tokens_per_s": tokens / seconds, "share_of_peak": flops / seconds / peak}


def measure_publication(name: str) -> dict[str, float]:
  """Seconds to publish and to read back one set of weights, checksums included, against one plain write and read."""
  policy = Policy(MODELS[name])
  params = jax.jit(policy.init)(jax.random.key(0))
  size = 4 * policy.parameter_count()
  blob = np.random.default_rng(0).bytes(size)
  with tempfile.TemporaryDirectory() as directory:
    publisher = Publisher(directory, policy.config, "benchmark")
    publish = best_seconds(lambda: publisher.publish(1, params), 2.0)
    publication = publisher.publish(2, params)
    read = best_seconds(lambda: read_params(publication), 2.0)

    def plain() -> None:
      with open(f"{directory}/blob", "wb") as file:
        file.write(blob)
      with open(f"{directory}/blob", "rb") as file:
        file.read()

    return {"publish_s": publish, "read_s": read, "plain_write_read_s": best_seconds(plain, 1.0), "bytes": size}


def main() -> None:
  """Measures, prints a table, and ends with one JSON line."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
  arguments = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", max(DEVICES.values()))
  figures: dict[str, object] = {"matmul_gflops": matmul_peak() / 1e9}
  print(f"matrix product: {figures['matmul_gflops']:.0f} GFLOP/s\n")
  print(f"{'':22}{'tokens/s':>12}{'share of peak':>16}")
  for name in arguments.models:
    for part, measure in (("learner", measure_learner), ("engine", measure_engine)):
      figures[f"{part}_{name}"] = result = measure(name)
      print(f"{part + ' ' + name:22}{result['tokens_per_s']:12,.0f}{result['share_of_peak']:16.1%}", flush=True)
  for name in arguments.models:
    figures[f"publication_{name}"] = result = measure_publication(name)
    print(f"publication {name:10}{result['publish_s']:10.3f} s to write, {result['read_s']:.3f} s to read and check")
  figures["interpreter"] = result = sandbox.measure()
  print()
  for key, value in result.items():
    print(f"interpreter {key:40}{value:12.3f}")
  print(json.dumps(figures))


if __name__ == "__main__":
  main()
