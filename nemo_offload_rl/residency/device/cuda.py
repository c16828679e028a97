"""A CUDA GPU as a residency device: side streams, staged small copies, events instead of synchronisation."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false
import os
import time
from collections import deque
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from nemo_offload_rl.residency.device.cuda_copies import (
    CHUNK_BYTES,
    STAGING_BYTES,
    CopiesOut,
    CudaTransfer,
    Piece,
    end_of_cuda_allocation,
    pieces_of,
)
from nemo_offload_rl.residency.device.device import Copy, CpuDevice, Device, Room, Transfer, copy_now
from nemo_offload_rl.residency.host.regions import HostRegion, new_region_on
from nemo_offload_rl.residency.table.errors import DeviceOutOfMemoryError
from nemo_offload_rl.residency.table.groups import StorageRecord, unique_storages
from nemo_offload_rl.residency.table.ledger import Leftover, TransitionReport, find_kept_blocks, find_leftovers

# Constants of torch's allocator (c10/cuda/CUDACachingAllocator.cpp): sizes are multiples of BLOCK_BYTES; those up to
# SMALL_BYTES have pages of their own.
BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20


def make_device(device: torch.device) -> Device:
    """Make the residency device for a torch device."""
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(device)
    raise NotImplementedError(f"state can be kept on a CPU or a CUDA GPU, not on {device.type!r}")


class CudaDevice(Device):
    """One GPU."""

    asynchronous = True

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index  # pyright: ignore[reportUnnecessaryComparison]
        self.device = torch.device("cuda", index)
        # Streams share a few hardware queues, where a kernel waits for those before it, even of other streams. The
        # kernel that gathers small pieces waits for earlier copies. Separate priorities keep it from blocking the work
        # of a pass.
        self._out = torch.cuda.Stream(self.device, priority=-1)
        self._in = torch.cuda.Stream(self.device, priority=-2)
        # Each on its own stream, for which torch has no cache yet: a buffer in a cached block of gigabytes would keep
        # all of it from going back to the driver. Seen on a GPU: 20 GiB of logits' memory stayed while the engine was
        # awake, and 1.7 GiB of what loading the model had left.
        self._staging = {stream: _staging_buffer(self.device, stream) for stream in (self._out, self._in)}
        # Launched once here: CUDA loads the kernel at its first launch and waits for the whole GPU, copies under way
        # included. On an H200 that held up the first caller for 0.13 s.
        staging = self._staging[self._out]
        torch._foreach_copy_([staging[:1], staging[1:2]], [staging[2:3], staging[3:4]])
        self._leaving = CopiesOut()
        # Events in order, each with the report that is charged for idle seconds until the next event.
        self._marks: deque[tuple[torch.cuda.Event, TransitionReport | None]] = deque()
        self._new_region = new_region_on(self.device)
        self._num_flushes = 0
        self._hands_over = False  # leaving groups have handed memory to arriving ones since the last transition

    def owns(self, storage: torch.UntypedStorage) -> bool:
        return storage.device == self.device

    def allocate(self, wanted: Sequence[Room]) -> None:
        # torch's allocator keeps a cache for each stream. No pass allocates on this stream, so state and activations
        # never divide each other's blocks, which would then be too small for the next pass. A block that a pass still
        # reads is safe: `copy_in` waits for the pass before it writes.
        with torch.cuda.stream(self._in):
            # Memory that was handed over is in pieces of the sizes wanted now; a new block would leave it unused.
            if not self._hands_over:
                self._cache_one_block([room.num_bytes for room in wanted if room.num_bytes > SMALL_BYTES])
            for room in wanted:
                self._allocate(room)

    def _cache_one_block(self, sizes_bytes: Sequence[int]) -> None:
        """Put one block to be divided into the present stream's cache, unless a cached one is large enough.

        A driver call for each part takes about 0.1 ms. Smaller blocks in its cache stay until `release_cache`.
        """
        num_bytes = sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes_bytes)
        if num_bytes <= uncached_free_bytes(self.device) and not _splits_are_limited():
            with suppress(torch.OutOfMemoryError):  # another process took the room; single parts may still fit
                torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def _allocate(self, room: Room) -> None:
        try:
            room.storage.resize_(room.num_bytes)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            gib = 2**30
            raise DeviceOutOfMemoryError(
                f"no room for {room.num_bytes / gib:.3f} GiB on {self.device}: {free / gib:.2f} of {total / gib:.2f} "
                f"GiB free, {torch.cuda.memory_allocated(self.device) / gib:.2f} GiB allocated by this process. Free "
                "memory that another process holds, lower policy.generation.vllm_cfg.gpu_memory_utilization, or raise "
                "policy.gpu_memory_limit_gib if it is set."
            ) from error

    def observe(self, storages: Iterable[torch.UntypedStorage]) -> None:
        self._hands_over = False

    def release_cache(self) -> None:
        # cuBLAS keeps 32 MiB for each thread that multiplied, the backward pass's included, which would keep the block
        # around it. The next product allocates it again.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]

    def free_bytes(self) -> int:
        return uncached_free_bytes(self.device) + self.cached_bytes()

    def room_bytes(self, work_bytes: int) -> int:
        for_work = self.cached_for_work_bytes()
        free_bytes = uncached_free_bytes(self.device) + self.cached_bytes() - for_work
        return free_bytes - max(0, work_bytes - for_work)

    def cached_for_work_bytes(self) -> int:
        # Groups allocate on their own stream (`allocate`), for which torch keeps a separate cache.
        own = self._in.cuda_stream
        return sum(s["total_size"] - s["active_size"] for s in self._segments() if s["stream"] != own)

    def _segments(self) -> list[dict[str, Any]]:
        snapshot: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # pyright: ignore[reportUnknownMemberType]
        return [s for s in snapshot if s["device"] == self.device.index]

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def leftovers(
        self, records: Mapping[str, Mapping[int, StorageRecord]], expected: Collection[str]
    ) -> list[Leftover]:
        staging = unique_storages(("staging", buffer) for buffer in self._staging.values())
        found = find_leftovers({**records, "staging": staging}, {*expected, "staging"}, self.device)
        return found + find_kept_blocks(self._segments())

    def drain_peak_bytes(self) -> int:
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def drain_cache_flushes(self) -> int:
        before, self._num_flushes = self._num_flushes, torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0)
        return self._num_flushes - before

    def copy_out(self, copies: Iterable[Copy]) -> Transfer:
        return self._copy(copies, self._out, to_host=True)

    def pace_out(self, is_paced: bool) -> None:
        self._leaving.is_paced = is_paced
        self._leaving.advance()

    def advance_out(self) -> None:
        self._leaving.advance()

    @property
    def is_paced(self) -> bool:
        return self._leaving.is_paced

    @property
    def lets_memory_go(self) -> bool:
        return self._leaving.are_few

    def copy_in(self, copies: Iterable[Copy]) -> Transfer:
        return self._copy(copies, self._in, to_host=False)

    def follow(self, transfer: Transfer) -> None:
        if isinstance(transfer, CudaTransfer):
            transfer.hold_up(self._in)
            self._hands_over = True

    @contextmanager
    def held_up(self, report: TransitionReport) -> Generator[None]:
        outer = self._marks[-1][1] if self._marks else None
        self._mark(report)
        try:
            yield
        finally:
            self._mark(outer)

    def _mark(self, report: TransitionReport | None) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self._marks.append((event, report))

    def account(self) -> None:
        while len(self._marks) > 1 and self._marks[0][0].query() and self._marks[1][0].query():
            begin, report = self._marks.popleft()
            if report is not None:
                # A stream that still had other work passes both events at the same time.
                report.exposed_s += max(0.0, begin.elapsed_time(self._marks[0][0])) / 1e3

    def new_region(self, num_bytes: int) -> HostRegion:
        return self._new_region(num_bytes)

    def _copy(self, copies: Iterable[Copy], stream: torch.cuda.Stream, to_host: bool) -> Transfer:
        pending = iter(copies)
        first = next(pending, None)
        if first is None:
            return Transfer(0, 0)
        copies = chain([first], pending)
        if not first.host.is_pinned():
            return self._copy_blocking(copies, to_host)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.device))
        # Paced copies are listed now, others while the first of them run.
        listed = list(copies) if to_host and self._leaving.is_paced else ()
        transfer = CudaTransfer(stream, listed)
        start = partial(self._start, transfer, listed or copies, stream, ready, to_host)
        if to_host:
            self._leaving.put(transfer, start)
        else:
            start()
        return transfer

    def _start(
        self,
        transfer: CudaTransfer,
        copies: Iterable[Copy],
        stream: torch.cuda.Stream,
        ready: torch.cuda.Event,
        to_host: bool,
    ) -> None:
        """Put copies on their stream, behind the work that `ready` covers."""
        stream.wait_event(ready)
        unmarked_bytes = 0
        try:
            with torch.cuda.stream(stream):
                transfer.begin()
                for piece in pieces_of(copies, end_of_cuda_allocation):
                    self._cross(piece, stream, to_host)
                    transfer.add(piece)
                    unmarked_bytes += piece.host.numel()
                    if unmarked_bytes >= CHUNK_BYTES:
                        transfer.mark()
                        unmarked_bytes = 0
        except BaseException:
            stream.synchronize()
            raise
        if unmarked_bytes:
            transfer.mark()

    def _cross(self, piece: Piece, stream: torch.cuda.Stream, to_host: bool) -> None:
        """Copy one piece on the present (side) stream, whose order lets the next piece reuse the staging buffer."""
        if piece.device is not None:
            if to_host:
                piece.host.copy_(piece.device, non_blocking=True)
            else:
                piece.device.copy_(piece.host, non_blocking=True)
            return
        staging = self._staging[stream][: piece.host.numel()]
        base = piece.host.data_ptr()
        slots = [staging[c.host.data_ptr() - base :][: c.host.numel()] for c in piece.copies]
        tensors = [copy.device for copy in piece.copies]
        if to_host:
            torch._foreach_copy_(slots, tensors)
            piece.host.copy_(staging, non_blocking=True)
        else:
            staging.copy_(piece.host, non_blocking=True)
            torch._foreach_copy_(tensors, slots)

    def _copy_blocking(self, copies: Iterable[Copy], to_host: bool) -> Transfer:
        current = torch.cuda.current_stream(self.device)
        if not to_host:
            # Copies out may still read memory that was handed over (`follow`).
            current.wait_stream(self._in)
        current.synchronize()  # earlier work is not timed as copying
        start = time.perf_counter()
        ended = copy_now((c.host, c.device) if to_host else (c.device, c.host) for c in copies)
        current.synchronize()
        return replace(ended, elapsed_s=time.perf_counter() - start)


def uncached_free_bytes(device: torch.device) -> int:
    """Memory that torch's allocator could still get from the driver, within this process's share of the GPU."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    if share >= 1:
        return free_bytes
    # torch refuses to exceed the share, even if memory is free.
    return min(free_bytes, max(0, int(share * total_bytes) - torch.cuda.memory_reserved(device)))


def _splits_are_limited() -> bool:
    """Tell whether the user has torch's allocator divide no large blocks."""
    settings = (os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    return any("max_split_size_mb" in value for value in settings)


def _staging_buffer(device: torch.device, stream: torch.cuda.Stream) -> Tensor:
    with torch.cuda.stream(stream):
        return torch.empty(STAGING_BYTES, dtype=torch.uint8, device=device)
