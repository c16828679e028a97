"""How long a step waits for parts, on a device whose clock says so: a unit is what one part takes one way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import toy_parts
from clocked_device import ClockedDevice
from toy_parts import PART_BYTES, PartsTraining

from nemo_offload_rl.residency.needs import RESERVE_BYTES
from nemo_offload_rl.residency.state import group_set as transaction
from nemo_offload_rl.residency.state import group_state
from nemo_offload_rl.residency.table import ledger

NUM_PARTS = 40
UPDATE = 0.01


class Clocked(PartsTraining):
    """`NUM_PARTS` parts, and room for so many beside the passes."""

    def __init__(self, room: int) -> None:
        def free_bytes() -> int:
            return RESERVE_BYTES + (room + 1 - self.held_parts()) * PART_BYTES

        super().__init__(ClockedDevice(PART_BYTES, free_bytes))

    def timed_step(self, passes: float) -> float:
        """The time that the optimizer step takes after passes that take so long."""
        clock = self.device
        self.backward()
        clock.run(passes)
        clock.synchronize()  # the norm of the gradients is known
        begin, clock.host_waited = clock.host, 0.0
        self.optim_step(lambda members: clock.run(UPDATE))
        clock.synchronize()
        return clock.host - begin


@pytest.fixture(autouse=True)
def many_parts(monkeypatch):
    monkeypatch.setattr(toy_parts, "NUM_PARTS", NUM_PARTS)


@pytest.mark.parametrize("room", [0, 3, 10, 20, 30, 40])
def test_a_step_waits_for_what_had_no_room_before_it_at_the_speed_of_both_directions_at_once(room):
    training = Clocked(room)
    for _ in range(4):
        took = training.timed_step(passes=2 * NUM_PARTS)
    assert training.device.host_waited == 0
    assert took <= NUM_PARTS - room + 1 + NUM_PARTS * UPDATE
    # Behind the next pass: what was updated last is still leaving.
    assert training.device._until["out"] - training.device.host >= min(room, NUM_PARTS) - 1.5


@pytest.mark.parametrize("room", [3, 10, 20])
def test_where_passes_are_too_short_for_the_copies_the_link_is_busy_both_ways_all_the_time(room):
    training = Clocked(room)
    for _ in range(3):
        training.timed_step(passes=1)
    begin, num_steps = training.device.host, 5
    for _ in range(num_steps):
        training.timed_step(passes=1)
    # Less than both directions one after the other, and as long as every part takes one way.
    per_step = (training.device.host - begin) / num_steps
    assert per_step <= NUM_PARTS + 1 + NUM_PARTS * UPDATE


@pytest.mark.parametrize("room", [4, NUM_PARTS])
def test_the_link_is_busy_both_ways_from_before_the_norm_is_known_though_starting_copies_takes_time(room):
    training = Clocked(room)
    training.manager._prefetcher._parts_come_ahead = False
    clock = training.device
    clock.start_cost = 0.07  # 1.5 ms beside parts of 1 GiB
    norm = 1.5

    def compute_norm():
        clock.run(norm)
        clock.synchronize()

    for _ in range(3):
        training.manager.settle()
        training.backward()
        clock.run(NUM_PARTS)
        clock.synchronize()
        begin = clock.host
        training.optim_step(lambda members: clock.run(UPDATE), before_update=compute_norm)
    # The first part has come when the norm is known, and from then on one leaves after the other.
    assert clock.idle_from() - begin <= norm + NUM_PARTS + 0.4


@pytest.mark.parametrize("start_cost", [0.0, 0.7])
@pytest.mark.parametrize("room", [0, 10, NUM_PARTS])
def test_what_a_step_takes_beyond_its_updates_is_in_the_ledger_once(monkeypatch, room, start_cost):
    training = Clocked(room)
    clock = training.device
    for module in (group_state, ledger, transaction):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.host))
    clock.start_cost = start_cost
    for _ in range(3):
        training.timed_step(passes=2 * NUM_PARTS)
    clock.exposed = 0.0
    clock.synchronize()
    training.manager.reports.drain()
    training.backward()
    clock.run(2 * NUM_PARTS)
    in_passes, begin = clock.exposed, clock.compute
    training.optim_step(lambda members: clock.run(UPDATE), before_update=clock.synchronize)  # the norm is read
    lost = clock.reached() - begin - NUM_PARTS * UPDATE
    assert clock.exposed - in_passes == pytest.approx(lost, abs=1e-6)
    reports = training.manager.reports.drain()
    assert sum(report.exposed_s for report in reports) == pytest.approx(clock.exposed)
    assert all(0 <= report.hidden_s <= report.transfer_s for report in reports)
