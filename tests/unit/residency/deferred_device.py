"""A device whose copies happen as late as they may: what is read without waiting is wrong, as on a GPU it may be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from nemo_offload_rl.residency.device import Copy, CpuDevice


class DeferredTransfer:
    """Copies nothing before it is waited for, then only what was waited for."""

    def __init__(self, copies: Sequence[Copy], to_host: bool) -> None:
        self.num_bytes = sum(copy.host.numel() for copy in copies)
        self._copies = copies
        self._to_host = to_host
        self._num_copied = 0

    def num_finished(self) -> int:
        return self._num_copied

    @property
    def finished(self) -> bool:
        return self._num_copied == len(self._copies)

    def wait_some(self) -> None:
        self.wait_host()

    def wait_host(self) -> float:
        self.wait_device()
        return 0.0

    def wait_device(self, num_copies: int | None = None) -> None:
        for copy in self._copies[self._num_copied : num_copies]:
            (copy.host if self._to_host else copy.device).copy_(copy.device if self._to_host else copy.host)
            self._num_copied += 1

    def seconds(self) -> float:
        assert self.finished
        return 0.0

    def exposed_s(self) -> float:
        assert self.finished
        return 0.0


class DeferredDevice(CpuDevice):
    """CPU memory behind deferred copies; memory that has no contents yet, and memory given up, is poisoned."""

    asynchronous = True

    def __init__(self, free_bytes: int = 1 << 40) -> None:
        self._free_bytes = free_bytes

    def free_bytes(self) -> int:
        return self._free_bytes

    def allocate(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        super().allocate(storage, num_bytes)
        storage.fill_(0xFF)

    def copy_out(self, copies: Iterable[Copy]) -> DeferredTransfer:
        copies = list(copies)
        for copy in copies:
            copy.host.fill_(0xFF)
        return DeferredTransfer(copies, to_host=True)

    def copy_in(self, copies: Iterable[Copy]) -> DeferredTransfer:
        return DeferredTransfer(list(copies), to_host=False)
