"""Buckets in anonymous shared memory, for processes of one host.

1. The sender makes two memory files (`memfd_create`), once, as large as the largest bucket that each will hold.
2. A bucket's handle names the sender's process, the file descriptor and the file's inode.
3. The receiver opens `/proc/<pid>/fd/<fd>`, checks the inode, maps the file and reads tensors in place.
4. The memory has no name in any file system: it is gone when the last of the two processes has closed it or died.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_offload_rl.protocols.refit import TensorSlice, WeightBucket
from nemo_offload_rl.weight_sync.errors import RefitError
from nemo_offload_rl.weight_sync.sender import NUM_BUFFERS, BucketSender

if TYPE_CHECKING:
    from nemo_offload_rl.protocols.backend import WeightSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedMemoryHandle:
    """Where a buffer is: descriptor `fd` of process `pid`, and the inode that proves it is still the same file."""

    pid: int
    fd: int
    inode: int
    num_bytes: int


class _SharedBuffer:
    def __init__(self, num_bytes: int) -> None:
        # mmap refuses an empty file; a bucket of empty tensors still needs a buffer.
        num_bytes = max(num_bytes, 1)
        self._fd = os.memfd_create("nemo_offload_rl_refit", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, num_bytes)
        self._map: mmap.mmap | None = mmap.mmap(self._fd, num_bytes)
        self.handle = SharedMemoryHandle(os.getpid(), self._fd, os.fstat(self._fd).st_ino, num_bytes)

    def view(self, piece: TensorSlice) -> Tensor:
        assert self._map is not None, "the buffer is closed"
        return _tensor_view(self._map, piece)

    def close(self) -> None:
        # Dropped, not closed: mmap.close() raises while a tensor view is alive.
        self._map = None
        os.close(self._fd)


class SharedMemorySender(BucketSender):
    """Fills two shared buffers in turn.

    Args:
        specs: What every refit sends, in order.
        buffer_bytes: Limit of a bucket; the two buffers together hold at most twice this, unless one tensor is larger.
    """

    transport = "shared_memory"

    def __init__(self, specs: Sequence[WeightSpec], buffer_bytes: int) -> None:
        super().__init__(specs, buffer_bytes)
        per_buffer = [self.plan[slot::NUM_BUFFERS] for slot in range(NUM_BUFFERS)]
        sizes = [max((plan.num_bytes for plan in plans), default=0) for plans in per_buffer]
        if max(sizes) > buffer_bytes:
            logger.warning("The largest tensor has %d bytes, more than the refit buffer's %d", max(sizes), buffer_bytes)
        self._buffers = [_SharedBuffer(size) for size in sizes]

    def close(self) -> None:
        """Free both buffers; a process that has mapped one keeps its bytes until it lets go."""
        super().close()
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []

    def _store(self, index: int, piece: TensorSlice, tensor: Tensor) -> None:
        self._buffers[index % NUM_BUFFERS].view(piece).copy_(tensor)

    def _handle(self, index: int) -> SharedMemoryHandle:
        return self._buffers[index % NUM_BUFFERS].handle


class SharedMemoryReceiver:
    """Maps buckets of another process (or of this one); each buffer is mapped once."""

    def __init__(self) -> None:
        self._maps: dict[SharedMemoryHandle, mmap.mmap] = {}

    def tensors(self, bucket: WeightBucket) -> Iterator[tuple[str, Tensor]]:
        """(name, view into the bucket) in sending order; a view's contents last as long as the bucket's.

        Raises:
            RefitError: The sender or its buffer is gone.
        """
        assert isinstance(bucket.handle, SharedMemoryHandle), f"not a shared-memory bucket: {bucket.transport}"
        mapped = self._mapped(bucket.handle)
        for piece in bucket.slices:
            yield piece.name, _tensor_view(mapped, piece)

    def close(self) -> None:
        """Let go of every buffer; views that were kept keep their own mapping alive."""
        self._maps.clear()

    def _mapped(self, handle: SharedMemoryHandle) -> mmap.mmap:
        if handle not in self._maps:
            path = f"/proc/{handle.pid}/fd/{handle.fd}"
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise RefitError(
                    f"The refit buffer of process {handle.pid} cannot be opened ({error.strerror}: {path}); "
                    "the policy worker died, or runs on another host or in another PID namespace"
                ) from error
            try:
                if os.fstat(fd).st_ino != handle.inode:
                    raise RefitError(f"The refit buffer of process {handle.pid} was closed before it was read")
                self._maps[handle] = mmap.mmap(fd, handle.num_bytes)
            finally:
                os.close(fd)
        return self._maps[handle]


def _tensor_view(mapped: mmap.mmap, piece: TensorSlice) -> Tensor:
    numel = 1
    for size in piece.shape:
        numel *= size
    if numel == 0:
        return torch.empty(piece.shape, dtype=piece.dtype)
    flat = torch.frombuffer(mapped, dtype=piece.dtype, count=numel, offset=piece.offset_bytes)
    return flat.view(piece.shape)
