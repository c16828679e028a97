"""State groups: what a worker moves, by name, the storages of their tensors, and the order in which passes read them.

Storages are the unit that moves, so tensors, views, parameters and optimizer keys keep their identity. A backend makes
the groups; it moves nothing itself. A storage of many parameters, such as Megatron's flat buffer, is divided into one
or more spans for each layer.
"""

# pyright: reportPrivateUsage=false
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef


class StateGroup:
    """Tensors that are placed together.

    Args:
        name: Row of the residency plan.
        tensors: Lists every tensor of the group by name. Called at transitions, and after passes and updates.
        prepare: Drops temporary copies before the group leaves the device.
        layers: Modules in the order of a forward pass; none for a group that is needed as a whole. Each of their
            parameters is first read in the forward of its first layer, or in `layer_arrived` just before, on the stream
            that is current there. It may still be arriving until then. The group's other tensors are there before any
            forward pass.
        layer_arrived: Called before a layer's forward, once its parameters have arrived: the current stream waits for
            them. Not called if they were there already.
        read_dtype: Type to which passes cast the parameters before they read them; a snapshot of wider ones is kept in
            it. None if they are read as they are.
    """

    def __init__(
        self,
        name: str,
        tensors: Callable[[], Iterable[tuple[str, Tensor]]] = tuple,
        prepare: Callable[[], None] = lambda: None,
        layers: Sequence[nn.Module] = (),
        layer_arrived: Callable[[nn.Module], None] | None = None,
        read_dtype: torch.dtype | None = None,
    ) -> None:
        self.name = name
        self.layers = layers
        self.read_dtype = read_dtype
        self.prepare = prepare
        self.layer_arrived = layer_arrived or _ignore
        self._tensors = tensors

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """List every tensor of the group by name."""
        return iter(self._tensors())

    def free(self) -> None:
        """Drop the contents, for a group with `FREED` in its row."""
        raise NotImplementedError(f"group {self.name!r} cannot be freed, because its contents could not be made again")

    def materialize(self) -> None:
        """Bring a freed group back to the device; its contents start from nothing."""


def _ignore(layer: nn.Module) -> None:
    """Do nothing with a layer."""


class GradsGroup(StateGroup):
    """Gradients that autograd allocates: freeing sets `grad` to None, and the next backward pass makes them again."""

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


@dataclass(frozen=True)
class Span:
    """Neighbouring bytes of a storage.

    Attributes:
        record: The storage.
        begin_bytes: Offset of the first byte.
        end_bytes: Offset past the last byte; None for the storage's end.
    """

    record: StorageRecord
    begin_bytes: int
    end_bytes: int | None

    def of(self, storage_bytes: Tensor) -> Tensor:
        """Take the span, [n] uint8, out of all bytes, [N], of the storage or of its copy."""
        return storage_bytes[self.begin_bytes : self.end_bytes]


@dataclass(frozen=True)
class _Place:
    """Start of bytes that a layer (from 1; 0 for none) reads first. They end at the storage's next place."""

    layer: int
    begin_bytes: int


class ArrivalOrder:
    """Finds spans and their order, once for each storage.

    Args:
        group: The group. Parameters in no layer are needed before the first layer, as are tensors that share their
            storage with no parameter.
    """

    def __init__(self, group: StateGroup) -> None:
        self._group = group
        self._places: dict[int, tuple[StorageWeakRef, list[_Place]]] = {}

    def of(self, records: Mapping[int, StorageRecord]) -> tuple[list[Span], list[int]]:
        """Find the spans of these storages, in order.

        Returns:
            Spans needed before any layer, then those of each layer in turn; and the number of spans up to each of these
            points, `len(layers) + 1` numbers.
        """
        if not all(key in self._places and not self._places[key][0].expired() for key in records):
            self._look(records)
        by_layer: list[list[Span]] = [[] for _ in range(len(self._group.layers) + 1)]
        for key, record in records.items():
            places = self._places[key][1]
            ends = [*(place.begin_bytes for place in places[1:]), None]
            for place, end_bytes in zip(places, ends, strict=True):
                by_layer[place.layer].append(Span(record, place.begin_bytes, end_bytes))
        return [span for spans in by_layer for span in spans], list(accumulate(map(len, by_layer)))

    def _look(self, records: Mapping[int, StorageRecord]) -> None:
        layer_of: dict[Tensor, int] = {}
        for number, layer in enumerate(self._group.layers, start=1):
            for parameter in layer.parameters():
                layer_of.setdefault(parameter, number)
        for _, tensor in self._group.tensors():
            if isinstance(tensor, nn.Parameter):
                layer_of.setdefault(tensor, 0)
        extents = defaultdict[int, list[tuple[int, int, int]]](list)
        for parameter, number in layer_of.items():
            local = local_tensor(parameter)
            extents[storage_key(local.untyped_storage())].append((*_extent(local), number))
        self._places = {
            key: (record.weak_ref, list(_places(sorted(extents[key]))) if key in extents else [_Place(0, 0)])
            for key, record in records.items()
        }


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Offsets in bytes of a tensor in its storage: of its first byte and past its last."""
    begin, size = int(tensor.storage_offset()), tensor.element_size()
    if tensor.numel() == 0:
        return begin * size, begin * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return begin * size, (begin + last + 1) * size


def _places(extents: Sequence[tuple[int, int, int]]) -> Iterator[_Place]:
    """Yield one storage's places from the sorted (begin, end, layer) of its parameters. Gaps go with what precedes."""
    apart: list[tuple[int, int, int]] = []
    for begin, end, layer in [it for it in extents if it[0] < it[1]] or extents[:1]:
        if apart and begin < apart[-1][1]:
            # Overlapping views: the bytes belong to the earliest layer that reads them.
            first, before, other = apart.pop()
            begin, end, layer = first, max(before, end), min(other, layer)
        apart.append((begin, end, layer))
    for index, (layer, members) in enumerate(groupby(apart, key=lambda it: it[2])):
        yield _Place(layer, next(members)[0] if index else 0)
