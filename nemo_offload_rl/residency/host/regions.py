"""Regions of host memory that the arena divides: pageable, or page-locked near the GPU at memory speed.

`cudaHostAlloc` pins at about 1 GB/s, and torch's caching host allocator rounds sizes up to powers of two. This module
maps a region of exactly the requested size, binds it to the GPU's NUMA node, backs it by huge pages that several
threads touch at once, and registers it. docs/measurements/mechanisms.md has the rates.
"""

import ctypes
import logging
import mmap
import os
import platform
import resource
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from nemo_offload_rl.residency.table.errors import ResidencyError

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
MAX_TOUCH_THREADS = 16
_MPOL_PREFERRED = 1
_MBIND_SYSCALL = {"x86_64": 237, "aarch64": 235}
_CUDA_SUCCESS = 0
_HOST_REGISTER_PORTABLE = 1

_libc = ctypes.CDLL(None, use_errno=True)


def _cudart() -> Any:
    return torch.cuda.cudart()  # pyright: ignore[reportUnknownVariableType]


def _forget_last_error() -> None:
    """Have torch find and drop CUDA's last error, which it would otherwise report for its next kernel."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def numa_node_of_gpu(device_index: int) -> int | None:
    """NUMA node that a GPU is attached to, from sysfs; None if sysfs has none."""
    properties = cast(Any, torch.cuda.get_device_properties(device_index))  # pyright: ignore[reportUnknownMemberType]
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    try:
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
    except OSError:
        return None
    return node if node >= 0 else None


type HostRegion = PageableRegion | PinnedRegion
"""Host memory that the arena divides: `buffer`, [num_bytes] uint8. After `close` no view of it may be used."""


class PageableRegion:
    """Ordinary host memory."""

    pinned = False

    def __init__(self, num_bytes: int) -> None:
        self.buffer: Tensor = torch.empty(num_bytes, dtype=torch.uint8)

    def close(self) -> None:
        """Drop the buffer."""
        self.buffer = torch.empty(0, dtype=torch.uint8)


class PinnedRegion:
    """A page-locked region.

    Args:
        num_bytes: Size of `buffer`; the mapping is rounded up to whole huge pages.
        numa_node: Preferred node of the pages; None for any.

    Raises:
        ResidencyError: CUDA refused to register the memory; nothing is left allocated.
    """

    pinned = True

    def __init__(self, num_bytes: int, numa_node: int | None) -> None:
        size = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        # One huge page more than needed, so that the region can start on a huge-page boundary.
        self._mapping = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(self._mapping, dtype=torch.uint8)
        skip = -whole.data_ptr() % HUGE_PAGE_BYTES
        self._address = whole.data_ptr() + skip
        self._size = size
        self.buffer: Tensor = whole[skip : skip + num_bytes]
        self._mapping.madvise(mmap.MADV_HUGEPAGE)
        if numa_node is not None:
            self._prefer_node(numa_node)
        self._touch()
        error = int(_cudart().cudaHostRegister(self._address, size, _HOST_REGISTER_PORTABLE))
        if error != _CUDA_SUCCESS:
            self.buffer = torch.empty(0, dtype=torch.uint8)
            _forget_last_error()
            raise ResidencyError(
                f"cudaHostRegister refused {size / 2**30:.2f} GiB of host memory (CUDA error {error}). The container's "
                "limit on locked memory or on memory is likely too low; raise it (ulimit -l unlimited)."
            )
        # A region that is dropped without `close` must not stay registered: its addresses will be used again.
        self._unregister = weakref.finalize(self, _cudart().cudaHostUnregister, self._address)
        self._unregister.atexit = False

    def close(self) -> None:
        """Unregister and unmap. No copy may be under way."""
        if self.buffer.numel():
            self._unregister()
            # The mapping is freed with the last tensor that views it.
            self.buffer = torch.empty(0, dtype=torch.uint8)

    def _prefer_node(self, node: int) -> None:
        syscall = _MBIND_SYSCALL.get(platform.machine())
        if syscall is None:
            return
        mask = ctypes.c_ulong(1 << node)
        result = _libc.syscall(
            ctypes.c_long(syscall),
            ctypes.c_void_p(self._address),
            ctypes.c_ulong(self._size),
            ctypes.c_int(_MPOL_PREFERRED),
            ctypes.byref(mask),
            ctypes.c_ulong(64),
            ctypes.c_uint(0),
        )
        if result != 0:
            logger.warning("binding host memory to NUMA node %d failed (errno %d)", node, ctypes.get_errno())

    def _touch(self) -> None:
        num_threads = min(MAX_TOUCH_THREADS, os.cpu_count() or 1)
        share = -(-self._size // num_threads // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = self._address + self._size
        starts = range(self._address, end, share)
        with ThreadPoolExecutor(num_threads) as pool:
            # memset releases the interpreter lock. MADV_POPULATE_WRITE does the same at half the speed (measured).
            list(pool.map(ctypes.memset, starts, repeat(0), (min(share, end - start) for start in starts)))


def new_region_on(device: torch.device) -> Callable[[int], HostRegion]:
    """Return a function that makes host memory for copies of a device: page-locked near a GPU, else pageable.

    If CUDA refuses to register memory, that function warns and makes pageable memory.
    """
    if device.type != "cuda":
        return PageableRegion
    numa_node = numa_node_of_gpu(device.index or 0)

    def new_region(num_bytes: int) -> HostRegion:
        try:
            return PinnedRegion(num_bytes, numa_node)
        except ResidencyError as error:
            lockable_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            has_no_limit = lockable_bytes == resource.RLIM_INFINITY
            limit = "not limited" if has_no_limit else f"{lockable_bytes / 2**30:.2f} GiB"
            logger.warning(
                "%s RLIMIT_MEMLOCK is %s. Going on with pageable memory, whose copies are several times slower and do "
                "not overlap with computing.",
                error,
                limit,
            )
            return PageableRegion(num_bytes)

    return new_region
