"""Limits of host memory at which Ray's memory monitor or the kernel kills a worker.

The monitor kills a worker once its host uses more than a share of its memory.

Source: `src/ray/common/threshold_memory_monitor.cc` and "Out-Of-Memory Prevention" in Ray's documentation (2.60).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from nemo_offload_rl.residency import HostLimit, memory_total_bytes, oom_kills, read_host_limits

THRESHOLD = "RAY_memory_usage_threshold"
_REFRESH = "RAY_memory_monitor_refresh_ms"
_DEFAULT_THRESHOLD = 0.95
# Memory that a Ray started here leaves free, if that is less than its default.
_FREE_BYTES = 3 * 2**30
_MACHINE = "MemAvailable"
# Files with a container's limit that the monitor reads, for both versions of cgroups.
_CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_KILLED = re.compile(r"Memory usage (\d+)B exceeded threshold of (\d+)B \((\S+)% of (\d+)B limit\)")


def as_started_here(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a Ray started on this machine: the smaller of 3 GiB and 5 % must stay free.

    A run knows its need before it starts, and 5 % of a host of 1 TiB are 51 GiB. A threshold that is already set stays.
    """
    return {THRESHOLD: f"{share_in_use(memory_total_bytes()):.4f}", **environment}


def share_in_use(total_bytes: int) -> float:
    """Share of a host's memory that may be in use if a run starts Ray there."""
    return max(_DEFAULT_THRESHOLD, 1 - _FREE_BYTES / total_bytes)


def host_limits(environment: Mapping[str, str] = os.environ) -> tuple[HostLimit, ...]:
    """Read the host's limits, lowered to what Ray's monitor allows.

    Args:
        environment: Environment of Ray's daemon on this host; its workers inherit it.
    """
    if environment.get(_REFRESH, "").strip() == "0":
        return read_host_limits()
    try:
        threshold = float(environment.get(THRESHOLD, _DEFAULT_THRESHOLD))
    except ValueError:
        threshold = _DEFAULT_THRESHOLD
    return watched(read_host_limits(), threshold)


def watched(limits: Sequence[HostLimit], threshold: float) -> tuple[HostLimit, ...]:
    """Lower the limit that the monitor watches (the machine's, or a smaller container's) to where it kills.

    Args:
        limits: Limits of a process.
        threshold: Share of the whole memory that may be in use.
    """
    candidates = [limit for limit in limits if limit.name == _MACHINE or limit.name in _CONTAINER]
    if not candidates:
        return tuple(limits)
    chosen = min(candidates, key=lambda limit: limit.whole_bytes)
    left_bytes = chosen.left_bytes - int((1 - threshold) * chosen.whole_bytes)
    name = f"Ray's memory monitor ({THRESHOLD}={threshold:g})"
    lowered = replace(chosen, name=name, left_bytes=max(0, left_bytes))
    return tuple(lowered if limit is chosen else limit for limit in limits)


def killed_by_monitor(text: str) -> str | None:
    """Shorten Ray's report on a worker that the monitor killed to one line; None for any other text."""
    found = _KILLED.search(text)
    if found is None:
        return None
    used, allowed, whole = (int(found.group(group)) / 2**30 for group in (1, 2, 4))
    return (
        f"Ray's memory monitor killed it, because {used:.2f} of {whole:.2f} GiB of its host's memory were in use, and "
        f"{THRESHOLD} allows {allowed:.2f} ({found.group(3)} %). Keep less in host memory (docs/guides/memory.md), or "
        f"set {THRESHOLD} higher where Ray starts"
    )


@functools.cache
def oom_kills_at_first() -> Mapping[str, int]:
    """Return the kernel's counters at the time of the first call, which must be made before workers start."""
    return oom_kills()


def killed_by_kernel() -> str | None:
    """One line if the kernel has killed processes since `oom_kills_at_first`; None if not or on another host."""
    before = oom_kills_at_first()
    for folder, count in oom_kills().items():
        if (num_killed := count - before.get(folder, 0)) > 0:
            processes = "1 process" if num_killed == 1 else f"{num_killed} processes"
            return (
                f"the kernel has killed {processes} of the cgroup {folder} since the start, for lack of memory: keep "
                "less in host memory (docs/guides/memory.md), or raise its limit"
            )
    return None
