from __future__ import annotations

import pathlib

import pytest

from agentic_rl.planning.hlo import Collective, read_collectives

TEXT = (pathlib.Path(__file__).parent / "step.hlo").read_text()


def found(micro_batches: int) -> dict[tuple[str, int], Collective]:
  return {(c.kind, c.group): c for c in read_collectives(TEXT, devices=8, unknown_trips=micro_batches).found}


def test_a_collective_in_two_loops_is_counted_once_a_trip_and_its_pieces_once():
  # bf16[64,16] in 28 layers of 3 micro-batches; the start and the done of channel 5 are one.
  gathered = found(3)["all-gather", 8]
  assert (gathered.count, gathered.payload_bytes) == (84, 84 * 2048)
  assert gathered.sent_bytes == pytest.approx(84 * 2048 * 7 / 8)


def test_a_fused_all_reduce_of_which_a_part_is_kept_is_a_reduce_scatter():
  scattered = found(1)["reduce-scatter", 8]
  assert (scattered.count, scattered.payload_bytes) == (28, 28 * 4096)
  assert scattered.sent_bytes == pytest.approx(28 * 4096 * 7 / 8)


def test_tuples_are_summed_and_an_all_reduce_is_sent_twice():
  reduced = found(2)["all-reduce", 4]
  assert (reduced.count, reduced.payload_bytes) == (2, 2 * 512)
  assert reduced.sent_bytes == pytest.approx(2 * 512 * 2 * 3 / 4)


def test_a_start_names_operands_and_results_and_a_known_trip_count_is_used():
  # The results f32[16] and bf16[8,8] have 192 bytes, five times; a reduce-scatter that leaves f32[4] took 64.
  assert found(9)["all-gather", 4] == Collective("all-gather", 4, 5, 960.0, 720.0)
  assert found(9)["reduce-scatter", 4] == Collective("reduce-scatter", 4, 5, 320.0, 240.0)


def test_a_permutation_sends_its_array():
  assert found(1)["collective-permute", 8] == Collective("collective-permute", 8, 1, 512.0, 512.0)


def test_trip_counts_are_reported():
  collectives = read_collectives(TEXT, devices=8, unknown_trips=2)
  assert (collectives.trips, collectives.unread, collectives.unplaced) == ((5, 28), 1, 0)


def test_a_collective_that_nothing_runs_is_reported():
  # Nothing calls the body of the loop once the loop is gone.
  text = "\n".join(line for line in TEXT.splitlines() if "body=%gpu_body" not in line)
  collectives = read_collectives(text, devices=8)
  assert collectives.unplaced == 2


def test_a_program_without_collectives_has_none():
  assert (
    read_collectives("ENTRY %main (x: f32[]) -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}\n", devices=1).found == ()
  )


def test_a_loop_that_counts_in_steps_has_fewer_trips():
  # Collective matrix products go two pieces a trip: i = 0, 2, 4, 6.
  windowed = """
%body (p: (f32[8], u32[])) -> (f32[8], u32[]) {
  %two = u32[]{:T(128)} constant(2)
  %p = (f32[8]{0}, u32[]{:T(128)}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=1
  %collective-permute-start.1 = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p)
  %collective-permute-done.1 = f32[8]{0} collective-permute-done(%collective-permute-start.1)
  %next = u32[]{:T(128)} add(%i, %two), control-predecessors={%i}
  ROOT %t = (f32[8]{0}, u32[]{:T(128)}) tuple(%collective-permute-done.1, /*index=1*/%next)
}

%condition (q: (f32[8], u32[])) -> pred[] {
  %limit = u32[]{:T(128)} constant(7)
  %q = (f32[8]{0}, u32[]{:T(128)}) parameter(0)
  %j = u32[]{:T(128)} get-tuple-element(%q), index=1
  ROOT %less = pred[] compare(%j, %limit), direction=LT
}

ENTRY %main (x: (f32[8], u32[])) -> (f32[8], u32[]) {
  %x = (f32[8]{0}, u32[]{:T(128)}) parameter(0)
  ROOT %loop = (f32[8]{0}, u32[]{:T(128)}) while(%x), condition=%condition, body=%body
}
"""
  (sent,) = read_collectives(windowed, devices=8).found
  assert (sent.kind, sent.count, sent.sent_bytes) == ("collective-permute", 4, 4 * 32.0)
