"""Buckets in GPU memory, for processes that share a GPU.

1. Every policy rank has two buffers on its own GPU, made at the start of a refit and freed after it. All ranks gather
   the same tensors, so each GPU's engine finds every tensor on its own GPU and nothing crosses between GPUs.
2. A rank fills a buffer, waits for its stream, and then returns the bucket. The driver joins the ranks' handles into
   one: buffers by GPU UUID, since the index of a GPU differs between processes.
3. The receiver opens the buffers of its own GPU once in a refit, reads tensors in place, and closes them at the end.

vLLM's own IPC engine (0.25.1, `distributed/weight_transfer/ipc_engine.py`) is not used: it opens and closes a handle
for each bucket, checks neither names nor missing parts, and loads layer by layer with references into the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nemo_offload_rl.protocols.refit import RefitError, TensorSlice, WeightBucket
from nemo_offload_rl.weight_sync.sender import NUM_BUFFERS, BucketSender

if TYPE_CHECKING:
    from nemo_offload_rl.protocols.backend import WeightSpec


@dataclass(frozen=True)
class SharedBuffer:
    """Fields of `UntypedStorage._share_cuda_` in order; torch opens another process's storage with them."""

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
    """Return a GPU's UUID, which is the same in every process, whatever CUDA_VISIBLE_DEVICES says."""
    return str(torch.cuda.get_device_properties(device).uuid)


def join_handles(buckets: Sequence[WeightBucket | None]) -> WeightBucket | None:
    """Return rank 0's bucket; if each rank has its own buffers, add those of all ranks."""
    first = buckets[0]
    if first is None or not isinstance(first.handle, CudaIpcHandle):
        return first
    buffers: dict[str, SharedBuffer] = {}
    for bucket in buckets:
        if bucket is not None and isinstance(bucket.handle, CudaIpcHandle):
            buffers |= bucket.handle.buffers
    return replace(first, handle=CudaIpcHandle(buffers))


class CudaIpcSender(BucketSender):
    """Fills two buffers of `device`, this rank's GPU, in turn."""

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
        return sum(self.buffer_sizes_bytes())

    def start(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Begin a refit; drop an unfinished one and its buffers, which a receiver may still have open."""
        super().start(weights)
        self.release()
        sizes = self.buffer_sizes_bytes()
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes]

    def release(self) -> None:
        """Free the buffers; those that a receiver has open are freed when it closes them."""
        self._shared = {}
        if self._buffers:
            self._buffers = []
            torch.cuda.ipc_collect()

    def close(self) -> None:
        """Free the buffers; the receivers of an unfinished refit must have ended. Safe to call twice."""
        super().close()
        for shared in self._shared.values():
            # torch keeps a shared buffer until its receiver decrements a counter; a killed receiver never does.
            torch.UntypedStorage._release_ipc_counter_cuda(shared.counter, shared.counter_offset)
        self.release()

    def _store(self, index: int, piece: TensorSlice, tensor: Tensor) -> None:
        piece.of(self._buffers[index % NUM_BUFFERS]).copy_(tensor)

    def _handle(self, index: int) -> CudaIpcHandle:
        # A handle's event orders only the opening of the buffer; it is opened once but filled many times.
        torch.cuda.current_stream(self._device).synchronize()
        slot = index % NUM_BUFFERS
        if slot not in self._shared:
            # Shared only now, because a buffer that is shared and never opened stays allocated until this process ends.
            # The first field is the sender's device index, which means nothing elsewhere.
            fields: Any = self._buffers[slot].untyped_storage()._share_cuda_()
            self._shared[slot] = SharedBuffer(*fields[1:])
        return CudaIpcHandle({self._uuid: self._shared[slot]})


class CudaIpcReceiver:
    """Opens the buffers that are on this process's GPU, each once."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._uuid = gpu_uuid(self._device)
        self._opened: dict[SharedBuffer, Tensor] = {}

    def tensors(self, bucket: WeightBucket) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, view into the bucket) in sending order; a view is valid as long as the bucket.

        Raises:
            RefitError: No policy rank sends on this GPU, or the sender has ended.
        """
        assert isinstance(bucket.handle, CudaIpcHandle), f"not a CUDA IPC bucket: {bucket.transport}"
        buffer = self._open(bucket.handle)
        for piece in bucket.slices:
            yield piece.name, piece.of(buffer)

    def close(self) -> None:
        """Unmap every buffer. The sender can free its memory once no view is left."""
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
                storage: Any = torch.UntypedStorage._new_shared_cuda(self._device.index, *astuple(shared))
            except RuntimeError as error:
                raise RefitError(f"The refit buffer of the policy worker cannot be opened: {error}") from error
            self._opened[shared] = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
        return self._opened[shared]
