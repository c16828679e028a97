"""Copies on a side stream of a GPU, and copies to the host that are started a few GiB at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from nemo_offload_rl.residency.device.pieces import Copy, Piece

# Limit of paced copies on the stream: under 0.1 s of the link, and enough to keep it busy.
PACE_BYTES = 2 << 30


class CudaTransfer:
    """Copies on a side stream, with an event after every chunk of them.

    Args:
        stream: Stream that runs them.
        copies: All copies, if they are known before the first is put on the stream.
    """

    def __init__(self, stream: torch.cuda.Stream, copies: Sequence[Copy] = ()) -> None:
        self.num_bytes = sum(copy.host.numel() for copy in copies)
        self.start: Callable[[], None] = _nothing
        self._stream = stream
        self._num_copies = len(copies)
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
        self._num_copies = max(self._num_copies, self._num_put)
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

    @property
    def finished(self) -> bool:
        return self.num_finished() == self._num_copies

    def wait_some(self) -> None:
        self.start()
        if self._num_passed < len(self._chunks):
            self._chunks[self._num_passed][1].synchronize()

    def wait_host(self) -> float:
        begin = time.perf_counter()
        self.start()
        self._chunks[-1][1].synchronize()
        return time.perf_counter() - begin

    def wait_device(self, num_copies: int | None = None) -> None:
        if num_copies == 0:
            return
        self.start()
        wanted = self._num_copies if num_copies is None else num_copies
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
