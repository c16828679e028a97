"""Buckets in GPU memory, for processes that share a GPU.

1. Every policy rank has two buffers on its own GPU, made at the first bucket of a refit and freed after it. All ranks
   gather the same tensors, so each GPU's engine finds every tensor on its own GPU and nothing crosses between GPUs.
2. A rank fills a buffer, waits for its stream, and only then tells of the bucket. The driver joins the ranks' handles
   into one: buffers by GPU UUID, since a GPU's index differs from process to process.
3. The receiver opens the buffer of its own GPU once in a refit, reads tensors in place, and closes it at the end.

vLLM's own IPC engine (0.25.1, `distributed/weight_transfer/ipc_engine.py`) is not used: it opens and closes a handle
for each bucket, checks neither names nor missing parts, and loads layer by layer with references into the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_offload_rl.protocols.refit import TensorSlice, WeightBucket
from nemo_offload_rl.weight_sync.errors import RefitError
from nemo_offload_rl.weight_sync.sender import NUM_BUFFERS, BucketSender

if TYPE_CHECKING:
    from nemo_offload_rl.protocols.backend import WeightSpec


@dataclass(frozen=True)
class SharedBuffer:
    """What torch needs to open a storage of another process: the fields of `UntypedStorage._share_cuda_`, in order."""

    memory: bytes
    num_bytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    needs_event: bool


@dataclass(frozen=True)
class CudaIpcHandle:
    """One bucket's buffer on each GPU, by the GPU's UUID."""

    buffers: Mapping[str, SharedBuffer]


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a GPU: the same in every process, whatever CUDA_VISIBLE_DEVICES says."""
    return str(torch.cuda.get_device_properties(device).uuid)


def join_handles(buckets: Sequence[WeightBucket | None]) -> WeightBucket | None:
    """Rank 0's bucket, with the buffers of all ranks where each has its own."""
    first = buckets[0]
    if first is None or not isinstance(first.handle, CudaIpcHandle):
        return first
    buffers: dict[str, SharedBuffer] = {}
    for bucket in buckets:
        if bucket is not None and isinstance(bucket.handle, CudaIpcHandle):
            buffers |= bucket.handle.buffers
    return replace(first, handle=CudaIpcHandle(buffers))


class CudaIpcSender(BucketSender):
    """Fills two buffers of one GPU in turn.

    Args:
        specs: What every refit sends, in order.
        buffer_bytes: Limit of a bucket; the two buffers together hold at most twice this, unless one tensor is larger.
        device: This rank's GPU.
    """

    transport = "cuda_ipc"

    def __init__(self, specs: Sequence[WeightSpec], buffer_bytes: int, device: torch.device) -> None:
        super().__init__(specs, buffer_bytes)
        self._device = device
        self._uuid = gpu_uuid(device)
        self._buffers: list[Tensor] = []
        self._shared: dict[int, SharedBuffer] = {}

    @property
    def device_bytes(self) -> int:
        """Device memory of the buffers while a refit runs."""
        return sum(self._sizes())

    def start(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Begin a refit; an unfinished one is dropped, with its buffers, which a receiver may still have open."""
        super().start(weights)
        self.release()
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in self._sizes()]

    def release(self) -> None:
        """Free the buffers. What a receiver has still open is freed when it closes it."""
        self._shared = {}
        if self._buffers:
            self._buffers = []
            torch.cuda.ipc_collect()

    def close(self) -> None:
        """Free the buffers, also those of an unfinished refit, whose receivers must be gone; safe to call twice."""
        super().close()
        for shared in self._shared.values():
            # torch keeps what was shared until its receiver counts down, which one that was killed never does.
            torch.UntypedStorage._release_ipc_counter_cuda(shared.counter, shared.counter_offset)
        self.release()

    def _sizes(self) -> list[int]:
        plans = [self.plan[slot::NUM_BUFFERS] for slot in range(NUM_BUFFERS)]
        return [max(plan.num_bytes for plan in of_slot) or 1 for of_slot in plans if of_slot]

    def _store(self, index: int, piece: TensorSlice, tensor: Tensor) -> None:
        tensor_view(self._buffers[index % NUM_BUFFERS], piece).copy_(tensor)

    def _handle(self, index: int) -> CudaIpcHandle:
        # The event inside a handle orders its opening only, and a buffer is opened once but filled many times.
        torch.cuda.current_stream(self._device).synchronize()
        slot = index % NUM_BUFFERS
        if slot not in self._shared:
            # Not before it is sent: what is shared and never opened stays allocated until this process ends.
            self._shared[slot] = _share(self._buffers[slot])
        return CudaIpcHandle({self._uuid: self._shared[slot]})


class CudaIpcReceiver:
    """Opens the buffers that lie on this process's GPU; each buffer once."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._uuid = gpu_uuid(self._device)
        self._opened: dict[SharedBuffer, Tensor] = {}

    def tensors(self, bucket: WeightBucket) -> Iterator[tuple[str, Tensor]]:
        """(name, view into the bucket) in sending order; a view's contents last as long as the bucket's.

        Raises:
            RefitError: No policy rank sends on this GPU, or the sender is gone.
        """
        assert isinstance(bucket.handle, CudaIpcHandle), f"not a CUDA IPC bucket: {bucket.transport}"
        buffer = self._open(bucket.handle)
        for piece in bucket.slices:
            yield piece.name, tensor_view(buffer, piece)

    def close(self) -> None:
        """Unmap every buffer; the sender's memory is its own again once the views are gone."""
        if self._opened:
            torch.cuda.synchronize(self._device)
            self._opened.clear()

    def _open(self, handle: CudaIpcHandle) -> Tensor:
        if self._uuid not in handle.buffers:
            raise RefitError(
                f"No policy worker sends weights on this engine's GPU {self._uuid}, only on "
                f"{', '.join(sorted(handle.buffers))}; engine and policy must share their GPUs"
            )
        shared = handle.buffers[self._uuid]
        if shared not in self._opened:
            try:
                self._opened[shared] = _open(shared, self._device)
            except RuntimeError as error:
                raise RefitError(f"The refit buffer of the policy worker cannot be opened: {error}") from error
        return self._opened[shared]


def tensor_view(buffer: Tensor, piece: TensorSlice) -> Tensor:
    """The tensor that lies at `piece.offset_bytes` of a flat uint8 buffer."""
    num_bytes = piece.dtype.itemsize
    for size in piece.shape:
        num_bytes *= size
    return buffer[piece.offset_bytes : piece.offset_bytes + num_bytes].view(piece.dtype).view(piece.shape)


def _share(buffer: Tensor) -> SharedBuffer:
    fields: Any = buffer.untyped_storage()._share_cuda_()
    return SharedBuffer(*fields[1:])  # the first is the sender's device index, which means nothing elsewhere


def _open(shared: SharedBuffer, device: torch.device) -> Tensor:
    storage: Any = torch.UntypedStorage._new_shared_cuda(
        device.index,
        shared.memory,
        shared.num_bytes,
        shared.offset_bytes,
        shared.counter,
        shared.counter_offset,
        shared.event,
        shared.needs_event,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
