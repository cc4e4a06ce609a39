from __future__ import annotations

import dataclasses

import jax
import pytest

from agentic_rl.parallel import MeshShape, make_mesh
from agentic_rl.planning.flops import count_work, hbm_traffic, layer_matrices, parameter_count, visible_pairs
from agentic_rl.planning.roofline import Assumptions, roofline, wire_bytes
from agentic_rl.policy import Policy, PolicyConfig
from agentic_rl.train.learner import Learner, LearnerConfig, policy_loss
from agentic_rl.train.optimizer import OptimizerConfig

SMALL = PolicyConfig(vocab_size=10, width=4, layers=2, heads=2, kv_heads=1, head_width=2, mlp_width=8)


def test_the_longest_part_is_the_step():
  line = roofline(
    executed_flops=300.0,
    model_flops=200.0,
    hbm_bytes=80.0,
    transfers=[(10.0, 10.0), (5.0, 20.0)],
    tokens=64,
    chips=4,
    peak_flops=100.0,
    hbm_bandwidth=40.0,
    assumed=Assumptions(compute=0.5, memory=0.5, links=0.25),
  )
  assert (line.compute_s, line.memory_s, line.links_s) == (6.0, 4.0, 5.0)
  assert (line.step_s, line.bound) == (6.0, "compute")
  assert line.tokens_per_s_chip == pytest.approx(64 / 6 / 4)
  assert line.mfu == pytest.approx(200 / 6 / 100)


def test_links_can_be_the_bound():
  line = roofline(
    executed_flops=1.0,
    model_flops=1.0,
    hbm_bytes=1.0,
    transfers=[(100.0, 1.0)],
    tokens=1,
    chips=1,
    peak_flops=1.0,
    hbm_bandwidth=1.0,
    assumed=Assumptions(1.0, 1.0, 1.0),
  )
  assert (line.step_s, line.bound) == (100.0, "links")


@pytest.mark.parametrize("efficiency", [0.0, 1.5, -1.0])
def test_an_efficiency_is_a_share(efficiency: float):
  with pytest.raises(ValueError, match="efficiency memory"):
    Assumptions(memory=efficiency)


@pytest.mark.parametrize(
  ("kind", "group", "sent"),
  [
    ("all-gather", 8, 70.0),
    ("reduce-scatter", 8, 70.0),
    ("all-reduce", 8, 140.0),
    ("all-to-all", 4, 60.0),
    ("collective-permute", 8, 80.0),
    ("all-reduce", 1, 0.0),
  ],
)
def test_what_a_ring_sends(kind: str, group: int, sent: float):
  assert wire_bytes(kind, 80.0, group) == sent


def test_work_by_hand():
  # A layer: q and o 2 x 4x2x2 = 32, k and v 2 x 4x1x2 = 16, MLP 3 x 4x8 = 96. The head: 10x4 = 40.
  assert layer_matrices(SMALL) == 144
  work = count_work(SMALL, rows=3, length=4)
  assert (work.tokens, work.matrices) == (12, 2 * 144 + 40)
  # 4 tokens of a row see 1 + 2 + 3 + 4 = 10 pairs; scores and values take 2 x 2 FLOPs for each of 2x2 features.
  forward_attention = 4 * 4 * 10 * 3 * 2
  assert work.attention == 3 * forward_attention
  assert work.model == 6 * 328 * 12 + 3 * forward_attention
  assert work.executed == work.model + 2 * 40 * 12  # logits are computed again in the backward pass


def test_recomputed_layers_are_executed_once_more():
  recomputed = count_work(dataclasses.replace(SMALL, remat="layer"), rows=3, length=4)
  kept = count_work(SMALL, rows=3, length=4)
  assert recomputed.model == kept.model
  # All but the last product of each layer's MLP, 4x8 weights.
  assert recomputed.executed - kept.executed == 2 * (288 - 2 * 32) * 12 + kept.attention / 3


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_work_is_what_the_compiler_counts(remat: str):
  # Without loops over layers and chunks, the compiler's count of the unoptimized step misses nothing. It has what is no
  # matrix product as well.
  wide = PolicyConfig(
    vocab_size=2048,
    width=256,
    layers=1,
    heads=4,
    kv_heads=2,
    head_width=64,
    mlp_width=1024,
    attention="blocks",
    remat=remat,
    unroll_layers=True,
  )

  def compare(layers: int) -> tuple[float, float]:
    config = dataclasses.replace(wide, layers=layers)
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    loss = policy_loss(clip_low=0.2, clip_high=0.2)
    learner = Learner(Policy(config), OptimizerConfig(), loss, LearnerConfig(1, 512), mesh)
    return learner.lower(1, 512).cost_analysis()["flops"], count_work(config, 1, 512).executed

  (one, one_counted), (two, two_counted) = compare(1), compare(2)
  assert two - one == pytest.approx(two_counted - one_counted, rel=0.05)
  assert two == pytest.approx(two_counted, rel=0.05)


@pytest.mark.parametrize(("length", "window", "pairs"), [(4, 0, 10), (4, 4, 10), (4, 9, 10), (4, 2, 7), (3, 1, 3)])
def test_pairs_in_sight(length: int, window: int, pairs: int):
  assert visible_pairs(length, window) == pairs


def test_a_token_meets_the_experts_it_is_sent_to():
  sparse = PolicyConfig(
    vocab_size=10,
    width=4,
    layers=2,
    heads=2,
    kv_heads=1,
    head_width=2,
    mlp_width=8,
    experts=6,
    experts_per_token=2,
    expert_width=5,
  )
  assert layer_matrices(sparse) == 48 + 4 * 6 + 2 * 3 * 4 * 5
  assert parameter_count(sparse) == 2 * (48 + 24 + 6 * 60) + 40


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_policy(tied: bool):
  config = dataclasses.replace(SMALL, tied_embeddings=tied)
  scales = 2 * 2 * 4 + 4  # two norms a layer and the last
  assert parameter_count(config) + scales == Policy(config).parameter_count()


def test_memory_traffic_by_hand():
  each, once = hbm_traffic(SMALL, 12, shard=164, tensor=1)
  assert once == 7 * 4 * 164
  # 2 x 144 + 40 = 328 float32 weights are written and read in two passes, gradients read and written, in three passes
  # of two layers 8 x 4 + 4 x 8 + 2 x 3 x 2 numbers a token, and ten logits a token eight times.
  assert each == 2 * 2 * 4 * 328 + 2 * 4 * 164 + 3 * 4 * (32 + 32 + 12) * 2 * 12 + 8 * 4 * 10 * 12
