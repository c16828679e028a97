"""What an optimizer is to the rest of the package: what it keeps, and what may be updated alone.

Sizes, rules, streaming and checkpoints ask an `OptimizerSpec`, never an optimizer's name. That of a torch optimizer is
found by trying it (`dtensor/torch_optim.py`), that of Megatron's follows from the settings
(`megatron/optimizer_spec.py`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class OptimizerSpec:
    """What an optimizer keeps for each parameter, and what its update of one needs.

    Attributes:
        states: Types by name of the tensors of a parameter's shape that it keeps. Scalars, such as a count of steps,
            are not among them: they stay where they are.
        masters: Types of the masters that it updates, by the type of the model's parameter; it updates parameters of
            other types themselves.
        is_elementwise: The update of an element needs no other element, so shards, and parts that stream, may be
            updated alone.
    """

    states: Mapping[str, torch.dtype]
    masters: Mapping[torch.dtype, torch.dtype]
    is_elementwise: bool

    def bytes_per_element(self, dtype: torch.dtype) -> int:
        """Bytes of states and master for each element of a parameter of this type."""
        master = self.masters.get(dtype)
        kept = [*self.states.values(), *([] if master is None else [master])]
        return sum(found.itemsize for found in kept)


def make_states(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Have a torch optimizer allocate the states of parameters that have none, by steps that change nothing.

    A step of one parameter after the other: a step of all takes gradients and, on a GPU, intermediate results of all of
    them beside the states, which is more than training does. The states' contents are for a checkpoint to overwrite.
    """
    rates = [options["lr"] for options in optimizer.param_groups]
    for options in optimizer.param_groups:
        options["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        with restricted_to(optimizer, [parameter]):
            optimizer.step()
        parameter.grad = None
    for options, rate in zip(optimizer.param_groups, rates, strict=True):
        options["lr"] = rate


@contextmanager
def restricted_to(optimizer: Optimizer, parameters: Iterable[Tensor]) -> Generator[None]:
    """Leave only these parameters in the optimizer's groups."""
    wanted = {id(parameter) for parameter in parameters}
    kept = [[some for some in group["params"] if id(some) in wanted] for group in optimizer.param_groups]
    with with_parameters(optimizer, kept):
        yield


@contextmanager
def with_parameters(optimizer: Optimizer, by_group: Sequence[list[Tensor]]) -> Generator[None]:
    """Have these parameters in the optimizer's groups."""
    whole = [group["params"] for group in optimizer.param_groups]
    for group, parameters in zip(optimizer.param_groups, by_group, strict=True):
        group["params"] = parameters
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters
