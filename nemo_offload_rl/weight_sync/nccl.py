"""Buckets over NCCL, for engines on GPUs of their own.

1. Rank 0 of the policy (the root) and every engine worker form one communicator, once.
2. Rank 0 fills one of two buffers and starts its broadcast, which waits on the GPU for the engines.
3. Each engine worker receives into a buffer of its own and loads from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_offload_rl.protocols.refit import RefitGroupAddress, TensorSlice, WeightBucket
from nemo_offload_rl.weight_sync.sender import NUM_BUFFERS, BucketSender

if TYPE_CHECKING:
    from nemo_offload_rl.protocols.backend import WeightSpec

ROOT = 0
_JOIN_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class NcclHandle:
    """Empty handle: every rank of the group receives."""


class NcclGroup:
    """Communicator for refits only. All ranks make it at once and wait for each other.

    Args:
        address: Address at which rank 0 listens, and the number of ranks.
        rank: 0 for the policy's rank 0, then the engines' workers.
        device: This process's GPU.
    """

    def __init__(self, address: RefitGroupAddress, rank: int, device: torch.device) -> None:
        self.device = device
        torch.cuda.set_device(device)
        store_type: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
        self._store = store_type(address.host, address.port, address.world_size, rank == ROOT, _JOIN_TIMEOUT)
        group: Any = dist.ProcessGroupNCCL  # pyright: ignore[reportAttributeAccessIssue]
        self._group = group(self._store, rank, address.world_size)
        # NCCL connects at the first operation; later ones do not wait for the other ranks to start.
        self.broadcast(torch.zeros(1, dtype=torch.uint8, device=device)).wait()
        torch.cuda.synchronize(device)

    def broadcast(self, tensor: Tensor) -> Any:
        """Start a broadcast from the root; `wait()` of the result makes the current stream wait for it."""
        options = dist.BroadcastOptions()  # pyright: ignore[reportAttributeAccessIssue]
        options.rootRank = ROOT
        return self._group.broadcast([tensor], options)

    def close(self) -> None:
        """End the communicator without waiting for the other ranks."""
        self._group.abort()


class NcclSender(BucketSender):
    """Fills two buffers in turn and broadcasts them over `group` as its root."""

    transport = "nccl"

    def __init__(self, specs: Sequence[WeightSpec], buffer_bytes: int, group: NcclGroup) -> None:
        super().__init__(specs, buffer_bytes)
        self._group = group
        self._buffers: list[Tensor] = []
        self._works: list[Any] = [None] * NUM_BUFFERS

    def start(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Begin a refit."""
        super().start(weights)
        if not self._buffers:
            sizes = self.buffer_sizes_bytes()
            self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._group.device) for size in sizes]

    def release(self) -> None:
        """Free the buffers once their broadcasts have ended."""
        for slot in range(NUM_BUFFERS):
            self._wait(slot)
        self._buffers = []

    def close(self) -> None:
        """Free the buffers; safe to call twice."""
        super().close()
        self._works = [None] * NUM_BUFFERS
        self._buffers = []

    def _wait(self, slot: int) -> None:
        if self._works[slot] is not None:
            self._works[slot].wait()
            self._works[slot] = None

    def _store(self, index: int, piece: TensorSlice, tensor: Tensor) -> None:
        slot = index % NUM_BUFFERS
        self._wait(slot)
        piece.of(self._buffers[slot]).copy_(tensor)

    def _handle(self, index: int) -> NcclHandle:
        slot = index % NUM_BUFFERS
        self._works[slot] = self._group.broadcast(self._buffers[slot][: self.plan[index].num_bytes])
        return NcclHandle()


class NcclReceiver:
    """Receives buckets over `group` into one buffer, which grows to the largest bucket."""

    def __init__(self, group: NcclGroup) -> None:
        self._group = group
        self._buffer = torch.empty(0, dtype=torch.uint8, device=group.device)

    def tensors(self, bucket: WeightBucket) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, view into the buffer) in sending order; a view is valid until the next bucket."""
        if self._buffer.numel() < bucket.num_bytes:
            self._buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._group.device)
        self._group.broadcast(self._buffer[: bucket.num_bytes]).wait()
        for piece in bucket.slices:
            yield piece.name, piece.of(self._buffer)

    def close(self) -> None:
        """Free the buffer."""
        self._buffer = self._buffer.new_empty(0)
