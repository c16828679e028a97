"""The host arena: memory for everything that a worker keeps on the host, taken once, divided, and filled with copies.

1. `reserve` takes one region of the size that the plan needs, before the first step.
2. `alloc` hands out 512-byte aligned blocks; without room it takes one more region, within the budget.
3. `free` returns a block to the arena, not to the system, so a steady step takes no memory.
4. `close` returns everything to the system; a block still in use then is a leak and is named.
"""

from __future__ import annotations

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
    """`num_bytes` rounded up to the arena's alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass
class _Region:
    memory: HostRegion
    free: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # (offset, size), sorted, never adjacent


@dataclass(frozen=True, eq=False)
class HostBlock:
    """Bytes of the arena: [num_bytes] uint8 `buffer`, whose `owner` is named in errors."""

    buffer: Tensor
    owner: str
    region_index: int
    offset_bytes: int
    size_bytes: int


class HostAllowance:
    """What the arenas of a worker may take from the system together.

    Args:
        num_bytes: The bound; None for none. It may be set later, before the first region is taken.
    """

    def __init__(self, num_bytes: int | None = None) -> None:
        self.num_bytes = num_bytes
        self.taken_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count a region that is about to be made.

        Raises:
            HostBudgetError: It would go over the bound; it is not counted.
        """
        total = self.taken_bytes + num_bytes
        if self.num_bytes is not None and total > self.num_bytes:
            gib = 2**30
            raise HostBudgetError(
                f"host arena: {num_bytes / gib:.2f} GiB more would make {total / gib:.2f} GiB, over the budget of "
                f"{self.num_bytes / gib:.2f} GiB. Offload fewer groups, or give the job more host memory."
            )
        self.taken_bytes = total

    def release(self, num_bytes: int) -> None:
        """Count a region no longer."""
        self.taken_bytes -= num_bytes


class HostArena:
    """Sub-allocator over a few regions of host memory.

    Args:
        allowance: What it may take from the system, beside other arenas; None for no bound.
        new_region: Makes a region of the given size; pageable memory unless a device brings its own.
    """

    def __init__(
        self, allowance: HostAllowance | None = None, new_region: Callable[[int], HostRegion] = PageableRegion
    ) -> None:
        self._allowance = allowance or HostAllowance()
        self._new_region = new_region
        self._regions: list[_Region] = []
        self._blocks: dict[int, HostBlock] = {}

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from the system."""
        return sum(region.memory.buffer.numel() for region in self._regions)

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks that are in use, alignment included."""
        return sum(block.size_bytes for block in self._blocks.values())

    @property
    def num_blocks(self) -> int:
        """Blocks in use."""
        return len(self._blocks)

    @property
    def pinned(self) -> bool:
        """Whether every region is page-locked."""
        return bool(self._regions) and all(region.memory.pinned for region in self._regions)

    def reserve(self, num_bytes: int) -> None:
        """Make sure that `num_bytes` can be had in one piece without asking the system again.

        Raises:
            HostBudgetError: The arena would grow over its budget.
        """
        wanted = aligned(num_bytes)
        if wanted and all(size < wanted for region in self._regions for _, size in region.free):
            self._grow(wanted)

    def alloc(self, num_bytes: int, owner: str) -> HostBlock:
        """A block of at least `num_bytes`, from the first gap that holds it.

        Raises:
            HostBudgetError: The arena would grow over its budget.
        """
        size = aligned(max(num_bytes, 1))
        found = self._take(size)
        if found is None:
            self._grow(size)
            found = self._take(size)
            assert found is not None
        index, offset = found
        buffer = self._regions[index].memory.buffer[offset : offset + num_bytes]
        block = HostBlock(buffer, owner, index, offset, size)
        self._blocks[id(block)] = block
        return block

    def try_alloc(self, num_bytes: int, owner: str) -> HostBlock | None:
        """`alloc`, or None where that would go over the budget: for what may stay on the device instead."""
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
        gaps = self._regions[block.region_index].free
        gaps.append((block.offset_bytes, block.size_bytes))
        gaps.sort()
        merged: list[tuple[int, int]] = []
        for offset, size in gaps:
            if merged and merged[-1][0] + merged[-1][1] == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._regions[block.region_index].free = merged

    def close(self) -> None:
        """Return all memory to the system.

        Raises:
            ResidencyError: Blocks are still in use; the message names their owners. The memory is returned anyway.
        """
        leaked = sorted({block.owner for block in self._blocks.values()})
        self._allowance.release(self.reserved_bytes)
        for region in self._regions:
            region.memory.close()
        self._regions, self._blocks = [], {}
        if leaked:
            raise ResidencyError(f"host blocks still in use at close: {', '.join(leaked)}; free them first")

    def _take(self, size: int) -> tuple[int, int] | None:
        for index, region in enumerate(self._regions):
            for position, (offset, gap) in enumerate(region.free):
                if gap >= size:
                    rest = [(offset + size, gap - size)] if gap > size else []
                    region.free[position : position + 1] = rest
                    return index, offset
        return None

    def _grow(self, size: int) -> None:
        self._allowance.take(size)
        try:
            memory = self._new_region(size)
        except BaseException:
            self._allowance.release(size)
            raise
        self._regions.append(_Region(memory, [(0, size)]))


class HostArenas:
    """The arenas of one worker, page-locked and pageable, each made at its first use; filled while other things load.

    Args:
        new_arena: Makes an arena, page-locked or not, that takes no more than the allowance (`Device.new_arena`).
    """

    def __init__(self, new_arena: Callable[[bool, HostAllowance], HostArena]) -> None:
        self._new_arena = new_arena
        self._allowance = HostAllowance()
        self._arenas: dict[bool, HostArena] = {}
        self._filling: Future[None] | None = None

    def limit(self, num_bytes: int) -> None:
        """Take no more than this from the system, of both kinds together; what is planned must fit."""
        self._allowance.num_bytes = num_bytes

    def arena(self, pinned: bool) -> HostArena:
        """The page-locked arena, or the pageable one; waits for what `begin_reserve` has started."""
        self.wait()
        return self._arena(pinned)

    def reserve(self, num_bytes: Mapping[bool, int]) -> None:
        """Take this much host memory now (page-locked under True), if it is not there yet.

        Raises:
            HostBudgetError: It does not fit; the message says by how much.
        """
        self.wait()
        self._reserve(num_bytes)

    def begin_reserve(self, num_bytes: Mapping[bool, int]) -> None:
        """Start to take this much in another thread: pinning runs at memory speed and needs no Python."""
        self.wait()
        pool = ThreadPoolExecutor(1, thread_name_prefix="arena")
        self._filling = pool.submit(self._reserve, dict(num_bytes))
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until what was started is there.

        Raises:
            HostBudgetError: It did not fit.
        """
        if self._filling is not None:
            filling, self._filling = self._filling, None
            filling.result()

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from the system, of both kinds."""
        self.wait()
        return sum(arena.reserved_bytes for arena in self._arenas.values())

    def close(self) -> None:
        """Return all memory to the system.

        Raises:
            ResidencyError: Blocks are still in use.
        """
        self.wait()
        for arena in self._arenas.values():
            arena.close()

    def _arena(self, pinned: bool) -> HostArena:
        if pinned not in self._arenas:
            self._arenas[pinned] = self._new_arena(pinned, self._allowance)
        return self._arenas[pinned]

    def _reserve(self, num_bytes: Mapping[bool, int]) -> None:
        for pinned, size in num_bytes.items():
            self._arena(pinned).reserve(size)


@dataclass
class _Entry:
    storage: StorageWeakRef  # keeps the key from being used again, not the memory alive
    block: HostBlock
    bytes: Tensor
    version: int  # of the group, that the bytes are of; -1 before the first copy


class HostMirror:
    """Host copies, one for each storage, laid out in the storages' order in as few blocks as there were growths.

    Args:
        owner: Named in the arena's errors.
        arena: Where the blocks come from.
    """

    def __init__(self, owner: str, arena: HostArena) -> None:
        self._owner = owner
        self._arena = arena
        self._entries: dict[int, _Entry] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes mirrored."""
        return sum(entry.bytes.numel() for entry in self._entries.values())

    def cover(self, records: Mapping[int, StorageRecord], sizes_bytes: Mapping[int, int] | None = None) -> None:
        """Have an entry for each record, and none for storages that no longer exist.

        Args:
            records: Storages by key.
            sizes_bytes: By key, of those that get an entry of another size than their own.

        Raises:
            HostBudgetError: The arena has no room; nothing has changed then.
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
        block = self._arena.alloc(sum(aligned(sizes[record.key]) for record in missing), self._owner)
        offset = 0
        for record in missing:
            size = sizes[record.key]
            self._entries[record.key] = _Entry(record.weak_ref, block, block.buffer[offset : offset + size], -1)
            offset += aligned(size)

    def bytes_of(self, key: int) -> Tensor:
        """[N] uint8 host bytes of a storage."""
        return self._entries[key].bytes

    def has(self, key: int) -> bool:
        """Whether the storage has a host copy with contents."""
        return key in self._entries and self._entries[key].version >= 0

    def is_clean(self, key: int, version: int) -> bool:
        """Whether the host copy holds what the device held at `version`."""
        return key in self._entries and self._entries[key].version == version

    def mark_clean(self, keys: Iterable[int], version: int) -> None:
        """The copies of these storages now hold the contents of `version`."""
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
