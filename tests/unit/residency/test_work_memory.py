"""What passes need of the device beside state groups is measured exactly, whatever comes and goes meanwhile."""

from __future__ import annotations

import pytest
import torch
from test_window import RoomyDevice
from toy_parts import NUM_PARTS, PART_BYTES, PartsTraining

from nemo_offload_rl.policy.passes import MANY_MICRO_BATCHES, TrainingPace
from nemo_offload_rl.residency import PassKind, Phase, needs
from nemo_offload_rl.residency.needs import LearnedNeed, PassNeed
from nemo_offload_rl.residency.streams import work_memory

CAPACITY_PARTS = 3 * NUM_PARTS  # parameters and gradients take as much as the states of all parts


class WorkingDevice(RoomyDevice):
    """A device on which passes take memory beside the parts, and fail where it is not free."""

    def __init__(self) -> None:
        super().__init__(0)
        self.capacity_bytes = CAPACITY_PARTS * PART_BYTES
        self.unusable_bytes = 0  # free, but in pieces too small for a pass

    def drain_peak_bytes(self) -> int:
        peak_bytes, self.peak_bytes = self.peak_bytes, self.used_bytes()
        return max(peak_bytes, self.used_bytes())

    def work(self, num_bytes: int) -> None:
        """Take this much beside all that is there, and release it."""
        if num_bytes > self.free_bytes() - self.unusable_bytes:
            raise torch.OutOfMemoryError(f"{num_bytes} bytes for a pass, {self.free_bytes()} are free")
        self.peak_bytes = max(self.peak_bytes, self.used_bytes() + num_bytes)


@pytest.fixture
def training(monkeypatch):
    """Gradients that stay, in TRAINING before the first update, with hardly any reserve."""
    for module in (needs, work_memory):
        monkeypatch.setattr(module, "RESERVE_BYTES", PART_BYTES // 10)
    training = PartsTraining(WorkingDevice())
    for parameter in training.parameters:
        parameter.grad = torch.zeros(parameter.numel())
    training.manager.enter(Phase.TRAINING)
    return training


def run_update(training: PartsTraining, num_bytes: int, num_micro_batches: int) -> int:
    """One update of passes that take so many bytes; the parts that had come before the step."""
    manager = training.manager
    for state in manager._parts:  # copies out of the update before have ended, and nobody has looked
        if state.is_leaving:
            state._flight.transfer.wait_host()
    manager.expect_work(PassKind.TRAINING, num_bytes)
    manager.step_opened()
    pace = TrainingPace(manager, num_micro_batches)
    for index in range(num_micro_batches):
        pace.before_micro_batch(index)
        training.device.work(num_bytes)
    num_parts = training.held_parts()
    training.optim_step()
    return num_parts


@pytest.mark.parametrize("num_micro_batches", [2, MANY_MICRO_BATCHES])
def test_sizes_that_creep_up_find_room_and_no_need_is_measured_smaller_than_it_was(training, num_micro_batches):
    size, came = 4.0 * PART_BYTES, []
    for step in range(10):
        size *= 1.09 if step > 2 else 1.0
        came.append(run_update(training, int(size), num_micro_batches))
        training.manager.enter(Phase.TRAINING)
        assert training.manager.work.needed_bytes(Phase.TRAINING) == int(size)
    assert max(came) > 0  # states came beside passes, so that there was something to leave


def test_nothing_is_prefetched_again_into_the_memory_that_a_pass_lacked_because_it_was_in_pieces(training):
    manager, device, num_bytes = training.manager, training.device, 4 * PART_BYTES
    came = [run_update(training, num_bytes, 1) for _ in range(3)]
    assert came[:2] == [0, 0]  # the first pass compiles, so nothing is known before the second has ended
    assert came[2] > 0
    manager.settle()
    assert training.held_parts() == 0
    # Passes find enough memory without parts, and not with them.
    device.unusable_bytes = device.free_bytes() - num_bytes - PART_BYTES
    for fails in (True, False, False):
        manager.settle()
        manager.expect_work(PassKind.TRAINING, num_bytes)
        manager.step_opened()
        manager.prefetch(Phase.OPTIM_STEP)
        assert (training.held_parts() > 1) == fails
        if fails:
            with pytest.raises(torch.OutOfMemoryError):
                device.work(num_bytes)
            manager.evict(after_failure=True)
            manager.expect_work(PassKind.TRAINING, num_bytes)
        device.work(num_bytes)
        training.optim_step()
        manager.enter(Phase.TRAINING)


def test_a_pass_without_backward_does_not_count_as_seen_for_one_with_backward(training):
    small, large = 4 * PART_BYTES, 12 * PART_BYTES
    for _ in range(3):
        came = run_update(training, small, 1)
    assert came > 0
    # An evaluation of as many tokens as the next training pass, of a quarter of its memory.
    training.manager.expect_work(PassKind.EVALUATION, large)
    training.device.work(large // 4)
    training.manager.release_finished()
    for _ in range(2):  # one evaluation, which needs less than training, keeps no state away
        assert run_update(training, small, 1) > 0
    run_update(training, large, 1)
    assert training.manager.work.needed_bytes(Phase.TRAINING) == large


@pytest.mark.parametrize(
    ("estimate", "stays"),
    [
        (None, False),
        (PassNeed(0, PART_BYTES / 2), True),
        (PassNeed(PART_BYTES * CAPACITY_PARTS, 0), False),
        (PassNeed(0, 0, (PassNeed(0, PART_BYTES * CAPACITY_PARTS),)), False),
    ],
)
def test_prefetched_state_leaves_before_the_first_pass_of_a_kind_that_is_not_known_to_fit(training, estimate, stays):
    if estimate is not None:
        training.manager.work._estimates = {PassKind.LOGPROBS: estimate}
    for _ in range(3):
        run_update(training, 4 * PART_BYTES, 1)
    training.manager.settle()
    training.manager.expect_work(PassKind.TRAINING, 4 * PART_BYTES)
    training.manager.prefetch(Phase.OPTIM_STEP)
    assert training.held_parts() > 0
    training.manager.expect_work(PassKind.LOGPROBS, 1)
    assert (training.held_parts() > 0) == stays


def test_a_larger_pass_needs_as_much_more_as_its_estimate_says_and_never_less_than_was_measured():
    estimate = PassNeed(-30, 1.5, (PassNeed(10, 1.0),))
    tokens = (10, 70, 80, 200)
    assert [estimate.num_bytes(n) for n in tokens] == [20, 80, 90, 270]
    assert [estimate.plus(7).num_bytes(n) for n in tokens] == [27, 87, 97, 277]
    need = LearnedNeed(estimate)
    assert need.expected_bytes(200) == 270
    need.include(45, 10)  # 2.25 times the estimate
    assert [need.expected_bytes(n) for n in (5, 10, 200)] == [45, 45, 270 * 45 // 20]
    need.include(30, 12)
    assert need.expected_bytes(11) == 45
    plain = LearnedNeed()
    assert not plain.is_known
    plain.include(45, 10)
    assert plain.expected_bytes(20) == 90


def test_state_that_comes_between_two_passes_is_no_part_of_what_either_needs(training):
    for _ in range(2):
        run_update(training, 4 * PART_BYTES, 1)
    training.manager.settle()
    training.manager.expect_work(PassKind.TRAINING, 4 * PART_BYTES)
    training.device.work(4 * PART_BYTES)  # before anything comes
    training.manager.prefetch(Phase.OPTIM_STEP)
    assert training.held_parts() > 0
    training.optim_step()
    assert training.manager.work.needed_bytes(Phase.TRAINING) == 4 * PART_BYTES
