"""The reference policy's parameters, brought to the device ahead of their use where there is room."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from deferred_device import DeferredDevice, DeferredTransfer
from toy_training import Training, assert_bitwise_equal

from nemo_offload_rl.residency import DeviceOutOfMemoryError, Phase, ResidencyError, snapshot_bytes, storage_key
from nemo_offload_rl.residency.device.device import Room
from nemo_offload_rl.residency.state import frozen_copy

NO_ROOM = 1 << 20
RESIDENT = frozenset({"params"})


def with_reference(
    free_bytes: int = 1 << 40,
    read_dtype: torch.dtype = torch.float32,
    resident_groups: frozenset[str] = frozenset(),
) -> tuple[Training, dict[str, torch.Tensor]]:
    """Training that has passed through a logprob phase once, and its first parameters as passes read them."""
    device = DeferredDevice(free_bytes)
    training = Training(device=device, read_dtype=read_dtype, verify=True, resident_groups=resident_groups)
    training.manager.enter(Phase.LP_INFERENCE)
    training.manager.snapshot("params", "reference")
    initial = training.state_as_read(read_dtype)
    training.step()
    training.manager.enter(Phase.REFIT)
    training.manager.enter(Phase.GENERATION)
    training.manager.reports.drain()
    return training, initial


@pytest.mark.parametrize("read_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("resident", [frozenset(), RESIDENT], ids=["leaves", "stays"])
@pytest.mark.parametrize("free_bytes", [1 << 40, NO_ROOM], ids=["staged", "without room"])
def test_every_way_of_swapping_shows_the_same_bits_and_restores_the_policys(
    free_bytes, resident, read_dtype, monkeypatch
):
    monkeypatch.setattr(frozen_copy, "CAST_AT_ONCE_BYTES", 100)
    monkeypatch.setattr(frozen_copy, "PIECE_BYTES", 100)
    plain = Training()
    plain.step()
    training, initial = with_reference(free_bytes, read_dtype, resident)
    training.manager.enter(Phase.LP_INFERENCE)
    for _ in range(2):
        with training.manager.swapped_in("reference"):
            assert_bitwise_equal(dict(training.model.state_dict()), initial)
        assert_bitwise_equal(dict(training.model.state_dict()), dict(plain.model.state_dict()))
    with pytest.raises(ValueError, match="reference forward"), training.manager.swapped_in("reference"):
        raise ValueError("reference forward")
    training.step()
    plain.step()
    with training.manager.checkpoint_view():
        assert_bitwise_equal(training.contents(), plain.contents())
    training.manager.close()


def test_with_room_the_reference_crosses_once_and_ahead_and_without_room_twice_when_it_is_used():
    training, _ = with_reference()
    params = sum(p.nbytes for p in training.model.parameters()) + 64
    entering = training.manager.enter(Phase.LP_INFERENCE)
    assert entering.groups["reference"].bytes_in == params
    training.manager.reports.drain()
    with training.manager.swapped_in("reference"):
        pass
    (swap,) = training.manager.reports.drain()
    assert swap.bytes_moved == 0

    training, _ = with_reference(free_bytes=1 << 20)
    assert training.manager.enter(Phase.LP_INFERENCE).without_room == ["reference", "optimizer"]
    training.manager.reports.drain()
    with training.manager.swapped_in("reference"):
        pass
    (swap,) = training.manager.reports.drain()
    assert swap.bytes_in == 2 * params


def test_parameters_that_are_read_in_16_bits_are_kept_and_moved_in_16_bits_and_buffers_as_they_are():
    for free_bytes, ahead in ((1 << 40, True), (1 << 20, False)):
        training, _ = with_reference(free_bytes, torch.bfloat16)
        params = sum(p.nbytes for p in training.model.parameters())
        half = params // 2 + 64
        assert training.manager.host_bytes()["reference"] == half
        moved = {"reference": half} if ahead else {}
        entering = training.manager.enter(Phase.LP_INFERENCE)
        assert {name: it.bytes_in for name, it in entering.groups.items() if name == "reference"} == moved
        training.manager.reports.drain()
        with training.manager.swapped_in("reference"):
            pass
        (swap,) = training.manager.reports.drain()
        moved = {} if ahead else {"reference": half, "params": params + 64}
        assert {name: it.bytes_in for name, it in swap.groups.items() if it.bytes_in} == moved
        # On the device it is as wide as the parameters, with which it changed places.
        assert training.manager._snapshots.release_staged() == (params + 64 if ahead else 0)
    group = training.manager._snapshots.all["reference"].state.group
    assert snapshot_bytes(group) == 512 * 5  # each storage begins anew in the arena


def test_a_storage_that_a_parameter_shares_with_a_buffer_is_kept_as_it_is():
    training = Training(read_dtype=torch.bfloat16)
    training.model.register_buffer("alias", training.model.norm.weight.detach())
    training.manager.enter(Phase.LP_INFERENCE)
    training.manager.snapshot("params", "reference")
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    before["norm.weight"] += 1e-3
    with torch.no_grad():
        training.model.norm.weight.add_(1e-3)
        training.manager.mark_written("params")
    with training.manager.swapped_in("reference"):
        assert torch.equal(training.model.alias, torch.ones(16))
        assert torch.equal(training.model.norm.weight, training.model.alias)
    assert_bitwise_equal(dict(training.model.state_dict()), before | {"alias": before["norm.weight"]})


def test_a_staged_copy_that_cannot_be_widened_is_given_up_and_the_next_pass_has_the_slower_swap(monkeypatch):
    training, initial = with_reference(read_dtype=torch.bfloat16)
    training.manager.enter(Phase.LP_INFERENCE)
    own = {name: value.clone() for name, value in training.model.state_dict().items()}

    def fail(*_):
        raise torch.OutOfMemoryError("no room for what is read while it is covered")

    with monkeypatch.context() as patched:
        patched.setattr(frozen_copy, "copy_at_once", fail)
        with pytest.raises(torch.OutOfMemoryError), training.manager.swapped_in("reference"):
            pytest.fail("the body ran with half a reference")
    assert_bitwise_equal(dict(training.model.state_dict()), own)
    with training.manager.swapped_in("reference"):
        assert_bitwise_equal(dict(training.model.state_dict()), initial)
    assert_bitwise_equal(dict(training.model.state_dict()), own)


def test_room_that_is_gone_when_it_is_taken_means_the_slower_swap_and_no_error(monkeypatch):
    training, initial = with_reference()
    device = training.manager._device
    allocate = device.allocate

    keys = {record.key for group in training.manager._groups.records().values() for record in group.values()}

    def full_but_for_the_groups(wanted: Sequence[Room]) -> None:
        if any(storage_key(room.storage) not in keys for room in wanted):
            raise DeviceOutOfMemoryError("somebody else took it")
        allocate(wanted)

    monkeypatch.setattr(device, "allocate", full_but_for_the_groups)
    assert "reference" in training.manager.enter(Phase.LP_INFERENCE).without_room
    with training.manager.swapped_in("reference"):
        assert_bitwise_equal(dict(training.model.state_dict()), initial)


@pytest.mark.parametrize("free_bytes", [1 << 40, 1 << 20], ids=["staged", "without room"])
def test_no_other_phase_is_entered_while_the_policys_bytes_are_swapped_out(free_bytes):
    plain = Training()
    plain.step()
    training, _ = with_reference(free_bytes)
    training.manager.enter(Phase.LP_INFERENCE)
    with training.manager.swapped_in("reference"):
        with pytest.raises(ResidencyError, match="cannot enter generation while snapshot 'reference' is swapped in"):
            training.manager.enter(Phase.GENERATION)
        training.manager.enter(Phase.LP_INFERENCE)
    assert_bitwise_equal(dict(training.model.state_dict()), dict(plain.model.state_dict()))
    training.manager.enter(Phase.GENERATION)


def test_the_copy_on_the_device_goes_with_the_phase():
    training, _ = with_reference()
    training.manager.enter(Phase.LP_INFERENCE)
    (staged,) = training.manager._snapshots.all.values()
    assert staged._staged
    training.manager.enter(Phase.TRAINING)
    assert not staged._staged


def test_an_exchange_that_fails_half_way_is_taken_back(monkeypatch):
    plain = Training()
    plain.step()
    training, _ = with_reference()
    training.manager.enter(Phase.LP_INFERENCE)
    copy, calls = frozen_copy.copy_at_once, []

    def fail_at_third_piece(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        calls.append(targets)
        if len(calls) == 5:  # two pieces have been fetched, and the first has been exchanged by two more
            raise RuntimeError("a kernel could not be launched")
        copy(targets, sources)

    monkeypatch.setattr(frozen_copy, "PIECE_BYTES", 256)
    monkeypatch.setattr(frozen_copy, "copy_at_once", fail_at_third_piece)
    with pytest.raises(RuntimeError, match="kernel"), training.manager.swapped_in("reference"):
        pytest.fail("the body ran with half a reference")
    assert_bitwise_equal(dict(training.model.state_dict()), dict(plain.model.state_dict()))
    training.step()


@pytest.mark.parametrize("free_bytes", [1 << 40, 1 << 20], ids=["staged", "without room"])
def test_buffers_that_a_module_replaces_or_empties_are_left_to_it(free_bytes):
    training, initial = with_reference(free_bytes)
    for phase in (Phase.LP_INFERENCE, Phase.REFIT, Phase.GENERATION, Phase.LP_INFERENCE):
        training.manager.enter(phase)
        # Made by a forward pass, after the copy of the snapshot came to the device.
        training.model.register_buffer("scale", torch.full((32,), 0.25))
        training.model.register_buffer("nothing", torch.empty(0))
        if phase is not Phase.LP_INFERENCE:
            continue
        own = {name: value.clone() for name, value in training.model.state_dict().items()}
        with training.manager.swapped_in("reference"):
            shown = dict(training.model.state_dict())
            assert torch.equal(shown.pop("scale"), own["scale"]) and not shown.pop("nothing").numel()
            assert_bitwise_equal(shown, {name: initial[name] for name in shown})
        assert_bitwise_equal(dict(training.model.state_dict()), own)


def test_a_parameter_in_other_memory_than_the_snapshot_has_bytes_for_is_refused_by_name():
    training, _ = with_reference(free_bytes=1 << 20)
    training.manager.enter(Phase.LP_INFERENCE)
    training.model.norm.bias = torch.nn.Parameter(torch.ones(16))
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    with pytest.raises(ResidencyError, match=r"'reference'.* parameter norm.bias of group 'params'"):
        training.manager.swapped_in("reference").__enter__()
    assert_bitwise_equal(dict(training.model.state_dict()), before)
    training.manager.enter(Phase.TRAINING)


def test_closing_waits_for_copies_that_only_the_device_has_waited_for(monkeypatch):
    training, _ = with_reference(free_bytes=1 << 20)
    training.manager.enter(Phase.LP_INFERENCE)
    copy_now, waited_for = DeferredTransfer.wait_device, []
    monkeypatch.setattr(DeferredTransfer, "wait_device", lambda self, num_copies=None: waited_for.append(self))

    def wait_host(transfer):
        copy_now(transfer)
        return 0.0

    monkeypatch.setattr(DeferredTransfer, "wait_host", wait_host)
    with training.manager.swapped_in("reference"):
        pass
    assert any(not transfer.finished for transfer in waited_for)
    arenas, close = training.manager._arena, training.manager._arena.close

    def close_arena():
        assert all(transfer.finished for transfer in waited_for)
        close()
        arenas.is_closed = True

    monkeypatch.setattr(arenas, "close", close_arena)
    training.manager.close()
    assert arenas.is_closed


def test_what_fails_while_a_snapshot_is_taken_or_copies_are_waited_for_is_what_is_raised(monkeypatch):
    def fail(*_):
        raise RuntimeError("a copy failed")

    training = Training(device=DeferredDevice())
    training.manager.enter(Phase.LP_INFERENCE)
    with monkeypatch.context() as patched:
        patched.setattr(DeferredTransfer, "wait_host", fail)
        with pytest.raises(RuntimeError, match="a copy failed"):
            training.manager.snapshot("params", "reference")
    training.manager._arena.close()  # nothing is in use

    training, _ = with_reference()
    training.manager.enter(Phase.LP_INFERENCE)
    with monkeypatch.context() as patched:
        patched.setattr(DeferredTransfer, "wait_host", fail)
        with pytest.raises(RuntimeError, match="a copy failed"):
            training.manager.close()
    assert training.manager._arena.reserved_bytes == 0
