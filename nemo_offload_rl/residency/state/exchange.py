"""Contents that change places: a group's on the device with a snapshot's, which is on the device or on the host.

They pass through a little device memory, which is taken beforehand and kept until they are back: a pass that ran out
of memory must not keep them from going back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
"""[N] tensors, the first of them on the device and at least as wide as the second."""

type Moved = Callable[[Transfer, bool], None]


class Exchange(ABC):
    """One exchange and its way back.

    Args:
        device: Where the first of each pair is.
        where: The same as a torch device.
        num_bytes: Of all pairs; for fewer than `PIECE_BYTES` less device memory is taken.

    Raises:
        DeviceOutOfMemoryError: There is no room for two pieces; none is taken then.
    """

    def __init__(self, device: Device, where: torch.device, num_bytes: int) -> None:
        self._device = device
        self._piece_bytes = min(PIECE_BYTES, num_bytes)
        self._done: list[Pairs] = []
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
        """Have the uint8 contents of each pair change places. Where it raises, `undo` takes back what did.

        Args:
            pairs: The second of each is on the device too, or on the host.
            moved: Called with each copy over the link, and whether it came to the device.
        """
        self._through(in_batches(pairs, self._piece_bytes), moved, self._done.append)

    def undo(self, moved: Moved) -> None:
        """Have what `run` exchanged where it was; `moved` as there.

        Raises:
            ResidencyError: `run` broke off in the middle of a piece, whose contents are lost.
        """
        self._through(reversed(list(self._done)), moved, self._forget)

    def close(self) -> None:
        """Free the device memory."""
        for buffer in self._buffers:
            self._device.release(buffer.untyped_storage())
        self._buffers = []

    @abstractmethod
    def _through(self, batches: Iterator[Pairs], moved: Moved, after_each: Callable[[Pairs], None]) -> None:
        """Exchange every batch; `after_each` is called with those that have been."""

    def _forget(self, batch: Pairs) -> None:
        self._done.pop()


class DeviceExchange(Exchange):
    """Both sides are on the device."""

    def _through(self, batches: Iterator[Pairs], moved: Moved, after_each: Callable[[Pairs], None]) -> None:
        for batch in batches:
            left, right = (list(side) for side in zip(*batch, strict=True))
            kept = _parts_of(self._buffers[0], batch)
            copy_at_once(kept, left)
            copy_at_once(left, right)
            copy_at_once(right, kept)
            after_each(batch)


class HostExchange(Exchange):
    """The second of each pair is on the host. Takes no host memory; both directions of the link are in use at once."""

    def __init__(self, device: Device, where: torch.device, num_bytes: int) -> None:
        super().__init__(device, where, num_bytes)
        self._is_torn = False

    def undo(self, moved: Moved) -> None:
        was_torn = self._is_torn
        super().undo(moved)
        if was_torn:
            raise ResidencyError("an exchange of device contents with the host broke off in the middle of a piece")

    def _through(self, batches: Iterator[Pairs], moved: Moved, after_each: Callable[[Pairs], None]) -> None:
        arriving: tuple[Pairs, list[Tensor], Transfer] | None = None
        try:
            for index, batch in enumerate(batches):
                kept = _parts_of(self._buffers[index % _NUM_BUFFERS], batch)
                transfer = self._device.copy_in(Copy(new, host) for new, (_, host) in zip(kept, batch, strict=True))
                before, arriving = arriving, (batch, kept, transfer)
                if before is not None:
                    self._finish(*before, moved, after_each)
            if arriving is not None:
                self._finish(*arriving, moved, after_each)
        except BaseException:
            if arriving is not None:
                arriving[2].wait_host()  # its memory is released next
            raise

    def _finish(
        self,
        batch: Pairs,
        kept: list[Tensor],
        coming: Transfer,
        moved: Moved,
        after_each: Callable[[Pairs], None],
    ) -> None:
        """The host's contents have come, or are about to: let the device's go there, and take their place."""
        coming.wait_device()
        moved(coming, True)
        self._is_torn = True
        try:
            going = self._device.copy_out(Copy(own, host) for own, host in batch)
        except BaseException:
            for new, (_, host) in zip(kept, batch, strict=True):
                host.copy_(new)
            self._is_torn = False
            raise
        going.wait_device()
        moved(going, False)
        copy_at_once([own for own, _ in batch], kept)
        after_each(batch)
        self._is_torn = False


def in_batches(pairs: Iterable[tuple[Tensor, Tensor]], num_bytes: int) -> Iterator[Pairs]:
    """All elements side by side and in order, in lists whose first tensors have at most `num_bytes` together."""
    batch: Pairs = []
    held_bytes = 0
    for left, right in pairs:
        count = max(1, num_bytes // left.element_size())
        for pair in zip(left.split(count), right.split(count), strict=True):
            if batch and held_bytes + pair[0].nbytes > num_bytes:
                yield batch
                batch, held_bytes = [], 0
            batch.append(pair)
            held_bytes += pair[0].nbytes
    if batch:
        yield batch


@torch.no_grad()
def copy_at_once(targets: list[Tensor], sources: list[Tensor]) -> None:
    """In few kernels: one for each tensor would have the host busy for longer than the device."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def _parts_of(buffer: Tensor, batch: Pairs) -> list[Tensor]:
    """Of a [N] uint8 buffer, a part for each pair of a batch of at most N bytes."""
    return list(buffer[: sum(own.numel() for own, _ in batch)].split([own.numel() for own, _ in batch]))
