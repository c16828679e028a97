"""Refit buckets as plain lists, which vLLM can send to its workers."""

from dataclasses import astuple
from typing import Any

import torch

from nemo_offload_rl.protocols.refit import TensorSlice, WeightBucket
from nemo_offload_rl.weight_sync.cuda_ipc import CudaIpcHandle, CudaIpcSender, SharedBuffer
from nemo_offload_rl.weight_sync.nccl import NcclHandle, NcclSender
from nemo_offload_rl.weight_sync.shared_memory import SharedMemoryHandle


def bucket_to_wire(bucket: WeightBucket) -> list[Any]:
    """Encode a bucket as lists, strings, bytes and integers."""
    handle = bucket.handle
    if isinstance(handle, CudaIpcHandle):
        place: list[Any] = [[uuid, *astuple(buffer)] for uuid, buffer in handle.buffers.items()]
    elif isinstance(handle, (SharedMemoryHandle, NcclHandle)):
        place = list(astuple(handle))
    else:
        raise NotImplementedError(f"vLLM workers cannot read buckets of {bucket.transport}")
    slices = [[s.name, list(s.shape), str(s.dtype).removeprefix("torch."), s.offset_bytes] for s in bucket.slices]
    return [bucket.index, bucket.transport, place, bucket.num_bytes, slices, int(bucket.is_last)]


def bucket_from_wire(wire: list[Any]) -> WeightBucket:
    """Decode a bucket that `bucket_to_wire` encoded."""
    index, transport, place, num_bytes, slices, is_last = wire
    pieces = tuple(
        TensorSlice(name, tuple(shape), getattr(torch, dtype), offset) for name, shape, dtype, offset in slices
    )
    if transport == CudaIpcSender.transport:
        handle: object = CudaIpcHandle({uuid: SharedBuffer(*fields) for uuid, *fields in place})
    else:
        handle = (NcclHandle if transport == NcclSender.transport else SharedMemoryHandle)(*place)
    return WeightBucket(index, transport, handle, num_bytes, pieces, bool(is_last))
