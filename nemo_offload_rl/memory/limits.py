"""Limits of host memory, the budget that the workers of a host share, and processes killed over a limit.

The kernel limits a machine, its cgroups and each process. Ray's memory monitor kills a worker once its host uses more
than a share of its memory.

Source: `src/ray/common/threshold_memory_monitor.cc` and "Out-Of-Memory Prevention" in Ray's documentation (2.60).
"""

from __future__ import annotations

import functools
import os
import re
import resource
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from nemo_offload_rl.residency import meminfo_bytes

PROC = Path("/proc")
# Cgroup version 1 writes "no limit" as a number near 2**63.
_NO_LIMIT_BYTES = 1 << 60
# (limit, usage, reclaimable page cache in memory.stat) of a cgroup, version 2 first.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
THRESHOLD = "RAY_memory_usage_threshold"
_REFRESH = "RAY_memory_monitor_refresh_ms"
_DEFAULT_THRESHOLD = 0.95
# Memory that a Ray started here leaves free, if that is less than its default.
_FREE_BYTES = 3 * 2**30
_MACHINE = "MemAvailable"
# Files with a container's limit that the monitor reads, for both versions of cgroups.
_CONTAINER = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_KILLED = re.compile(r"Memory usage (\d+)B exceeded threshold of (\d+)B \((\S+)% of (\d+)B limit\)")


@dataclass(frozen=True)
class HostLimit:
    """A bound on the memory of some processes.

    Attributes:
        scope: Identifier of the bound, equal for all processes that share it, on any host.
        name: Name for messages: `MemAvailable`, a file of a cgroup, or a resource limit.
        left_bytes: Memory that these processes together may still take.
        whole_bytes: Memory that they could take if they had none yet.
    """

    scope: str
    name: str
    left_bytes: int
    whole_bytes: int = 0


@dataclass(frozen=True)
class HostShortage:
    """A limit that is too tight for the ranks that share it.

    Attributes:
        limit: The limit; of several, the one that leaves the smallest share of the need.
        num_ranks: Number of ranks that share it.
        needed_bytes: Memory that these ranks need together.
        parts: Needs of the first of these ranks, in bytes by name.
    """

    limit: HostLimit
    num_ranks: int
    needed_bytes: int
    parts: Mapping[str, int]

    @property
    def worker_bytes(self) -> int:
        """Memory that the limit leaves for the rank of `parts`, in proportion to its need."""
        return self.limit.left_bytes * sum(self.parts.values()) // self.needed_bytes


@dataclass(frozen=True)
class HostShare:
    """Memory that a rank may take: its own need, plus an equal share of what no rank of its host needs."""

    num_bytes: int


def memory_total_bytes() -> int:
    """Memory of the machine."""
    return meminfo_bytes("MemTotal")


def resident_bytes() -> int:
    """Resident set size of this process."""
    return int((PROC / "self/statm").read_text().split()[1]) * resource.getpagesize()


def read_host_limits(proc: Path = PROC) -> tuple[HostLimit, ...]:
    """Read all limits of this process's memory: from the machine, its cgroups and its resource limits.

    Page cache that a cgroup would drop first does not count as used. A virtual machine that grows its memory on first
    use can provide more than MemAvailable shows; the reading is on the safe side.

    Args:
        proc: Folder of the kernel's files.
    """
    machine = _machine_id(proc)
    available, total = (meminfo_bytes(name, proc) for name in (_MACHINE, "MemTotal"))
    limits = [HostLimit(f"{machine} memory", _MACHINE, available, total)]
    for folder in _cgroup_folders(proc):
        for maximum, current, cache in _CGROUP_FILES:
            limit, used = _read_number(folder / maximum), _read_number(folder / current)
            if limit is not None and used is not None and limit < _NO_LIMIT_BYTES:
                left = limit - max(0, used - _table(folder / "memory.stat").get(cache, 0))
                # The file's identity: processes may see the same cgroup under different paths.
                scope = f"{machine} cgroup {folder.stat().st_dev}:{folder.stat().st_ino} {maximum}"
                limits.append(HostLimit(scope, str(folder / maximum), max(0, left), limit))
    sizes = _table(proc / "self/status")
    for name, kind, used in (
        ("RLIMIT_AS (ulimit -v)", resource.RLIMIT_AS, "VmSize:"),
        ("RLIMIT_DATA (ulimit -d)", resource.RLIMIT_DATA, "VmData:"),
    ):
        soft_limit, _ = resource.getrlimit(kind)
        if soft_limit != resource.RLIM_INFINITY and used in sizes:
            left = soft_limit - 1024 * sizes[used]
            limits.append(HostLimit(f"{machine} process {os.getpid()} {name}", name, max(0, left), soft_limit))
    return tuple(limits)


def oom_kills(proc: Path = PROC) -> dict[str, int]:
    """Count the processes that the kernel has killed for lack of memory, by cgroup folder (version 2 or 1).

    Only this process's cgroups are counted. The machine's counter includes other cgroups.

    Args:
        proc: Folder of the kernel's files.
    """
    files = [folder / name for folder in _cgroup_folders(proc) for name in ("memory.events", "memory.oom_control")]
    counts = {str(file.parent): _table(file).get("oom_kill") for file in files if file.is_file()}
    return {folder: count for folder, count in counts.items() if count is not None}


def reserve_host_memory(
    parts: Mapping[str, int], limits: Sequence[HostLimit] | None = None
) -> HostShare | HostShortage:
    """Decide whether the ranks of each host can all take what they need, before any of them takes it.

    A collective over the default process group if there is one. All limits are read before any rank returns, so no
    rank's reading lacks what another one takes afterwards. Every rank comes to the same verdict.

    Args:
        parts: Needs of this rank, in bytes by name.
        limits: Limits of this rank; None reads them.
    """
    mine = (tuple(read_host_limits() if limits is None else limits), dict(parts))
    asked = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        asked = [mine] * dist.get_world_size()
        dist.all_gather_object(asked, mine)  # pyright: ignore[reportUnknownMemberType]
    return judge_host_memory(asked, dist.get_rank() if dist.is_initialized() else 0)


def judge_host_memory(
    asked: Sequence[tuple[Sequence[HostLimit], Mapping[str, int]]], rank: int
) -> HostShare | HostShortage:
    """Return the verdict for `rank`, given the limits and the parts of all ranks."""
    tightest: dict[str, HostLimit] = {}
    members: dict[str, list[int]] = {}
    for index, (limits, _) in enumerate(asked):
        for limit in limits:
            members.setdefault(limit.scope, []).append(index)
            if limit.scope not in tightest or limit.left_bytes < tightest[limit.scope].left_bytes:
                tightest[limit.scope] = limit
    needs = [sum(parts.values()) for _, parts in asked]
    needed = {scope: sum(needs[index] for index in indices) for scope, indices in members.items()}
    short = [scope for scope, limit in tightest.items() if needed[scope] > limit.left_bytes]
    if short:
        scope = min(short, key=lambda scope: tightest[scope].left_bytes / needed[scope])
        return HostShortage(tightest[scope], len(members[scope]), needed[scope], asked[members[scope][0]][1])
    spare = [
        (limit.left_bytes - needed[scope]) // len(members[scope])
        for scope, limit in tightest.items()
        if rank in members[scope]
    ]
    return HostShare(needs[rank] + min(spare))


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


def _machine_id(proc: Path) -> str:
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _cgroup_folders(proc: Path) -> Iterator[Path]:
    """Yield the folders of this process's memory cgroups of both versions, each from its own up to the visible root."""
    paths: dict[str, str] = {}  # by version
    for line in _lines(proc / "self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    for line in _lines(proc / "self/mountinfo"):
        mount, _, file_system = line.partition(" - ")
        kind, _, options = file_system.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        root, point = (Path(field) for field in mount.split(" ")[3:5])
        path = Path(paths[kind])
        # In a namespace the mount may begin below the cgroup; only the mounted part is visible then.
        below = path.relative_to(root) if path.is_relative_to(root) else Path()
        yield point / below
        yield from (point / parent for parent in below.parents)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _table(path: Path) -> dict[str, int]:
    """Read the numbers of a file with lines `name number [unit]`."""
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _read_number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None
