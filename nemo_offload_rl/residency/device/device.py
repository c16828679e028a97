"""Devices, which hold state while it is in use, and copies between them and the host.

`CpuDevice` treats ordinary memory as the device, so that every mechanism runs and is tested without an accelerator.
`cuda.py` has the device for GPUs.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nemo_offload_rl.residency.host.regions import HostRegion, PageableRegion
from nemo_offload_rl.residency.table.groups import StorageRecord
from nemo_offload_rl.residency.table.ledger import Leftover, TransitionReport, find_leftovers


@dataclass(frozen=True)
class Copy:
    """One copy's bytes on both sides: [N] uint8 each."""

    device: Tensor
    host: Tensor


@dataclass(frozen=True)
class Room:
    """Memory to allocate for a released storage."""

    storage: torch.UntypedStorage
    num_bytes: int


@dataclass(eq=False)
class Transfer:
    """Copies under way in one direction. Those of this base class have finished when they are returned.

    Do not read the host side or release the device side until `num_finished` covers the copy or `wait_host` returns.
    """

    num_bytes: int
    num_copies: int
    elapsed_s: float = 0.0

    def num_finished(self) -> int:
        """Number of copies, in the order given, that are known to have finished. Does not block."""
        return self.num_copies

    @property
    def finished(self) -> bool:
        """Tell whether all copies are known to have finished."""
        return self.num_finished() == self.num_copies

    def wait_some(self) -> None:
        """Block until more copies have finished than `num_finished` last returned, or until all have."""

    def wait_host(self) -> None:
        """Block until all copies have finished."""

    def wait_device(self, num_copies: int | None = None) -> None:
        """Make work that is launched on the device from now on run after the copies. Does not block.

        Args:
            num_copies: Number of copies to wait for, in the order given; None for all.
        """

    def seconds(self) -> float:
        """Seconds that the copies took on the link. Call it only after they have finished."""
        return self.elapsed_s


class Device(ABC):
    """Memory of one accelerator, as the residency manager uses it.

    The default methods suit a device that counts nothing and whose copies have finished when they return.

    Attributes:
        asynchronous: Copies run while the device works.
        is_host_memory: The device's memory is the host's own.
    """

    asynchronous: bool = False
    is_host_memory: bool = False

    # -- memory

    @abstractmethod
    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether a storage is on this device; others (a CPU optimizer's) are left alone."""

    @abstractmethod
    def allocate(self, wanted: Sequence[Room]) -> None:
        """Allocate memory for released storages, contents undefined. One call may be quicker than one for each.

        Raises:
            DeviceOutOfMemoryError: There is no room; some storages may have memory now.
        """

    def release(self, storage: torch.UntypedStorage) -> None:
        """Release a storage's memory; its tensors stay valid objects without contents."""
        storage.resize_(0)

    def observe(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Note the groups' storages at each transition; code outside of residency may have allocated some of them."""
        return None

    def release_cache(self) -> None:
        """Release cached free memory to the driver, so that other processes can have it."""
        return None

    @abstractmethod
    def total_bytes(self) -> int:
        """Memory of the whole device."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory that could still be allocated."""

    def room_bytes(self, work_bytes: int) -> int:
        """Memory that groups could take while passes need `work_bytes`; negative if there is too little."""
        return self.free_bytes() - work_bytes

    def allocated_bytes(self) -> int:
        """Bytes that this process has allocated on the device; 0 if unknown."""
        return 0

    def reserved_bytes(self) -> int:
        """Memory that this process's allocator holds, cached or in use; 0 if unknown."""
        return 0

    def cached_bytes(self) -> int:
        """Bytes that this process holds on the device without using them."""
        return max(0, self.reserved_bytes() - self.allocated_bytes())

    def cached_for_work_bytes(self) -> int:
        """Free memory that only passes can allocate, not groups."""
        return 0

    def drain_peak_bytes(self) -> int:
        """Most bytes that this process had allocated at a time since the last call; 0 if unknown."""
        return 0

    def drain_cache_flushes(self) -> int:
        """Times since the last call that the allocator gave all of its cache back because a request found no memory."""
        return 0

    @abstractmethod
    def leftovers(
        self, records: Mapping[str, Mapping[int, StorageRecord]], expected: Collection[str]
    ) -> list[Leftover]:
        """Find leftovers on this device, including memory that only the device's own code can name."""

    def new_region(self, num_bytes: int) -> HostRegion:
        """Allocate host memory of the kind whose copies are fastest."""
        # Page-locking gains nothing without a link.
        return PageableRegion(num_bytes)

    # -- copies

    @abstractmethod
    def copy_out(self, copies: Iterable[Copy]) -> Transfer:
        """Start copying device to host."""

    @abstractmethod
    def copy_in(self, copies: Iterable[Copy]) -> Transfer:
        """Start copying host to device. If this raises, no copy is under way."""

    def follow(self, transfer: Transfer) -> None:
        """Make later copies to the device run after those of `transfer`. Does not block.

        Memory that `transfer` reads may then be released for `allocate` to use again.
        """
        transfer.wait_device()

    @property
    def is_paced(self) -> bool:
        """Tell whether few copies to the host run at a time; releasing memory to the driver waits for these."""
        return False

    def pace_out(self, is_paced: bool) -> None:
        """Start few copies to the host at a time from now on, or all of them as they are asked for. Does not block.

        Paced copies are started by `advance_out` and by waiting for them.
        """
        return None

    def advance_out(self) -> None:
        """Start the paced copies to the host that may run now. Does not block."""
        return None

    @property
    def lets_memory_go(self) -> bool:
        """Tell whether copies to the host are paced and no large one runs."""
        return False

    # -- seconds

    def held_up(self, report: TransitionReport) -> AbstractContextManager[None]:
        """Charge a report the seconds in which the present stream has nothing to run because of the body.

        The body holds up the host, or has the device wait for copies. Seconds in which the stream still runs earlier
        work are not charged. If copies do not overlap with work, the host's seconds are charged. A nested body charges
        its own report.
        """
        return report.held_up()

    def account(self) -> None:
        """Fill in the seconds of `held_up` that are known by now. Does not block."""
        return None


def meminfo_bytes(name: str, proc: Path = Path("/proc")) -> int:
    """Bytes of main memory that the kernel gives under a name, such as `MemTotal`.

    Args:
        name: Start of a line of `meminfo`.
        proc: Folder of the kernel's files.
    """
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"{proc}/meminfo has no line {name}")


class CpuDevice(Device):
    """Ordinary memory as a device: offloaded state leaves its tensors and lives in the arena."""

    is_host_memory = True

    def owns(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type == "cpu"

    def allocate(self, wanted: Sequence[Room]) -> None:
        for room in wanted:
            self._allocate(room)

    def _allocate(self, room: Room) -> None:
        room.storage.resize_(room.num_bytes)

    def total_bytes(self) -> int:
        return meminfo_bytes("MemTotal")

    def free_bytes(self) -> int:
        return meminfo_bytes("MemAvailable")

    def leftovers(
        self, records: Mapping[str, Mapping[int, StorageRecord]], expected: Collection[str]
    ) -> list[Leftover]:
        return find_leftovers(records, expected, torch.device("cpu"))

    def copy_out(self, copies: Iterable[Copy]) -> Transfer:
        return copy_now((copy.host, copy.device) for copy in copies)

    def copy_in(self, copies: Iterable[Copy]) -> Transfer:
        return copy_now((copy.device, copy.host) for copy in copies)


def copy_now(pairs: Iterable[tuple[Tensor, Tensor]]) -> Transfer:
    """Copy each source to its target in this call."""
    start = time.perf_counter()
    num_bytes = num_copies = 0
    for target, source in pairs:
        target.copy_(source)
        num_bytes += source.numel()
        num_copies += 1
    return Transfer(num_bytes, num_copies, time.perf_counter() - start)
