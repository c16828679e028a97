"""Exchanges a group's contents on the device with a snapshot's, on the device or on the host, and back.

The contents pass through a little device memory. It is taken beforehand and kept until they are back, so that they can
go back even if a pass runs out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from nemo_offload_rl.residency.device.device import Device, Room, Transfer
from nemo_offload_rl.residency.device.pieces import Copy
from nemo_offload_rl.residency.table.errors import ResidencyError
from nemo_offload_rl.residency.table.groups import storage_bytes

PIECE_BYTES = 64 << 20  # exchanged at once; large enough for the speed of the link
_NUM_BUFFERS = 2  # a piece arrives while the one before it leaves

type Pairs = list[tuple[Tensor, Tensor]]
"""Pairs of [N] tensors; the first is on the device and at least as wide as the second."""

type Moved = Callable[[Transfer, bool], None]


class Exchange:
    """One exchange and its reversal. Takes no host memory; an exchange with the host uses both directions of the link.

    Args:
        device: Device of the first tensors.
        where: The same device, as torch names it.
        num_bytes: Size of all pairs; if below `PIECE_BYTES`, less device memory is taken.
        with_host: The second tensors are on the host.

    Raises:
        DeviceOutOfMemoryError: There is no room for two pieces; none is taken.
    """

    def __init__(self, device: Device, where: torch.device, num_bytes: int, *, with_host: bool) -> None:
        self._device = device
        self._with_host = with_host
        self._piece_bytes = min(PIECE_BYTES, num_bytes)
        self._done: list[Pairs] = []
        self._is_torn = False
        storages = [torch.empty(0, dtype=torch.uint8, device=where).untyped_storage() for _ in range(_NUM_BUFFERS)]
        try:
            device.allocate([Room(storage, self._piece_bytes) for storage in storages])
        except BaseException:
            for storage in storages:
                if storage.nbytes():
                    device.release(storage)
            raise
        self._buffers = [storage_bytes(storage, self._piece_bytes) for storage in storages]

    def run(self, pairs: Iterable[tuple[Tensor, Tensor]], moved: Moved) -> None:
        """Exchange the uint8 contents of each pair. If it raises, `undo` reverses what was exchanged.

        Args:
            pairs: A tensor on the device and one on the device or the host.
            moved: Called with each copy over the link and whether it came to the device.
        """
        self._through(in_batches(pairs, self._piece_bytes), moved)

    def undo(self, moved: Moved) -> None:
        """Reverse what `run` exchanged. `moved` is as in `run`.

        Raises:
            ResidencyError: `run` broke off in the middle of a piece, whose contents are lost.
        """
        was_torn, batches, self._done = self._is_torn, self._done, []
        self._through(batches, moved)
        if was_torn:
            raise ResidencyError("an exchange of device contents broke off in the middle of a piece")

    def close(self) -> None:
        """Free the device memory."""
        for buffer in self._buffers:
            self._device.release(buffer.untyped_storage())
        self._buffers = []

    def _through(self, batches: Iterable[Pairs], moved: Moved) -> None:
        """Exchange batches. Each is fetched while the one before it leaves."""
        fetched: tuple[Pairs, list[Tensor], Transfer | None] | None = None
        try:
            for index, batch in enumerate(batches):
                kept = _parts_of(self._buffers[index % _NUM_BUFFERS], batch)
                before, fetched = fetched, (batch, kept, self._fetch(kept, batch))
                if before is not None:
                    self._finish(*before, moved)
            if fetched is not None:
                self._finish(*fetched, moved)
        except BaseException:
            if fetched is not None and fetched[2] is not None:
                fetched[2].wait_host()  # its memory is released next
            raise

    def _fetch(self, kept: list[Tensor], batch: Pairs) -> Transfer | None:
        """Bring the second contents to `kept`, or start to."""
        if self._with_host:
            return self._device.copy_in(Copy(new, host) for new, (_, host) in zip(kept, batch, strict=True))
        copy_at_once(kept, [other for _, other in batch])
        return None

    def _finish(self, batch: Pairs, kept: list[Tensor], coming: Transfer | None, moved: Moved) -> None:
        """Write a batch's first contents over the second, and `kept`, a copy of the second, over the first."""
        own, others = (list(side) for side in zip(*batch, strict=True))
        if coming is not None:
            coming.wait_device()
            moved(coming, True)
        self._is_torn = True
        if coming is None:
            copy_at_once(others, own)
        else:
            moved(self._send(own, others, kept), False)
        copy_at_once(own, kept)
        self._done.append(batch)
        self._is_torn = False

    def _send(self, own: list[Tensor], hosts: list[Tensor], kept: list[Tensor]) -> Transfer:
        """Copy to the host. If that cannot start, restore the host's contents from `kept`."""
        try:
            going = self._device.copy_out(map(Copy, own, hosts))
        except BaseException:
            for host, new in zip(hosts, kept, strict=True):
                host.copy_(new)
            self._is_torn = False
            raise
        going.wait_device()
        return going


def in_batches(pairs: Iterable[tuple[Tensor, Tensor]], num_bytes: int) -> Iterator[Pairs]:
    """Yield all elements in order, in lists whose first tensors have at most `num_bytes` together."""
    batch: Pairs = []
    held_bytes = 0
    for left, right in pairs:
        count = max(1, num_bytes // left.element_size())
        for pair in zip(torch.split(left, count), torch.split(right, count), strict=True):
            if batch and held_bytes + pair[0].nbytes > num_bytes:
                yield batch
                batch, held_bytes = [], 0
            batch.append(pair)
            held_bytes += pair[0].nbytes
    if batch:
        yield batch


@torch.no_grad()
def copy_at_once(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy in few kernels: launching one for each tensor would take the host longer than the device."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]


def _parts_of(buffer: Tensor, batch: Pairs) -> list[Tensor]:
    """Split a [N] uint8 buffer into a part for each pair of a batch of at most N bytes."""
    sizes = [own.numel() for own, _ in batch]
    return list(torch.split(buffer[: sum(sizes)], sizes))
