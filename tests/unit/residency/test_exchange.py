"""Parameters that never leave the device change places with the reference's host memory, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from clocked_device import ClockedDevice
from deferred_device import DeferredDevice
from simulated_device import SimulatedDevice
from toy_training import Training, assert_bitwise_equal

from nemo_offload_rl.residency import CpuDevice, DeviceOutOfMemoryError, Phase, ResidencyError, aligned
from nemo_offload_rl.residency.device.device import Copy, Device, Transfer
from nemo_offload_rl.residency.state import frozen_copy

PIECE_BYTES = 200
RESIDENT = {"resident_groups": frozenset({"params"}), "offload_optimizer_states": True}
PHASES = (Phase.REFIT, Phase.GENERATION, Phase.LP_INFERENCE)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(frozen_copy, "PIECE_BYTES", PIECE_BYTES)


def resident_training(device: Device) -> tuple[Training, Training, dict[str, torch.Tensor]]:
    """Training after a step, whose parameters stay on the device; a plain twin; the reference's parameters."""
    training, plain = Training(device=device, verify=True, **RESIDENT), Training()
    training.manager.enter(Phase.LP_INFERENCE)
    training.manager.snapshot("params", "reference")
    initial = {name: value.clone() for name, value in training.model.state_dict().items()}
    training.step()
    plain.step()
    for phase in PHASES:
        training.manager.enter(phase)
    training.manager.reports.drain()
    return training, plain, initial


def own(training: Training) -> dict[str, torch.Tensor]:
    return dict(training.model.state_dict())


class FailingDevice(CpuDevice):
    """Refuses the copy of that number, counted from when the number is set."""

    def __init__(self) -> None:
        self.refused: dict[str, int] = {}

    def copy_in(self, copies: Iterable[Copy]) -> Transfer:
        self._count("in")
        return super().copy_in(copies)

    def copy_out(self, copies: Iterable[Copy]) -> Transfer:
        copies = list(copies)
        for copy in copies if self.refused.get("out") == 1 else []:
            copy.host.fill_(0xFF)  # as far as it came
        self._count("out")
        return super().copy_out(copies)

    def _count(self, way: str) -> None:
        if way in self.refused:
            self.refused[way] -= 1
            if self.refused[way] == 0:
                raise RuntimeError(f"the copy {way} failed")


def test_parameters_that_stay_take_no_host_memory_through_whole_steps_with_a_reference():
    training, plain, initial = resident_training(DeferredDevice(free_bytes=0))
    for _ in range(3):
        with training.manager.swapped_in("reference"):
            assert_bitwise_equal(own(training), initial)
        assert_bitwise_equal(own(training), own(plain))
        training.step()
        plain.step()
        for phase in PHASES:
            training.manager.enter(phase)
    assert training.manager.host_bytes()["params"] == 0
    blocks = list(training.manager._arena._blocks.values())
    assert {block.owner.partition(".")[0] for block in blocks} == {"reference", "optimizer/part"}
    with training.manager.checkpoint_view():
        assert_bitwise_equal(training.contents(), plain.contents())


def test_the_arena_that_the_plan_has_without_parameters_is_enough():
    training = Training(device=DeferredDevice(free_bytes=0), **RESIDENT)
    manager = training.manager
    storages = {p.untyped_storage().data_ptr(): p.nbytes for p in training.model.parameters()}
    kept = sum(aligned(size) for size in storages.values()) + aligned(training.model.scale.nbytes)
    states = 2 * sum(aligned(size) for size in storages.values())
    manager.reserve({"reference": kept, "optimizer/part": states})
    taken = manager._arena.reserved_bytes
    manager._arena.limit_bytes = taken
    manager.enter(Phase.LP_INFERENCE)
    manager.snapshot("params", "reference")
    for _ in range(2):
        with manager.swapped_in("reference"):
            pass
        training.step()
        for phase in PHASES:
            manager.enter(phase)
    assert manager._arena.reserved_bytes == taken


def test_a_pass_that_raises_leaves_the_policy_and_the_reference_as_they_were():
    training, plain, initial = resident_training(DeferredDevice(free_bytes=0))
    for _ in range(2):
        with pytest.raises(ValueError, match="reference forward"), training.manager.swapped_in("reference"):
            assert_bitwise_equal(own(training), initial)
            raise ValueError("reference forward")
        assert_bitwise_equal(own(training), own(plain))


def test_the_peak_of_an_exchange_is_two_pieces_above_the_parameters():
    device = SimulatedDevice(1 << 20)
    training, _, initial = resident_training(device)
    held = training.manager.device_bytes()["params"]
    device.capacity_bytes = device.used_bytes() + 2 * PIECE_BYTES
    device.peak_bytes = 0
    assert device.used_bytes() == held
    with training.manager.swapped_in("reference"):
        assert_bitwise_equal(own(training), initial)
    assert device.peak_bytes == held + 2 * PIECE_BYTES
    assert device.used_bytes() == held


def test_without_room_for_two_pieces_the_pass_is_refused_and_nothing_has_changed():
    device = SimulatedDevice(1 << 20)
    training, plain, _ = resident_training(device)
    device.capacity_bytes = device.used_bytes() + 2 * PIECE_BYTES - 1
    with pytest.raises(DeviceOutOfMemoryError), training.manager.swapped_in("reference"):
        pytest.fail("the body ran without a reference")
    assert device.used_bytes() == training.manager.device_bytes()["params"]
    assert_bitwise_equal(own(training), own(plain))
    device.capacity_bytes = 1 << 20
    training.step()


def test_each_side_is_charged_what_crosses_there_and_back():
    training, _, _ = resident_training(DeferredDevice(free_bytes=0))
    with training.manager.swapped_in("reference"):
        pass
    (report,) = training.manager.reports.drain()
    held = training.manager.device_bytes()["params"]
    assert {name: (move.bytes_in, move.bytes_out) for name, move in report.groups.items()} == {
        "reference": (held, held),
        "params": (held, held),
    }


@pytest.mark.parametrize("work", [0.0, 2.5])
def test_directions_that_run_at_once_count_their_seconds_once_and_what_is_lost_to_both_too(work):
    device = ClockedDevice(PIECE_BYTES, lambda: 0)
    training, _, _ = resident_training(device)
    device.host = begin = device.compute = device.idle_from()
    device.run(work)  # that the device was given before
    with training.manager.swapped_in("reference"):
        pass
    lost = device.compute - begin - work
    device.host = device.compute
    (report,) = training.manager.reports.drain()
    num_pieces = training.manager.device_bytes()["params"] / PIECE_BYTES
    assert report.transfer_s == pytest.approx(2 * num_pieces)
    # Beside it each way has the first piece's arrival.
    assert report.exposed_s == pytest.approx(lost)
    assert lost == pytest.approx(report.transfer_s + 2, abs=0.1)
    assert report.hidden_s == 0


@pytest.mark.parametrize("way", ["in", "out"])
@pytest.mark.parametrize("number", [1, 3])
def test_a_copy_that_fails_in_the_middle_is_taken_back_on_both_sides(way, number):
    device = FailingDevice()
    training, plain, initial = resident_training(device)
    device.refused[way] = number
    with pytest.raises(RuntimeError, match="copy"), training.manager.swapped_in("reference"):
        pytest.fail("the body ran with half a reference")
    assert_bitwise_equal(own(training), own(plain))
    with training.manager.swapped_in("reference"):
        assert_bitwise_equal(own(training), initial)
    training.step()
    plain.step()
    assert_bitwise_equal(own(training), own(plain))


def test_after_a_piece_that_was_lost_the_worker_refuses_further_work(monkeypatch):
    training, _, _ = resident_training(CpuDevice())
    copy, calls = frozen_copy.copy_at_once, []

    def fail_at_second(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        calls.append(targets)
        if len(calls) == 2:
            raise RuntimeError("a kernel could not be launched")
        copy(targets, sources)

    monkeypatch.setattr(frozen_copy, "copy_at_once", fail_at_second)
    with pytest.raises(ResidencyError, match="middle of a piece"), training.manager.swapped_in("reference"):
        pytest.fail("the body ran with half a reference")
    with pytest.raises(ResidencyError, match=r"refuses to enter training: .*lost while 'reference' was swapped in"):
        training.manager.enter(Phase.TRAINING)


def test_a_copy_back_that_fails_leaves_a_worker_that_refuses():
    device = FailingDevice()
    training, _, _ = resident_training(device)
    with pytest.raises(RuntimeError, match="copy in failed"), training.manager.swapped_in("reference"):
        device.refused["in"] = 1
    with pytest.raises(ResidencyError, match="lost while 'reference' was swapped in"):
        training.manager.enter(Phase.TRAINING)


def test_a_reference_that_is_kept_narrower_still_takes_the_parameters_host_copy():
    training = Training(device=DeferredDevice(free_bytes=0), read_dtype=torch.bfloat16, **RESIDENT)
    training.manager.enter(Phase.LP_INFERENCE)
    training.manager.snapshot("params", "reference")
    with training.manager.swapped_in("reference"):
        pass
    assert training.manager.host_bytes()["params"] == training.manager.device_bytes()["params"]
