from __future__ import annotations

import importlib.util

import pytest

from agentic_rl.errors import UserError
from agentic_rl.planning import topologies
from agentic_rl.planning.topologies import parse_topology, topology_devices


@pytest.mark.parametrize(
  ("name", "chips", "layout"),
  [
    ("v5e-8", 8, "2x4"),
    ("v5e-1", 1, "1x1"),
    ("v6e-256", 256, "16x16"),
    ("v5p-128", 64, "4x4x4"),  # the number counts cores, two a chip
    ("v4-8", 4, "2x2x1"),
    ("H100-8", 8, "1x1x8"),
    ("h200-2", 2, "1x1x2"),
    ("h100-16", 16, "1x2x8"),
  ],
)
def test_names(name: str, chips: int, layout: str):
  topology = parse_topology(name)
  assert (topology.chips, topology.layout) == (chips, layout)


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("v5e", "unknown topology 'v5e'"),
    ("v9-8", "known: v4-N, v5e-N"),
    ("v5e-6", "slices are v5e-1, v5e-4, v5e-8"),
    ("v5p-4", "slices are v5p-8, v5p-16"),
    ("h100-12", "whole hosts of 8"),
    ("h100-0", "whole hosts of 8"),
  ],
)
def test_names_that_are_no_topology(name: str, message: str):
  with pytest.raises(UserError, match=message):
    parse_topology(name)


def test_collectives_over_more_than_a_host_of_gpus_go_over_the_network():
  two_hosts, pod = parse_topology("h100-16"), parse_topology("v5e-16")
  assert (two_hosts.bandwidth(8), two_hosts.bandwidth(16)) == (450e9, 50e9)
  assert pod.bandwidth(16) == pod.bandwidth(4) == 200e9


@pytest.mark.parametrize(("name", "extra"), [("v5e-8", "plan-tpu"), ("h100-8", "plan-gpu")])
def test_a_missing_compiler_is_named_with_its_extra(name: str, extra: str, monkeypatch: pytest.MonkeyPatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(UserError, match=rf"missing; pip install -e '\.\[{extra}\]'"):
    topology_devices(parse_topology(name))


def test_what_the_user_has_set_for_libtpu_stays(monkeypatch: pytest.MonkeyPatch):
  described = []

  class Description:
    devices = ("device",)

  def describe(name: str, platform: str, **options: object) -> Description:
    described.append((name, platform, options))
    return Description()

  monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
  monkeypatch.setattr(topologies.topologies, "get_topology_desc", describe)
  monkeypatch.setattr(topologies.os, "environ", environment := {"TPU_WORKER_ID": "3"})
  assert topology_devices(parse_topology("v4-8")) == ["device"]
  assert described == [("v4:2x2x1", "tpu", {"chip_config_name": "megacore"})]
  assert environment["TPU_WORKER_ID"] == "3"
  assert environment["TPU_SKIP_MDS_QUERY"] == environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1"
