"""Pieces that cross the link to and from a GPU in one copy.

A copy for each storage is slow for two reasons. Small copies lose bandwidth. And a stream takes about a thousand
copies; the next call blocks until the first have finished. On an H200, starting to load the 4,900 states of a mixture
of experts took 1.1 s, about as long as their copies.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from nemo_offload_rl.residency.host.arena import ALIGNMENT_BYTES, aligned

STAGED_BELOW_BYTES = 4 << 20  # a single copy below this size loses bandwidth
STAGING_BYTES = 32 << 20
# Memory is released, or a layer begun, at most this much late: about 1.2 ms of the link.
CHUNK_BYTES = 64 << 20

type EndOf = Callable[[int], int]
"""Returns the end of the allocation that contains a device address."""


@dataclass(frozen=True)
class Piece:
    """Copies that cross the link in one go.

    Attributes:
        copies: Copies in order, adjacent in host memory.
        host: [N] uint8, the bytes of all copies.
        device: [N] uint8; None if they are apart on the device and go through staging.
    """

    copies: tuple[Copy, ...]
    host: Tensor
    device: Tensor | None


def pieces_of(copies: Iterable[Copy], end_of: EndOf) -> Iterator[Piece]:
    """Join copies into pieces, in order.

    Neighbours in host memory are joined up to `CHUNK_BYTES` if they are neighbours on the device too, else up to
    `STAGING_BYTES` if each is small.

    Args:
        copies: Copies to or from one device.
        end_of: Finds the ends of that device's allocations.
    """
    run: _Run | None = None
    for copy in copies:
        if run is None or not run.add(copy):
            if run is not None:
                yield run.piece()
            run = _Run(copy, end_of)
    if run is not None:
        yield run.piece()


class _Run:
    """Copies that are to be joined."""

    def __init__(self, first: Copy, end_of: EndOf) -> None:
        self._copies = [first]
        self._memory = first.host.untyped_storage().data_ptr()
        self._host, self._device = first.host.data_ptr(), first.device.data_ptr()
        self._num_bytes = first.host.numel()
        self._is_small = _is_small(first)
        self._is_adjacent = True  # on the device
        self._end_of = end_of
        self._end: int | None = None  # end of the allocation, once known

    def add(self, copy: Copy) -> bool:
        """Join one more copy; return False if that is impossible."""
        offset = copy.host.data_ptr() - self._host
        is_near = 0 <= offset - aligned(self._num_bytes) < ALIGNMENT_BYTES
        if not is_near or copy.host.untyped_storage().data_ptr() != self._memory:
            return False
        num_bytes = offset + copy.host.numel()
        is_small = self._is_small and _is_small(copy)
        is_adjacent = self._is_adjacent and num_bytes <= CHUNK_BYTES and self._is_next_on_device(copy, offset)
        if not is_adjacent and not (is_small and num_bytes <= STAGING_BYTES):
            return False
        self._copies.append(copy)
        self._num_bytes, self._is_small, self._is_adjacent = num_bytes, is_small, is_adjacent
        return True

    def _is_next_on_device(self, copy: Copy, offset: int) -> bool:
        """Tell whether only torch's rounding of sizes is between this copy and the last one."""
        address = copy.device.data_ptr()
        if address - self._device != offset or offset != aligned(self._num_bytes):
            return False
        if self._end is None:
            self._end = self._end_of(self._device)
        return address + copy.device.numel() <= self._end

    def piece(self) -> Piece:
        """Make a piece of the joined copies."""
        first = self._copies[0]
        if len(self._copies) == 1:
            return Piece((first,), first.host, first.device)
        host = first.host.new_empty(0).set_(
            first.host.untyped_storage(), first.host.storage_offset(), (self._num_bytes,), (1,)
        )
        device = _bytes_at(self._device, self._num_bytes, first.device.device) if self._is_adjacent else None
        return Piece(tuple(self._copies), host, device)


def _is_small(copy: Copy) -> bool:
    return copy.host.numel() < STAGED_BELOW_BYTES


def _bytes_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """View memory that others own as [num_bytes] uint8."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))


def end_of_cuda_allocation(address: int) -> int:
    """End of the CUDA driver's allocation that contains an address; the address itself if the driver knows none.

    A copy must not cross two allocations, which may happen to be neighbours.
    """
    base, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
    status = _cuda_driver().cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(num_bytes), ctypes.c_uint64(address)
    )
    return address if status else base.value + num_bytes.value


@cache
def _cuda_driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@dataclass(frozen=True)
class Copy:
    """One copy's bytes on both sides: [N] uint8 each."""

    device: Tensor
    host: Tensor
