"""Buckets in anonymous shared memory, for processes of one host.

1. The sender makes two memory files (`memfd_create`) once, each as large as its largest bucket.
2. A bucket's handle names the sender's process, the file descriptor and the file's inode.
3. The receiver opens `/proc/<pid>/fd/<fd>`, checks the inode, maps the file and reads tensors in place.
4. The files have no name. Their memory is freed once both processes have closed them or ended.
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

from nemo_offload_rl.protocols.refit import RefitError, TensorSlice, WeightBucket
from nemo_offload_rl.weight_sync.sender import NUM_BUFFERS, BucketSender

if TYPE_CHECKING:
    from nemo_offload_rl.protocols.backend import WeightSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedMemoryHandle:
    """Descriptor `fd` of process `pid`; the inode shows the receiver that it is still the same file."""

    pid: int
    fd: int
    inode: int
    num_bytes: int


class _SharedBuffer:
    def __init__(self, num_bytes: int) -> None:
        self._fd = os.memfd_create("nemo_offload_rl_refit", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, num_bytes)
        self.bytes = _mapped(self._fd, num_bytes)
        self.handle = SharedMemoryHandle(os.getpid(), self._fd, os.fstat(self._fd).st_ino, num_bytes)

    def close(self) -> None:
        os.close(self._fd)


class SharedMemorySender(BucketSender):
    """Fills two shared buffers in turn."""

    transport = "shared_memory"

    def __init__(self, specs: Sequence[WeightSpec], buffer_bytes: int) -> None:
        super().__init__(specs, buffer_bytes)
        sizes = self.buffer_sizes_bytes()
        if (largest_bytes := max(sizes, default=0)) > buffer_bytes:
            logger.warning(
                "The largest tensor has %d bytes, more than the refit buffer's %d", largest_bytes, buffer_bytes
            )
        self._buffers = [_SharedBuffer(size) for size in sizes]

    def close(self) -> None:
        """Free the buffers; a process that has mapped one keeps its bytes until it unmaps it."""
        super().close()
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []

    def _store(self, index: int, piece: TensorSlice, tensor: Tensor) -> None:
        piece.of(self._buffers[index % NUM_BUFFERS].bytes).copy_(tensor)

    def _handle(self, index: int) -> SharedMemoryHandle:
        return self._buffers[index % NUM_BUFFERS].handle


class SharedMemoryReceiver:
    """Maps buckets of another process (or of this one); each buffer is mapped once."""

    def __init__(self) -> None:
        self._maps: dict[SharedMemoryHandle, Tensor] = {}

    def tensors(self, bucket: WeightBucket) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, view into the bucket) in sending order; a view is valid as long as the bucket.

        Raises:
            RefitError: The sender has ended, or closed its buffer.
        """
        assert isinstance(bucket.handle, SharedMemoryHandle), f"not a shared-memory bucket: {bucket.transport}"
        buffer = self._opened(bucket.handle)
        for piece in bucket.slices:
            yield piece.name, piece.of(buffer)

    def close(self) -> None:
        """Unmap every buffer; a view that is still in use keeps its buffer mapped."""
        self._maps.clear()

    def _opened(self, handle: SharedMemoryHandle) -> Tensor:
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
                self._maps[handle] = _mapped(fd, handle.num_bytes)
            finally:
                os.close(fd)
        return self._maps[handle]


def _mapped(fd: int, num_bytes: int) -> Tensor:
    """Map a file as [num_bytes] uint8; it stays mapped as long as a view is in use."""
    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
