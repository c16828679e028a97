"""State groups: what a worker moves, by name. A backend hands them over; it moves nothing itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn


class StateGroup(ABC):
    """Tensors that are placed together.

    Attributes:
        name: The row of the residency plan.
        layers: Modules in the order of a forward pass; none for a group that is wanted as a whole. Each parameter of
            theirs is first read in the forward of the first layer that has it, or in `layer_arrived` just before that,
            on the stream that is current there, so it may arrive behind what runs before. The group's other tensors
            are there before any forward pass.
    """

    def __init__(self, name: str, layers: Sequence[nn.Module] = ()) -> None:
        self.name = name
        self.layers = layers

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the group by name. Asked at each transition, since optimizer state appears lazily."""

    def prepare(self) -> None:
        """Called before the group leaves the device, for a backend that must first drop temporary copies."""
        return None

    def layer_arrived(self, layer: nn.Module) -> None:
        """Called before a layer's forward, after the current stream was made to wait for the layer's parameters.

        Not called where they were there already.
        """
        return None

    def free(self) -> None:
        """Drop the contents, for a group with `FREED` in its row."""
        raise NotImplementedError(f"group {self.name!r} cannot be freed: its contents could not be made anew")

    def materialize(self) -> None:
        """Called when a freed group is wanted on the device again; the contents start from nothing."""
        return None


class TensorGroup(StateGroup):
    """A group given by a function that lists its tensors."""

    def __init__(
        self,
        name: str,
        tensors: Callable[[], Iterable[tuple[str, Tensor]]],
        prepare: Callable[[], None] | None = None,
        layers: Sequence[nn.Module] = (),
        layer_arrived: Callable[[nn.Module], None] | None = None,
    ) -> None:
        super().__init__(name, layers)
        self._tensors = tensors
        self._prepare = prepare
        self._layer_arrived = layer_arrived

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors())

    def prepare(self) -> None:
        if self._prepare is not None:
            self._prepare()

    def layer_arrived(self, layer: nn.Module) -> None:
        if self._layer_arrived is not None:
            self._layer_arrived(layer)


class GradsGroup(StateGroup):
    """Gradients that autograd allocates: freeing sets `grad` to None, and the next backward makes them anew."""

    def __init__(self, parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]], name: str = "grads") -> None:
        super().__init__(name)
        self._parameters = parameters

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters():
            if parameter.grad is not None:
                yield name, parameter.grad

    def free(self) -> None:
        for _, parameter in self._parameters():
            parameter.grad = None


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Callable[[], Iterable[tuple[str, Tensor]]]
) -> Iterator[tuple[str, Tensor]]:
    """State tensors that a torch optimizer has for the named parameters, as `<parameter>/<state>`.

    Scalars (Adam's `step`) are left out: on the host they cost nothing, and on the device every one of them would
    cost a synchronisation a step.
    """
    for name, parameter in names():
        # Not `state[parameter]`: that would make an entry, and the optimizer would take it for one it has filled.
        if parameter in optimizer.state:
            for key, value in optimizer.state[parameter].items():
                if isinstance(value, Tensor) and value.dim() > 0:
                    yield f"{name}/{key}", value
