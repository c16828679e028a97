"""Host memory: its limits, and the budget that the workers of a host share."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

PROC = Path("/proc")
# Cgroup version 1 writes "no limit" as a number near 2**63.
_NO_LIMIT_BYTES = 1 << 60
# (limit, usage, reclaimable page cache in memory.stat) of a cgroup, version 2 first.
_CGROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.high", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


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


def available_bytes() -> int:
    """Memory available to new work, as the kernel estimates it."""
    return _meminfo_bytes(PROC, "MemAvailable")


def memory_total_bytes() -> int:
    """Memory of the machine."""
    return _meminfo_bytes(PROC, "MemTotal")


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
    available, total = (_meminfo_bytes(proc, name) for name in ("MemAvailable", "MemTotal"))
    limits = [HostLimit(f"{machine} memory", "MemAvailable", available, total)]
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


def lockable_bytes() -> int | None:
    """RLIMIT_MEMLOCK of this process; None without a limit."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft_limit == resource.RLIM_INFINITY else soft_limit


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


def _meminfo_bytes(proc: Path, name: str) -> int:
    table = _table(proc / "meminfo")
    if f"{name}:" not in table:
        raise OSError(f"{proc}/meminfo has no line {name}")
    return table[f"{name}:"] * 1024


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
