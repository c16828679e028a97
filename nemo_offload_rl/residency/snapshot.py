"""A frozen copy of one group's contents that can take their place for a while: the reference policy's parameters.

Two ways to swap, the same bits. Without room on the device the snapshot's bytes are written over the group's, and the
group's come back from its own host copy: two crossings that are waited for. With room the snapshot is on the device
ahead of its use, and the two exchange their contents there: one crossing, behind earlier work.

Of parameters that passes cast before they read them (`StateGroup.read_dtype`) the snapshot has the cast values, which
give a pass the same bits. They cross as they are kept, into the last bytes of where they belong, and become as wide as
the parameters there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nemo_offload_rl.residency.device import Copy, Device, Room, Transfer
from nemo_offload_rl.residency.errors import DeviceOutOfMemoryError, ResidencyError
from nemo_offload_rl.residency.group_state import GroupState
from nemo_offload_rl.residency.groups import (
    StateGroup,
    StorageRecord,
    local_tensor,
    storage_bytes,
    storage_key,
    unique_storages,
)
from nemo_offload_rl.residency.host_arena import HostArena, HostMirror, aligned
from nemo_offload_rl.residency.ledger import TransitionReport
from nemo_offload_rl.residency.passing import PassingParts
from nemo_offload_rl.residency.plan import Placement
from nemo_offload_rl.residency.transaction import GroupSet

EXCHANGED_AT_ONCE_BYTES = 256 << 20

type Pairs = list[tuple[Tensor, Tensor]]
"""[N] tensors, the first of them on the device and at least as wide as the second."""


@dataclass(frozen=True)
class _Form:
    """Types of a storage's elements in its group and in the snapshot; both uint8 where the bytes are kept as they are.

    Attributes:
        num_bytes: Of the storage.
    """

    own: torch.dtype
    kept: torch.dtype
    num_bytes: int

    @property
    def kept_bytes(self) -> int:
        return self.num_bytes // self.own.itemsize * self.kept.itemsize


def _forms(group: StateGroup, records: Mapping[int, StorageRecord]) -> dict[int, _Form]:
    """How a snapshot keeps each storage that has contents: narrower where it has nothing but wider parameters."""
    read_dtype = group.read_dtype
    types: dict[int, set[torch.dtype | None]] = {}
    for _, tensor in group.tensors():
        is_cast = read_dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        key = storage_key(local_tensor(tensor).untyped_storage())
        types.setdefault(key, set()).add(tensor.dtype if is_cast else None)
    forms = {}
    for key, record in records.items():
        num_bytes, (own, *others) = record.storage.nbytes(), types[key]
        if own is None or others or read_dtype is None or own.itemsize <= read_dtype.itemsize:
            forms[key] = _Form(torch.uint8, torch.uint8, num_bytes)
        else:
            forms[key] = _Form(own, read_dtype, num_bytes)
    return {key: form for key, form in forms.items() if form.num_bytes}


def snapshot_bytes(group: StateGroup) -> int:
    """Host bytes of a snapshot of a group that is on the device, alignment included."""
    return sum(aligned(form.kept_bytes) for form in _forms(group, unique_storages(group.tensors())).values())


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
        self._forms: dict[int, _Form] = {}
        self._staged: dict[int, Tensor] = {}
        self._is_widened = False
        self._transfer: Transfer | None = None
        self._exchanged: list[Pairs] = []

    def take(self, records: Mapping[int, StorageRecord]) -> None:
        """Copy the group's present contents, once."""
        self.state.wait_arrival()
        self._forms = _forms(self.state.group, records)
        self.mirror.cover(
            {key: records[key] for key in self._forms}, {key: form.kept_bytes for key, form in self._forms.items()}
        )
        pairs = (
            (_whole(records[key].storage).view(form.own), self.mirror.bytes_of(key).view(form.kept))
            for key, form in self._forms.items()
        )
        for batch in _in_batches(pairs):
            kept = [(own.to(host.dtype), host) for own, host in batch]
            self._device.copy_out(Copy(a.view(torch.uint8), b.view(torch.uint8)) for a, b in kept).wait_host()
        self.mirror.mark_clean(self._forms, 0)

    @property
    def device_bytes(self) -> int:
        """What it takes of the device where it is staged."""
        return sum(form.num_bytes for form in self._forms.values())

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
            if self.mirror.has(key) and self._forms[key].num_bytes == record.storage.nbytes()
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
                record.storage.nbytes(),
            )
            for key, record in self.covered(records).items()
        }
        try:
            self._device.allocate(list(places.values()))
        except DeviceOutOfMemoryError:
            return False
        self._staged = {key: storage_bytes(room.storage, room.num_bytes) for key, room in places.items()}
        self._is_widened = False
        self._transfer = self._device.copy_in(self._copies(self._staged))
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
        elif not self._is_widened:
            self._transfer.wait_device()
            try:
                self._widen(self._staged)
            except BaseException:
                self.release()  # some of it is neither
                raise
            self._is_widened = True

    def swap_in(self, records: Mapping[int, StorageRecord], report: TransitionReport) -> None:
        """Have the snapshot's bytes in the group's storages; `prepare` came before."""
        if self._transfer is None:
            places = {key: _whole(record.storage) for key, record in records.items()}
            self.state.overwrite(self._copies(places), report, self.name)
            self._widen(places)
            return
        # What was made after the copy came to the device is no part of it.
        staged = [key for key in records if key in self._staged]
        for pairs in _in_batches((_whole(records[key].storage), self._staged[key]) for key in staged):
            _exchange(pairs)
            self._exchanged.append(pairs)

    def swap_out(self, records: Mapping[int, StorageRecord], report: TransitionReport) -> None:
        """Have the group's own bytes back, also after a `swap_in` that failed half-way."""
        if self._transfer is None:
            self.state.restore(records, report)
        while self._exchanged:
            _exchange(self._exchanged[-1])
            self._exchanged.pop()

    def _copies(self, places: Mapping[int, Tensor]) -> Iterator[Copy]:
        """From the host to the last bytes of each place."""
        for key, place in places.items():
            host = self.mirror.bytes_of(key)
            yield Copy(place[place.numel() - host.numel() :], host)

    def _widen(self, places: Mapping[int, Tensor]) -> None:
        """Have what came to the last bytes of each place fill it, from the front: a piece covers what was read before.

        That is so because element i of n ends at byte `own * i`, and no later element begins before
        `(own - kept) * n + kept * i`, which is more.
        """
        pairs = (
            (place.view(form.own), place[form.num_bytes - form.kept_bytes :].view(form.kept))
            for key, place in places.items()
            if (form := self._forms[key]).kept_bytes < form.num_bytes
        )
        for batch in _in_batches(pairs):
            _copy_at_once([wide for wide, _ in batch], [narrow.clone() for _, narrow in batch])

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
        passing: The parameters that pass through the device part by part, which have copies of their own.
        arena_for: Host memory for a snapshot, by its name.

    Attributes:
        all: By name.
        present: The name of the one that is swapped in.
    """

    def __init__(
        self,
        groups: GroupSet,
        passing: PassingParts | None,
        arena_for: Callable[[str], HostArena],
    ) -> None:
        self.all: dict[str, Snapshot] = {}
        self.present: str | None = None
        self._groups = groups
        self._passing = passing
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
        if self._passing is not None:
            self._passing.take_copy(name, self._arena_for(name))

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
            with nullcontext() if self._passing is None else self._passing.showing_copy(name):
                yield
        finally:
            with report.held_up():
                self._groups.failure = f"the contents of {group.name!r} were lost while {name!r} was swapped in"
                group.prepare()
                snapshot.swap_out(records, report)
                self._groups.failure = self.present = None

    def host_bytes(self) -> dict[str, int]:
        """Bytes of all snapshots."""
        of_parts = {} if self._passing is None else self._passing.copies_bytes()
        return {name: snapshot.mirror.num_bytes + of_parts.get(name, 0) for name, snapshot in self.all.items()}

    def release_staged(self) -> int:
        """Release all copies on the device that are not swapped in; returns their bytes."""
        return sum(snapshot.release() for name, snapshot in self.all.items() if name != self.present)

    def close(self) -> None:
        """Free host and device memory."""
        if self._passing is not None:
            self._passing.close()
        for snapshot in self.all.values():
            snapshot.close()
        self.all.clear()

    def _on_device(self, group: str, purpose: str) -> GroupState:
        self._groups.refuse_if_failed(purpose)
        state = self._groups.states[group]
        if state.location is not Placement.DEVICE:
            raise ResidencyError(f"cannot {purpose}: group {group!r} is {state.location.value}; enter a phase first")
        return state


def _whole(storage: torch.UntypedStorage) -> Tensor:
    return storage_bytes(storage, storage.nbytes())


def _in_batches(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Pairs]:
    """All elements side by side and in order, as many at a time as are worked on at once."""
    batch: Pairs = []
    num_bytes = 0
    for left, right in pairs:
        count = max(1, EXCHANGED_AT_ONCE_BYTES // left.element_size())
        for pair in zip(left.split(count), right.split(count), strict=True):
            if batch and num_bytes + pair[0].nbytes > EXCHANGED_AT_ONCE_BYTES:
                yield batch
                batch, num_bytes = [], 0
            batch.append(pair)
            num_bytes += pair[0].nbytes
    if batch:
        yield batch


@torch.no_grad()
def _exchange(pairs: Pairs) -> None:
    left, right = (list(side) for side in zip(*pairs, strict=True))
    kept = [tensor.clone() for tensor in left]
    _copy_at_once(left, right)
    _copy_at_once(right, kept)


@torch.no_grad()
def _copy_at_once(targets: list[Tensor], sources: list[Tensor]) -> None:
    """In few kernels: one for each tensor would have the host busy for longer than the device."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
