"""What mapping memory takes one process, and releasing it another, while copies run on the GPU that they share.

    python benchmarks/beside_another_process.py --json benchmarks/results/beside_another_process.json

One process stands for the policy: it copies between the GPU and page-locked memory on a stream of its own, and releases
memory to the driver. The other stands for an engine that wakes: it maps memory as vLLM's allocator does, and copies
inside the GPU. Milliseconds are medians of `--repeats`. Needs a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

MIB, GIB = 1 << 20, 1 << 30
PIECE_BYTES, FLIGHT_BYTES = 64 * MIB, 2 * GIB
NUM_MAPPED, MAPPED_BYTES = 200, 150 * MIB  # the allocations of an engine's weights
BLOCKS = {"1 block of 32 GiB": (1, 32 * GIB), "128 blocks of 256 MiB": (128, 256 * MIB)}


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """`CUmemAllocationProp` of cuda.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Mapping:
    """Address ranges that are given memory and lose it again."""

    def __init__(self, num: int, num_bytes: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._size = ctypes.c_size_t(num_bytes)
        self._addresses = [ctypes.c_uint64() for _ in range(num)]
        self._handles: list[ctypes.c_uint64] = []
        for address in self._addresses:
            zero = ctypes.c_uint64(0)
            self._call("cuMemAddressReserve", ctypes.byref(address), self._size, ctypes.c_size_t(0), zero, zero)

    def map(self) -> None:
        """Give every range memory."""
        here = _Location(1, 0)
        properties, access, zero = _Properties(1, 0, here, None), _Access(here, 3), ctypes.c_uint64(0)
        for address in self._addresses:
            handle = ctypes.c_uint64()
            self._call("cuMemCreate", ctypes.byref(handle), self._size, ctypes.byref(properties), zero)
            self._call("cuMemMap", address, self._size, ctypes.c_size_t(0), handle, zero)
            self._call("cuMemSetAccess", address, self._size, ctypes.byref(access), ctypes.c_size_t(1))
            self._handles.append(handle)

    def unmap(self) -> None:
        """Take it away."""
        for address in self._addresses:
            self._call("cuMemUnmap", address, self._size)
        while self._handles:
            self._call("cuMemRelease", self._handles.pop())

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._driver, name)(*arguments)
        if error:
            raise SystemExit(f"{name} failed with CUDA error {error}")


def seconds(body: Callable[[], Any]) -> float:
    """How long the body takes."""
    start = time.perf_counter()
    body()
    return time.perf_counter() - start


def engine(calls: Connection) -> None:
    """Answer every call with its seconds, until `end` comes."""
    torch.zeros(1, device="cuda")
    memory = Mapping(NUM_MAPPED, MAPPED_BYTES)
    source = torch.zeros(GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy_inside() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    copy_inside()
    bodies = {"map": memory.map, "unmap": memory.unmap, "copy": copy_inside}
    calls.send(0.0)
    while (call := calls.recv()) != "end":
        calls.send(seconds(bodies[call]))


class Copies:
    """Copies between the GPU and page-locked memory, on their own stream."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream(priority=-1)
        self._host = torch.zeros(FLIGHT_BYTES, dtype=torch.uint8, pin_memory=True)
        self._device = torch.zeros(FLIGHT_BYTES, dtype=torch.uint8, device="cuda")

    def start(self, num_bytes: int, *, to_host: bool) -> torch.cuda.Event:
        """Start so much; the event is behind it."""
        with torch.cuda.stream(self._stream):
            for host, device in zip(
                self._host[:num_bytes].split(PIECE_BYTES), self._device[:num_bytes].split(PIECE_BYTES), strict=True
            ):
                target, source = (host, device) if to_host else (device, host)
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    @contextmanager
    def running(self, direction: str | None) -> Iterator[None]:
        """Copies `out` or `in` are on the stream all through the body, 2 GiB at a time; None for none."""
        stop = threading.Event()

        def keep() -> None:
            events = [self.start(FLIGHT_BYTES // 2, to_host=direction == "out")]
            while not stop.is_set():
                events.append(self.start(FLIGHT_BYTES // 2, to_host=direction == "out"))
                events.pop(0).synchronize()

        thread = threading.Thread(target=keep)
        if direction:
            thread.start()
            time.sleep(0.1)
        try:
            yield
        finally:
            stop.set()
            if direction:
                thread.join()
            torch.cuda.synchronize()


def main() -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU here; this measures two processes on one.")
    spawn = get_context("spawn")
    calls, other = spawn.Pipe()
    process = spawn.Process(target=engine, args=(other,), daemon=True)
    process.start()
    calls.recv()
    copies = Copies()

    def ask(call: str) -> float:
        calls.send(call)
        return calls.recv()

    def map_once() -> float:
        taken_s = ask("map")
        ask("unmap")
        return taken_s

    def map_after_start() -> float:
        event = copies.start(FLIGHT_BYTES, to_host=True)
        taken_s = map_once()
        event.synchronize()
        return taken_s

    def release(num: int, num_bytes: int, flight_bytes: int) -> float:
        blocks = [torch.empty(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(num)]
        torch.cuda.synchronize()
        blocks.clear()
        if flight_bytes:
            copies.start(flight_bytes, to_host=True)
        taken_s = seconds(torch.cuda.empty_cache)
        torch.cuda.synchronize()
        return taken_s

    def median_s(body: Callable[[], float]) -> float:
        return statistics.median([body() for _ in range(arguments.repeats + 1)][1:])

    copies.start(FLIGHT_BYTES, to_host=True).synchronize()
    rows = {"2 GiB to the host": median_s(lambda: seconds(copies.start(FLIGHT_BYTES, to_host=True).synchronize))}
    for direction in (None, "in", "out"):
        beside = f"copies {direction}" if direction else "nothing"
        with copies.running(direction):
            rows[f"30 GiB mapped beside {beside}"] = median_s(map_once)
            rows[f"1 GiB copied inside the GPU beside {beside}"] = median_s(lambda: ask("copy"))
    rows["30 GiB mapped, 2 GiB on their way out before"] = median_s(map_after_start)
    for name, (num, num_bytes) in BLOCKS.items():
        for flight_bytes in (0, FLIGHT_BYTES):
            before = "2 GiB on their way out before" if flight_bytes else "nothing before"
            rows[f"{name} released, {before}"] = median_s(lambda args=(num, num_bytes, flight_bytes): release(*args))
    calls.send("end")
    process.join()
    for name, taken_s in rows.items():
        print(f"{name:60s}{1e3 * taken_s:10.1f} ms")
    if arguments.json is not None:
        found = {
            "date": date.today().isoformat(),
            "command": shlex.join(["python", f"benchmarks/{Path(__file__).name}", *sys.argv[1:]]),
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "seconds": rows,
        }
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
