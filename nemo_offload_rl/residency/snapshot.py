"""A frozen copy of one group's contents that can take their place for a while: the reference policy's parameters.

Two ways to swap, the same bits. Without room on the device the snapshot's bytes are written over the group's, and the
group's come back from its own host copy: two crossings that are waited for. With room the snapshot is on the device
ahead of its use, and the two exchange their contents there: one crossing, behind earlier work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nemo_offload_rl.residency.device import Copy, Device, Room, Transfer
from nemo_offload_rl.residency.errors import DeviceOutOfMemoryError, ResidencyError
from nemo_offload_rl.residency.group_state import GroupState
from nemo_offload_rl.residency.groups import StorageRecord, storage_bytes
from nemo_offload_rl.residency.host_arena import HostArena, HostMirror
from nemo_offload_rl.residency.ledger import TransitionReport
from nemo_offload_rl.residency.plan import Placement
from nemo_offload_rl.residency.transaction import GroupSet

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

    def covered(self, records: Mapping[int, StorageRecord]) -> dict[int, StorageRecord]:
        """Those of the group's storages that the snapshot has bytes for.

        Buffers without contents, and those that a module has replaced since (a rotary embedding that follows the
        longest sequence), are no part of it: a pass finds them as the module left them.

        Raises:
            ResidencyError: A parameter has got other memory since, so that its frozen contents have no place.
        """
        found = {
            key: record
            for key, record in records.items()
            if self.mirror.has(key) and self.mirror.bytes_of(key).numel() == record.storage.nbytes()
        }
        others = {name for key, r in records.items() if key not in found and r.storage.nbytes() for name in r.names}
        if others:
            for name, tensor in self.state.group.tensors():
                if name in others and isinstance(tensor, nn.Parameter):
                    raise ResidencyError(
                        f"snapshot {self.name!r} cannot be swapped in: parameter {name} of group "
                        f"{self.state.group.name!r} was given other memory after the snapshot was taken; write into "
                        "the parameter instead"
                    )
        return found

    def stage(self, records: Mapping[int, StorageRecord], report: TransitionReport) -> bool:
        """Start to bring the bytes to the device, beside the group's own; False where there is no room after all."""
        if self._staged:
            return True
        places = {
            key: Room(
                torch.empty(0, dtype=torch.uint8, device=record.storage.device).untyped_storage(),
                self.mirror.bytes_of(key).numel(),
            )
            for key, record in self.covered(records).items()
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

    def release(self) -> int:
        """Release the copy on the device, if there is one; returns its bytes."""
        if self._transfer is not None:
            self._transfer.wait_host()
        num_bytes = sum(tensor.numel() for tensor in self._staged.values())
        self._staged, self._transfer = {}, None
        return num_bytes

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
            if key not in self._staged:
                continue  # made after the copy came to the device
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
        try:
            self.release()
        finally:
            self.mirror.close()


class Snapshots:
    """All snapshots of a worker.

    Args:
        groups: The groups; their `failure` is set where contents cannot be brought back.
        arena_for: Host memory for a snapshot, by its name.

    Attributes:
        all: By name.
        present: The name of the one that is swapped in.
    """

    def __init__(
        self,
        groups: GroupSet,
        arena_for: Callable[[str], HostArena],
    ) -> None:
        self.all: dict[str, Snapshot] = {}
        self.present: str | None = None
        self._groups = groups
        self._arena_for = arena_for

    def take(self, group: str, name: str) -> None:
        """Copy a group's present contents; see `ResidencyManager.snapshot`."""
        if name in self.all:
            raise ResidencyError(f"snapshot {name!r} exists already; take it under another name")
        state = self._on_device(group, f"take the snapshot {name!r}")
        made = Snapshot(name, state, HostMirror(name, self._arena_for(name)), self._groups.device)
        try:
            made.take(self._groups.records()[group])
        except BaseException:
            made.close()  # else `close` would raise for its host memory, and hide this error
            raise
        self.all[name] = made

    @contextmanager
    def swapped_in(self, name: str, report: TransitionReport) -> Iterator[None]:
        """A snapshot's bytes in place of its group's; see `ResidencyManager.swapped_in`."""
        snapshot = self.all[name]
        group = snapshot.state.group
        self._on_device(group.name, f"swap in {name!r}")
        group.prepare()
        records = snapshot.covered(self._groups.records()[group.name])
        with report.held_up():
            snapshot.prepare(records, report)
        try:
            self.present = name
            with report.held_up():
                snapshot.swap_in(records, report)
            yield
        finally:
            with report.held_up():
                self._groups.failure = f"the contents of {group.name!r} were lost while {name!r} was swapped in"
                group.prepare()
                snapshot.swap_out(records, report)
                self._groups.failure = self.present = None

    def release_staged(self) -> int:
        """Release all copies on the device that are not swapped in; returns their bytes."""
        return sum(snapshot.release() for name, snapshot in self.all.items() if name != self.present)

    def close(self) -> None:
        """Free host and device memory."""
        for snapshot in self.all.values():
            snapshot.close()
        self.all.clear()

    def _on_device(self, group: str, purpose: str) -> GroupState:
        self._groups.refuse_if_failed(purpose)
        state = self._groups.states[group]
        if state.location is not Placement.DEVICE:
            raise ResidencyError(f"cannot {purpose}: group {group!r} is {state.location.value}; enter a phase first")
        return state


@torch.no_grad()
def _exchange(pairs: Pairs) -> None:
    """In few kernels: one for each tensor would have the host busy for longer than the device."""
    left, right = (list(side) for side in zip(*pairs, strict=True))
    kept = [tensor.clone() for tensor in left]
    torch._foreach_copy_(left, right)  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_copy_(right, kept)  # pyright: ignore[reportPrivateImportUsage]
