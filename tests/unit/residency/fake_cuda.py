"""CudaDevice without a GPU: streams that copy as late as they may, events that say how far they are.

Copies issued inside `torch.cuda.stream(...)` wait in that stream's queue. They run when somebody waits for them, so
that whatever reads without waiting, or frees too early, sees wrong bytes; memory without contents is poisoned. Each
copy takes a millisecond of a common clock. Everything else is CPU memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nemo_offload_rl.residency.device import cuda
from nemo_offload_rl.residency.device.cuda import CudaDevice
from nemo_offload_rl.residency.device.device import Room
from nemo_offload_rl.residency.host import regions as host_regions

COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default)


class FakeStream:
    clock_ms = 0
    lock = threading.RLock()

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device = device
        self.priority = priority
        self.cuda_stream = id(self)
        self.queue: list[tuple[Any, tuple[Any, ...]]] = []
        self.events: list[FakeEvent] = []
        self.num_done = 0

    def run_to(self, position: int) -> None:
        # A thread that waits may itself be in the body of a stream, and two may wait at once.
        with FakeStream.lock, _disable_current_modes():
            while self.num_done < position:
                func, args = self.queue[self.num_done]
                func(*args)
                self.num_done += 1
                FakeStream.clock_ms += 1
                for event in self.events:
                    if event.position == self.num_done:
                        event.time_ms = FakeStream.clock_ms

    def synchronize(self) -> None:
        self.run_to(len(self.queue))

    def wait_stream(self, other: FakeStream) -> None:
        other.synchronize()

    def wait_event(self, event: FakeEvent) -> None:
        event.synchronize()


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.stream = FakeStream()
        self.position = 0
        self.time_ms = 0

    def record(self, stream: FakeStream) -> None:
        self.stream, self.position = stream, len(stream.queue)
        self.time_ms = FakeStream.clock_ms
        stream.events.append(self)

    def query(self) -> bool:
        return self.stream.num_done >= self.position

    def synchronize(self) -> None:
        self.stream.run_to(self.position)

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.query() and later.query()
        return float(later.time_ms - self.time_ms)


class _Queueing(TorchDispatchMode):
    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in COPIES:
            return func(*args, **(kwargs or {}))
        self.stream.queue.append((func, args))
        return args[0] if func is COPIES[0] else None


@contextmanager
def on_stream(stream: FakeStream) -> Iterator[None]:
    with _Queueing(stream):
        yield


class FakeRuntime:
    """`torch.cuda.cudart()`: page-locking that works, or is refused."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


class PoisoningCudaDevice(CudaDevice):
    def allocate(self, wanted: Sequence[Room]) -> None:
        super().allocate(wanted)
        for room in wanted:
            room.storage.fill_(0xFF)


def make_cuda_device(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> CudaDevice:
    """A `CudaDevice` on CPU memory; the patches end with the test."""
    main = FakeStream()
    allocator = SimpleNamespace(num_released=0)

    def empty_cache() -> None:
        allocator.num_released += 1

    replacements = {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": on_stream,
        "current_stream": lambda device=None: main,
        "current_device": lambda: 0,
        "empty_cache": empty_cache,
        "mem_get_info": lambda device=None: (6 << 30, 8 << 30),
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "memory_reserved": lambda device=None: 3 << 30,
        "memory_allocated": lambda device=None: 1 << 30,
        "max_memory_allocated": lambda device=None: 2 << 30,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_stats": lambda device=None: {"num_alloc_retries": 2},
        "get_device_properties": lambda index: SimpleNamespace(pci_domain_id=0, pci_bus_id=255, pci_device_id=255),
    }
    for name, value in replacements.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(host_regions, "_cudart", lambda: runtime)
    monkeypatch.setattr(cuda, "end_of_cuda_allocation", lambda address: address)
    monkeypatch.setattr(
        cuda, "_staging_buffer", lambda device, stream: torch.empty(cuda.STAGING_BYTES, dtype=torch.uint8)
    )
    monkeypatch.setattr(
        torch.Tensor, "is_pinned", lambda self: any(a <= self.data_ptr() < a + n for a, n in runtime.registered.items())
    )
    device = PoisoningCudaDevice(torch.device("cuda", 0))
    device.device = torch.device("cpu")
    own, of_groups = device.device.index, device._in.cuda_stream
    segments = [
        {"device": own, "stream": 0, "total_size": 5 << 29, "active_size": 1 << 30, "blocks": []},
        {"device": own, "stream": of_groups, "total_size": 1 << 29, "active_size": 0, "blocks": []},
        {"device": 1, "stream": 0, "total_size": 7 << 30, "active_size": 0, "blocks": []},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    return device
