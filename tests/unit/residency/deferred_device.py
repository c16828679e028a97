"""A device whose copies happen as late as they may: what is read without waiting is wrong, as on a GPU it may be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from nemo_offload_rl.residency.device.device import Copy, CpuDevice, Room

type Unseen = tuple[int, torch.Tensor, torch.Tensor]
"""Of a copy to the host: the transfer's number, where the bytes go, and what they are."""


class DeferredTransfer:
    """Copies nothing before it is waited for, then only what was waited for.

    A copy to the host that only the device waited for has read its bytes, but the host sees them only once it waits for
    that copy or for a later one; copies to the device do at once.
    """

    def __init__(self, copies: Sequence[Copy], to_host: bool, number: int, unseen: list[Unseen]) -> None:
        self.num_bytes = sum(copy.host.numel() for copy in copies)
        self._copies = copies
        self._to_host = to_host
        self._number = number
        self._unseen = unseen
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
        self._show(up_to=self._number)
        return 0.0

    def wait_device(self, num_copies: int | None = None) -> None:
        for copy in self._copies[self._num_copied : num_copies]:
            if self._to_host:
                self._unseen.append((self._number, copy.host, copy.device.clone()))
            else:
                self._show(up_to=max((number for number, _, _ in self._unseen), default=0))
                copy.device.copy_(copy.host)
            self._num_copied += 1

    def _show(self, up_to: int) -> None:
        for number, host, value in self._unseen:
            if number <= up_to:
                host.copy_(value)
        self._unseen[:] = [entry for entry in self._unseen if entry[0] > up_to]

    def seconds(self) -> float:
        assert self.finished
        return 0.0


class DeferredDevice(CpuDevice):
    """CPU memory behind deferred copies; memory that has no contents yet, and memory given up, is poisoned."""

    asynchronous = True
    held_bytes = 1 << 40  # what `reserved_bytes` says

    def __init__(self, free_bytes: int = 1 << 40) -> None:
        self._free_bytes = free_bytes
        self._num_transfers = 0
        self._unseen: list[Unseen] = []

    def reserved_bytes(self) -> int:
        return self.held_bytes

    def free_bytes(self) -> int:
        return self._free_bytes

    def _allocate(self, room: Room) -> None:
        super()._allocate(room)
        room.storage.fill_(0xFF)

    def copy_out(self, copies: Iterable[Copy]) -> DeferredTransfer:
        copies = list(copies)
        for copy in copies:
            copy.host.fill_(0xFF)
        return self._transfer(copies, to_host=True)

    def copy_in(self, copies: Iterable[Copy]) -> DeferredTransfer:
        return self._transfer(list(copies), to_host=False)

    def _transfer(self, copies: Sequence[Copy], to_host: bool) -> DeferredTransfer:
        self._num_transfers += 1
        return DeferredTransfer(copies, to_host, self._num_transfers, self._unseen)
