"""Orders a group's bytes as a forward pass first reads them.

A storage of many parameters, such as Megatron's flat buffer, is divided into one or more spans for each layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_offload_rl.residency.table.groups import StateGroup, StorageRecord, local_tensor, storage_key


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
