"""Description of an optimizer for the rest of the package: the states it keeps, and which parts may be updated alone.

Sizes, rules, streaming and checkpoints ask an `OptimizerSpec`, never an optimizer's name. The spec of a torch optimizer
is found by trying it (`dtensor/torch_optim.py`); Megatron's follows from the settings (`megatron/optimizer_spec.py`).
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True)
class OptimizerSpec:
    """The states that an optimizer keeps for each parameter, and whether it can update parts alone.

    Attributes:
        states: Types by name of its state tensors that have the parameter's shape. Scalars, such as a step count, are
            left out: they never move.
        masters: Type of the master copy that it updates, by the type of the model's parameter; parameters of other
            types have no master.
        is_elementwise: The update of an element needs no other element, so shards and streamed parts may be updated
            alone.
    """

    states: Mapping[str, torch.dtype]
    masters: Mapping[torch.dtype, torch.dtype]
    is_elementwise: bool

    def bytes_per_element(self, dtype: torch.dtype) -> int:
        """Return the bytes of states and master for each element of a parameter of this type."""
        master = self.masters.get(dtype)
        kept = [*self.states.values(), *([] if master is None else [master])]
        return sum(found.itemsize for found in kept)


def make_states(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Allocate a torch optimizer's missing states, by steps that change no parameter.

    Steps one parameter at a time: one step of all would need gradients and, on a GPU, intermediate results of all of
    them, which is more memory than training takes. A checkpoint then overwrites the states' contents.
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
    """Leave only these parameters in the optimizer's groups, within the context."""
    wanted = {id(parameter) for parameter in parameters}
    kept = [[some for some in group["params"] if id(some) in wanted] for group in optimizer.param_groups]
    with with_parameters(optimizer, kept):
        yield


@contextmanager
def with_parameters(optimizer: Optimizer, by_group: Sequence[list[Tensor]]) -> Generator[None]:
    """Put these parameters into the optimizer's groups, within the context."""
    whole = [group["params"] for group in optimizer.param_groups]
    for group, parameters in zip(optimizer.param_groups, by_group, strict=True):
        group["params"] = parameters
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters
