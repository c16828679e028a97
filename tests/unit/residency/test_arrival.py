"""Parameters that arrive layer by layer behind a forward pass, on a device that makes every missing wait visible."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from deferred_device import DeferredDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toy_training import WIDTH, Training, assert_bitwise_equal

from nemo_offload_rl.residency import DeviceOutOfMemoryError, Phase, Placement, StateGroup, unique_storages
from nemo_offload_rl.residency.device.device import Room
from nemo_offload_rl.residency.table.groups import ArrivalOrder


def arrived(training: Training) -> list[str]:
    """Tensors of the parameters' group that are there, in the model's order; the others are poisoned."""
    state = training.model.state_dict()
    return [name for name in ("first.weight", "norm.weight", "scale") if not state[name].isnan().all()]


def params_under_way(device: DeferredDevice | None = None, **changes: bool) -> tuple[Training, Training]:
    """A training step, then parameters that come back for logprobs, layer by layer; and the same without residency."""
    training, plain = Training(device=device or DeferredDevice(), layered=True, **changes), Training()
    training.manager.enter(Phase.LP_INFERENCE)
    training.manager.snapshot("params", "reference")
    training.step()
    plain.step()
    for phase in (Phase.REFIT, Phase.GENERATION, Phase.LP_INFERENCE):
        training.manager.enter(phase)
    assert arrived(training) == ["scale"]
    return training, plain


def assert_same_parameters(training: Training, plain: Training) -> None:
    assert_bitwise_equal(dict(training.model.state_dict()), dict(plain.model.state_dict()))


def test_each_layer_waits_for_its_own_parameters_and_those_before_it_and_logprobs_are_bitwise_the_same():
    training, plain = params_under_way()
    seen = []
    for layer in (training.model.first, training.model.norm):
        layer.register_forward_hook(lambda *_: seen.append(arrived(training)))
    outputs = training.outputs()
    assert seen == [["first.weight", "scale"], ["first.weight", "norm.weight", "scale"]]
    assert torch.equal(outputs, plain.outputs())
    training.step()
    plain.step()
    assert torch.equal(training.outputs(), plain.outputs())


def test_a_layer_that_runs_out_of_turn_waits_for_all_before_it():
    training, _ = params_under_way()
    training.model.norm(torch.ones(WIDTH))
    assert arrived(training) == ["first.weight", "norm.weight", "scale"]


def test_training_passes_too_begin_while_layers_are_under_way_and_gradients_are_the_same():
    training, plain = params_under_way()
    training.manager.enter(Phase.TRAINING)
    assert arrived(training) == ["scale"]
    training.backward()
    plain.backward()
    for mine, other in zip(training.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("changes", [{"layered": False}, {"layered": True, "overlap": False}], ids=str)
def test_without_layers_or_without_overlap_the_whole_group_is_there_once_the_phase_is_entered(changes):
    training = Training(device=DeferredDevice(), **changes)
    training.manager.enter(Phase.GENERATION)
    training.manager.enter(Phase.LP_INFERENCE)
    assert arrived(training) == ["first.weight", "norm.weight", "scale"]


def test_entering_logprobs_waits_for_no_optimizer_that_is_on_its_way_back():
    training, plain = params_under_way()
    for phase in (Phase.GENERATION, Phase.TRAINING, Phase.LP_INFERENCE):
        training.manager.enter(phase)
    assert training.manager.location("optimizer") is Placement.DEVICE
    moments = [state["exp_avg"] for state in training.optimizer.state.values()]
    assert all(moment.isnan().all() for moment in moments)
    training.step()
    plain.step()
    with training.manager.checkpoint_view():
        assert_bitwise_equal(training.contents(), plain.contents())


# -- who reads parameters otherwise than in a forward pass -------------------------------------------------------------


def takes_a_snapshot(training: Training) -> None:
    training.manager.snapshot("params", "trained")
    training.manager.mark_written("params")
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    with training.manager.swapped_in("trained"):
        trained = {name: value.clone() for name, value in training.model.state_dict().items()}
    training.model.load_state_dict(trained)


def swaps_a_snapshot_in(training: Training) -> None:
    initial = Training()
    with training.manager.swapped_in("reference"):
        assert_same_parameters(training, initial)
        assert torch.equal(training.outputs(), initial.outputs())


def views_a_checkpoint(training: Training) -> None:
    with training.manager.checkpoint_view():
        assert arrived(training) == ["first.weight", "norm.weight", "scale"]


def reads_where_a_tensor_is(training: Training) -> None:
    assert training.manager.host_view(training.model.norm.weight) is None


def enters(*phases: Phase) -> Callable[[Training], None]:
    def enter_all(training: Training) -> None:
        for phase in phases:
            training.manager.enter(phase)

    return enter_all


def copies_out_what_counts_as_written(training: Training) -> None:
    training.manager.mark_written("params")
    enters(Phase.REFIT, Phase.GENERATION, Phase.REFIT)(training)


READERS = {
    "a snapshot is taken": takes_a_snapshot,
    "a snapshot is swapped in": swaps_a_snapshot_in,
    "a checkpoint is viewed": views_a_checkpoint,
    "a host copy is asked for": reads_where_a_tensor_is,
    "parameters are read": lambda training: training.manager.wait_parameters(),
    "the optimizer step": enters(Phase.OPTIM_STEP),
    "a refit": enters(Phase.REFIT),
    "leaving again": enters(Phase.GENERATION, Phase.REFIT),
    "leaving after a write": copies_out_what_counts_as_written,
}


@pytest.mark.parametrize("free_bytes", [1 << 40, 1 << 20], ids=["with room", "without room"])
@pytest.mark.parametrize("reader", READERS)
def test_who_comes_while_layers_are_under_way_finds_the_right_bytes(reader, free_bytes):
    training, plain = params_under_way(DeferredDevice(free_bytes))
    READERS[reader](training)
    assert_same_parameters(training, plain)
    training.step()
    plain.step()
    with training.manager.checkpoint_view():
        assert_bitwise_equal(training.contents(), plain.contents())


MOVES = st.lists(
    st.sampled_from([*Phase, "step", "forward", "poll", "prefetch", "reference", "view", "read"]),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150)
@given(moves=MOVES, for_logprob=st.booleans(), streamed=st.booleans(), has_room=st.booleans())
def test_whatever_the_order_nothing_is_read_before_it_was_waited_for(moves, for_logprob, streamed, has_room):
    training = Training(
        device=DeferredDevice(1 << (40 if has_room else 20)),
        layered=True,
        offload_optimizer_states_for_logprob=for_logprob,
        offload_optimizer_states=streamed,
    )
    manager, plain, initial = training.manager, Training(), Training()
    manager.snapshot("params", "reference")
    for move in moves:
        is_here = manager.phase is not None and manager.location("params") is Placement.DEVICE
        if isinstance(move, Phase):
            manager.enter(move)
        elif move == "step":
            training.step()
            plain.step()
        elif move == "poll":
            manager.release_finished()
        elif move == "prefetch":
            manager.prefetch(Phase.TRAINING)
        elif move == "view":
            with manager.checkpoint_view():
                assert_bitwise_equal(training.contents(), plain.contents())
        elif move == "forward" and is_here and manager.phase is not Phase.GENERATION:
            assert torch.equal(training.outputs(), plain.outputs())
        elif move == "reference" and is_here:
            with manager.swapped_in("reference"):
                assert torch.equal(training.outputs(), initial.outputs())
        elif move == "read" and is_here:
            manager.wait_parameters()
            assert_same_parameters(training, plain)
    with manager.checkpoint_view():
        assert_bitwise_equal(training.contents(), plain.contents())
    manager.close()


# -- failures, and the end ---------------------------------------------------------------------------------------------


class FillingDevice(DeferredDevice):
    """Refuses every allocation after `num_good` more, where that is set."""

    num_good: int | None = None

    def _allocate(self, room: Room) -> None:
        if self.num_good == 0:
            raise DeviceOutOfMemoryError("no room")
        if self.num_good is not None:
            self.num_good -= 1
        super()._allocate(room)


@pytest.mark.parametrize("num_good", range(8))
def test_an_arrival_that_fails_half_way_is_undone_and_a_later_one_brings_every_layer(num_good):
    device = FillingDevice()
    training, plain = Training(device=device, layered=True), Training()
    training.step()
    plain.step()
    training.manager.enter(Phase.REFIT)
    training.manager.enter(Phase.GENERATION)
    device.num_good = num_good
    with pytest.raises(DeviceOutOfMemoryError):
        training.manager.enter(Phase.TRAINING)
    assert sum(training.manager.device_bytes().values()) == 0
    device.num_good = None
    training.manager.enter(Phase.LP_INFERENCE)
    assert arrived(training) == ["scale"]
    assert torch.equal(training.outputs(), plain.outputs())


def test_layers_that_are_under_way_stay_so_when_what_was_to_come_beside_them_finds_no_room():
    device = FillingDevice(free_bytes=1 << 20)
    training, plain = params_under_way(device)
    device.num_good = 1
    with pytest.raises(DeviceOutOfMemoryError):
        training.manager.enter(Phase.TRAINING)
    device.num_good = None
    assert training.manager.phase is Phase.LP_INFERENCE
    assert arrived(training) == ["scale"]
    assert torch.equal(training.outputs(), plain.outputs())
    training.step()
    plain.step()
    assert_same_parameters(training, plain)


@pytest.mark.parametrize("num_good", range(4))
def test_a_prefetch_that_finds_no_room_half_way_leaves_the_group_where_it_was(num_good):
    device = FillingDevice()
    training, plain = Training(device=device), Training()
    for _ in range(2):
        training.step()
        plain.step()
        for phase in (Phase.REFIT, Phase.GENERATION, Phase.LP_INFERENCE):
            training.manager.enter(phase)
    assert training.manager.location("optimizer") is Placement.DEVICE  # prefetched, where there is room
    training.step()
    plain.step()
    for phase in (Phase.REFIT, Phase.GENERATION):
        training.manager.enter(phase)
    device.num_good = num_parameters(training) + num_good
    training.manager.enter(Phase.LP_INFERENCE)
    device.num_good = None
    assert training.manager.location("optimizer") is Placement.HOST
    assert training.manager.device_bytes()["optimizer"] == 0
    training.step()
    plain.step()
    assert_same_parameters(training, plain)


def num_parameters(training: Training) -> int:
    """Storages of the group `params`."""
    return len(training.manager._groups.records()["params"])


def test_closing_takes_the_waits_off_the_layers():
    training = Training(device=DeferredDevice(), layered=True)
    layers = (training.model.first, training.model.norm)
    assert all(len(layer._forward_pre_hooks) == 1 for layer in layers)
    training.manager.close()
    assert not any(layer._forward_pre_hooks for layer in layers)


# -- the order ---------------------------------------------------------------------------------------------------------


def order_of(tensors: dict[str, torch.Tensor], layers: list[nn.Module]) -> ArrivalOrder:
    return ArrivalOrder(StateGroup("params", lambda: tensors.items(), layers=layers))


def test_what_no_layer_has_comes_first_and_what_two_layers_share_with_the_first_of_them():
    embedding, one, two, head = (nn.Linear(2, 2, bias=False) for _ in range(4))
    two.register_parameter("shared", one.weight)
    tensors = {name: it.weight for name, it in {"head": head, "two": two, "one": one, "embedding": embedding}.items()}
    records = unique_storages(tensors.items())
    spans, num_needed = order_of(tensors, [one, two]).of(records)
    assert [span.record.names for span in spans] == [["head"], ["embedding"], ["one"], ["two"]]
    assert num_needed == [2, 3, 4]
    spans, num_needed = order_of(tensors, []).of(records)
    assert [span.record.names for span in spans] == [["head"], ["two"], ["one"], ["embedding"]]
    assert num_needed == [4]
    assert order_of(tensors, [one, two]).of({}) == ([], [0, 0, 0])


def test_a_storage_that_a_parameter_has_got_since_comes_with_its_layer():
    one, two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    layers: list[nn.Module] = [two, one]
    order = ArrivalOrder(StateGroup("params", lambda: [("one", one.weight), ("two", two.weight)], layers=layers))
    for _ in range(2):
        records = unique_storages([("one", one.weight), ("two", two.weight)])
        spans, num_needed = order.of(records)
        assert [span.record.names for span in spans] == [["two"], ["one"]]
        assert num_needed == [0, 1, 2]
        one.weight.data = torch.empty(3, 3)


@given(
    # Of each parameter, the layer (0 for none), its elements, and what lies before it.
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=12),
    st.integers(0, 3),
)
def test_of_a_flat_buffer_each_layer_has_all_of_its_bytes_with_its_own_turn_and_every_byte_comes_once(members, rest):
    flat = torch.zeros(sum(size + gap for _, size, gap in members) + rest)
    layers: list[nn.Module] = [nn.Module() for _ in range(3)]
    tensors, at = {"flat": flat}, 0
    for number, (layer, size, gap) in enumerate(members):
        parameter = nn.Parameter(flat[at + gap : at + gap + size])
        at += gap + size
        if layer:
            layers[layer - 1].register_parameter(str(number), parameter)
        tensors[str(number)] = parameter
    spans, num_needed = order_of(tensors, layers).of(unique_storages(tensors.items()))
    assert num_needed[-1] == len(spans)
    copied = torch.zeros(flat.nbytes, dtype=torch.uint8)
    for turn, (begin, end) in enumerate(zip([0, *num_needed], num_needed, strict=False)):
        for span in spans[begin:end]:
            span.of(copied).add_(1)
        ready = copied.view(torch.uint8).tolist()
        for number, (layer, _, _) in enumerate(members):
            if layer <= turn:
                mine = tensors[str(number)].detach()
                first = mine.storage_offset() * 4
                assert all(ready[first : first + mine.nbytes])
    assert copied.tolist() == [1] * flat.nbytes
    # No more spans than turns of neighbours: padding is no copy of its own.
    filled = [layer for layer, _, _ in members]
    assert len(spans) <= len(list(itertools.groupby(filled)))
