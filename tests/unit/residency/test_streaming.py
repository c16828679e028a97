"""Optimizer states that pass through the device in parts."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from deferred_device import DeferredDevice
from hypothesis import given
from hypothesis import strategies as st
from simulated_device import SimulatedDevice
from torch import nn
from toy_training import WIDTH, Training, assert_bitwise_equal

from nemo_offload_rl.backends.optimizer_parts import divide_optimizer, num_streamed
from nemo_offload_rl.residency import CpuDevice, DeviceOutOfMemoryError, Phase, Placement

MATRIX_STATE_BYTES = 2 * 4 * WIDTH * WIDTH
VECTOR_STATE_BYTES = 2 * 4 * WIDTH


def streamed(device: CpuDevice | None = None, part_bytes: int | None = VECTOR_STATE_BYTES) -> Training:
    return Training(device=device, part_bytes=part_bytes, offload_optimizer_states=True)


def part_bytes_on_device(training: Training) -> list[int]:
    return [size for name, size in training.manager.device_bytes().items() if name.startswith("optimizer/") and size]


def test_the_states_are_on_the_host_outside_their_update_and_the_result_is_that_of_plain_training():
    training, plain = streamed(), Training()
    assert len(training.parts.parts) == 4
    for _ in range(3):
        training.step()
        plain.step()
        assert part_bytes_on_device(training) == []
        assert all(training.manager.location(name) is Placement.HOST for name in training.parts.parts)
    with training.manager.checkpoint_view():
        assert_bitwise_equal(training.contents(), plain.contents())


def test_without_room_for_more_at_most_two_parts_are_on_the_device_from_the_first_step_on():
    training = streamed(DeferredDevice(free_bytes=1 << 20))
    seen = []
    for _ in range(3):
        training.manager.enter(Phase.TRAINING)
        training.backward()
        training.manager.prefetch(Phase.OPTIM_STEP)
        with training.manager.during(Phase.OPTIM_STEP):
            training.manager.mark_written("params", "optimizer")
            training.parts.step(
                training.optimizer,
                training.manager.streamed(),
                after_each=lambda members: seen.append(len(part_bytes_on_device(training))),
            )
        training.manager.step_closed()
    # The first updates find no states: nothing comes, and what has been made is away before the next is.
    assert seen == [1, 1, 1, 1, *[2, 2, 2, 2] * 2]


@pytest.mark.parametrize("missing_bytes", [0, 1])
def test_without_overlap_room_for_the_largest_part_is_enough_and_a_byte_less_is_not(missing_bytes):
    fixed = sum(Training().manager.device_bytes().values())
    grads = MATRIX_STATE_BYTES // 2 + 3 * VECTOR_STATE_BYTES // 2
    training = streamed(SimulatedDevice(fixed + grads + MATRIX_STATE_BYTES - missing_bytes))
    training.step()
    with pytest.raises(DeviceOutOfMemoryError) if missing_bytes else nullcontext():
        training.step()
    assert part_bytes_on_device(training) == []


def test_an_update_that_raises_leaves_the_other_parts_as_they_were_and_the_next_step_works():
    training = streamed()
    training.step()
    training.manager.enter(Phase.TRAINING)
    training.backward()

    def fail(members: object) -> None:
        raise RuntimeError("broken update")

    with pytest.raises(RuntimeError, match="broken update"), training.manager.during(Phase.OPTIM_STEP):
        training.manager.mark_written("params", "optimizer")
        training.parts.step(training.optimizer, training.manager.streamed(), fail)
    assert part_bytes_on_device(training) == []
    assert sum(len(group["params"]) for group in training.optimizer.param_groups) == 4
    training.manager.step_closed()
    training.step()
    with training.manager.checkpoint_view():
        steps = [float(state["step"]) for state in training.optimizer.state.values()]
    assert sorted(steps) == [2.0, 2.0, 2.0, 3.0]


def test_what_a_part_shares_with_the_parameters_stays_with_them():
    training, plain = streamed(), Training()
    for state in training.manager._parts:
        states = state.group.tensors
        state.group.tensors = lambda states=states: iter([*states(), *training.model.named_parameters()])
    for _ in range(2):
        training.step()
        plain.step()
        assert training.manager.device_bytes()["params"] == plain.manager.device_bytes()["params"]
    with training.manager.checkpoint_view():
        assert_bitwise_equal(training.contents(), plain.contents())


def test_a_part_that_never_comes_is_an_error():
    training = streamed()
    with pytest.raises(RuntimeError, match=r"optimizer/part\.1, .* never came"):
        training.parts.step(training.optimizer, ["optimizer/part.0"])


class GroupCountingSGD(torch.optim.Optimizer):
    """Counts its steps by parameter group, as fused optimizers do, and scales its update by the count."""

    def __init__(self, groups: list[dict]) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group["step"] + 1 if "step" in group else 1
            for parameter in group["params"]:
                parameter -= group["lr"] / group["step"] * parameter.grad


def test_an_optimizer_that_counts_steps_by_group_counts_one_a_step():
    def make() -> tuple[list[nn.Parameter], GroupCountingSGD]:
        parameters = [nn.Parameter(torch.ones(size)) for size in (3, 2, 5)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        return parameters, GroupCountingSGD([{"params": parameters[:2]}, {"params": parameters[2:]}])

    (divided, optimizer), (plain, reference) = make(), make()
    named = [(str(index), parameter) for index, parameter in enumerate(divided)]
    parts = divide_optimizer(named, lambda parameter: parameter.nbytes, len(named), 1)
    for _ in range(3):
        parts.step(optimizer, iter(parts.parts))
        reference.step()
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    for left, right in zip(divided, plain, strict=True):
        assert torch.equal(left, right)


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=20),
    fraction=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    part_bytes=st.sampled_from([None, 1, 400, 10_000]),
)
def test_every_parameter_is_in_one_place_and_the_streamed_share_is_what_was_asked_for(sizes, fraction, part_bytes):
    named = [(str(index), torch.empty(size)) for index, size in enumerate(sizes)]
    num = num_streamed(sizes, fraction)
    divided = divide_optimizer(named, lambda parameter: parameter.nbytes, num, part_bytes)
    members = [name for part in divided.parts.values() for name, _ in part] + [name for name, _ in divided.rest]
    assert sorted(members) == sorted(name for name, _ in named)
    assert [name for name, _ in divided.rest] == [name for name, _ in named[len(named) - len(divided.rest) :]]
    sums = [sum(parameter.nbytes for _, parameter in part) for part in divided.parts.values()]
    assert sum(sums) >= fraction * 4 * sum(sizes)
    if divided.parts:
        last = named[len(named) - len(divided.rest) - 1][1]
        assert sum(sums) - last.nbytes < fraction * 4 * sum(sizes)
    for part, size in zip(divided.parts.values(), sums, strict=True):
        assert part_bytes is None or size <= part_bytes or len(part) == 1
    # Copies run in both directions while the large parts come and go.
    large = [index for index, size in enumerate(sums) if part_bytes is not None and size > part_bytes]
    if large:
        assert large == list(range(large[0], large[-1] + 1))
        assert abs(large[0] - (len(sums) - 1 - large[-1])) <= 1
