"""Memory that is still on the device after groups left it, by owner."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from nemo_offload_rl.residency.table.groups import StorageRecord, local_tensor, storage_key

REPORTED_FROM_BYTES = 16 << 20
# torch takes 20 MiB from the driver for allocations below 10 MiB; such blocks are seldom free as a whole.
KEPT_FROM_BYTES = 64 << 20


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
    """Find what is on `device` but in no group that may be there, largest first, from `from_bytes` on.

    Walks all Python objects, which takes tenths of a second; use it if numbers do not add up.

    Args:
        records: Storages by group.
        expected: Groups that may be on the device now.
        device: Device to search.
        from_bytes: Smaller sums are left out.
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


def find_kept_blocks(segments: Iterable[Mapping[str, Any]], from_bytes: int = KEPT_FROM_BYTES) -> list[Leftover]:
    """Find cached memory that cannot go back to the driver, because something small lives in the same block.

    Args:
        segments: Segments of one device, as `torch.cuda.memory_snapshot` lists them.
        from_bytes: Blocks with less free memory are left out.
    """
    found: list[Leftover] = []
    for segment in segments:
        kept = [block["size"] for block in segment["blocks"] if block["state"] != "inactive"]
        free_bytes = segment["total_size"] - sum(kept)
        if kept and free_bytes >= from_bytes:
            keepers = f"{len(kept)} allocation{'s' if len(kept) > 1 else ''} of {sum(kept) / 2**20:.1f} MiB"
            found.append(Leftover(f"cached block that {keepers} keep{'' if len(kept) > 1 else 's'}", free_bytes))
    return sorted(found, key=lambda leftover: -leftover.num_bytes)
