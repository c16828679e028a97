"""Buckets as plain lists: what vLLM's message encoding carries to its worker processes."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch

from nemo_offload_rl.protocols.refit import TensorSlice, WeightBucket
from nemo_offload_rl.weight_sync.cuda_ipc import CudaIpcHandle, CudaIpcSender, SharedBuffer
from nemo_offload_rl.weight_sync.nccl import NcclHandle, NcclSender
from nemo_offload_rl.weight_sync.shared_memory import SharedMemoryHandle


def bucket_to_wire(bucket: WeightBucket) -> list[Any]:
    """Lists, strings, bytes and integers only."""
    handle = bucket.handle
    if isinstance(handle, SharedMemoryHandle):
        place: list[Any] = [handle.pid, handle.fd, handle.inode, handle.num_bytes]
    elif isinstance(handle, CudaIpcHandle):
        place = [[uuid, *astuple(buffer)] for uuid, buffer in handle.buffers.items()]
    elif isinstance(handle, NcclHandle):
        place = []
    else:
        raise NotImplementedError(f"vLLM workers cannot read buckets of {bucket.transport}")
    slices = [[s.name, list(s.shape), str(s.dtype).removeprefix("torch."), s.offset_bytes] for s in bucket.slices]
    return [bucket.index, bucket.transport, place, bucket.num_bytes, slices, int(bucket.is_last)]


def bucket_from_wire(wire: list[Any]) -> WeightBucket:
    """The inverse of `bucket_to_wire`."""
    index, transport, place, num_bytes, slices, is_last = wire
    pieces = tuple(
        TensorSlice(name, tuple(shape), getattr(torch, dtype), offset) for name, shape, dtype, offset in slices
    )
    if transport == CudaIpcSender.transport:
        handle: object = CudaIpcHandle({uuid: SharedBuffer(*fields) for uuid, *fields in place})
    elif transport == NcclSender.transport:
        handle = NcclHandle()
    else:
        handle = SharedMemoryHandle(*place)
    return WeightBucket(index, transport, handle, num_bytes, pieces, bool(is_last))
