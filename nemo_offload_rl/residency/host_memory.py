"""Host memory: how much a worker may take, and regions of it."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostBudget:
    """How much more host memory this process may take, and which limit says so.

    Attributes:
        num_bytes: Bytes still to be had.
        limit_name: The tightest limit: `MemAvailable` or a cgroup file.
        lockable_bytes: RLIMIT_MEMLOCK, or None without a limit.
    """

    num_bytes: int
    limit_name: str
    lockable_bytes: int | None


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def available_bytes() -> int:
    """Memory that the machine could give to new work, as the kernel estimates it."""
    return _meminfo_bytes("MemAvailable")


def memory_total_bytes() -> int:
    """Memory of the machine."""
    return _meminfo_bytes("MemTotal")


def _meminfo_bytes(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no line {name}")


def resident_bytes() -> int:
    """Resident set size of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def read_host_budget(cgroup_root: Path = CGROUP_ROOT) -> HostBudget:
    """Read the machine's and the container's limits.

    A cgroup limit above the machine's memory (version 1's "no limit" value) does not count. A virtual machine that
    grows its memory on first use shows less in MemAvailable than it can give; there the budget is on the safe side.
    """
    limits = {"MemAvailable": available_bytes()}
    for maximum, current in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _read_limit(cgroup_root / maximum), _read_limit(cgroup_root / current)
        if limit is not None and used is not None and limit < 2**60:
            limits[str(cgroup_root / maximum)] = max(0, limit - used)
    name = min(limits, key=lambda key: limits[key])
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return HostBudget(limits[name], name, None if soft_limit == resource.RLIM_INFINITY else soft_limit)


class HostRegion(Protocol):
    """A piece of host memory that the arena divides."""

    @property
    def buffer(self) -> Tensor:
        """[num_bytes] uint8."""
        ...

    @property
    def pinned(self) -> bool: ...

    def close(self) -> None:
        """Give the memory back; views of `buffer` must not be used afterwards."""
        ...


class PageableRegion:
    """Ordinary host memory."""

    pinned = False

    def __init__(self, num_bytes: int) -> None:
        self.buffer: Tensor = torch.empty(num_bytes, dtype=torch.uint8)

    def close(self) -> None:
        """Drop the buffer."""
        self.buffer = torch.empty(0, dtype=torch.uint8)
