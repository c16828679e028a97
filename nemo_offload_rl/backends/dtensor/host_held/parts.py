"""The model in parts that pass through the device one after the other, for one rank (`cpu_offload`).

A part is a unit of FSDP, which reads its parameters at one point: where it casts them to the compute type, before the
unit's forward and again before its backward. So they come just before, leave just after, and what computes has the cast
copy. Gradients are added up by FSDP after each unit's backward, in the same order as where everything stays.

Order of one pass with backward over an embedding E, layers 1 and 2 and an output layer O: forward E 1 2 O, backward
O 2 1 E. O stays in between. With tied embeddings E and O are one part E, and FSDP keeps its cast copy through each
direction: forward E 1 2, backward E 2 1, and its gradients are there at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from nemo_offload_rl.backends.dtensor.parallel import wait_for_gradients
from nemo_offload_rl.residency import PassingParts, local_tensor


@dataclass(frozen=True)
class Part:
    """What is read and written together.

    Attributes:
        first: Its parameters are read before this module's forward; after its backward its gradients are there.
        last: Its parameters are read before this module's backward.
        is_read_in_backward: Whether that needs them; an embedding does not.
        parameters: By Hugging Face name.
    """

    first: nn.Module
    last: nn.Module
    is_read_in_backward: bool = True
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list[tuple[str, nn.Parameter]])


def outer_units(embedding: nn.Module, scorer: nn.Module, *, is_tied: bool) -> list[list[nn.Module]]:
    """Units outside of the layers: embedding and output layer, together where they share their parameter."""
    return [[embedding, scorer]] if is_tied else [[embedding], [scorer]]


def parts_of(units: Sequence[Sequence[nn.Module]], layers: Sequence[nn.Module]) -> list[Part]:
    """Parts in the order of a forward pass, without their parameters.

    Args:
        units: What `outer_units` gave.
        layers: The decoder layers.
    """
    (embedding, *rest), *outputs = units
    first = Part(embedding, rest[-1] if rest else embedding, is_read_in_backward=bool(rest))
    return [first, *(Part(layer, layer) for layer in layers), *(Part(output, output) for (output,) in outputs)]


def share_out(parts: Sequence[Part], parameters: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """Give each part its parameters; returns what is in none of them, which stays on the device in training."""
    part_of = {parameter: part for part in reversed(parts) for parameter in part.first.parameters()}
    rest = []
    for name, parameter in parameters:
        found = part_of.get(parameter)
        (rest if found is None else found.parameters).append((name, parameter))
    return rest


def gradient_norms(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """L2 norm of this rank's part of each gradient, a 0-dim tensor; where a gradient is with others changes no bit."""
    with_gradient = {parameter: parameter.grad for parameter in parameters if parameter.grad is not None}
    if not with_gradient:
        return {}
    norms = torch._foreach_norm([local_tensor(grad) for grad in with_gradient.values()])  # pyright: ignore[reportPrivateImportUsage]
    return dict(zip(with_gradient, norms, strict=True))


class PassHooks:
    """Hooks on a model's parts that bring what FSDP is about to read and send away what it has read and written.

    Args:
        parts: In the order of a forward pass; FSDP has its hooks on their modules already.
        passing: Moves them.

    Attributes:
        norms: Of each gradient of the last pass that was measured, a 0-dim tensor on the device.
    """

    def __init__(self, parts: Sequence[Part], passing: PassingParts) -> None:
        self.norms: dict[nn.Parameter, Tensor] = {}
        self._parts = parts
        self._passing = passing
        self._measures = False
        self._read: set[int] = set()  # in the present backward pass
        self._growing: list[int] = []  # parts whose gradients are on the device
        # Read first in backward: what the last module of the pass has.
        self._begins_backward = 0 if parts[0].last is not parts[0].first else len(parts) - 1
        for index, part in enumerate(parts):
            self._register(index, part)
            if not part.is_read_in_backward:
                cast(FSDPModule, part.first).set_unshard_in_backward(False)

    def _register(self, index: int, part: Part) -> None:
        """FSDP's own hooks come between those that are registered here before it and after it."""
        part.first.register_forward_pre_hook(_hook(partial(self._before_forward, index)), prepend=True)
        part.first.register_forward_pre_hook(_hook(partial(self._after_cast, index)))
        if part.first is not part.last:
            part.first.register_forward_hook(_on_gradients(partial(self._before_gradients, index)))
        part.last.register_forward_hook(_on_gradients(partial(self._before_backward, index)), prepend=True)
        part.last.register_forward_hook(_on_gradients(partial(self._after_cast_in_backward, index)))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A pass without backward."""
        with self._passing.charged():
            yield

    @contextmanager
    def training(self, *, measures: bool) -> Iterator[None]:
        """A forward and a backward pass.

        Args:
            measures: No gradient is added to those of this pass: their norms are taken while they are there.
        """
        self._measures = measures
        self._read.clear()
        self._growing = []
        self.norms = {}
        with self._passing.charged():
            yield
            self._send_gradients()

    def drop(self) -> None:
        """Forget the gradients."""
        self._growing = []
        self.norms = {}
        self._passing.drop_gradients()

    # -- hooks

    def _before_forward(self, index: int) -> None:
        if not _is_in_backward():  # else the forward is run again, with what its backward has cast
            self._passing.bring(index)

    def _after_cast(self, index: int) -> None:
        if _is_in_backward():
            return
        is_last = index == len(self._parts) - 1
        if not is_last:
            self._passing.has_read(index, index + 1)
        elif not torch.is_grad_enabled():
            self._passing.has_read(index)
        elif index != self._begins_backward:
            self._passing.has_read(index, self._begins_backward)

    def _before_backward(self, index: int) -> None:
        if index in self._read:
            return  # another of the module's outputs
        part = self._parts[index]
        if part.first is part.last:
            self._before_gradients(index)
        if part.is_read_in_backward:
            self._passing.bring(index)

    def _after_cast_in_backward(self, index: int) -> None:
        if index in self._read:
            return
        self._read.add(index)
        before = (len(self._parts) if self._begins_backward == 0 == index else index) - 1
        if before < 0:
            return
        following = before if self._parts[before].is_read_in_backward and before not in self._read else None
        self._passing.has_read(index, following, with_gradients=before)

    def _before_gradients(self, index: int) -> None:
        if index not in self._growing:
            self._send_gradients()  # of the part behind, whose backward is over
            self._passing.bring_gradients(index)
            self._growing.append(index)

    def _send_gradients(self) -> None:
        for index in self._growing:
            part = self._parts[index]
            wait_for_gradients(cast(FSDPModule, part.first))
            if self._measures:
                self.norms |= gradient_norms(parameter for _, parameter in part.parameters)
            self._passing.has_gradients(index)
        self._growing = []


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _hook(run: Callable[[], None]) -> Callable[..., None]:
    return lambda *_: run()


def _on_gradients(run: Callable[[], None]) -> Callable[..., None]:
    """A forward hook that has `run` called once the gradient of a module's output is there, before it is used."""

    def before(_: Tensor) -> None:
        run()

    def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled() and not _is_in_backward():
            for output in tree_leaves(outputs):
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(before)

    return hook
