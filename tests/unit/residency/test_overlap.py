"""What may run beside copies, on a device that makes every missing wait visible."""

from __future__ import annotations

import time

import pytest
import torch
from deferred_device import DeferredDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_training import Training, assert_bitwise_equal

from nemo_offload_rl.residency import CpuDevice, Phase, Placement, totals
from nemo_offload_rl.residency.device.device import Transfer
from nemo_offload_rl.residency.needs import RESERVE_BYTES, PassKind
from nemo_offload_rl.residency.streams.work_memory import WorkMemory

MOVES = st.lists(st.sampled_from([*Phase, "step", "poll", "prefetch", "go", "settle"]), min_size=1, max_size=14)


@settings(max_examples=120)
@given(
    moves=MOVES,
    for_logprob=st.booleans(),
    streamed=st.booleans(),
    part_bytes=st.sampled_from([None, 1, 300]),
    free_bytes=st.sampled_from([0, RESERVE_BYTES + 300, RESERVE_BYTES + 2100, 1 << 40]),
    left_by_engine_bytes=st.sampled_from([0, 1, 1 << 41]),  # nothing, less and more than is held
)
def test_no_copy_is_read_before_it_was_waited_for_whatever_the_order_of_phases(
    moves, for_logprob, streamed, part_bytes, free_bytes, left_by_engine_bytes
):
    flags = {"offload_optimizer_states_for_logprob": for_logprob, "offload_optimizer_states": streamed}
    moved = Training(DeferredDevice(free_bytes), part_bytes, left_by_engine_bytes=left_by_engine_bytes, **flags)
    plain = Training()
    for move in moves:
        if move == "step":
            moved.step()
            plain.step()
        elif move == "poll":
            moved.manager.release_finished()
        elif move == "prefetch":
            moved.manager.prefetch(Phase.OPTIM_STEP)
        elif move == "go":
            moved.manager.enter(Phase.GENERATION, waits_for_all=False)
        elif move == "settle":
            moved.manager.finish_leaving()
        else:
            moved.manager.enter(move)
    moved.manager.enter(Phase.TRAINING)
    with moved.manager.checkpoint_view():
        assert_bitwise_equal(moved.contents(), plain.contents())


def cycle(training: Training) -> None:
    training.step()
    for phase in (Phase.REFIT, Phase.GENERATION, Phase.LP_INFERENCE):
        training.manager.enter(phase)


def test_the_optimizer_comes_back_during_logprobs_once_their_memory_is_known():
    training = Training(device=DeferredDevice())
    cycle(training)
    assert training.manager.location("optimizer") is Placement.HOST
    cycle(training)
    assert training.manager.location("optimizer") is Placement.DEVICE


def test_nothing_is_prefetched_where_the_plan_wants_the_optimizer_on_the_host():
    training = Training(device=DeferredDevice(), offload_optimizer_states_for_logprob=True)
    cycle(training)
    cycle(training)
    assert training.manager.location("optimizer") is Placement.HOST


def test_nothing_is_prefetched_without_room_beside_the_work():
    training = Training(device=DeferredDevice(free_bytes=1 << 20))
    cycle(training)
    assert not any(report.without_room for report in training.manager.reports.drain())
    cycle(training)
    assert training.manager.location("optimizer") is Placement.HOST
    report = training.manager.reports.drain()[-1]
    assert report.without_room == ["optimizer"]
    assert "no room to prefetch optimizer" in report.line()


def test_leaving_memory_is_kept_until_its_copy_has_finished_and_generation_waits_for_all():
    training = Training(device=DeferredDevice())
    training.step()
    training.manager.enter(Phase.REFIT)
    assert training.manager.device_bytes()["optimizer"] > 0
    training.manager.enter(Phase.GENERATION)
    assert sum(training.manager.device_bytes().values()) == 0


@pytest.mark.parametrize("left_by_engine_bytes", [0, 1, 1 << 40])
def test_generation_does_not_wait_for_memory_that_the_engine_leaves(left_by_engine_bytes):
    training = Training(device=DeferredDevice(), left_by_engine_bytes=left_by_engine_bytes)
    manager = training.manager
    training.step()
    trained = training.contents()
    manager.enter(Phase.REFIT)
    held_bytes = manager.device_bytes()
    report = manager.enter(Phase.GENERATION, waits_for_all=False)
    assert report.groups["params"].bytes_clean == held_bytes["params"]
    stays = left_by_engine_bytes == 1 << 40
    assert manager.device_bytes() == (held_bytes if stays else dict.fromkeys(held_bytes, 0))
    manager.finish_leaving()
    assert sum(manager.device_bytes().values()) == 0
    manager.enter(Phase.TRAINING)
    with manager.checkpoint_view():
        assert_bitwise_equal(training.contents(), trained)


class PeakDevice(DeferredDevice):
    """Reports a peak that the test sets."""

    peak_bytes = 0

    def drain_peak_bytes(self) -> int:
        peak, self.peak_bytes = self.peak_bytes, 0
        return peak


def test_room_is_what_is_free_less_the_work_seen_with_a_margin_and_a_reserve():
    gib = 1 << 30
    device = PeakDevice(free_bytes=10 * gib)
    work = WorkMemory(device)
    work.begin(Phase.LP_INFERENCE, held_bytes=3 * gib)
    device.peak_bytes = 5 * gib
    work.end()
    assert work.room_bytes(Phase.LP_INFERENCE) == pytest.approx(6.8 * gib)
    assert not work.is_known(Phase.TRAINING)


def test_what_sending_weights_takes_is_counted_beside_all_that_was_there_when_it_began():
    gib = 1 << 30
    device = PeakDevice()
    work = WorkMemory(device)
    assert work.needed_bytes(Phase.REFIT) == 0
    for held_gib, allocated_gib, peak_gib in ((3, 4, 6), (9, 9, 10)):  # the most that was seen counts
        device.allocated_bytes = lambda allocated=allocated_gib: allocated * gib
        work.begin(Phase.REFIT, held_bytes=held_gib * gib)
        device.peak_bytes = peak_gib * gib
        work.end()
        assert work.needed_bytes(Phase.REFIT) == 2 * gib


def test_what_the_allocator_holds_for_passes_counts_as_needed_where_it_is_more_than_they_allocated():
    gib = 1 << 30
    device = PeakDevice(free_bytes=10 * gib)
    work = WorkMemory(device)
    # Of 2 GiB that a pass took 1 is still there when the phase ends: its gradients, which are no longer free. A tenth
    # more than it took is left to it, or what it had at the end, the most that was seen.
    for cached_gib, room_gib in ((0.5, 7.8), (3, 6), (0.5, 6)):
        device.allocated_bytes = lambda: 3 * gib
        work.begin(Phase.TRAINING, held_bytes=3 * gib)
        work.expect(PassKind.TRAINING, 1)
        device.peak_bytes = 5 * gib
        device.allocated_bytes = lambda: 4 * gib
        device.cached_for_work_bytes = lambda cached=cached_gib: int(cached * gib)
        work.end()
        assert work.room_bytes(Phase.TRAINING) == pytest.approx(room_gib * gib)


def test_parameters_are_copied_out_while_the_refit_reads_them_and_leave_without_a_copy_after_it():
    training = Training(device=DeferredDevice())
    training.step()
    params_bytes = training.manager.device_bytes()["params"]
    refit = training.manager.enter(Phase.REFIT)
    assert refit.groups["params"].bytes_out == params_bytes
    assert training.manager.device_bytes()["params"] == params_bytes
    leaving = training.manager.enter(Phase.GENERATION)
    assert leaving.groups["params"].bytes_out == 0
    assert leaving.groups["params"].bytes_clean == params_bytes


def test_a_host_copy_that_only_the_device_waited_for_is_not_shown_before_it_has_finished():
    training = Training(device=DeferredDevice())
    training.step()
    weight = training.model.first.weight
    trained = weight.detach().clone()
    training.manager.enter(Phase.REFIT)
    training.manager.enter(Phase.LP_INFERENCE)
    training.manager.enter(Phase.GENERATION)
    shown = training.manager.host_view(weight)
    assert shown is not None
    assert torch.equal(shown, trained)


class Watched(DeferredDevice):
    """Writes down when memory is given back to the driver and when copies out start."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def release_cache(self) -> None:
        self.events.append("release_cache")

    def copy_out(self, copies):
        transfer = super().copy_out(copies)
        self.events += ["copy"] if transfer.num_bytes else []
        return transfer


def test_memory_goes_back_once_somebody_looks_after_the_last_copy_and_not_beside_copies():
    training = Training(device=Watched())
    training.step()
    training.manager.enter(Phase.TRAINING)
    device = training.manager._device
    device.events.clear()
    training.manager.enter(Phase.REFIT)
    assert device.events == ["copy", "copy"]  # the optimizer leaves, the parameters' host copy is made
    training.manager.release_finished()
    assert device.events == ["copy", "copy"]
    training.manager._states["optimizer"]._flight.transfer.wait_device()
    training.manager.release_finished()
    assert device.events == ["copy", "copy", "release_cache"]


def test_memory_goes_back_where_an_engine_takes_it_and_stays_cached_between_training_and_logprobs():
    training = Training(
        device=Watched(), part_bytes=300, offload_optimizer_states=True, offload_optimizer_states_for_logprob=True
    )
    device = training.manager._device
    for _ in range(2):
        training.step()
        training.manager.enter(Phase.LP_INFERENCE)
        training.step()
        training.manager.release_finished()
        training.manager.settle()
        assert "release_cache" not in device.events
    training.manager.enter(Phase.REFIT)
    training.manager.settle()
    assert "release_cache" in device.events
    device.events.clear()
    training.manager.enter(Phase.GENERATION)
    assert device.events.count("release_cache") == 1


@pytest.mark.parametrize("colocated", [False, True])
def test_an_engine_elsewhere_gets_no_memory_and_one_here_gets_all_that_is_free(colocated):
    training = Training(device=Watched(), left_by_engine_bytes=1 << 41, colocated=colocated)
    device = training.manager._device
    training.step()
    training.manager.enter(Phase.REFIT)
    training.manager.settle()
    device.events.clear()
    training.manager.enter(Phase.GENERATION, waits_for_all=False)
    training.manager.finish_leaving()
    assert device.events == ["release_cache"] * colocated


class SlowDriver(Watched):
    """Takes its time with memory that is given back."""

    TAKES_S = 0.01

    def release_cache(self) -> None:
        super().release_cache()
        time.sleep(self.TAKES_S)


def test_what_giving_memory_back_takes_is_charged_to_the_transition_and_hides_no_copies():
    training = Training(device=SlowDriver())
    training.step()
    training.manager.reports.drain()
    refit = training.manager.enter(Phase.REFIT)
    assert refit.give_back_s == 0
    training.manager._states["optimizer"]._flight.transfer.wait_device()
    training.manager.release_finished()
    generation = training.manager.enter(Phase.GENERATION)
    for report in (refit, generation):
        assert SlowDriver.TAKES_S <= report.give_back_s <= report.exposed_s
    assert totals([refit, generation])["give_back_s"] == refit.give_back_s + generation.give_back_s
    assert training.manager.enter(Phase.LP_INFERENCE).give_back_s == 0


class BlockingCopies(DeferredDevice):
    """Copies run inside the call that starts them, as those of pageable memory do."""

    TAKES_S = 0.01

    def copy_in(self, copies):
        copies = list(copies)
        CpuDevice.copy_in(self, copies)
        time.sleep(self.TAKES_S)
        return Transfer(sum(copy.host.numel() for copy in copies), len(copies), self.TAKES_S)


def test_a_copy_that_blocks_whoever_starts_it_early_is_not_called_hidden():
    training = Training(device=BlockingCopies())
    cycle(training)
    cycle(training)
    assert training.manager.location("optimizer") is Placement.DEVICE
    (report,) = [r for r in training.manager.reports.drain()[-2:] if r.target is Phase.LP_INFERENCE]
    assert set(report.groups) == {"params", "optimizer"}
    assert report.exposed_s >= report.transfer_s == 2 * BlockingCopies.TAKES_S
    assert report.hidden_s == 0


def test_copies_of_parts_that_block_inside_the_step_are_not_called_hidden():
    training = Training(device=BlockingCopies(), part_bytes=300, offload_optimizer_states=True)
    training.step()
    training.manager.reports.drain()
    training.step()
    reports = [r for r in training.manager.reports.drain() if any(move.bytes_in for move in r.groups.values())]
    assert reports
    for report in reports:
        assert report.exposed_s >= report.transfer_s > 0
        assert report.hidden_s == 0


def test_cached_memory_goes_back_before_a_refit_also_if_nothing_is_left_to_leave():
    training = Training(device=Watched(), offload_optimizer_states_for_logprob=True)
    training.step()
    training.manager.enter(Phase.LP_INFERENCE)
    device = training.manager._device
    assert "release_cache" not in device.events
    training.manager.enter(Phase.REFIT)
    assert device.events[-2:] == ["release_cache", "copy"]  # then the parameters' host copy is made


def test_nothing_goes_back_to_the_driver_where_no_engine_shares_the_device():
    training = Training(device=Watched(), colocated=False)
    cycle(training)
    assert "release_cache" not in training.manager._device.events
