"""A device with a clock of its own: one copy after another in each direction, both directions at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

from nemo_offload_rl.residency.device.device import Copy, CpuDevice
from nemo_offload_rl.residency.table.ledger import TransitionReport


class ClockedTransfer:
    """Copies that run from `start` to `end`, in time units of the device."""

    def __init__(self, device: ClockedDevice, copies: Sequence[Copy], start: float, end: float) -> None:
        self.num_bytes = sum(copy.host.numel() for copy in copies)
        self.start = start
        self.end = end
        self._device = device
        self._num_copies = len(copies)

    def num_finished(self) -> int:
        return self._num_copies if self.finished else 0

    @property
    def finished(self) -> bool:
        return self.end <= self._device.host

    def wait_some(self) -> None:
        self.wait_host()

    def wait_host(self) -> float:
        waited = max(0.0, self.end - self._device.host)
        self._device.host += waited
        self._device.host_waited += waited
        return waited

    def wait_device(self, num_copies: int | None = None) -> None:
        self._device.compute = max(self._device.reached(), self.end)

    def seconds(self) -> float:
        return self.end - self.start


class ClockedDevice(CpuDevice):
    """Copies happen at once, and take time on clocks.

    Args:
        unit_bytes: What crosses in a unit of time, in each direction.
        free_bytes: What is free now.

    Attributes:
        host: When the host is.
        start_cost: What the host needs to start copies.
        compute: When what runs on the device so far has run.
        host_waited: How long the host has waited for copies.
        exposed: What all reports have been charged.
    """

    asynchronous = True

    def __init__(self, unit_bytes: int, free_bytes: Callable[[], int]) -> None:
        self.host = self.compute = self.host_waited = self.start_cost = self.exposed = 0.0
        self.free_bytes = free_bytes
        self._unit_bytes = unit_bytes
        self._until = {"in": 0.0, "out": 0.0}

    def run(self, duration: float) -> None:
        """Work on the device."""
        self.compute = self.reached() + duration

    def reached(self) -> float:
        """When the device comes to what the host gives it now."""
        return max(self.compute, self.host)

    @contextmanager
    def held_up(self, report: TransitionReport) -> Generator[None]:
        begin, exposed = self.reached(), self.exposed
        try:
            yield
        finally:
            # Less what bodies inside it have charged.
            idle = self.reached() - begin - (self.exposed - exposed)
            report.exposed_s += idle
            self.exposed += idle

    def synchronize(self) -> None:
        """The host waits for the work, not for copies."""
        self.host = max(self.host, self.compute)

    def copy_out(self, copies: Iterable[Copy]) -> ClockedTransfer:
        return self._start("out", copies)

    def copy_in(self, copies: Iterable[Copy]) -> ClockedTransfer:
        return self._start("in", copies)

    def idle_from(self) -> float:
        """When the last copy in either direction has ended."""
        return max(self._until.values())

    def follow(self, transfer: ClockedTransfer) -> None:
        self._until["in"] = max(self._until["in"], transfer.end)

    def _start(self, way: str, copies: Iterable[Copy]) -> ClockedTransfer:
        copies = list(copies)
        for copy in copies:
            target, source = (copy.host, copy.device) if way == "out" else (copy.device, copy.host)
            target.copy_(source)
        self.run(0.0)
        if not copies:
            return ClockedTransfer(self, copies, self.host, self.host)
        start = max(self._until[way], self.compute)
        self.host += self.start_cost
        transfer = ClockedTransfer(self, copies, start, start)
        transfer.end = self._until[way] = start + transfer.num_bytes / self._unit_bytes
        return transfer
