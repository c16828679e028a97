"""Reports of what each transition moved, what it cost, and what stayed on the device outside of all groups."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nemo_offload_rl.residency.table.groups import StorageRecord, local_tensor, storage_key
from nemo_offload_rl.residency.table.plan import Phase

REPORTED_FROM_BYTES = 16 << 20
# torch takes 20 MiB from the driver for allocations below 10 MiB; such blocks are seldom free as a whole.
KEPT_FROM_BYTES = 64 << 20
_NUM_RECENT = 8


@dataclass(frozen=True)
class Leftover:
    """Device memory that the plan does not account for.

    Attributes:
        owner: A state group and one of its tensors, or a kind of tensor that no group lists.
        num_bytes: Bytes of all its tensors.
    """

    owner: str
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.owner}: {self.num_bytes / 2**20:.0f} MiB"


def find_leftovers(
    records: Mapping[str, Mapping[int, StorageRecord]],
    expected: Collection[str],
    device: torch.device,
    from_bytes: int = REPORTED_FROM_BYTES,
) -> list[Leftover]:
    """Find what is on `device` but in none of the `expected` groups, largest first, from `from_bytes` on.

    Walks all Python objects, which takes tenths of a second; use it if numbers do not add up.
    """
    sizes: dict[str, int] = defaultdict(int)
    known: set[int] = set()
    for group, storages in records.items():
        known.update(storages)
        if group not in expected:
            for record in storages.values():
                sizes[f"group {group}"] += record.storage.nbytes()
    for candidate in gc.get_objects():
        # issubclass of the type: isinstance would run code of lazy proxies that other libraries keep alive.
        # Fake tensors, which torch.compile leaves behind, have the device's name and symbolic sizes, but no memory.
        if not issubclass(type(candidate), Tensor) or issubclass(type(candidate), FakeTensor) or candidate.is_meta:
            continue
        tensor = local_tensor(candidate)
        if tensor.device != device or tensor.layout is not torch.strided:
            continue
        storage = tensor.untyped_storage()
        if storage_key(storage) not in known:
            known.add(storage_key(storage))
            kind = type(candidate).__name__.lower()
            sizes[f"{kind} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"] += storage.nbytes()
    found = [Leftover(owner, size) for owner, size in sizes.items() if size >= from_bytes]
    return sorted(found, key=lambda leftover: -leftover.num_bytes)


def find_kept_blocks(segments: Iterable[Mapping[str, Any]]) -> list[Leftover]:
    """Find cached memory, from `KEPT_FROM_BYTES` on, that cannot go back to the driver since a block is partly in use.

    `segments` are those of one device, as `torch.cuda.memory_snapshot` lists them.
    """
    found: list[Leftover] = []
    for segment in segments:
        kept = [block["size"] for block in segment["blocks"] if block["state"] != "inactive"]
        free_bytes = segment["total_size"] - sum(kept)
        if kept and free_bytes >= KEPT_FROM_BYTES:
            keepers = f"{len(kept)} allocation{'s' if len(kept) > 1 else ''} of {sum(kept) / 2**20:.1f} MiB"
            found.append(Leftover(f"cached block that {keepers} keep{'' if len(kept) > 1 else 's'}", free_bytes))
    return sorted(found, key=lambda leftover: -leftover.num_bytes)


@dataclass
class GroupMove:
    """One group's part of a transition, in bytes."""

    bytes_out: int = 0  # copied to the host
    bytes_in: int = 0  # copied to the device
    bytes_clean: int = 0  # left the device without a copy, since the host copy was up to date
    bytes_freed: int = 0  # device memory released


@dataclass
class TransitionReport:
    """Report of one transition. Seconds of asynchronous copies are filled in when the copies are waited for.

    Attributes:
        source: Phase before; None for the first transition.
        target: Phase entered.
        groups: Bytes by group; groups that did not move are absent.
        exposed_s: Seconds lost to this transition. While groups move, seconds of the host; at other times seconds in
            which the device was idle, because it waited for copies or the host was held up (`Device.held_up`).
        give_back_s: Exposed seconds in which memory was released to the driver or communicators got theirs back.
        transfer_s: Seconds that its copies took on the link, waited for or not.
        peak_bytes: Most device memory that this process held in the phase before; 0 if unknown.
        cache_flushes: Times in the phase before that the allocator gave all of its cache back to find memory.
        without_room: Groups that did not fit with the work of the phase, so that they are waited for later.
        leftovers: Device memory of this process that the plan does not account for, largest first.
    """

    source: Phase | None
    target: Phase
    groups: dict[str, GroupMove] = field(default_factory=dict[str, GroupMove])
    exposed_s: float = 0.0
    give_back_s: float = 0.0
    transfer_s: float = 0.0
    peak_bytes: int = 0
    cache_flushes: int = 0
    without_room: list[str] = field(default_factory=list[str])
    leftovers: list[Leftover] = field(default_factory=list[Leftover])

    @contextmanager
    def held_up(self) -> Generator[None]:
        """Count the body's seconds as exposed once, whatever the body charges itself."""
        start, before_s = time.perf_counter(), self.exposed_s
        try:
            yield
        finally:
            self.exposed_s = before_s + time.perf_counter() - start

    def seconds_since(self, before: TransitionReport) -> TransitionReport:
        """Report of only the seconds that were added since this one was as `before`."""
        return TransitionReport(
            self.source,
            self.target,
            exposed_s=self.exposed_s - before.exposed_s,
            give_back_s=self.give_back_s - before.give_back_s,
            transfer_s=self.transfer_s - before.transfer_s,
        )

    def group(self, name: str) -> GroupMove:
        """Entry of `name`, made at first use."""
        return self.groups.setdefault(name, GroupMove())

    @property
    def bytes_out(self) -> int:
        return sum(move.bytes_out for move in self.groups.values())

    @property
    def bytes_in(self) -> int:
        return sum(move.bytes_in for move in self.groups.values())

    @property
    def bytes_clean(self) -> int:
        return sum(move.bytes_clean for move in self.groups.values())

    @property
    def bytes_freed(self) -> int:
        return sum(move.bytes_freed for move in self.groups.values())

    @property
    def bytes_moved(self) -> int:
        return self.bytes_out + self.bytes_in

    @property
    def hidden_s(self) -> float:
        """Seconds of copying during which the caller did something else."""
        return max(0.0, self.transfer_s - (self.exposed_s - self.give_back_s))

    @property
    def link_gb_per_s(self) -> float:
        """Bytes moved over the seconds that the copies took, in units of 1e9 bytes; 0 if nothing was copied."""
        return self.bytes_moved / self.transfer_s / 1e9 if self.transfer_s > 0 else 0.0

    def line(self) -> str:
        """One line for the log."""
        source = self.source.value if self.source else "start"
        gib = 2**30
        return (
            f"{source} -> {self.target.value}: out {self.bytes_out / gib:.3f} GiB, in {self.bytes_in / gib:.3f} GiB, "
            f"clean {self.bytes_clean / gib:.3f} GiB, freed {self.bytes_freed / gib:.3f} GiB, "
            f"exposed {self.exposed_s:.3f} s, hidden {self.hidden_s:.3f} s, {self.link_gb_per_s:.1f} GB/s"
            + "".join(f"; no room to prefetch {name}" for name in self.without_room)
            + "".join(f"; still on the device: {leftover}" for leftover in self.leftovers)
        )


def totals(reports: list[TransitionReport]) -> dict[str, float]:
    """Sum transitions, under the names that the metrics use; seconds also by the phase that was entered.

    `PHASE/peak_gib` is the most device memory that this process held in a phase that was left, if that is known.
    """
    by_phase: dict[str, float] = {}
    for phase in Phase:
        entered = [report for report in reports if report.target is phase]
        if phase is Phase.TEACHER_INFERENCE and not entered:
            continue  # most runs have no teacher
        by_phase[f"{phase.value}/exposed_s"] = sum(report.exposed_s for report in entered)
        by_phase[f"{phase.value}/hidden_s"] = sum(report.hidden_s for report in entered)
        if peak_bytes := max((report.peak_bytes for report in reports if report.source is phase), default=0):
            by_phase[f"{phase.value}/peak_gib"] = peak_bytes / 2**30
    return by_phase | {
        "bytes_out": float(sum(r.bytes_out for r in reports)),
        "bytes_in": float(sum(r.bytes_in for r in reports)),
        "bytes_clean": float(sum(r.bytes_clean for r in reports)),
        "bytes_freed": float(sum(r.bytes_freed for r in reports)),
        "exposed_s": sum(r.exposed_s for r in reports),
        "give_back_s": sum(r.give_back_s for r in reports),
        "hidden_s": sum(r.hidden_s for r in reports),
        "late_groups": float(sum(len(r.without_room) for r in reports)),
        "cache_flushes": float(sum(r.cache_flushes for r in reports)),
    }


class Ledger:
    """Reports since the last `drain`, oldest first, and the last few for error messages."""

    def __init__(self) -> None:
        self._reports: list[TransitionReport] = []
        self._recent: list[TransitionReport] = []
        self._returned: list[tuple[TransitionReport, TransitionReport]] = []  # each with a copy of how it was then

    def add(self, report: TransitionReport) -> None:
        """Keep a report."""
        self._reports.append(report)
        self._recent = [*self._recent, report][-_NUM_RECENT:]

    def add_if_moved(self, report: TransitionReport) -> None:
        """Keep a report that has groups."""
        if report.groups:
            self.add(report)

    def drain(self) -> list[TransitionReport]:
        """Return the reports gathered since the last call.

        Seconds added to reports since they were returned, by copies that ran on, are in separate reports.
        """
        late = [report.seconds_since(before) for report, before in self._returned]
        reports, self._reports = self._reports, []
        self._returned = [(report, replace(report)) for report in reports]
        return [report for report in late if report.exposed_s or report.transfer_s] + reports

    def recent_lines(self) -> str:
        """The last transitions, one a line."""
        return "\n".join(report.line() for report in self._recent)
