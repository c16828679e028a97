"""How many parts of a streamed optimizer are on the device, and that copies both ways run beside each other."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from deferred_device import DeferredDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import SimulatedDevice
from toy_parts import NUM_PARTS, PART_BYTES, WIDTH, PartsTraining
from toy_training import assert_bitwise_equal

from nemo_offload_rl.residency import CpuDevice, DeviceOutOfMemoryError, Phase, ResidencyError
from nemo_offload_rl.residency.needs import RESERVE_BYTES


class RoomyDevice(DeferredDevice, SimulatedDevice):
    """Copies as late as they may be, and a capacity: room for so many parts beside parameters and gradients.

    Where not all parts fit, there is room for one more, which stays free. Writes down what is asked of it; copies that
    the host waits for are "wait".
    """

    def __init__(self, num_parts: float, says_free_bytes: int | None = None) -> None:
        DeferredDevice.__init__(self)
        fixed_bytes = 2 * NUM_PARTS * 4 * WIDTH
        num_free = 0 if num_parts >= NUM_PARTS else 1
        SimulatedDevice.__init__(self, RESERVE_BYTES + fixed_bytes + int((num_parts + num_free) * PART_BYTES))
        self.says_free_bytes = says_free_bytes
        self.events: list[str] = []

    def free_bytes(self) -> int:
        return SimulatedDevice.free_bytes(self) if self.says_free_bytes is None else self.says_free_bytes

    def copy_out(self, copies):
        return self._watch("out", super().copy_out(copies))

    def copy_in(self, copies):
        return self._watch("in", super().copy_in(copies))

    def release_cache(self):
        self.events.append("release_cache")

    def follow(self, transfer):
        self.events.append("follow")
        super().follow(transfer)

    def _watch(self, name, transfer):
        if transfer.num_bytes:
            self.events.append(name)
            wait = transfer.wait_host

            def wait_host():
                self.events.append("wait")
                return wait()

            transfer.wait_host = wait_host
        return transfer


def after(num_steps: int, device: CpuDevice | None = None, **changes: bool) -> PartsTraining:
    training = PartsTraining(device, **changes)
    for _ in range(num_steps):
        training.step()
    return training


@pytest.mark.parametrize(("room", "ahead"), [(0, 0), (1, 1), (3.9, 3), (5, 5), (8, 8), (20, 8)])
def test_as_many_parts_come_before_the_step_as_fit_beside_the_passes_work(room, ahead):
    training = after(1, RoomyDevice(room))
    training.manager.settle()
    training.backward()
    assert training.on_device() == list(range(ahead))


def test_nothing_comes_ahead_before_it_is_known_what_passes_need():
    training = PartsTraining(RoomyDevice(20))
    training.backward()
    assert training.manager._prefetcher.parts_limit_bytes == 0


def test_a_skipped_update_does_not_tell_what_an_update_takes():
    training = PartsTraining(RoomyDevice(20))
    training.backward()
    with training.manager.during(Phase.OPTIM_STEP), training.manager.writing_state():
        training.manager.streamed()
    training.manager.step_closed()
    training.backward()
    assert training.manager._prefetcher.parts_limit_bytes == 0
    training.optim_step()
    training.backward()
    assert training.manager._prefetcher.parts_limit_bytes > 0


@settings(max_examples=30)
@given(room=st.floats(0, 6.9) | st.floats(8, 10), num_steps=st.integers(1, 4), leaves=st.booleans())
def test_no_more_parts_are_on_the_device_than_two_or_than_have_room_and_no_bit_changes(room, num_steps, leaves):
    training, plain = PartsTraining(RoomyDevice(room)), after(num_steps, streamed=False)
    for _ in range(num_steps):
        training.step()
        if leaves:
            for phase in (Phase.REFIT, Phase.GENERATION, Phase.LP_INFERENCE):
                training.manager.enter(phase)
            assert training.held_parts() == 0
    assert training.most_held <= max(2, int(room))
    assert_bitwise_equal(training.contents(), plain.contents())


@pytest.mark.parametrize("room", [1, 3, 20])
def test_the_host_waits_for_no_copy_in_a_step_and_memory_is_handed_over_only_where_it_is_needed(room):
    training = after(2, RoomyDevice(room))
    training.manager.settle()
    training.backward()
    device = training.device
    device.events.clear()
    training.optim_step()
    assert device.events.count("out") == NUM_PARTS
    assert device.events.count("in") == NUM_PARTS - min(room, NUM_PARTS)
    assert "wait" not in device.events
    assert device.events.count("follow") == NUM_PARTS - max(2, min(room, NUM_PARTS))


def test_a_part_comes_while_those_before_it_are_still_on_their_way_out():
    training = after(2, RoomyDevice(4))
    training.manager.settle()
    training.backward()
    leaving = []
    training.optim_step(lambda members: leaving.append(sum(s.is_leaving for s in training.manager._parts)))
    # None of the copies out has finished: nothing has waited for them but later copies in, on the device.
    assert leaving == list(range(NUM_PARTS))


def test_parts_that_are_wanted_again_before_they_have_left_stay_and_the_others_hand_over_their_memory():
    training, plain = after(3, RoomyDevice(5)), after(5, streamed=False)
    device = training.device
    assert training.held_parts() == 5  # parts 3 to 7 are leaving
    device.events.clear()
    training.backward()
    assert training.on_device() == [0, 1, 2, 3, 4]
    assert device.events.count("in") == 3
    assert device.events.count("follow") == 3
    training.optim_step()
    training.step()
    assert_bitwise_equal(training.contents(), plain.contents())


def test_where_all_parts_fit_none_is_copied_to_the_device_again():
    training, plain = after(2, RoomyDevice(20)), after(4, streamed=False)
    training.device.events.clear()
    training.step()
    training.step()
    assert "in" not in training.device.events
    assert_bitwise_equal(training.contents(), plain.contents())


@pytest.mark.parametrize("colocated", [True, False])
def test_before_a_refit_cached_memory_goes_to_the_driver_while_nothing_is_leaving_and_only_for_an_engine(colocated):
    training = PartsTraining(RoomyDevice(20), colocated=colocated)
    for before_refit in (False, True):
        training.backward()
        training.manager.evict()
        training.device.events.clear()
        training.optim_step(before_refit=before_refit)
        assert ("release_cache" in training.device.events) == (before_refit and colocated)
    assert training.device.events.index("out") > 0 or not colocated


def test_before_a_refit_no_memory_goes_to_the_driver_beside_copies_which_that_would_wait_for():
    training = after(2, RoomyDevice(20))
    training.manager.settle()
    training.backward()
    training.device.events.clear()
    training.optim_step(before_refit=True)
    assert training.device.events[0] == "out"
    assert "release_cache" not in training.device.events


@pytest.mark.parametrize("room", [0, 4])
def test_a_skipped_update_leaves_parts_that_were_on_their_way_to_the_step_after_it(room):
    training, plain = after(2, RoomyDevice(room)), after(3, streamed=False)
    training.manager.settle()
    training.backward()
    with training.manager.during(Phase.OPTIM_STEP), training.manager.writing_state():
        training.manager.streamed()
        assert len(training.on_device()) >= 2
    training.manager.step_closed()
    needed = training.manager.work.needed_bytes(Phase.OPTIM_STEP)
    training.step()
    assert training.manager.work.needed_bytes(Phase.OPTIM_STEP) == needed
    assert training.most_held <= max(2, room)
    assert_bitwise_equal(training.contents(), plain.contents())


def test_a_checkpoint_that_is_read_brings_no_part_before_it_is_asked_for():
    training = after(2, RoomyDevice(4))
    training.manager.settle()
    training.device.events.clear()
    with training.manager.checkpoint_view("params", "optimizer"), training.manager.writing_state():
        streamed = training.manager.streamed()
        assert "in" not in training.device.events
        next(streamed)
        assert "in" in training.device.events


def test_an_engine_finds_nothing_of_the_parts():
    training = after(3, RoomyDevice(5))
    assert training.held_parts() == 5
    training.manager.enter(Phase.REFIT)
    training.manager.enter(Phase.GENERATION)
    assert sum(training.manager.device_bytes().values()) == 0
    assert not any(state.is_leaving for state in training.manager._parts)


@pytest.mark.parametrize("room", [1, 2, 4])
def test_a_device_that_has_less_room_than_it_says_gets_what_fits_and_no_bit_changes(room):
    device, plain = RoomyDevice(room, says_free_bytes=1 << 40), after(4, streamed=False)
    device.capacity_bytes -= RESERVE_BYTES + PART_BYTES
    training = after(4, device)
    assert training.most_held <= room
    device.capacity_bytes += RESERVE_BYTES  # to look at everything at once
    assert_bitwise_equal(training.contents(), plain.contents())


def test_a_part_that_fits_only_alone_is_refused_where_a_byte_is_missing():
    for missing_bytes in (0, 1):
        device = RoomyDevice(1, says_free_bytes=0)
        training = after(1, device)
        training.manager.settle()
        device.capacity_bytes -= RESERVE_BYTES + PART_BYTES + missing_bytes
        with pytest.raises(DeviceOutOfMemoryError) if missing_bytes else nullcontext():
            training.step()


def test_what_was_prefetched_leaves_without_a_copy_where_a_pass_needs_its_room_and_two_parts_come_in_the_step():
    training, plain = after(2, RoomyDevice(6)), after(3, streamed=False)
    training.manager.settle()
    training.backward()
    assert training.held_parts() == 6
    training.device.events.clear()
    assert training.manager.evict() == 6 * PART_BYTES
    assert training.device.events.count("out") == 0
    training.most_held = 0
    training.optim_step()
    assert training.most_held == 2
    assert_bitwise_equal(training.contents(), plain.contents())


@pytest.mark.parametrize("room", [0, 4, 20])
def test_parts_that_came_ahead_and_left_before_their_own_update_lose_nothing_of_it(room):
    training, plain = after(2, RoomyDevice(room)), after(4, streamed=False)
    for _ in range(2):
        training.backward()
        training.optim_step(before_update=lambda: training.manager.evict())
    assert_bitwise_equal(training.contents(), plain.contents())


@pytest.mark.parametrize("room", [0, 4, 20])
@pytest.mark.parametrize("num_updated", [1, 5])
def test_after_an_update_that_raises_nothing_goes_on_with_a_state_that_is_neither_old_nor_new(room, num_updated):
    training = after(2, RoomyDevice(room))
    training.backward()
    seen = []

    def fail(members) -> None:
        seen.append(members)
        if len(seen) == num_updated:
            raise RuntimeError("broken update")

    with pytest.raises(RuntimeError, match="broken update"):
        training.optim_step(fail)
    training.manager.step_closed()
    with pytest.raises(ResidencyError, match=f"broke off in part {num_updated} of {NUM_PARTS} .*last checkpoint"):
        training.step()
    with pytest.raises(ResidencyError, match="broke off"):
        training.contents()


def test_an_update_in_one_go_that_raises_is_not_gone_on_with_either():
    training = after(2, streamed=False)
    training.backward()

    def fail(*_: object) -> None:
        raise RuntimeError("broken update")

    with pytest.raises(RuntimeError, match="broken update"):
        training.optim_step(fail)
    training.manager.step_closed()
    with pytest.raises(ResidencyError, match=r"an update of the state broke off \(RuntimeError: broken update\)"):
        training.step()


@pytest.mark.parametrize("streamed", [True, False])
def test_a_checkpoint_that_cannot_be_read_may_be_followed_by_another(streamed):
    training = after(2, RoomyDevice(3), streamed=streamed)
    with (
        pytest.raises(RuntimeError, match="damaged"),
        training.manager.checkpoint_view("params", "optimizer"),
        training.manager.writing_state(loads=True),
    ):
        next(training.manager.streamed(), None)
        raise RuntimeError("damaged")
    training.step()


@pytest.mark.parametrize("room", [0, 3, 20])
def test_host_copies_that_are_read_right_after_a_step_are_those_of_the_step(room):
    training, plain = after(3, RoomyDevice(room)), after(3, streamed=False)
    for mine, other in zip(training.parameters, plain.parameters, strict=True):
        moment = training.optimizer.state[mine]["exp_avg"]
        shown = training.manager.host_view(moment)
        assert torch.equal(moment if shown is None else shown, plain.optimizer.state[other]["exp_avg"])


class PeakDevice(RoomyDevice):
    """Reports that the process held what is charged, and more in the optimizer step."""

    extra_bytes = 0

    def drain_peak_bytes(self) -> int:
        peak_bytes, self.peak_bytes = self.peak_bytes, self.used_bytes()
        extra_bytes, self.extra_bytes = self.extra_bytes, 0
        return peak_bytes + extra_bytes


def test_what_the_update_itself_takes_stays_free_and_parts_that_came_in_the_step_do_not_count_as_that():
    training = PartsTraining(PeakDevice(6))
    for _ in range(4):
        training.backward()
        limit = training.manager._prefetcher.parts_limit_bytes
        training.optim_step()
    work = training.manager.work
    # The first step makes states that no account has charged; later ones take nothing but parts.
    assert work.needed_bytes(Phase.OPTIM_STEP) <= PART_BYTES
    training.backward()
    training.optim_step(lambda members: setattr(training.device, "extra_bytes", 4 * PART_BYTES))
    training.backward()
    assert training.manager._prefetcher.parts_limit_bytes < limit - 3 * PART_BYTES


def test_what_passes_have_allocated_does_not_narrow_the_step():
    training = after(2, RoomyDevice(6))
    training.manager.settle()
    training.backward()
    limit = training.manager._prefetcher.parts_limit_bytes
    training.device.capacity_bytes -= 2 * PART_BYTES  # as activations and gradients do
    training.manager.prefetch(Phase.OPTIM_STEP)
    assert training.manager._prefetcher.parts_limit_bytes == limit > 0


def test_memory_of_parts_that_are_leaving_counts_as_released_where_a_pass_ran_out_of_it():
    training = after(3, RoomyDevice(5))
    assert training.held_parts() == 5
    assert training.manager.evict() == 5 * PART_BYTES
    assert training.held_parts() == 0
