"""Frozen copies of a group's contents that can replace them for a while: the reference policy's parameters.

There are three ways to swap, with the same bits:
1. If the device has room, the snapshot comes there ahead of its use and exchanges its contents with the group's: one
   crossing of the link, behind earlier work.
2. Without room, if the plan has a host copy of the group, the snapshot is written over the group, which comes back from
   that copy: two crossings that are waited for.
3. A group that never leaves the device has no host copy. Its bytes and the snapshot's on the host are exchanged piece
   by piece, there and back. A snapshot narrower than the group has no room for this and is swapped as in 2.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from nemo_offload_rl.residency.device.device import Device, Room, Transfer
from nemo_offload_rl.residency.state.frozen_copy import Exchange, Form, FrozenCopy
from nemo_offload_rl.residency.state.group_set import GroupSet
from nemo_offload_rl.residency.state.group_state import GroupState
from nemo_offload_rl.residency.streams.passing import PassingParts
from nemo_offload_rl.residency.table.errors import DeviceOutOfMemoryError, ResidencyError
from nemo_offload_rl.residency.table.groups import StorageRecord, storage_bytes
from nemo_offload_rl.residency.table.ledger import TransitionReport
from nemo_offload_rl.residency.table.plan import Placement, ResidencyPlan


class Snapshot:
    """Frozen copy of one group's contents.

    If `has_host_copy`, the plan has host memory for a copy of the group itself.
    """

    def __init__(self, name: str, state: GroupState, copy: FrozenCopy, device: Device, *, has_host_copy: bool) -> None:
        self.name = name
        self.state = state
        self.copy = copy
        self._device = device
        self._has_host_copy = has_host_copy
        self._forms: dict[int, Form] = {}
        self._staged: dict[int, Tensor] = {}
        self._is_widened = False
        self._transfer: Transfer | None = None
        self._exchange: Exchange | None = None

    def take(self, records: Mapping[int, StorageRecord]) -> None:
        """Copy the group's present contents, once."""
        self.state.wait_arrival()
        self._forms = self.copy.keep(self._device, self.state.group, records)

    @property
    def device_bytes(self) -> int:
        """Device memory that the snapshot takes when it is staged."""
        return sum(form.num_bytes for form in self._forms.values())

    def covered(self, records: Mapping[int, StorageRecord]) -> dict[int, StorageRecord]:
        """Storages of the group that the snapshot has bytes for.

        Buffers without contents, and buffers that a module has replaced since (a rotary embedding that follows the
        longest sequence), are left out: a pass finds them as the module left them.

        Raises:
            ResidencyError: A parameter was given other memory since, so that its frozen contents have no place.
        """
        found = {
            key: record
            for key, record in records.items()
            if key in self._forms and self._forms[key].num_bytes == record.storage.nbytes()
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
        """Start copying to the device, in addition to the group's own bytes; return False if there is no room."""
        if self._staged:
            return True
        rooms = {
            key: Room(
                torch.empty(0, dtype=torch.uint8, device=record.storage.device).untyped_storage(),
                record.storage.nbytes(),
            )
            for key, record in self.covered(records).items()
        }
        try:
            self._device.allocate(list(rooms.values()))
        except DeviceOutOfMemoryError:
            return False
        self._staged = {key: storage_bytes(room.storage, room.num_bytes) for key, room in rooms.items()}
        self._is_widened = False
        self._transfer = self._device.copy_in(self.copy.copies_to(self._staged))
        self.state.track(self._transfer, report)
        report.group(self.name).bytes_in += self._transfer.num_bytes
        return True

    def release(self) -> int:
        """Release the staged copy, if there is one; return its bytes."""
        if self._transfer is not None:
            self._transfer.wait_host()
        num_bytes = sum(tensor.numel() for tensor in self._staged.values())
        self._staged, self._transfer = {}, None
        return num_bytes

    def prepare(self, records: Mapping[int, StorageRecord], report: TransitionReport) -> None:
        """Make sure that the group's own bytes are all there and survive a swap. Changes none of them.

        Raises:
            DeviceOutOfMemoryError: There is no room for the exchange.
        """
        self.state.wait_arrival()
        if self._transfer is not None:
            self._widen_staged(self._transfer)
        elif self._has_host_copy or any(form.is_cast for form in self._forms.values()):
            self.state.refresh_mirror(records, report)
            return
        if records:
            where = next(iter(records.values())).storage.device
            self._exchange = Exchange(self._device, where, self.device_bytes, with_host=self._transfer is None)

    def swap_in(self, records: Mapping[int, StorageRecord], report: TransitionReport) -> None:
        """Put the snapshot's bytes into the group's storages. Call `prepare` first."""
        places = {key: storage_bytes(record.storage, record.storage.nbytes()) for key, record in records.items()}
        if self._exchange is None:
            self.state.overwrite(self._device.copy_in(self.copy.copies_to(places)), report, self.name)
            self.copy.widen(places)
            return
        # The staged copy lacks storages that were made after it.
        others = self._staged if self._transfer is not None else {key: self.copy.bytes_of(key) for key in records}
        pairs = ((place, others[key]) for key, place in places.items() if key in others)
        self._exchange.run(pairs, self._charged_to(report, coming=self.name, going=self.state.group.name))

    def swap_out(self, records: Mapping[int, StorageRecord], report: TransitionReport) -> None:
        """Restore the group's own bytes, also after a `swap_in` that failed half-way."""
        if self._exchange is None:
            self.state.restore(records, report)
            return
        exchange, self._exchange = self._exchange, None
        try:
            exchange.undo(self._charged_to(report, coming=self.state.group.name, going=self.name))
        finally:
            exchange.close()

    def _charged_to(self, report: TransitionReport, *, coming: str, going: str) -> Callable[[Transfer, bool], None]:
        """Return a function that charges each copy of an exchange to the name whose contents move."""

        def charge(transfer: Transfer, is_coming: bool) -> None:
            self.state.track(transfer, report, is_untimed=is_coming)
            if is_coming:
                report.group(coming).bytes_in += transfer.num_bytes
            else:
                report.group(going).bytes_out += transfer.num_bytes

        return charge

    def _widen_staged(self, transfer: Transfer) -> None:
        if self._is_widened:
            return
        try:
            transfer.wait_device()
            self.copy.widen(self._staged)
        except BaseException:
            self.release()  # it may be widened in part
            raise
        self._is_widened = True

    def close(self) -> None:
        """Free host and device memory."""
        try:
            self.release()
        finally:
            self.copy.close()


class Snapshots:
    """All snapshots of a worker.

    Args:
        groups: The groups; their `failure` is set if contents cannot be brought back.
        passing: Parameters that pass through the device part by part, which snapshots include; None if there are none.
        plan: Tells which groups have host memory for a copy of their own.
        new_copy: Makes an empty copy for a snapshot of a given name.

    Attributes:
        all: Snapshots by name.
        present: Name of the snapshot that is swapped in, or None.
    """

    def __init__(
        self,
        groups: GroupSet,
        passing: PassingParts | None,
        plan: ResidencyPlan,
        new_copy: Callable[[str], FrozenCopy],
    ) -> None:
        self.all: dict[str, Snapshot] = {}
        self.present: str | None = None
        self._groups = groups
        self._passing = passing
        self._plan = plan
        self._new_copy = new_copy

    def take(self, group: str, name: str) -> None:
        """Copy a group's present contents; see `ResidencyManager.snapshot`."""
        if name in self.all:
            raise ResidencyError(f"snapshot {name!r} exists already; take it under another name")
        state = self._on_device(group, f"take the snapshot {name!r}")
        copy = self._new_copy(name)
        made = Snapshot(name, state, copy, self._groups.device, has_host_copy=self._plan.leaves_the_device(group))
        try:
            made.take(self._groups.records()[group])
            if self._passing is not None:
                self._passing.keep_in(copy)
        except BaseException:
            made.close()  # else `close` would raise for its host memory, and hide this error
            raise
        self.all[name] = made

    @contextmanager
    def swapped_in(self, name: str, report: TransitionReport) -> Generator[None]:
        """Put a snapshot's bytes in place of its group's for the body; see `ResidencyManager.swapped_in`."""
        snapshot = self.all[name]
        group = snapshot.state.group
        self._on_device(group.name, f"swap in {name!r}")
        group.prepare()
        records = snapshot.covered(self._groups.records()[group.name])
        held_up = partial(self._groups.device.held_up, report)
        with held_up():
            snapshot.prepare(records, report)
        try:
            self.present = name
            with held_up():
                snapshot.swap_in(records, report)
            with nullcontext() if self._passing is None else self._passing.showing(snapshot.copy):
                yield
        finally:
            self._groups.failure = f"the contents of {group.name!r} were lost while {name!r} was swapped in"
            with held_up():
                group.prepare()
                snapshot.swap_out(records, report)
                self._groups.failure = self.present = None

    def host_bytes(self) -> dict[str, int]:
        """Host bytes by snapshot."""
        return {name: snapshot.copy.num_bytes for name, snapshot in self.all.items()}

    def release_staged(self) -> int:
        """Release the staged copies of all snapshots that are not swapped in; return their bytes."""
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
