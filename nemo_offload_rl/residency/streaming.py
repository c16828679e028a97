"""Optimizer states that are on the device for their own update only, one part after another.

A part is a set of parameters whose states move together. At most two parts are on the device: one is updated while the
next comes in and the one before goes out. The idea of staging the states in chunks around the step is that of
Megatron-LM's ChunkedOptimizerStateOffloader (megatron/core/optimizer/cpu_offloading).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_offload_rl.residency.device import Device
from nemo_offload_rl.residency.group_state import GroupState
from nemo_offload_rl.residency.groups import StateGroup, StorageRecord, TensorGroup, unique_storages
from nemo_offload_rl.residency.ledger import TransitionReport
from nemo_offload_rl.residency.plan import OPTIMIZER, OPTIMIZER_PART, Placement

type NamedTensors = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class OptimizerParts:
    """An optimizer's parameters, divided by how their states move.

    Attributes:
        rest: (name, parameter) of those whose states are on the device throughout training.
        parts: Group name -> (name, parameter) of those whose states stream, in the order of their updates.
    """

    rest: NamedTensors
    parts: Mapping[str, NamedTensors]

    @property
    def members(self) -> Mapping[str, NamedTensors]:
        """The parameters of every group of states."""
        return {OPTIMIZER: self.rest, **self.parts}

    def groups(self, states: Callable[[NamedTensors], Iterable[tuple[str, Tensor]]]) -> list[StateGroup]:
        """The group of the rest, then one of each part.

        Args:
            states: State tensors of some parameters, by name; called at each transition.
        """
        return [TensorGroup(name, lambda mine=mine: states(mine)) for name, mine in self.members.items()]

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        streamed: Iterable[str],
        after_each: Callable[[NamedTensors], None] | None = None,
    ) -> None:
        """One optimizer step: the rest at once, then each part once `streamed` has brought it.

        Args:
            optimizer: Any whose update of a parameter needs nothing of other parameters.
            streamed: Names of parts (`ResidencyManager.streamed`); every part must come.
            after_each: Called with the parameters that were just updated, while their states are on the device.
        """
        waiting = dict(self.parts)
        counts = _StepCounts(optimizer)
        for members in itertools.chain([self.rest], (waiting.pop(name) for name in streamed)):
            if members or not self.parts:
                with counts.same_step(), restricted_to(optimizer, [parameter for _, parameter in members]):
                    optimizer.step()
                if after_each is not None:
                    after_each(members)
        counts.conclude()
        if waiting:
            raise RuntimeError(f"the states of {', '.join(waiting)} never came, so their parameters were not updated")


def divide_optimizer(
    parameters: NamedTensors,
    state_bytes: Callable[[Tensor], int],
    fraction: float,
    part_bytes: int | None,
    first_index: int = 0,
) -> OptimizerParts:
    """Choose what streams.

    Args:
        parameters: (name, parameter) in the optimizer's order.
        state_bytes: Bytes of one parameter's states.
        fraction: Share of all state bytes that streams, at least; 0 for none.
        part_bytes: Most bytes in one part, unless a single parameter has more; None for one part.
        first_index: Number of the first part, where several optimizers follow each other.
    """
    goal_bytes = fraction * sum(state_bytes(parameter) for _, parameter in parameters)
    parts: list[list[tuple[str, Tensor]]] = []
    streamed_bytes = held_bytes = index = 0
    while index < len(parameters) and streamed_bytes < goal_bytes:
        size = state_bytes(parameters[index][1])
        if not parts or (part_bytes is not None and held_bytes + size > part_bytes):
            parts.append([])
            held_bytes = 0
        parts[-1].append(parameters[index])
        held_bytes += size
        streamed_bytes += size
        index += 1
    named = {f"{OPTIMIZER_PART}.{first_index + number}": members for number, members in enumerate(parts)}
    return OptimizerParts(parameters[index:], named)


def stream_through(
    states: Sequence[GroupState], device: Device, others: Collection[int], ahead: bool, report: TransitionReport
) -> Iterator[GroupState]:
    """Bring each group to the device in turn, and send it back once the caller asks for the next.

    Args:
        states: Groups in order; those on the device already are left where they are until their turn is over.
        device: Where they go.
        others: Keys of storages that belong to other groups, though a group here may list them too.
        ahead: Let the next one come, and the one before go, beside the caller's work on the present one.
        report: What is charged.
    """

    def records(state: GroupState) -> dict[int, StorageRecord]:
        found = unique_storages(state.group.tensors())
        return {key: record for key, record in found.items() if key not in others and device.owns(record.storage)}

    with report.held_up():
        settle_leaving(states)
    for index, state in enumerate(states):
        with report.held_up():
            _bring(state, records(state), report)
            if ahead and index + 1 < len(states):
                _bring(states[index + 1], records(states[index + 1]), report)
            state.wait_arrival()
        yield state
        with report.held_up():
            # Listed now: an optimizer makes its states in its first update.
            state.leave(Placement.HOST, records(state), report)
            if not ahead or index + 2 < len(states):
                # Its memory is the room of the one after the next.
                state.settle()


def settle_leaving(states: Sequence[GroupState]) -> None:
    """Wait for parts that left behind earlier work and release their memory: others are about to come."""
    for state in states:
        if state.is_leaving:
            state.settle()


def _bring(state: GroupState, records: dict[int, StorageRecord], report: TransitionReport) -> None:
    if state.location is Placement.HOST:
        try:
            state.arrive(records, report)
        except BaseException:
            state.undo_arrival(records)
            raise


class _StepCounts:
    """Keeps one count where an optimizer counts its steps by parameter group, as some fused ones do in `step`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups
        self._before = [copy.copy(group.get("step")) for group in self._groups]
        self._after = list(self._before)

    @contextmanager
    def same_step(self) -> Iterator[None]:
        """One of several updates that together are one step."""
        self._set(self._before)
        yield
        for index, (group, before) in enumerate(zip(self._groups, self._before, strict=True)):
            if group.get("step") != before:
                self._after[index] = group["step"]

    def conclude(self) -> None:
        """Every group has made one step."""
        self._set(self._after)

    def _set(self, counts: Sequence[object]) -> None:
        for group, count in zip(self._groups, counts, strict=True):
            if count is None:
                group.pop("step", None)
            else:
                group["step"] = copy.copy(count)


@contextmanager
def restricted_to(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Leave only these parameters in the optimizer's groups."""
    wanted = {id(parameter) for parameter in parameters}
    whole = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = [parameter for parameter in group["params"] if id(parameter) in wanted]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters
