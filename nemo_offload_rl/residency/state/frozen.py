"""Frozen copies of storages: taken once, read many times, on the host or (`disk_copy.py`) in a file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_offload_rl.residency.device.device import Device, Transfer
from nemo_offload_rl.residency.device.pieces import Copy
from nemo_offload_rl.residency.host.arena import HostMirror
from nemo_offload_rl.residency.state.exchange import in_batches
from nemo_offload_rl.residency.table.groups import StorageRecord

CAST_AT_ONCE_BYTES = 256 << 20


@dataclass(frozen=True)
class Content:
    """A storage to keep.

    Attributes:
        record: The storage.
        own: [N] its elements, on the device.
        kept: The type that they are kept in.
    """

    record: StorageRecord
    own: Tensor
    kept: torch.dtype

    @property
    def kept_bytes(self) -> int:
        return self.own.numel() * self.kept.itemsize


class FrozenCopy(ABC):
    """Bytes of storages by key, each kept once."""

    @abstractmethod
    def keep(self, device: Device, contents: Sequence[Content]) -> None:
        """Keep these storages beside those of before. The device has them; nothing may be under way that writes them.

        Raises:
            HostBudgetError: There is no host memory for them.
            ResidencyError: They cannot be written to disk.
        """

    @abstractmethod
    def has(self, key: int) -> bool:
        """Whether the storage is kept."""

    @abstractmethod
    def size_bytes(self, key: int) -> int:
        """Bytes that are kept of a storage."""

    @abstractmethod
    def copy_in(self, device: Device, places: Iterable[tuple[int, Tensor]], *, behind: bool = False) -> Transfer:
        """Start to bring storages to the device.

        Args:
            device: The device.
            places: Key of each storage and where it goes, [N] uint8 on the device with N its `size_bytes`.
            behind: Return while bytes are still read; `wait_device` of the transfer raises what goes wrong then.

        Raises:
            ResidencyError: They cannot be read. Some places are overwritten; nothing is under way.
        """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Host memory that it takes."""

    @abstractmethod
    def close(self) -> None:
        """Free what it takes. Nothing may be under way."""


class HostCopy(FrozenCopy):
    """Bytes in the host arena.

    Args:
        mirror: Which holds them.
    """

    def __init__(self, mirror: HostMirror) -> None:
        self._mirror = mirror

    def keep(self, device: Device, contents: Sequence[Content]) -> None:
        records = {content.record.key: content.record for content in contents}
        self._mirror.cover(records, {content.record.key: content.kept_bytes for content in contents})
        pairs = ((it.own, self._mirror.bytes_of(it.record.key).view(it.kept)) for it in contents)
        for batch in in_batches(pairs, CAST_AT_ONCE_BYTES):
            kept = [(own.to(host.dtype), host) for own, host in batch]
            device.copy_out(Copy(a.view(torch.uint8), b.view(torch.uint8)) for a, b in kept).wait_host()
        self._mirror.mark_clean(records, 0)

    def has(self, key: int) -> bool:
        return self._mirror.has(key)

    def size_bytes(self, key: int) -> int:
        return self.bytes_of(key).numel()

    def bytes_of(self, key: int) -> Tensor:
        """[N] uint8 host bytes of a storage."""
        return self._mirror.bytes_of(key)

    def copy_in(self, device: Device, places: Iterable[tuple[int, Tensor]], *, behind: bool = False) -> Transfer:
        return device.copy_in(Copy(place, self.bytes_of(key)) for key, place in places)

    @property
    def num_bytes(self) -> int:
        return self._mirror.num_bytes

    def close(self) -> None:
        self._mirror.close()
