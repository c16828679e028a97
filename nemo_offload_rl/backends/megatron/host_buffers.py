"""Host memory for offloaded activations: reused across shapes, limited in size, pinned to the byte.

Megatron-core's pool keeps a pinned buffer for each exact shape, so it only grows: reinforcement learning has new shapes
in each batch. Here a buffer serves any tensor that fits, and above a limit the least recently used are released.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_offload_rl.residency.host.regions import HostRegion
from nemo_offload_rl.residency.table.errors import ResidencyError

logger = logging.getLogger(__name__)

ROUND_BYTES = 2 << 20  # a huge page, the smallest pinned region
MAX_WASTE = 1.5  # largest size of a buffer relative to the request that it serves


@dataclass(eq=False)
class _Buffer:
    region: HostRegion
    num_bytes: int
    last_pass: int


def round_up(num_bytes: int) -> int:
    """Return the size of the buffer for a request of `num_bytes`."""
    return max(1, -(-num_bytes // ROUND_BYTES)) * ROUND_BYTES


class HostBufferPool:
    """Pool of host tensors of any shape; has the methods of megatron-core's `OffloadTensorPool` (0.19.2).

    Args:
        limit_bytes: Most memory that is kept between passes. A pass exceeds it, with one warning, only if no free
            buffer is large enough.
        new_region: Allocates host memory of a size.
        synchronize: Waits for running copies. It is called before memory is released, since Megatron calls `free` when
            a copy back starts, not when it ends.
    """

    def __init__(
        self, limit_bytes: int, new_region: Callable[[int], HostRegion], synchronize: Callable[[], None]
    ) -> None:
        self.limit_bytes = limit_bytes
        self._new_region = new_region
        self._synchronize = synchronize
        self._free: list[_Buffer] = []  # sorted by size
        self._in_use: dict[int, _Buffer] = {}  # by address
        self._pass = 0
        self._has_warned = False
        self.total_bytes = 0
        self.num_regions_made = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a host tensor with arbitrary contents."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        buffer = self._take_free(num_bytes) or self._make(num_bytes)
        buffer.last_pass = self._pass
        tensor = buffer.region.buffer[:num_bytes].view(dtype).view(tuple(shape))
        self._in_use[tensor.data_ptr()] = buffer
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Take back a tensor of `allocate`.

        Raises:
            ResidencyError: The tensor is not in use.
        """
        buffer = self._in_use.pop(tensor.data_ptr(), None)
        if buffer is None:
            raise ResidencyError("an activation's host buffer was freed twice or belongs to another pool")
        insort(self._free, buffer, key=_size)

    def reset(self) -> None:
        """End a pass: mark all buffers as free and release those above the limit."""
        for buffer in self._in_use.values():
            insort(self._free, buffer, key=_size)
        self._in_use.clear()
        self._pass += 1
        self._release_down_to(self.limit_bytes)

    def clear(self) -> None:
        """Release everything."""
        self.reset()
        self._release_down_to(0)

    def _take_free(self, num_bytes: int) -> _Buffer | None:
        index = bisect_left(self._free, num_bytes, key=_size)
        if index == len(self._free):
            return None
        fits = self._free[index].num_bytes <= max(MAX_WASTE * num_bytes, ROUND_BYTES)
        # At the limit a far too large buffer is better than a new one in each pass.
        is_full = self.total_bytes + round_up(num_bytes) > self.limit_bytes
        return self._free.pop(index) if fits or is_full else None

    def _make(self, num_bytes: int) -> _Buffer:
        num_bytes = round_up(num_bytes)
        self._release_down_to(self.limit_bytes - num_bytes)
        self.total_bytes += num_bytes
        self.num_regions_made += 1
        if self.total_bytes > self.limit_bytes and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Offloaded activations need more than %.2f GiB of host memory at once: the least of "
                "policy.megatron_cfg.activation_offload_host_limit_gib, which may be raised, and of what tokens and "
                "layers were expected to need. Buffers above it are made anew in every pass.",
                self.limit_bytes / 2**30,
            )
        return _Buffer(self._new_region(num_bytes), num_bytes, self._pass)

    def _release_down_to(self, target_bytes: int) -> None:
        """Close free buffers, least recently used first, until the rest takes at most `target_bytes`."""
        if self.total_bytes <= target_bytes or not self._free:
            return
        self._synchronize()
        for buffer in sorted(self._free, key=lambda buffer: buffer.last_pass):
            if self.total_bytes <= target_bytes:
                break
            self._free.remove(buffer)
            self.total_bytes -= buffer.num_bytes
            buffer.region.close()


def _size(buffer: _Buffer) -> int:
    return buffer.num_bytes
