"""An optimizer divided into parts whose states move together, and its step part by part."""

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_offload_rl.protocols.optimizer import with_parameters
from nemo_offload_rl.residency import OPTIMIZER, OPTIMIZER_PART, StateGroup

type NamedTensors = Sequence[tuple[str, Tensor]]


def _nothing(members: NamedTensors) -> None:
    """Do nothing before or after an update."""


@dataclass(frozen=True)
class OptimizerParts:
    """An optimizer's parameters, divided by how their states move.

    Attributes:
        rest: (name, parameter) whose states stay on the device throughout training.
        parts: Group name -> (name, parameter) whose states stream, in the order of their updates.
    """

    rest: NamedTensors
    parts: Mapping[str, NamedTensors]

    @property
    def members(self) -> Mapping[str, NamedTensors]:
        """Parameters by the name of their state group."""
        return {OPTIMIZER: self.rest, **self.parts}

    def groups(self, states: Callable[[NamedTensors], Iterable[tuple[str, Tensor]]]) -> list[StateGroup]:
        """Return the state group of the rest, then one group per part.

        Args:
            states: Returns the named state tensors of some parameters; called at each transition.
        """
        return [StateGroup(name, lambda mine=mine: states(mine)) for name, mine in self.members.items()]

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        streamed: Iterable[str],
        after_each: Callable[[NamedTensors], None] = _nothing,
        before_each: Callable[[NamedTensors], None] = _nothing,
    ) -> None:
        """Make one optimizer step: each part once `streamed` has brought it, then the rest at once.

        Args:
            optimizer: Must update each parameter independently of the others.
            streamed: Names of parts (`ResidencyManager.streamed`); every part must come.
            after_each: Called with the parameters that were just updated, while their states are on the device.
            before_each: Called with the parameters that are about to be updated.
        """
        waiting, by_group, groups = dict(self.parts), self._by_group(optimizer), optimizer.param_groups
        # Some fused optimizers count steps by parameter group; all parts together count as one step.
        before = [copy.copy(group.get("step")) for group in groups]
        after = list(before)
        # The rest comes last: if the first part fails to arrive, nothing has been updated.
        for name in itertools.chain(streamed, [OPTIMIZER]):
            members = self.rest if name == OPTIMIZER else waiting.pop(name)
            if members or not self.parts:
                before_each(members)
                _set_counts(optimizer, before)
                with with_parameters(optimizer, by_group[name]):
                    optimizer.step()
                counts = [group.get("step") for group in groups]
                after = [new if new != old else so_far for new, old, so_far in zip(counts, before, after, strict=True)]
                after_each(members)
        _set_counts(optimizer, after)
        if waiting:
            raise RuntimeError(f"the states of {', '.join(waiting)} never came, so their parameters were not updated")

    def _by_group(self, optimizer: torch.optim.Optimizer) -> dict[str, list[list[Tensor]]]:
        """Return the parameters of the rest and of each part, by the optimizer's parameter groups."""
        name_of = {id(parameter): name for name, members in self.members.items() for _, parameter in members}
        found: dict[str, list[list[Tensor]]] = {name: [[] for _ in optimizer.param_groups] for name in self.members}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if (name := name_of.get(id(parameter))) is not None:
                    found[name][number].append(parameter)
        return found


def num_streamed(sizes: Sequence[int], fraction: float) -> int:
    """Return how many of the first parameters stream, so that they make up at least `fraction` of all sizes.

    Args:
        sizes: Sizes of the parameters, in any unit.
        fraction: Share that streams; 0 for none.
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
    """Divide the streamed parameters into parts, with parts larger than `part_bytes` in the middle.

    Nothing leaves while the first part arrives, and nothing arrives while the last one leaves. A large part there would
    keep one direction of the link idle for long.

    Args:
        parameters: (name, parameter) in the optimizer's order.
        state_bytes: Returns the bytes of one parameter's states.
        num: Number of first parameters that stream (`num_streamed`).
        part_bytes: Most bytes in one part, unless a single parameter has more; None for one part.
        first_index: Number of the first part; above 0 for the second of several optimizers.
    """
    limit_bytes = float("inf") if part_bytes is None else part_bytes
    parts: list[list[tuple[str, Tensor]]] = []
    sizes_bytes: list[int] = []
    for named in parameters[:num]:
        size_bytes = state_bytes(named[1])
        if not parts or sizes_bytes[-1] + size_bytes > limit_bytes:
            parts.append([])
            sizes_bytes.append(0)
        parts[-1].append(named)
        sizes_bytes[-1] += size_bytes
    is_large = [size_bytes > limit_bytes for size_bytes in sizes_bytes]
    large = [part for part, is_one in zip(parts, is_large, strict=True) if is_one]
    small = [part for part, is_one in zip(parts, is_large, strict=True) if not is_one]
    ordered = [*small[: len(small) // 2], *large, *small[len(small) // 2 :]]
    in_order = {f"{OPTIMIZER_PART}.{first_index + number}": members for number, members in enumerate(ordered)}
    return OptimizerParts(parameters[num:], in_order)


def _set_counts(optimizer: torch.optim.Optimizer, counts: Sequence[object]) -> None:
    for group, count in zip(optimizer.param_groups, counts, strict=True):
        if count is None:
            group.pop("step", None)
        else:
            group["step"] = copy.copy(count)
