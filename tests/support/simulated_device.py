"""A device with a capacity, which raises when it is exceeded."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_offload_rl.residency import CpuDevice, DeviceOutOfMemoryError, storage_key
from nemo_offload_rl.residency.device.device import Room


class SimulatedDevice(CpuDevice):
    """A device of fixed size: CPU memory with an account that refuses to overdraw.

    Args:
        capacity_bytes: What the device holds.
        fail_after_allocations: Refuse every allocation after this many, to test failures in the middle.
    """

    def __init__(self, capacity_bytes: int, fail_after_allocations: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.fail_after_allocations = fail_after_allocations
        self.peak_bytes = 0
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}

    def used_bytes(self) -> int:
        """What tensors that are alive have: some are dropped by their owners."""
        self._sizes = {key: entry for key, entry in self._sizes.items() if not entry[0].expired()}
        return sum(size for _, size in self._sizes.values())

    def allocated_bytes(self) -> int:
        return self.used_bytes()

    def total_bytes(self) -> int:
        return self.capacity_bytes

    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes()

    def observe(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Set the account to exactly these storages."""
        self._sizes = {}
        for storage in storages:
            self._charge(storage, storage.nbytes())

    def _allocate(self, room: Room) -> None:
        if self.fail_after_allocations is not None:
            if self.fail_after_allocations == 0:
                raise DeviceOutOfMemoryError("simulated device: this allocation was set to fail")
            self.fail_after_allocations -= 1
        self._charge(room.storage, room.num_bytes)
        super()._allocate(room)

    def release(self, storage: torch.UntypedStorage) -> None:
        self._sizes.pop(storage_key(storage), None)
        super().release(storage)

    def _charge(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        used = self.used_bytes() + num_bytes
        if used > self.capacity_bytes:
            raise DeviceOutOfMemoryError(
                f"simulated device: {num_bytes} bytes more would make {used} of {self.capacity_bytes} bytes"
            )
        self._sizes[storage_key(storage)] = (StorageWeakRef(storage), num_bytes)
        self.peak_bytes = max(self.peak_bytes, used)
