"""Buckets as plain lists: what vLLM's message encoding carries to its worker processes."""

from __future__ import annotations

from typing import Any

import torch

from nemo_offload_rl.weight_sync.interfaces import TensorSlice, WeightBucket
from nemo_offload_rl.weight_sync.shared_memory import SharedMemoryHandle


def bucket_to_wire(bucket: WeightBucket) -> list[Any]:
    """Lists, strings and integers only."""
    if not isinstance(bucket.handle, SharedMemoryHandle):
        raise NotImplementedError(f"vLLM workers read shared-memory buckets only, not {bucket.transport}")
    handle = bucket.handle
    slices = [[s.name, list(s.shape), str(s.dtype).removeprefix("torch."), s.offset_bytes] for s in bucket.slices]
    place = [handle.pid, handle.fd, handle.inode, handle.num_bytes]
    return [bucket.index, bucket.transport, place, bucket.num_bytes, slices, int(bucket.is_last)]


def bucket_from_wire(wire: list[Any]) -> WeightBucket:
    """The inverse of `bucket_to_wire`."""
    index, transport, place, num_bytes, slices, is_last = wire
    pieces = tuple(
        TensorSlice(name, tuple(shape), getattr(torch, dtype), offset) for name, shape, dtype, offset in slices
    )
    return WeightBucket(index, transport, SharedMemoryHandle(*place), num_bytes, pieces, bool(is_last))
