"""Frozen host copies of parameters: taken once, in the type to which passes cast them, and read many times.

A copy narrower than its group crosses the link as it is, to the last bytes of its place, and is widened there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nemo_offload_rl.residency.device.device import Device
from nemo_offload_rl.residency.device.pieces import Copy
from nemo_offload_rl.residency.host.arena import HostArena, HostMirror, aligned
from nemo_offload_rl.residency.state.exchange import copy_at_once, in_batches
from nemo_offload_rl.residency.table.groups import (
    StateGroup,
    StorageRecord,
    local_tensor,
    storage_bytes,
    storage_key,
    unique_storages,
)

CAST_AT_ONCE_BYTES = 256 << 20


@dataclass(frozen=True)
class Form:
    """Types and size of a storage with contents.

    Attributes:
        own: Element type in the group; uint8 if the bytes are kept as they are.
        kept: Element type in the copy.
        num_bytes: Size of the storage.
    """

    own: torch.dtype
    kept: torch.dtype
    num_bytes: int

    @property
    def kept_bytes(self) -> int:
        return self.num_bytes // self.own.itemsize * self.kept.itemsize

    @property
    def is_cast(self) -> bool:
        return self.kept_bytes < self.num_bytes


class FrozenCopy(HostMirror):
    """Storages of one or more groups, each kept once.

    Args:
        owner: Name in the arena's errors.
        arena: Provides the host memory.
        pinned: The host memory is page-locked.
    """

    def __init__(self, owner: str, arena: HostArena, *, pinned: bool = True) -> None:
        super().__init__(owner, arena, pinned=pinned)
        self._forms: dict[int, Form] = {}

    def keep(self, device: Device, group: StateGroup, records: Mapping[int, StorageRecord]) -> dict[int, Form]:
        """Add a group's storages, which are on the device and not being written; return their forms.

        Raises:
            HostBudgetError: There is no host memory for them.
        """
        forms = forms_of(group, records)
        self.cover({key: records[key] for key in forms}, {key: form.kept_bytes for key, form in forms.items()})
        pairs = (
            (storage_bytes(records[key].storage, form.num_bytes).view(form.own), self.bytes_of(key).view(form.kept))
            for key, form in forms.items()
        )
        for batch in in_batches(pairs, CAST_AT_ONCE_BYTES):
            kept = [(own.to(host.dtype), host) for own, host in batch]
            device.copy_out(Copy(a.view(torch.uint8), b.view(torch.uint8)) for a, b in kept).wait_host()
        self.mark_clean(forms, 0)
        self._forms |= forms
        return forms

    def copies_to(self, places: Mapping[int, Tensor]) -> Iterator[Copy]:
        """Yield copies that bring storages to the last bytes of their places, [N] uint8 on the device by key."""
        for key, place in places.items():
            host = self.bytes_of(key)
            yield Copy(place[place.numel() - host.numel() :], host)

    def widen(self, places: Mapping[int, Tensor]) -> None:
        """Widen what `copies_to` brought, from the front, to fill its places. Reads each element before overwriting it.

        The first i of n wide elements end at byte `own * i`. The narrow elements after them begin at `(own - kept) * n
        + kept * i`, which is no less.
        """
        pairs = (
            (place.view(form.own), place[form.num_bytes - form.kept_bytes :].view(form.kept))
            for key, place in places.items()
            if (form := self._forms[key]).is_cast
        )
        for batch in in_batches(pairs, CAST_AT_ONCE_BYTES):
            copy_at_once([wide for wide, _ in batch], [narrow.clone() for _, narrow in batch])


def forms_of(group: StateGroup, records: Mapping[int, StorageRecord]) -> dict[int, Form]:
    """Choose how a copy keeps each storage with contents: narrower if all of its tensors are wider parameters."""
    read_dtype = group.read_dtype
    types: dict[int, set[torch.dtype | None]] = {}
    for _, tensor in group.tensors():
        is_cast = read_dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        key = storage_key(local_tensor(tensor).untyped_storage())
        types.setdefault(key, set()).add(tensor.dtype if is_cast else None)
    forms: dict[int, Form] = {}
    for key, record in records.items():
        num_bytes, (own, *others) = record.storage.nbytes(), types[key]
        if own is None or others or read_dtype is None or own.itemsize <= read_dtype.itemsize:
            forms[key] = Form(torch.uint8, torch.uint8, num_bytes)
        else:
            forms[key] = Form(own, read_dtype, num_bytes)
    return {key: form for key, form in forms.items() if form.num_bytes}


def snapshot_bytes(group: StateGroup) -> int:
    """Host bytes of a copy of a group that is on the device, alignment included."""
    return sum(aligned(form.kept_bytes) for form in forms_of(group, unique_storages(group.tensors())).values())


def snapshot_is_cast(group: StateGroup) -> bool:
    """Tell whether a copy of a group that is on the device takes fewer bytes than the group."""
    return any(form.is_cast for form in forms_of(group, unique_storages(group.tensors())).values())


def part_copy_bytes(group: StateGroup) -> int:
    """Host bytes of a copy of a group of parameters that may have no contents yet, alignment included."""
    sizes: dict[int, int] = {}
    for _, tensor in group.tensors():
        local = local_tensor(tensor)
        kept_bytes = min(local.itemsize, group.read_dtype.itemsize if group.read_dtype is not None else local.itemsize)
        sizes[storage_key(local.untyped_storage())] = aligned(local.numel() * kept_bytes)
    return sum(sizes.values())
