"""A frozen copy of one group's contents that can take their place for a while: the reference policy's parameters.

Two ways to swap, the same bits. Without room on the device the snapshot's bytes are written over the group's, and the
group's come back from its own host copy: two crossings that are waited for. With room the snapshot is on the device
ahead of its use, and the two exchange their contents there: one crossing, behind earlier work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from nemo_offload_rl.residency.device import Copy, Device, Room, Transfer
from nemo_offload_rl.residency.errors import DeviceOutOfMemoryError
from nemo_offload_rl.residency.group_state import GroupState
from nemo_offload_rl.residency.ledger import TransitionReport
from nemo_offload_rl.residency.mirror import HostMirror
from nemo_offload_rl.residency.storage import StorageRecord, storage_bytes

EXCHANGED_AT_ONCE_BYTES = 256 << 20

type Pairs = list[tuple[Tensor, Tensor]]
"""[N] uint8 tensors of the same size, both on the device."""


class Snapshot:
    """One snapshot.

    Args:
        name: What it is called in reports.
        state: Its group.
        mirror: Where its bytes are kept on the host.
        device: Where its group lives.
    """

    def __init__(self, name: str, state: GroupState, mirror: HostMirror, device: Device) -> None:
        self.name = name
        self.state = state
        self.mirror = mirror
        self._device = device
        self._staged: dict[int, Tensor] = {}
        self._transfer: Transfer | None = None
        self._exchanged: list[Pairs] = []

    def take(self, records: Mapping[int, StorageRecord]) -> None:
        """Copy the group's present contents, once."""
        self.state.wait_arrival()
        self.state.copy_to(self.mirror, records)

    def stage(self, records: Mapping[int, StorageRecord], report: TransitionReport) -> bool:
        """Start to bring the bytes to the device, beside the group's own; False where there is no room after all."""
        if self._staged:
            return True
        places = {
            key: Room(
                torch.empty(0, dtype=torch.uint8, device=record.storage.device).untyped_storage(),
                self.mirror.bytes_of(key).numel(),
            )
            for key, record in records.items()
        }
        try:
            self._device.allocate(list(places.values()))
        except DeviceOutOfMemoryError:
            return False
        self._staged = {key: storage_bytes(room.storage, room.num_bytes) for key, room in places.items()}
        self._transfer = self._device.copy_in(Copy(self._staged[key], self.mirror.bytes_of(key)) for key in places)
        self.state.track(self._transfer, report)
        report.group(self.name).bytes_in += self._transfer.num_bytes
        return True

    def drop(self) -> None:
        """Give up the copy on the device, if there is one."""
        if self._transfer is not None:
            self._transfer.wait_host()
        self._staged, self._transfer = {}, None

    def prepare(self, records: Mapping[int, StorageRecord], report: TransitionReport) -> None:
        """Make sure that the group's own bytes are all there and survive a swap. Changes nothing on the device."""
        self.state.wait_arrival()
        if self._transfer is None:
            self.state.refresh_mirror(records, report)

    def swap_in(self, records: Mapping[int, StorageRecord], report: TransitionReport) -> None:
        """Have the snapshot's bytes in the group's storages; `prepare` came before."""
        if self._transfer is None:
            self.state.copy_from(self.mirror, records, report, self.name)
            return
        self._transfer.wait_device()
        for pairs in self._batches(records):
            _exchange(pairs)
            self._exchanged.append(pairs)

    def swap_out(self, records: Mapping[int, StorageRecord], report: TransitionReport) -> None:
        """Have the group's own bytes back, also after a `swap_in` that failed half-way."""
        if self._transfer is None:
            self.state.copy_from(self.state.mirror, records, report, self.state.group.name)
        while self._exchanged:
            _exchange(self._exchanged[-1])
            self._exchanged.pop()

    def _batches(self, records: Mapping[int, StorageRecord]) -> Iterator[Pairs]:
        """All bytes of the group and of the snapshot side by side, as many at a time as are exchanged at once."""
        batch: Pairs = []
        num_bytes = 0
        for key, record in records.items():
            own, staged = storage_bytes(record.storage, record.storage.nbytes()), self._staged[key]
            for pair in zip(own.split(EXCHANGED_AT_ONCE_BYTES), staged.split(EXCHANGED_AT_ONCE_BYTES), strict=True):
                if batch and num_bytes + pair[0].numel() > EXCHANGED_AT_ONCE_BYTES:
                    yield batch
                    batch, num_bytes = [], 0
                batch.append(pair)
                num_bytes += pair[0].numel()
        if batch:
            yield batch

    def close(self) -> None:
        """Free host and device memory."""
        self.drop()
        self.mirror.close()


@torch.no_grad()
def _exchange(pairs: Pairs) -> None:
    """In few kernels: one for each tensor would have the host busy for longer than the device."""
    left, right = (list(side) for side in zip(*pairs, strict=True))
    kept = [tensor.clone() for tensor in left]
    torch._foreach_copy_(left, right)  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_copy_(right, kept)  # pyright: ignore[reportPrivateImportUsage]
