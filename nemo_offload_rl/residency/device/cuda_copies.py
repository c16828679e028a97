"""Copies between a GPU and the host: joined into pieces, run on side streams, and started a few GiB at a time.

A copy for each storage is slow for two reasons. Small copies lose bandwidth. And a stream takes about a thousand
copies; the next call blocks until the first have finished. On an H200, starting to load the 4,900 states of a mixture
of experts took 1.1 s, about as long as their copies.
"""

# pyright: reportPrivateUsage=false

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from nemo_offload_rl.residency.device.device import Copy, Transfer
from nemo_offload_rl.residency.host.arena import ALIGNMENT_BYTES, aligned

STAGED_BELOW_BYTES = 4 << 20  # a single copy below this size loses bandwidth
STAGING_BYTES = 32 << 20
# Memory is released, or a layer begun, at most this much late: about 1.2 ms of the link.
CHUNK_BYTES = 64 << 20
# Limit of paced copies on the stream: under 0.1 s of the link, and enough to keep it busy.
PACE_BYTES = 2 << 30

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
    `STAGING_BYTES` if each is small. All are to or from the device whose allocations `end_of` knows.
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


class CudaTransfer(Transfer):
    """Copies on a side stream, with an event after every chunk of them.

    Args:
        stream: Stream that runs them.
        copies: All copies, if they are known before the first is put on the stream.
    """

    def __init__(self, stream: torch.cuda.Stream, copies: Sequence[Copy] = ()) -> None:
        super().__init__(sum(copy.host.numel() for copy in copies), len(copies))
        self.start: Callable[[], None] = _nothing
        self._stream = stream
        self._num_put = 0
        self._put_bytes = 0
        self._began = torch.cuda.Event(enable_timing=True)
        self._chunks: list[tuple[int, torch.cuda.Event]] = []  # number of copies finished once the event has passed
        self._num_passed = 0

    def begin(self) -> None:
        """Record the start, just before the first copy is put on the stream."""
        self._began.record(self._stream)

    def add(self, piece: Piece) -> None:
        """Count copies that were put on the stream."""
        self._num_put += len(piece.copies)
        self._put_bytes += sum(copy.host.numel() for copy in piece.copies)
        self.num_copies = max(self.num_copies, self._num_put)
        self.num_bytes = max(self.num_bytes, self._put_bytes)

    def mark(self) -> None:
        """Record an event on the stream after all copies added so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._chunks.append((self._num_put, event))

    def num_finished(self) -> int:
        while self._num_passed < len(self._chunks) and self._chunks[self._num_passed][1].query():
            self._num_passed += 1
        return self._chunks[self._num_passed - 1][0] if self._num_passed else 0

    def wait_some(self) -> None:
        self.start()
        if self._num_passed < len(self._chunks):
            self._chunks[self._num_passed][1].synchronize()

    def wait_host(self) -> None:
        self.start()
        self._chunks[-1][1].synchronize()

    def wait_device(self, num_copies: int | None = None) -> None:
        if num_copies == 0:
            return
        self.start()
        wanted = self.num_copies if num_copies is None else num_copies
        copied = next(event for num_covered, event in self._chunks if num_covered >= wanted)
        torch.cuda.current_stream(self._stream.device).wait_event(copied)

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        """Make a stream run nothing more before the copies have finished."""
        self.start()
        stream.wait_event(self._chunks[-1][1])

    def seconds(self) -> float:
        return self._began.elapsed_time(self._chunks[-1][1]) / 1e3


class CopiesOut:
    """Queue of copies to the host. Paced ones are started only while fewer than `PACE_BYTES` run.

    `cudaFree` waits for queued copies; a short queue returns memory sooner. Waiting for a transfer starts it and those
    before it. `advance` starts the others.
    """

    def __init__(self) -> None:
        self.is_paced = False
        self._waiting: deque[tuple[CudaTransfer, Callable[[], None]]] = deque()
        self._started: list[CudaTransfer] = []

    def put(self, transfer: CudaTransfer, start: Callable[[], None]) -> None:
        """Queue a transfer, which `start` begins when its turn comes: now, unless copies are paced."""
        transfer.start = partial(self._start_up_to, transfer)
        self._waiting.append((transfer, start))
        self.advance()

    def advance(self) -> None:
        """Start the copies that may run now. Does not block."""
        while self._waiting and not (self.is_paced and self._running_bytes() >= PACE_BYTES):
            self._start_next()

    @property
    def are_few(self) -> bool:
        """Tell whether copies are paced and at most twice `PACE_BYTES` run, which one large transfer may exceed."""
        return self.is_paced and self._running_bytes() <= 2 * PACE_BYTES

    def _running_bytes(self) -> int:
        self._started = [transfer for transfer in self._started if not transfer.finished]
        return sum(transfer.num_bytes for transfer in self._started)

    def _start_up_to(self, transfer: CudaTransfer) -> None:
        while any(transfer is waiting for waiting, _ in self._waiting):
            self._start_next()

    def _start_next(self) -> None:
        transfer, start = self._waiting.popleft()
        transfer.start = _nothing
        start()
        self._started = [*(earlier for earlier in self._started if not earlier.finished), transfer]


def _nothing() -> None:
    """Start nothing."""
