"""Host copies of one group's storages, and which of them still hold what the device holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_offload_rl.residency.arena import HostArena, HostBlock, aligned
from nemo_offload_rl.residency.storage import StorageRecord


@dataclass
class _Entry:
    storage: StorageWeakRef  # keeps the key from being used again, not the memory alive
    block: HostBlock
    bytes: Tensor
    generation: int  # the group's generation that the bytes are of, -1 before the first copy


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

    def cover(self, records: Mapping[int, StorageRecord]) -> None:
        """Have an entry for each record, and none for storages that no longer exist.

        Raises:
            HostBudgetError: The arena has no room; nothing has changed then.
        """
        missing = [r for r in records.values() if r.storage.nbytes() and key_is_new(self._entries, r)]
        gone = [key for key, entry in self._entries.items() if entry.storage.expired()]
        self._forget(gone)
        if not missing:
            return
        self._forget([record.key for record in missing if record.key in self._entries])
        block = self._arena.alloc(sum(aligned(record.storage.nbytes()) for record in missing), self._owner)
        offset = 0
        for record in missing:
            size = record.storage.nbytes()
            self._entries[record.key] = _Entry(record.weak_ref, block, block.buffer[offset : offset + size], -1)
            offset += aligned(size)

    def bytes_of(self, key: int) -> Tensor:
        """[N] uint8 host bytes of a storage."""
        return self._entries[key].bytes

    def has(self, key: int) -> bool:
        """Whether the storage has a host copy with contents."""
        return key in self._entries and self._entries[key].generation >= 0

    def is_clean(self, key: int, generation: int) -> bool:
        """Whether the host copy holds what the device held at `generation`."""
        return key in self._entries and self._entries[key].generation == generation

    def mark_clean(self, keys: Iterable[int], generation: int) -> None:
        """The copies of these storages now hold the contents of `generation`."""
        for key in keys:
            self._entries[key].generation = generation

    def close(self) -> None:
        """Free every block."""
        self._forget(list(self._entries))

    def _forget(self, keys: Iterable[int]) -> None:
        dropped = [self._entries.pop(key).block for key in keys]
        kept = {id(entry.block) for entry in self._entries.values()}
        for block in {id(block): block for block in dropped}.values():
            if id(block) not in kept:
                self._arena.free(block)


def key_is_new(entries: Mapping[int, _Entry], record: StorageRecord) -> bool:
    """Whether a storage with contents has no entry of its size yet (an optimizer may resize its state)."""
    entry = entries.get(record.key)
    return entry is None or entry.bytes.numel() != record.storage.nbytes()
