"""The host arena: memory for everything that a worker keeps on the host, taken once and divided into blocks.

1. `begin_reserve` takes one region of each kind, of the size that the plan needs, while the model loads.
2. `alloc` hands out 512-byte aligned blocks; without room it takes one more region, within the limit.
3. `free` returns a block to the arena, not to the system, so a steady step takes no memory.
4. `close` returns everything to the system; a block still in use then is a leak and is named.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_offload_rl.residency.host.regions import HostRegion, PageableRegion
from nemo_offload_rl.residency.table.errors import HostBudgetError, ResidencyError
from nemo_offload_rl.residency.table.groups import StorageRecord

ALIGNMENT_BYTES = 512


def aligned(num_bytes: int) -> int:
    """Round `num_bytes` up to the arena's alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(eq=False)
class _Region:
    memory: HostRegion
    pinned: bool  # as requested
    free: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # (offset, size), sorted, never adjacent


@dataclass(frozen=True, eq=False)
class HostBlock:
    """A block of the arena: `buffer` is [num_bytes] uint8, and errors name `owner`."""

    buffer: Tensor
    owner: str
    region: _Region
    offset_bytes: int
    size_bytes: int


class HostArena:
    """Sub-allocator over a few regions of host memory, page-locked and pageable.

    Args:
        new_region: Makes a page-locked region of a given size (`Device.new_region`), or a substitute.
        limit_bytes: Most bytes to take from the system, both kinds together; None for no limit.
    """

    def __init__(
        self, new_region: Callable[[int], HostRegion] = PageableRegion, limit_bytes: int | None = None
    ) -> None:
        self.limit_bytes = limit_bytes
        self._new_region = {True: new_region, False: PageableRegion}
        self._regions: list[_Region] = []
        self._blocks: dict[int, HostBlock] = {}
        self._filling: Future[None] | None = None

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from the system."""
        self.wait()
        return sum(region.memory.buffer.numel() for region in self._regions)

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks that are in use, alignment included."""
        return sum(block.size_bytes for block in self._blocks.values())

    @property
    def pinned(self) -> bool:
        """Tell whether all regions requested as page-locked are page-locked."""
        wanted = [region for region in self._regions if region.pinned]
        return bool(wanted) and all(region.memory.pinned for region in wanted)

    def reserve(self, num_bytes: int, *, pinned: bool = True) -> None:
        """Make sure that `num_bytes` are available in one piece without asking the system again.

        Raises:
            HostBudgetError: The arena would grow over its limit.
        """
        self.wait()
        self._reserve({pinned: num_bytes})

    def begin_reserve(self, num_bytes: Mapping[bool, int]) -> None:
        """Start taking memory in another thread: page-locked bytes under True, pageable bytes under False."""
        self.wait()
        pool = ThreadPoolExecutor(1, thread_name_prefix="arena")
        self._filling = pool.submit(self._reserve, dict(num_bytes))
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Wait for the memory that `begin_reserve` started to take.

        Raises:
            HostBudgetError: The memory did not fit.
        """
        if self._filling is not None:
            filling, self._filling = self._filling, None
            filling.result()

    def alloc(self, num_bytes: int, owner: str, *, pinned: bool = True) -> HostBlock:
        """Take a block of at least `num_bytes` from the first gap that holds it.

        Raises:
            HostBudgetError: The arena would grow over its limit.
        """
        self.wait()
        size = aligned(max(num_bytes, 1))
        found = self._take(size, pinned)
        if found is None:
            self._grow(size, pinned)
            found = self._take(size, pinned)
            assert found is not None
        region, offset = found
        block = HostBlock(region.memory.buffer[offset : offset + num_bytes], owner, region, offset, size)
        self._blocks[id(block)] = block
        return block

    def try_alloc(self, num_bytes: int, owner: str) -> HostBlock | None:
        """Take a block, or return None over the limit; for data that may stay on the device instead."""
        try:
            return self.alloc(num_bytes, owner)
        except HostBudgetError:
            return None

    def free(self, block: HostBlock) -> None:
        """Return a block to the arena.

        Raises:
            ResidencyError: The block is not in use (freed twice, or from another arena).
        """
        if self._blocks.pop(id(block), None) is None:
            raise ResidencyError(f"host block of {block.owner!r} was freed twice or belongs to another arena")
        merged: list[tuple[int, int]] = []
        for offset, size in sorted([*block.region.free, (block.offset_bytes, block.size_bytes)]):
            if merged and sum(merged[-1]) == offset:
                offset, size = merged[-1][0], merged.pop()[1] + size
            merged.append((offset, size))
        block.region.free = merged

    def close(self) -> None:
        """Return all memory to the system.

        Raises:
            ResidencyError: Blocks are still in use; the message names their owners. The memory is returned anyway.
        """
        self.wait()
        leaked = sorted({block.owner for block in self._blocks.values()})
        for region in self._regions:
            region.memory.close()
        self._regions, self._blocks = [], {}
        if leaked:
            raise ResidencyError(f"host blocks still in use at close: {', '.join(leaked)}; free them first")

    def _reserve(self, num_bytes: Mapping[bool, int]) -> None:
        for pinned, wanted in num_bytes.items():
            size = aligned(wanted)
            gaps = (gap for region in self._regions if region.pinned is pinned for _, gap in region.free)
            if size and all(gap < size for gap in gaps):
                self._grow(size, pinned)

    def _take(self, size: int, pinned: bool) -> tuple[_Region, int] | None:
        for region in self._regions:
            for position, (offset, gap) in enumerate(region.free):
                if region.pinned is pinned and gap >= size:
                    rest = [(offset + size, gap - size)] if gap > size else []
                    region.free[position : position + 1] = rest
                    return region, offset
        return None

    def _grow(self, size: int, pinned: bool) -> None:
        total = sum(region.memory.buffer.numel() for region in self._regions) + size
        if self.limit_bytes is not None and total > self.limit_bytes:
            gib = 2**30
            raise HostBudgetError(
                f"host arena: {size / gib:.2f} GiB more would make {total / gib:.2f} GiB, over the budget of "
                f"{self.limit_bytes / gib:.2f} GiB. Offload fewer groups, or give the job more host memory."
            )
        self._regions.append(_Region(self._new_region[pinned](size), pinned, [(0, size)]))


@dataclass
class _Entry:
    storage: StorageWeakRef  # reserves the key without keeping the memory alive
    block: HostBlock
    bytes: Tensor
    version: int  # group version that the bytes hold; -1 before the first copy


class HostMirror:
    """Host copies of storages. Each growth adds one block, laid out in the storages' order.

    Args:
        owner: Name in the arena's errors.
        arena: Provides the blocks.
        pinned: The blocks are page-locked.
    """

    def __init__(self, owner: str, arena: HostArena, *, pinned: bool = True) -> None:
        self._owner = owner
        self._arena = arena
        self._pinned = pinned
        self._entries: dict[int, _Entry] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes mirrored."""
        return sum(entry.bytes.numel() for entry in self._entries.values())

    def cover(self, records: Mapping[int, StorageRecord], sizes_bytes: Mapping[int, int] | None = None) -> None:
        """Make an entry for each record and drop entries of storages that no longer exist.

        Args:
            records: Storages by key.
            sizes_bytes: Sizes by key, for entries whose size is not the storage's.

        Raises:
            HostBudgetError: The arena has no room; no entry was added.
        """
        sizes = {key: record.storage.nbytes() for key, record in records.items()} | dict(sizes_bytes or {})
        # An optimizer may resize its state.
        missing = [
            record
            for key, record in records.items()
            if sizes[key] and (key not in self._entries or self._entries[key].bytes.numel() != sizes[key])
        ]
        gone = [key for key, entry in self._entries.items() if entry.storage.expired()]
        self._forget(gone)
        if not missing:
            return
        self._forget([record.key for record in missing if record.key in self._entries])
        block = self._arena.alloc(
            sum(aligned(sizes[record.key]) for record in missing), self._owner, pinned=self._pinned
        )
        offset = 0
        for record in missing:
            size = sizes[record.key]
            self._entries[record.key] = _Entry(record.weak_ref, block, block.buffer[offset : offset + size], -1)
            offset += aligned(size)

    def bytes_of(self, key: int) -> Tensor:
        """Host copy of a storage, [N] uint8."""
        return self._entries[key].bytes

    def has(self, key: int) -> bool:
        """Tell whether the storage has a host copy with contents."""
        return key in self._entries and self._entries[key].version >= 0

    def is_clean(self, key: int, version: int) -> bool:
        """Tell whether the host copy holds the device contents of `version`."""
        return key in self._entries and self._entries[key].version == version

    def mark_clean(self, keys: Iterable[int], version: int) -> None:
        """Record that the copies of these storages hold the contents of `version`."""
        for key in keys:
            self._entries[key].version = version

    def close(self) -> None:
        """Free every block."""
        self._forget(list(self._entries))

    def _forget(self, keys: Iterable[int]) -> None:
        dropped = [self._entries.pop(key).block for key in keys]
        kept = {id(entry.block) for entry in self._entries.values()}
        for block in {id(block): block for block in dropped}.values():
            if id(block) not in kept:
                self._arena.free(block)
