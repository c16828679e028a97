"""Copies out before a refit: few run at a time, so that memory goes back to the driver before the last of them."""

from __future__ import annotations

import pytest
import torch
from fake_cuda import FakeRuntime, make_cuda_device
from toy_parts import NUM_PARTS, PART_BYTES, PartsTraining, give_room
from toy_training import assert_bitwise_equal

from nemo_offload_rl.residency import HostArena, PassKind, Phase
from nemo_offload_rl.residency.device import cuda_copies
from nemo_offload_rl.residency.device.device import Copy

RUNNING_PARTS = 2


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(cuda_copies, "STAGED_BELOW_BYTES", 0)
    monkeypatch.setattr(cuda_copies, "PACE_BYTES", RUNNING_PARTS * PART_BYTES)
    return make_cuda_device(monkeypatch, FakeRuntime())


def started(device) -> int:
    """Copies out on the stream that have not run."""
    return len(device._out.queue) - device._out.num_done


def updated(device, monkeypatch, room: int = 2 * NUM_PARTS) -> PartsTraining:
    """Training after an update before a refit; all parts were on the device, where the room is not less."""
    training = PartsTraining(device)
    give_room(training, monkeypatch, room)
    for _ in range(2):
        training.backward()
        training.optim_step(before_refit=True)
    return training


def test_copies_of_parts_start_two_at_a_time_and_memory_goes_back_beside_them(device, monkeypatch):
    training = updated(device, monkeypatch)
    manager, of_a_part = training.manager, 2
    assert training.on_device() == []  # all of them are leaving
    assert training.held_parts() == NUM_PARTS
    assert started(device) == RUNNING_PARTS * of_a_part
    held_when_released = []
    monkeypatch.setattr(device, "release_cache", lambda: held_when_released.append(training.held_parts()))
    manager.enter(Phase.REFIT)
    assert held_when_released == [NUM_PARTS]
    manager.release_finished()
    assert held_when_released == [NUM_PARTS]  # nothing has left since
    device._out.synchronize()
    manager.release_finished()
    assert held_when_released == [NUM_PARTS, NUM_PARTS - RUNNING_PARTS]
    assert started(device) == RUNNING_PARTS * of_a_part
    device._out.synchronize()
    manager.release_finished(to_driver=False)  # between buckets
    assert training.held_parts() == NUM_PARTS - 2 * RUNNING_PARTS
    assert len(held_when_released) == 2
    manager.enter(Phase.GENERATION)
    # First what had left by then, for the engine, then the rest.
    assert held_when_released[2:] == [NUM_PARTS - 2 * RUNNING_PARTS, 0]
    manager.close()


def test_memory_does_not_wait_for_a_transfer_that_is_larger_than_what_may_run(device, monkeypatch):
    training = updated(device, monkeypatch)
    monkeypatch.setattr(cuda_copies, "PACE_BYTES", PART_BYTES // 4)  # each part is
    num_released = []
    monkeypatch.setattr(device, "release_cache", lambda: num_released.append(started(device)))
    training.manager.enter(Phase.REFIT)
    assert num_released == []
    device._out.synchronize()
    training.manager.release_finished()  # the next one starts
    assert num_released == [0]
    training.manager.close()


def test_states_that_leave_as_a_whole_are_not_paced(device):
    training = PartsTraining(device, streamed=False)
    training.backward()
    training.optim_step(before_refit=True)
    assert not device.is_paced
    training.manager.close()


@pytest.mark.parametrize("is_divided", [False, True], ids=["whole blocks", "blocks in use in part"])
@pytest.mark.parametrize("num_parts", [1, 3, NUM_PARTS])
def test_generation_waits_for_as_many_parts_as_the_engine_needs_and_the_others_leave_beside_it(
    device, monkeypatch, num_parts, is_divided
):
    training = updated(device, monkeypatch)
    manager, plain = training.manager, PartsTraining(streamed=False)
    for _ in range(2):
        plain.step()
    in_cache = []

    def reserved_bytes() -> int:
        return PART_BYTES * max([training.held_parts(), *in_cache])

    num_released = []

    def release_cache() -> None:
        in_cache[:] = [training.held_parts()]
        num_released.append(NUM_PARTS - in_cache[0])

    monkeypatch.setattr(device, "release_cache", release_cache)
    monkeypatch.setattr(device, "reserved_bytes", reserved_bytes)
    monkeypatch.setattr(device, "allocated_bytes", lambda: 0 if is_divided else PART_BYTES * training.held_parts())
    monkeypatch.setattr(manager, "_left_by_engine_bytes", num_parts * PART_BYTES)
    in_cache.append(NUM_PARTS)
    manager.enter(Phase.REFIT)
    before = [(report.exposed_s, report.give_back_s) for report in manager.reports.drain()]
    num_released.clear()
    report = manager.enter(Phase.GENERATION, waits_for_all=False)
    # Seconds of this wait are its own, and not once more those of the copies that were waited for.
    late = [late for late in manager.reports.drain() if late is not report]
    assert before and not any(late.exposed_s or late.give_back_s for late in late)
    assert training.held_parts() == in_cache[0]  # all that is free went to the driver
    assert num_parts - RUNNING_PARTS < training.held_parts() <= num_parts
    if not is_divided:
        assert len(num_released) == 1
    assert device.is_paced  # no more copies are started before the engine, which maps memory next, is awake
    assert started(device) <= RUNNING_PARTS * 2
    exposed_s = report.exposed_s
    manager.finish_leaving()
    assert not device.is_paced
    assert training.held_parts() == in_cache[0] == 0
    assert report.exposed_s == exposed_s
    manager.enter(Phase.LP_INFERENCE)
    assert_bitwise_equal(training.contents(), plain.contents())
    manager.close()


@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.LP_INFERENCE])
def test_all_copies_start_where_no_refit_comes(device, monkeypatch, phase):
    training = updated(device, monkeypatch)
    training.manager.enter(Phase.LP_INFERENCE)
    training.manager.enter(phase)
    assert not device.is_paced
    device._out.synchronize()
    training.manager.release_finished()
    assert training.held_parts() == 0
    training.manager.close()


@pytest.mark.parametrize("room", [0, 3, 20])
@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.parametrize("phases", [(Phase.REFIT, Phase.GENERATION, Phase.LP_INFERENCE), ()], ids=["refit", "none"])
def test_paced_copies_change_no_bit_where_a_refit_follows_and_where_parts_come_again_at_once(
    device, monkeypatch, room, is_saved, phases
):
    training, plain = updated(device, monkeypatch, room), PartsTraining(streamed=False)
    for _ in range(2):
        plain.step()
    for _ in range(3):
        if is_saved:  # before the refit, while copies wait for their turn
            assert_bitwise_equal(training.contents(), plain.contents())
        for phase in phases:
            training.manager.enter(phase)
        training.backward()
        training.optim_step(before_refit=True)
        plain.step()
    assert_bitwise_equal(training.contents(), plain.contents())
    training.manager.close()


def test_the_parts_storages_are_listed_once_from_an_update_to_the_next_pass(device, monkeypatch):
    training = updated(device, monkeypatch)
    manager, listed = training.manager, set[str]()
    for name, state in manager._states.items():

        def tensors(name=name, tensors=state.group.tensors):
            listed.add(name)
            return tensors()

        monkeypatch.setattr(state.group, "tensors", tensors)
    for phase in (Phase.REFIT, Phase.GENERATION, Phase.LP_INFERENCE):
        manager.enter(phase)
    assert listed.isdisjoint(training.names)
    manager.enter(Phase.TRAINING)
    assert listed.issuperset(training.names)  # there was a pass
    training.step()
    listed.clear()
    manager.expect_work(PassKind.EVALUATION, 1)
    manager.enter(Phase.REFIT)
    assert listed.issuperset(training.names)
    manager.close()


@pytest.mark.parametrize("is_paced", [False, True])
def test_who_waits_for_a_copy_starts_it_and_those_before_it_alone(device, is_paced):
    arena = HostArena(device.new_region)
    arena.reserve(8 * (PART_BYTES + 512))
    sources = [torch.full((PART_BYTES,), index, dtype=torch.uint8) for index in range(6)]
    device.pace_out(is_paced)
    transfers = [device.copy_out([Copy(source, arena.alloc(PART_BYTES, "test").buffer)]) for source in sources]
    assert started(device) == (RUNNING_PARTS if is_paced else 6)
    assert [transfer.num_bytes for transfer in transfers] == [PART_BYTES] * 6
    assert not any(transfer.finished for transfer in transfers)
    transfers[3].wait_host()
    assert [transfer.finished for transfer in transfers] == [True] * 4 + [False] * 2
    assert started(device) == (0 if is_paced else 2)
    device.advance_out()
    assert started(device) == 2
    assert transfers[3].seconds() > 0
    transfers[5].wait_host()
    device.copy_out([Copy(sources[0], arena.alloc(PART_BYTES, "test").buffer)])
    assert len(device._leaving._started) == 1  # finished ones are forgotten
