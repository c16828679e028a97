"""Storages: the unit that moves. Tensors, views, parameters and optimizer keys keep their identity."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    # Not `to_local`: that makes a new autograd tensor, 20 microseconds for each of a thousand at every transition.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storage_key(storage: torch.UntypedStorage) -> int:
    """Identity of a storage. Its data pointer will not do: that is 0 for every released storage."""
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
    """Storages in first-seen order, keyed by identity, each once however many tensors share it."""
    records: dict[int, StorageRecord] = {}
    for name, tensor in named_tensors:
        storage = local_tensor(tensor).untyped_storage()
        key = storage_key(storage)
        if key in records:
            records[key].names.append(name)
        else:
            records[key] = StorageRecord(storage, [name])
    return records
