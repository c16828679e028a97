"""Processes that hold a GPU's memory, from the driver library (NVML), without a CUDA context.

Without NVML, or if it names no processes, the answers are empty: nothing here may end a run.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil


@dataclass(frozen=True)
class GpuUse:
    """One GPU at one moment, in bytes; `by_pid` counts contexts and all allocations of a process."""

    name: str  # such as "NVIDIA H200"
    total_bytes: int
    used_bytes: int
    by_pid: Mapping[int, int] = field(default_factory=dict)

    def by_owner(self, owners: Mapping[int, str]) -> dict[str, int]:
        """Bytes by owner; a process counts for its nearest ancestor in `owners`, all other bytes are `other`."""
        shares: dict[str, int] = dict.fromkeys([*owners.values(), "other"], 0)
        for pid, num_bytes in self.by_pid.items():
            owner = _owner_of(pid, owners)
            if owner is not None:
                shares[owner] += num_bytes
        shares["other"] = max(0, self.used_bytes - sum(shares.values()))
        return shares


def read_gpus() -> dict[str, GpuUse]:
    """Every GPU of this host by UUID (as torch writes it, without `GPU-`)."""
    nvml = _nvml()
    if nvml is None:
        return {}
    found = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        by_pid = {process.pid: process.usedGpuMemory or 0 for process in processes}
        uuid = nvml.nvmlDeviceGetUUID(handle).removeprefix("GPU-")
        found[uuid] = GpuUse(nvml.nvmlDeviceGetName(handle), memory.total, memory.used, by_pid)
    return found


def first_gpu_name() -> str | None:
    """Name of the first GPU of this host, if there is one."""
    return next((use.name for use in read_gpus().values()), None)


def holders(uuid: str, names: Mapping[int, str]) -> str:
    """Processes on a GPU, the largest first, as text: `policy worker 0 (pid 12) 3.10 GiB, ...`."""
    use = read_gpus().get(uuid)
    if use is None or not use.by_pid:
        return "processes that the driver does not name"
    lines = []
    for pid, num_bytes in sorted(use.by_pid.items(), key=lambda item: -item[1]):
        owner = _owner_of(pid, names) or "another process"
        lines.append(f"{owner} (pid {pid}) {num_bytes / 2**30:.2f} GiB")
    return ", ".join(lines)


def _owner_of(pid: int, owners: Mapping[int, str]) -> str | None:
    if pid in owners:
        return owners[pid]
    try:
        parents = psutil.Process(pid).parents()
    except psutil.Error:
        return None
    return next((owners[parent.pid] for parent in parents if parent.pid in owners), None)


@functools.cache
def _nvml() -> Any:
    """NVML, kept open for the process; None if it is missing."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
