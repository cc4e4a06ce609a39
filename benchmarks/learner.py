"""Speed and memory of the learner's step beside PyTorch `transformers`, in one run.

  python -m benchmarks.learner [--quick]          (make bench-learner installs PyTorch); the last line is JSON

Both train the same weights on the same tokens: forward, backward, clipping by the global norm and AdamW. Each has a
process of its own with all cores, and they take turns step by step, so that what else the machine does hits both; a
ratio is the median over the rounds of theirs over ours. Theirs is `transformers` with its scaled-dot-product attention,
in bfloat16 under autocast.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

MODELS = {"20m": (8, 512), "20m_one_row": (1, 1024), "135m": (8, 512)}
"""Rows and tokens in a row."""
BARS = {
  "f32_vs_torch_20m": (">=", 1.0),
  "f32_vs_torch_20m_one_row": (">=", 1.0),
  "f32_vs_torch_135m": (">=", 1.0),
  "bf16_vs_torch_135m": (">=", 1.2),
  "packed_vs_padded": (">=", 1.5),
  "padding_share": ("<", 0.05),
  "loss_memory_vs_naive": ("<", 0.05),
}
_LENGTHS = pathlib.Path(__file__).with_name("episode_lengths.json")


def tokens(rows: int, length: int, vocabulary: int) -> np.ndarray:
  """int32[rows, length], the same for both."""
  return np.random.default_rng(0).integers(0, vocabulary, (rows, length)).astype(np.int32)


# -- the two processes -------------------------------------------------------------------------------------------------


def our_step(model: str, dtype: str, rows: int, length: int) -> Callable[[], float]:
  """One step of ours; returns the loss."""
  import jax

  from agentic_rl.data import pack_sequences
  from agentic_rl.parallel import MeshShape, make_mesh
  from agentic_rl.policy import Policy, huggingface
  from agentic_rl.train.learner import Learner, LearnerConfig, supervised_loss
  from agentic_rl.train.optimizer import OptimizerConfig

  config, params = huggingface.load(model, dtype=np.float32, unroll_layers=True)
  policy = Policy(type(config).from_dict(config.to_dict() | {"dtype": dtype}))
  mesh = make_mesh(MeshShape(), jax.devices()[:1])
  learner = Learner(policy, OptimizerConfig(), supervised_loss, LearnerConfig(microbatch_rows=rows), mesh)
  ids = tokens(rows, length, config.vocab_size)
  masks = [np.arange(length) > 0 for _ in ids]
  batch = pack_sequences(list(ids), masks, length_buckets=(length,), row_multiple=rows)
  state = learner.from_params(params)

  def step() -> float:
    nonlocal state
    state, metrics = learner.update(state, batch)
    return float(metrics["loss"])

  return step


def their_step(model: str, dtype: str, rows: int, length: int) -> Callable[[], float]:
  """One step of transformers; returns the loss."""
  import torch
  import transformers

  torch.set_num_threads(len(os.sched_getaffinity(0)))
  net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
  net.train()
  optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.01)
  ids = torch.tensor(tokens(rows, length, net.config.vocab_size), dtype=torch.long)

  def step() -> float:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
      loss = net(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss)

  return step


def work(side: str, model: str, dtype: str, rows: int, length: int) -> None:
  """A process that does a step for each line of its input and answers with seconds and loss."""
  make = our_step if side == "ours" else their_step
  step = make(model, dtype, rows, length)
  step()  # compiles
  print("ready", flush=True)
  for _ in sys.stdin:
    begin = time.perf_counter()
    loss = step()
    print(json.dumps([time.perf_counter() - begin, loss]), flush=True)


def race(model: pathlib.Path, dtype: str, rows: int, length: int, rounds: int) -> dict[str, float]:
  """Both in turns; their time over ours, tokens a second of each, and how far the losses of a step are apart."""
  workers = {}
  for side in ("ours", "theirs"):
    command = [sys.executable, "-m", "benchmarks.learner", f"--worker={side}", f"--model={model}", f"--dtype={dtype}"]
    command += [f"--rows={rows}", f"--length={length}"]
    workers[side] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if workers[side].stdout.readline() != "ready\n":  # type: ignore[union-attr]
      raise RuntimeError(f"the process of {side} did not start")
  taken: dict[str, list[float]] = {side: [] for side in workers}
  losses: dict[str, list[float]] = {side: [] for side in workers}
  for _ in range(rounds):
    for side, worker in workers.items():
      worker.stdin.write("\n")  # type: ignore[union-attr]
      worker.stdin.flush()  # type: ignore[union-attr]
      seconds, loss = json.loads(worker.stdout.readline())  # type: ignore[union-attr]
      taken[side].append(seconds)
      losses[side].append(loss)
  for worker in workers.values():
    worker.communicate()
  ratios = [theirs / ours for ours, theirs in zip(taken["ours"], taken["theirs"], strict=True)]
  return {
    "ratio": statistics.median(ratios),
    "ours": rows * length / statistics.median(taken["ours"]),
    "theirs": rows * length / statistics.median(taken["theirs"]),
    "loss_difference": max(abs(a - b) for a, b in zip(losses["ours"], losses["theirs"], strict=True)),
  }


# -- alone -------------------------------------------------------------------------------------------------------------


def measure_packing(rounds: int) -> dict[str, float]:
  """A step on real episodes, packed against one to a row: the same gradient, and how much sooner it is there."""
  import jax

  from agentic_rl.data import pack_sequences
  from agentic_rl.parallel import MeshShape, make_mesh
  from agentic_rl.policy import Policy
  from agentic_rl.train.learner import Learner, LearnerConfig, supervised_loss
  from agentic_rl.train.optimizer import OptimizerConfig
  from benchmarks.core import MODELS as CORE_MODELS

  lengths = json.loads(_LENGTHS.read_text())["lengths"]
  policy = Policy(CORE_MODELS["nano"])
  rng = np.random.default_rng(0)
  ids = [rng.integers(2, policy.config.vocab_size, n).astype(np.int32) for n in lengths]
  masks = [np.arange(n) > 0 for n in lengths]
  width = 1 << (max(lengths) - 1).bit_length()
  micro = 8
  learner = Learner(
    policy,
    OptimizerConfig(),
    supervised_loss,
    LearnerConfig(microbatch_rows=micro),
    make_mesh(MeshShape(), jax.devices()[:1]),
  )
  packed = pack_sequences(ids, masks, length_buckets=(width,), row_multiple=micro)
  alone = [
    pack_sequences(ids[i : i + 1], masks[i : i + 1], length_buckets=(width,), row_multiple=1) for i in range(len(ids))
  ]
  names = ("token_ids", "positions", "segment_ids", "sequence_ids", "loss_mask", "behaviour_logprobs", "advantages")
  rows = [*alone, *alone[: -len(alone) % micro]]
  fields: dict[str, Any] = {name: np.concatenate([getattr(b, name) for b in rows]) for name in names}
  fields["loss_mask"][len(alone) :] = False
  weights = fields["loss_mask"] / fields["loss_mask"].sum()
  padded = type(packed)(**fields, loss_weights=weights.astype(np.float32))
  taken: dict[str, list[float]] = {"packed": [], "padded": []}
  for i in range(rounds + 1):
    for name, batch in (("packed", packed), ("padded", padded)):
      state = learner.init(jax.random.key(0))
      jax.block_until_ready(state)
      begin = time.perf_counter()
      jax.block_until_ready(learner.update(state, batch))
      if i:  # the first compiles
        taken[name].append(time.perf_counter() - begin)
  ratio = statistics.median(b / a for a, b in zip(taken["packed"], taken["padded"], strict=True))
  return {"packed_vs_padded": ratio, "padding_share": packed.padding_fraction, "padded_share": padded.padding_fraction}


def measure_loss_memory(length: int = 4096, vocabulary: int = 151_936, width: int = 896, chunk: int = 64) -> float:
  """Temporary memory of the loss and its gradient over that of all logits at once, by the compiler's account.

  The gradient is that of the hidden states: the head's own has the head's size, however the loss is computed.
  """
  import jax
  import jax.numpy as jnp

  from agentic_rl.policy import token_logprobs

  def ours(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    logp, _ = token_logprobs(hidden, head, targets, chunk=chunk)
    return jnp.sum(logp)

  def naive(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax((hidden @ head.T).astype(jnp.float32))
    return jnp.sum(jnp.take_along_axis(logp, targets[:, None], axis=-1))

  arguments = (
    jax.ShapeDtypeStruct((length, width), jnp.float32),
    jax.ShapeDtypeStruct((vocabulary, width), jnp.float32),
    jax.ShapeDtypeStruct((length,), jnp.int32),
  )
  sizes = [
    jax.jit(jax.grad(loss)).lower(*arguments).compile().memory_analysis().temp_size_in_bytes  # type: ignore[union-attr]
    for loss in (ours, naive)
  ]
  return sizes[0] / sizes[1]


# -- all ---------------------------------------------------------------------------------------------------------------


def write_models(directory: pathlib.Path) -> dict[str, pathlib.Path]:
  """Random weights of each shape, as Hugging Face directories."""
  import jax

  from agentic_rl.policy import Policy, huggingface
  from agentic_rl.policy.families import named
  from benchmarks.core import MODELS as CORE_MODELS

  found = {}
  for name, config in (("20m", CORE_MODELS["20m"]), ("135m", named("smollm2_135m"))):
    params = jax.tree.map(np.asarray, jax.jit(Policy(config).init)(jax.random.key(0)))
    found[name] = huggingface.save(directory / name, config, params, max_length=2048)
  return found


def main() -> None:
  """Measures, prints a table, and ends with one JSON line."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--quick", action="store_true", help="few rounds, without the largest model")
  for name in ("worker", "model", "dtype"):
    parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
  for name in ("rows", "length"):
    parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.worker:
    work(arguments.worker, arguments.model, arguments.dtype, arguments.rows, arguments.length)
    return
  figures: dict[str, float] = {}
  print(f"{'':28}{'ours':>12}{'transformers':>14}{'ratio':>8}   tokens/s", flush=True)
  with tempfile.TemporaryDirectory() as directory:
    models = write_models(pathlib.Path(directory))
    for name, dtype in (
      ("20m", "float32"),
      ("20m_one_row", "float32"),
      ("20m", "bfloat16"),
      ("135m", "float32"),
      ("135m", "bfloat16"),
    ):
      if arguments.quick and name == "135m":
        continue
      rounds = 3 if arguments.quick or name == "135m" else 9
      found = race(models[name.partition("_")[0]], dtype, *MODELS[name], rounds)
      figures[f"{'bf16' if dtype == 'bfloat16' else 'f32'}_vs_torch_{name}"] = round(found["ratio"], 3)
      label = f"{name}, {MODELS[name][0]} x {MODELS[name][1]}, {dtype}"
      print(f"{label:28}{found['ours']:12,.0f}{found['theirs']:14,.0f}{found['ratio']:8.2f}", flush=True)
      if dtype == "float32" and found["loss_difference"] > 1e-3:
        raise AssertionError(f"the losses differ by {found['loss_difference']}: it is not the same step")
  from benchmarks.core import measure_learner

  figures["matmul_share"] = round(measure_learner("20m")["share_of_peak"], 3)
  figures |= {name: round(value, 4) for name, value in measure_packing(3 if arguments.quick else 9).items()}
  figures["loss_memory_vs_naive"] = round(measure_loss_memory(), 4)
  print("\nBars")
  for name, (relation, bar) in BARS.items():
    if name in figures:
      met = figures[name] >= bar if relation == ">=" else figures[name] < bar
      print(f"  {name:28}{figures[name]:10.3f}   {relation} {bar:<6g} {'met' if met else 'MISSED'}")
  print(json.dumps(figures))


if __name__ == "__main__":
  main()
