"""Keeps the contents of a worker's KV blocks on the host while the engine sleeps."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_offload_rl.residency import HostArena, HostBlock, make_device, new_region_on
from nemo_offload_rl.residency.device.device import Copy, Transfer

_GATHERED_BYTES = 64 << 20


class KeptKv:
    """Copies of KV blocks in the host arena.

    Args:
        runner: `model_runner` of vLLM's worker.
        device: Device of the worker.
        limit_bytes: Most bytes that `put_away` will be asked to keep.
    """

    def __init__(self, runner: Any, device: torch.device, limit_bytes: int) -> None:
        self._num_blocks: int = runner.kv_cache_config.num_blocks
        self._caches: Sequence[Any] = runner.kv_caches
        self._device = device
        self._arena = HostArena(new_region_on(device))
        self._limit_bytes = limit_bytes
        self._ids = torch.empty(0, dtype=torch.int64)
        self._block: HostBlock | None = None

    def put_away(self, block_ids: Sequence[int]) -> None:
        """Copy blocks to the host, all layers of each, and return when they are there.

        Raises:
            ValueError: The KV cache is not laid out block by block.
        """
        assert self._block is None, "the blocks put away before were not brought back"
        self._ids = torch.tensor(block_ids, dtype=torch.int64, device=self._device)
        if not block_ids:
            return
        num_bytes = len(block_ids) * sum(pages.shape[1] for pages in self._pages())
        if self._arena.reserved_bytes < num_bytes:  # replaced by a larger region; a second one would add to it
            self._arena.close()
            self._arena.reserve(max(num_bytes, min(num_bytes * 5 // 4, self._limit_bytes)))
        self._block = self._arena.alloc(num_bytes, "kept KV blocks")
        device = make_device(self._device)  # it holds memory of the GPU
        leaving: list[tuple[Transfer, Tensor]] = []
        for pages, ids, host in self._parts(self._block.buffer):
            gathered = pages[ids]
            leaving.append((device.copy_out([Copy(gathered.view(-1), host)]), gathered))
            if len(leaving) > 1:
                leaving.pop(0)[0].wait_host()
        for transfer, _ in leaving:
            transfer.wait_host()

    def bring_back(self) -> None:
        """Copy the blocks back to where they were; the host's memory stays reserved for the next time."""
        if self._block is None:
            return
        device = make_device(self._device)
        for pages, ids, host in self._parts(self._block.buffer):
            arriving = torch.empty((len(ids), pages.shape[1]), dtype=torch.uint8, device=self._device)
            transfer = device.copy_in([Copy(arriving.view(-1), host)])
            transfer.wait_device()
            pages[ids] = arriving
            transfer.wait_host()
        self._arena.free(self._block)
        self._block = None

    def _pages(self) -> list[Tensor]:
        """Return the memory of each of the engine's KV tensors as [blocks, bytes of a block].

        Raises:
            ValueError: A tensor is not laid out block by block.
        """
        found: dict[int, Tensor] = {}
        for cache in self._caches:
            if not isinstance(cache, Tensor) or not self._is_by_block(cache):
                raise ValueError(
                    "vLLM lays out the KV cache of this model in another way than block by block, so that parts of it "
                    "cannot be kept on the host; set grpo.async_grpo.paused_kv to recompute"
                )
            storage = cache.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
            found[storage.data_ptr()] = whole.view(self._num_blocks, -1)
        return list(found.values())

    def _is_by_block(self, cache: Tensor) -> bool:
        is_first = cache.shape[0] % self._num_blocks == 0 and cache.stride(0) == max(cache.stride())
        return is_first and cache.untyped_storage().nbytes() % self._num_blocks == 0

    def _parts(self, host: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each KV tensor as in `_pages`, with ids of some blocks and the place of these blocks in host memory."""
        start = 0
        for pages in self._pages():
            for ids in self._ids.split(max(1, _GATHERED_BYTES // pages.shape[1])):
                size = len(ids) * pages.shape[1]
                yield pages, ids, host[start : start + size]
                start += size
