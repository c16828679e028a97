"""State groups: what a worker moves, by name, and the storages that their tensors live in.

Storages are the unit that moves, so tensors, views, parameters and optimizer keys keep their identity. A backend makes
the groups; it moves nothing itself.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef


class StateGroup(ABC):
    """Tensors that are placed together.

    Attributes:
        name: Row of the residency plan.
        layers: Modules in the order of a forward pass; none for a group that is needed as a whole. Each of their
            parameters is first read in the forward of its first layer, or in `layer_arrived` just before, on the stream
            that is current there. It may still be arriving until then. The group's other tensors are there before any
            forward pass.
        read_dtype: Type to which passes cast the parameters before they read them; a snapshot of wider ones is kept in
            it. None if they are read as they are.
    """

    def __init__(self, name: str, layers: Sequence[nn.Module] = (), read_dtype: torch.dtype | None = None) -> None:
        self.name = name
        self.layers = layers
        self.read_dtype = read_dtype

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """List every tensor of the group by name. Called at transitions, and after passes and updates."""

    def prepare(self) -> None:
        """Drop temporary copies, if any, before the group leaves the device."""
        return None

    def layer_arrived(self, layer: nn.Module) -> None:
        """React to the arrival of a layer's parameters, before its forward; the current stream already waits for them.

        Not called if they were there already.
        """
        return None

    def free(self) -> None:
        """Drop the contents, for a group with `FREED` in its row."""
        raise NotImplementedError(f"group {self.name!r} cannot be freed: its contents could not be made anew")

    def materialize(self) -> None:
        """Bring a freed group back to the device; its contents start from nothing."""
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
        read_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(name, layers, read_dtype)
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
    """Yield a torch optimizer's state tensors for the named parameters, as `<parameter>/<state>`.

    Scalars (Adam's `step`) are left out. On the host they cost nothing; on the device each would cost a synchronisation
    a step.
    """
    for name, parameter in names():
        # Not `state[parameter]`: that would make an entry, and the optimizer would take it for one it has filled.
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim() > 0:
                yield f"{name}/{key}", value


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    # Not `to_local`: that makes a new autograd tensor, 20 microseconds for each of a thousand at every transition.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_key(storage: torch.UntypedStorage) -> int:
    """Identity of a storage. The data pointer does not serve: it is 0 for every released storage."""
    return storage._cdata


def storage_bytes(storage: torch.UntypedStorage, num_bytes: int) -> Tensor:
    """The storage's first `num_bytes` as a [num_bytes] uint8 tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (num_bytes,), (1,))


@dataclass
class StorageRecord:
    """One unique storage of a group.

    Attributes:
        storage: Kept only while a transition runs; a record must not keep a replaced tensor's memory alive.
        names: Every tensor that lives in it (tied tensors and views share one record).
    """

    storage: torch.UntypedStorage
    names: list[str]

    @property
    def key(self) -> int:
        return storage_key(self.storage)

    @property
    def weak_ref(self) -> StorageWeakRef:
        return StorageWeakRef(self.storage)


def unique_storages(named_tensors: Iterable[tuple[str, Tensor]]) -> dict[int, StorageRecord]:
    """List storages in first-seen order by identity, each once however many tensors share it."""
    records: dict[int, StorageRecord] = {}
    for name, tensor in named_tensors:
        storage = local_tensor(tensor).untyped_storage()
        key = storage_key(storage)
        if key in records:
            records[key].names.append(name)
        else:
            records[key] = StorageRecord(storage, [name])
    return records
