"""Optimizer states that are on the device around their own update only, one part after another.

A part is a set of parameters whose states move together. While one is updated the next ones come in and those before
go out: two are on the device, and more where there is room (`window.py`). The idea of staging the states in chunks
around the step is that of Megatron-LM's ChunkedOptimizerStateOffloader (megatron/core/optimizer/cpu_offloading).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nemo_offload_rl.residency.device.device import Device
from nemo_offload_rl.residency.state.group_state import GroupState
from nemo_offload_rl.residency.state.transaction import GroupSet
from nemo_offload_rl.residency.streams.window import Bundle, Window
from nemo_offload_rl.residency.table.groups import StateGroup, StorageRecord, TensorGroup, unique_storages
from nemo_offload_rl.residency.table.ledger import Ledger, TransitionReport
from nemo_offload_rl.residency.table.plan import OPTIMIZER, OPTIMIZER_PART, Phase

type NamedTensors = Sequence[tuple[str, Tensor]]

# Parts that are started at a time in a step. Starting the copies of one takes the host a millisecond or two. Starting
# all that fit would hold up the first update, and with it the first copy out.
STARTED_AT_ONCE = 2


def _nothing(members: NamedTensors) -> None:
    """What is done beside an update."""


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
        after_each: Callable[[NamedTensors], None] = _nothing,
        before_each: Callable[[NamedTensors], None] = _nothing,
    ) -> None:
        """One optimizer step: each part once `streamed` has brought it, then the rest at once.

        Args:
            optimizer: Any whose update of a parameter needs nothing of other parameters.
            streamed: Names of parts (`ResidencyManager.streamed`); every part must come.
            after_each: Called with the parameters that were just updated, while their states are on the device.
            before_each: Called with the parameters that are updated next.
        """
        waiting, by_group = dict(self.parts), self._by_group(optimizer)
        counts = _StepCounts(optimizer)
        # The rest last: nothing has been updated yet where the first part cannot come.
        for name in itertools.chain(streamed, [OPTIMIZER]):
            members = self.rest if name == OPTIMIZER else waiting.pop(name)
            if members or not self.parts:
                before_each(members)
                with counts.same_step(), _with_parameters(optimizer, by_group[name]):
                    optimizer.step()
                after_each(members)
        counts.conclude()
        if waiting:
            raise RuntimeError(f"the states of {', '.join(waiting)} never came, so their parameters were not updated")

    def _by_group(self, optimizer: torch.optim.Optimizer) -> dict[str, list[list[Tensor]]]:
        """Parameters of each part, and of the rest, in each of the optimizer's parameter groups; found in one pass."""
        name_of = {id(parameter): name for name, members in self.members.items() for _, parameter in members}
        found: dict[str, list[list[Tensor]]] = {name: [[] for _ in optimizer.param_groups] for name in self.members}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if (name := name_of.get(id(parameter))) is not None:
                    found[name][number].append(parameter)
        return found


def num_streamed(sizes: Sequence[int], fraction: float) -> int:
    """How many of the first parameters stream, so that their states are this share of all, at least.

    Args:
        sizes: Of the parameters, in any unit.
        fraction: 0 for none.
    """
    goal = fraction * sum(sizes)
    return next(num for num, size in enumerate(itertools.accumulate(sizes, initial=0)) if size >= goal)


def divide_optimizer(
    parameters: NamedTensors,
    state_bytes: Callable[[Tensor], int],
    num: int,
    part_bytes: int | None,
    first_index: int = 0,
) -> OptimizerParts:
    """Divide what streams into parts. Of these, those that are larger than asked for come in the middle.

    While the first one comes nothing leaves, and while the last one leaves nothing comes: a large one would keep a
    direction of the link idle.

    Args:
        parameters: (name, parameter) in the optimizer's order.
        state_bytes: Bytes of one parameter's states.
        num: So many of the first stream (`num_streamed`).
        part_bytes: Most bytes in one part, unless a single parameter has more; None for one part.
        first_index: Number of the first part, where several optimizers follow each other.
    """
    parts: list[list[tuple[str, Tensor]]] = []
    held_bytes = 0
    for named in parameters[:num]:
        size = state_bytes(named[1])
        if not parts or (part_bytes is not None and held_bytes + size > part_bytes):
            parts.append([])
            held_bytes = 0
        parts[-1].append(named)
        held_bytes += size
    small: list[list[tuple[str, Tensor]]] = []
    large: list[list[tuple[str, Tensor]]] = []
    for part in parts:
        is_large = part_bytes is not None and sum(state_bytes(parameter) for _, parameter in part) > part_bytes
        (large if is_large else small).append(part)
    ordered = [*small[: len(small) // 2], *large, *small[len(small) // 2 :]]
    in_order = {f"{OPTIMIZER_PART}.{first_index + number}": members for number, members in enumerate(ordered)}
    return OptimizerParts(parameters[num:], in_order)


def stream_through(
    bundles: Sequence[Bundle], window: Window, ahead: bool, held_up: Callable[[], AbstractContextManager[None]]
) -> Iterator[Bundle]:
    """Bring groups to the device in turn, and send them back once the caller asks for the next.

    Args:
        bundles: In order, groups that are on the device together; those there already are left where they are until
            their turn is over.
        window: Of these bundles; how many come ahead.
        ahead: Let the next ones come, and those before go, beside the caller's work on the present ones.
        held_up: `Device.held_up` of what is charged.
    """
    for index, bundle in enumerate(bundles):
        with held_up():
            if not ahead:
                window.settle()
            window.bring(index)
            if ahead:
                window.fill(index + 1, at_least=1, most_new=STARTED_AT_ONCE)
        yield bundle
        with held_up():
            window.leave(index)
    if not ahead:
        with held_up():
            window.settle()


@torch.no_grad()
def records_of(state: GroupState, device: Device, others: Collection[int] = ()) -> dict[int, StorageRecord]:
    """A group's present storages on a device, by key, without `others`."""
    found = unique_storages(state.group.tensors())
    return {key: record for key, record in found.items() if key not in others and device.owns(record.storage)}


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
    kept = [[some for some in group["params"] if id(some) in wanted] for group in optimizer.param_groups]
    with _with_parameters(optimizer, kept):
        yield


@contextmanager
def _with_parameters(optimizer: torch.optim.Optimizer, by_group: Sequence[list[Tensor]]) -> Iterator[None]:
    """Have these parameters in the optimizer's groups."""
    whole = [group["params"] for group in optimizer.param_groups]
    for group, parameters in zip(optimizer.param_groups, by_group, strict=True):
        group["params"] = parameters
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters


@dataclass
class _Stream:
    """Groups that come in turn.

    Attributes:
        window: Of these groups.
        report: What they are charged to.
        target: The phase that they are for.
        counted_bytes: Of the window's most memory, what is known to be held.
    """

    window: Window
    report: TransitionReport
    target: Phase
    counted_bytes: int


class Streams:
    """The groups of a worker that are on the device for one use only, one after the other.

    Args:
        groups: All groups; their `failure` is set where the state was written in part.
        updated: What is on the device for the update of each part: its optimizer states first.
        teacher_layers: The layers of a teacher.
        overlap: Let copies run beside the caller's work.
        ledger: Gets the report of each stream.
        add_held: Told by how much the device memory of the updated groups grew at most in a step, in bytes.
    """

    def __init__(
        self,
        groups: GroupSet,
        updated: Sequence[Bundle],
        teacher_layers: Sequence[GroupState],
        overlap: bool,
        ledger: Ledger,
        add_held: Callable[[int], None],
    ) -> None:
        self._groups = groups
        self._updated = updated
        self._teacher_layers = [(layer,) for layer in teacher_layers]
        self._overlap = overlap
        self._ledger = ledger
        self._add_held = add_held
        self._num_written = 0

    def optimizer(self, phase: Phase | None, limit_bytes: int, release_cache: bool) -> Iterator[str]:
        """See `ResidencyManager.streamed`.

        Args:
            phase: The present one. In OPTIM_STEP the first parts start to come now; the caller may yet ask for none.
            limit_bytes: As of `Window`.
            release_cache: Release cached memory to the driver first, if that has to wait for no copy.
        """
        open_stream = partial(self._open, self._updated, phase, Phase.OPTIM_STEP, limit_bytes, release_cache)
        # Parameters come when they are asked for: passes would find those that a skipped update has left there.
        if not (self._overlap and phase is Phase.OPTIM_STEP and self._updated and self._writes_states_only):
            return self._updates(open_stream)
        stream = open_stream()
        with self._groups.device.held_up(stream.report):
            stream.window.fill(0, at_least=STARTED_AT_ONCE, most_new=STARTED_AT_ONCE)
        self._count_held(stream)
        return self._updates(lambda: stream)

    def _updates(self, open_stream: Callable[[], _Stream]) -> Iterator[str]:
        for bundle in self._through(self._updated, open_stream):
            # Now, not only as the step begins: a part that came ahead and had to leave again has a host copy by then,
            # which would count as that of the update.
            for state in bundle:
                state.version += 1
            self._num_written += 1
            yield bundle[0].group.name

    @property
    def _writes_states_only(self) -> bool:
        """Tell whether parameters stay on the device while their states stream."""
        return all(len(bundle) == 1 for bundle in self._updated)

    @property
    def has_updated(self) -> bool:
        """Whether the last update of the state came to its first part; one that is skipped asks for none."""
        return self._num_written > 0

    def teacher(self, phase: Phase | None) -> Iterator[str]:
        """See `ResidencyManager.streamed_layers`."""
        open_stream = partial(self._open, self._teacher_layers, phase, Phase.TEACHER_INFERENCE)
        for (layer,) in self._through(self._teacher_layers, open_stream):
            yield layer.group.name

    @contextmanager
    def writing(self, *, loads: bool) -> Iterator[None]:
        """See `ResidencyManager.writing_state`."""
        self._num_written = 0
        try:
            yield
        except BaseException as error:
            # An update that streams nothing writes everything in one go. Whether it came to that is not known.
            is_partial = self._num_written > 0 or not self._updated
            if is_partial and not (loads and self._writes_states_only):
                part = f" in part {self._num_written} of {len(self._updated)}" if self._updated else ""
                self._groups.failure = f"an update of the state broke off{part} ({type(error).__name__}: {error})"
            raise

    def _open(
        self,
        bundles: Sequence[Bundle],
        phase: Phase | None,
        target: Phase,
        limit_bytes: int = 0,
        release_cache: bool = False,
    ) -> _Stream:
        report = TransitionReport(phase, phase or target)
        self._ledger.add(report)
        if release_cache and not any(state.is_moving for state in self._groups.states.values()):
            self._groups.release_cache_for(report)
        streamed = {state.group.name for bundle in bundles for state in bundle}
        # With what keeps a key from another storage while this runs: gradients end in between, states begin.
        others = {
            key: record.weak_ref
            for name, found in self._groups.records().items()
            if name not in streamed
            for key, record in found.items()
        }
        window = Window(bundles, lambda state: records_of(state, self._groups.device, others), limit_bytes, report)
        return _Stream(window, report, target, window.held_bytes)

    def _through(self, bundles: Sequence[Bundle], open_stream: Callable[[], _Stream]) -> Iterator[Bundle]:
        if not bundles:
            return
        stream = open_stream()
        try:
            held_up = partial(self._groups.device.held_up, stream.report)
            yield from stream_through(bundles, stream.window, self._overlap, held_up)
        finally:
            self._count_held(stream)

    def _count_held(self, stream: _Stream) -> None:
        if stream.target is Phase.OPTIM_STEP:  # a teacher's layers are what its pass needs
            self._add_held(stream.window.most_held_bytes - stream.counted_bytes)
            stream.counted_bytes = stream.window.most_held_bytes
