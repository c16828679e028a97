"""The host arena: memory for everything that a worker keeps on the host, taken once and divided.

1. `reserve` takes one region of the size that the plan needs, before the first step.
2. `alloc` hands out 512-byte aligned blocks; without room it takes one more region, within the budget.
3. `free` gives a block back to the arena, not to the system, so a steady step takes no memory.
4. `close` gives everything back; a block still in use then is a leak and is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from nemo_offload_rl.residency.errors import HostBudgetError, ResidencyError
from nemo_offload_rl.residency.host_memory import HostRegion, PageableRegion

ALIGNMENT_BYTES = 512


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to the arena's alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass
class _Region:
    memory: HostRegion
    free: list[tuple[int, int]] = field(default_factory=list)  # (offset, size), sorted, never adjacent


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

    def give_back(self, num_bytes: int) -> None:
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

    def free(self, block: HostBlock) -> None:
        """Give a block back to the arena.

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
        """Give all memory back to the system.

        Raises:
            ResidencyError: Blocks are still in use; it names their owners. The memory is given back all the same.
        """
        leaked = sorted({block.owner for block in self._blocks.values()})
        self._allowance.give_back(self.reserved_bytes)
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
            self._allowance.give_back(size)
            raise
        self._regions.append(_Region(memory, [(0, size)]))
