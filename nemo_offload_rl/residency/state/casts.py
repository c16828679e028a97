"""Frozen copies of parameters in the type to which passes cast them, made as wide as parameters on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nemo_offload_rl.residency.host.arena import aligned
from nemo_offload_rl.residency.state.exchange import copy_at_once, in_batches
from nemo_offload_rl.residency.state.frozen import CAST_AT_ONCE_BYTES, Content
from nemo_offload_rl.residency.table.groups import (
    StateGroup,
    StorageRecord,
    local_tensor,
    storage_bytes,
    storage_key,
    unique_storages,
)


@dataclass(frozen=True)
class Form:
    """Types of a storage's elements in its group and in the snapshot; both uint8 where the bytes are kept as they are.

    Attributes:
        num_bytes: Of the storage.
    """

    own: torch.dtype
    kept: torch.dtype
    num_bytes: int

    @property
    def kept_bytes(self) -> int:
        return self.num_bytes // self.own.itemsize * self.kept.itemsize


def forms_of(group: StateGroup, records: Mapping[int, StorageRecord]) -> dict[int, Form]:
    """How a snapshot keeps each storage that has contents: narrower where it has nothing but wider parameters."""
    read_dtype = group.read_dtype
    types: dict[int, set[torch.dtype | None]] = {}
    for _, tensor in group.tensors():
        is_cast = read_dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        key = storage_key(local_tensor(tensor).untyped_storage())
        types.setdefault(key, set()).add(tensor.dtype if is_cast else None)
    forms = {}
    for key, record in records.items():
        num_bytes, (own, *others) = record.storage.nbytes(), types[key]
        if own is None or others or read_dtype is None or own.itemsize <= read_dtype.itemsize:
            forms[key] = Form(torch.uint8, torch.uint8, num_bytes)
        else:
            forms[key] = Form(own, read_dtype, num_bytes)
    return {key: form for key, form in forms.items() if form.num_bytes}


def snapshot_bytes(group: StateGroup) -> int:
    """Host bytes of a snapshot of a group that is on the device, alignment included."""
    return sum(aligned(form.kept_bytes) for form in forms_of(group, unique_storages(group.tensors())).values())


def part_copy_bytes(group: StateGroup) -> int:
    """Host bytes of a copy of a group of parameters that may have no contents yet, alignment included."""
    sizes = {}
    for _, tensor in group.tensors():
        local = local_tensor(tensor)
        kept_bytes = min(local.itemsize, group.read_dtype.itemsize if group.read_dtype is not None else local.itemsize)
        sizes[storage_key(local.untyped_storage())] = aligned(local.numel() * kept_bytes)
    return sum(sizes.values())


def snapshot_is_cast(group: StateGroup) -> bool:
    """Whether a snapshot of a group that is on the device keeps less than the group has."""
    return are_cast(forms_of(group, unique_storages(group.tensors())))


def are_cast(forms: Mapping[int, Form]) -> bool:
    """Whether less is kept than the group has."""
    return any(form.kept_bytes < form.num_bytes for form in forms.values())


def contents_of(records: Mapping[int, StorageRecord], forms: Mapping[int, Form]) -> list[Content]:
    """What a frozen copy keeps of a group's storages, in the types of their forms."""
    return [
        Content(records[key], storage_bytes(records[key].storage, form.num_bytes).view(form.own), form.kept)
        for key, form in forms.items()
    ]


def widen(places: Mapping[int, Tensor], forms: Mapping[int, Form]) -> None:
    """Have what came to the last bytes of each place fill it, from the front: a piece covers what was read before.

    That is so because element i of n ends at byte `own * i`, and no later element begins before
    `(own - kept) * n + kept * i`, which is more.

    Args:
        places: [N] uint8 device bytes by storage.
        forms: How each is kept.
    """
    pairs = (
        (place.view(form.own), place[form.num_bytes - form.kept_bytes :].view(form.kept))
        for key, place in places.items()
        if (form := forms[key]).kept_bytes < form.num_bytes
    )
    for batch in in_batches(pairs, CAST_AT_ONCE_BYTES):
        copy_at_once([wide for wide, _ in batch], [narrow.clone() for _, narrow in batch])
