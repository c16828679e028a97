"""One state group's place, host copy and copies under way, and the waits of layers for their parameters.

A group arrives in the order in which a forward pass first reads it. The pass starts while parameters of later layers
are still arriving: a hook before each layer's forward makes the device wait for the copies up to that layer's. The host
does not wait.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_offload_rl.residency.device.device import Copy, Device, Room, Transfer
from nemo_offload_rl.residency.host.arena import HostMirror
from nemo_offload_rl.residency.state.frozen_copy import FrozenCopy
from nemo_offload_rl.residency.table.errors import ResidencyError
from nemo_offload_rl.residency.table.groups import ArrivalOrder, StateGroup, StorageRecord, storage_bytes, storage_key
from nemo_offload_rl.residency.table.ledger import TransitionReport
from nemo_offload_rl.residency.table.plan import Placement


@dataclass
class _Flight:
    """Copies under way.

    Attributes:
        transfer: The copies.
        report: Report to charge.
        to_release: Storages of a leaving group, released as their copies finish.
        read: Storages of a staying group whose host copy is updated; they become `to_release` if it leaves meanwhile.
        num_released: Number of storages released so far.
        num_needed: For an arriving group, the number of copies needed before any layer, then up to each layer.
        is_untimed: Its seconds on the link are not counted, since other copies run at the same time and theirs are.
        order: Grows with each flight.
    """

    transfer: Transfer
    report: TransitionReport
    to_release: Sequence[torch.UntypedStorage] = ()
    read: Sequence[torch.UntypedStorage] = ()
    num_released: int = 0
    num_needed: Sequence[int] = ()
    is_untimed: bool = False
    order: int = field(default_factory=count().__next__)


class GroupState:
    """Moves one group when told to. Each method makes its whole move, or raises with nothing moved.

    Attributes:
        location: Where the group is or is going.
        version: Number of writes to the device contents; a host copy of an older version is out of date.
    """

    def __init__(self, group: StateGroup, device: Device, mirror: HostMirror, verify: bool) -> None:
        self.group = group
        self.mirror = mirror
        self.location = Placement.DEVICE
        self.version = 0
        self._device = device
        self._order = ArrivalOrder(group)
        self._verify = verify
        self._flight: _Flight | None = None
        self._unaccounted: list[_Flight] = []
        # Storages whose memory `allocate` made; the references keep keys from being used again.
        self._brought: dict[int, StorageWeakRef] = {}
        self._is_foreign = False  # the device has a snapshot's contents, which must not overwrite the host copy

    def leave(self, place: Placement, records: Mapping[int, StorageRecord], report: TransitionReport) -> None:
        """Move the group to the host or free it. Memory is released as its copies finish."""
        on_device = {key: record for key, record in records.items() if record.storage.nbytes()}
        if place is Placement.FREED or not self._is_refreshing(on_device):
            self.settle()
        move = report.group(self.group.name)
        freed = sum(record.storage.nbytes() for record in on_device.values())
        if place is Placement.FREED:
            self.location = place
            self.group.free()
        else:
            self._start_leaving(on_device, report)
        move.bytes_freed += freed

    def arrive(
        self, records: Mapping[int, StorageRecord], report: TransitionReport, source: FrozenCopy | None = None
    ) -> None:
        """Bring the group from its host copy, or make it again if it was freed.

        Args:
            records: The group's storages.
            report: The report to charge.
            source: Snapshot whose contents take the place of the group's own until the group leaves.
        """
        if source is None and self._is_whole(records):
            self._stay()
            return
        self.settle()
        if self.location is Placement.FREED:
            self.group.materialize()
        else:
            kept = source or self.mirror
            absent = {key: r for key, r in records.items() if not r.storage.nbytes() and kept.has(key)}
            self._start_arriving(absent, source, report)
        self.location = Placement.DEVICE
        self._is_foreign = source is not None

    def undo_arrival(self, records: Mapping[int, StorageRecord]) -> None:
        """Release what a failed `arrive` allocated, so that memory without contents is not taken for state."""
        self.settle()  # copies of a leaving group still read its memory
        for key, record in records.items():
            if record.storage.nbytes() and self.mirror.has(key):
                self._device.release(record.storage)

    def hand_over(self) -> None:
        """Release the memory of a leaving group before its copies have finished.

        Later copies to the device wait on the device for the copies out. The host waits only for memory that `arrive`
        did not allocate, such as for states made by their first update.
        """
        flight = self._flight
        if flight is None or not self.is_leaving or self._is_released:
            return
        rest = flight.to_release[flight.num_released :]
        if {storage_key(storage) for storage in rest} <= self._brought.keys():
            self._device.follow(flight.transfer)
            for storage in rest:
                self._device.release(storage)
            flight.num_released = len(flight.to_release)
        else:
            self.settle()

    @property
    def held_bytes(self) -> int:
        """Bytes of the group's host copy while the group holds device memory, also while it is leaving; else 0."""
        if self.location is Placement.DEVICE or (self.is_leaving and not self._is_released):
            return self.mirror.num_bytes
        return 0

    @property
    def leaving_bytes(self) -> int:
        """Device memory that a leaving group still holds; 0 for other groups."""
        if self._flight is None or not self.is_leaving:
            return 0
        return sum(storage.nbytes() for storage in self._flight.to_release)

    @property
    def can_release(self) -> bool:
        """Tell whether finished copies out have memory to release."""
        flight = self._flight
        if flight is None or not self.is_leaving:
            return False
        return min(flight.transfer.num_finished(), len(flight.to_release)) > flight.num_released

    @property
    def is_leaving(self) -> bool:
        """Tell whether copies out are under way or have memory left to release."""
        return self._flight is not None and self.location is not Placement.DEVICE

    @property
    def order(self) -> int:
        """Rank of the copies under way among all groups' copies; the earliest is lowest."""
        return self._flight.order if self._flight is not None else 0

    def wait_some(self) -> None:
        """Wait until some of the copies under way have finished."""
        if self._flight is not None:
            self._flight.transfer.wait_some()

    @property
    def is_arriving(self) -> bool:
        """Tell whether copies in are under way and nothing has waited for the last one."""
        return self._flight is not None and bool(self._flight.num_needed)

    @property
    def is_moving(self) -> bool:
        """Tell whether copies are under way that have not finished."""
        return self._flight is not None and not self._flight.transfer.finished

    def wait_arrival(self, num_layers: int | None = None) -> None:
        """Make all later work on the device wait for the group's copies.

        Copies out of a group that stays are waited for as a whole, and the host goes on tracking them.

        Args:
            num_layers: Wait only for copies needed before and in this many first layers; None for all.
        """
        flight = self._flight
        if flight is None or self.location is not Placement.DEVICE:
            return
        num_copies = None
        if num_layers is not None and num_layers + 1 < len(flight.num_needed):
            num_copies = flight.num_needed[num_layers]
        with self._device.held_up(flight.report):
            flight.transfer.wait_device(num_copies)
        if num_copies is None and self.is_arriving:
            self._finish()

    def settle(self) -> float:
        """Wait for copies under way and release the memory of those that left; return the seconds waited."""
        if self._flight is None:
            return 0.0
        start = time.perf_counter()
        while self._flight.num_released < len(self._flight.to_release):
            self._flight.transfer.wait_some()
            self.release_finished()
        self._flight.transfer.wait_host()
        waited = time.perf_counter() - start
        self._finish()
        return waited

    def wait_copies(self) -> None:
        """Wait for every copy of the group, also a snapshot's, and those that only the device waited for."""
        self.settle()
        for flight in self._unaccounted:
            flight.transfer.wait_host()

    def settle_and_charge(self, *, is_exposed: bool = True) -> TransitionReport | None:
        """Settle outside of a transition; charge and return the report of the copies, None if there are none.

        Args:
            is_exposed: Charge the wait as exposed seconds.
        """
        if self._flight is None:
            return None
        report = self._flight.report
        waited_s = self.settle()
        report.exposed_s += waited_s if is_exposed else 0.0
        return report

    def release_finished(self) -> bool:
        """Release the memory of copies out that have finished; return True once all have."""
        flight = self._flight
        if flight is None:
            return False
        finished = min(flight.transfer.num_finished(), len(flight.to_release))
        for storage in flight.to_release[flight.num_released : finished]:
            self._device.release(storage)
        flight.num_released = max(flight.num_released, finished)
        return self._is_released and flight.transfer.finished

    def account(self) -> None:
        """Add the seconds of finished copies to their reports."""
        for flight in self._unaccounted:
            if flight.transfer.finished:
                flight.report.transfer_s += 0.0 if flight.is_untimed else flight.transfer.seconds()
        self._unaccounted = [flight for flight in self._unaccounted if not flight.transfer.finished]

    def track(self, transfer: Transfer, report: TransitionReport, *, is_untimed: bool = False) -> None:
        """Charge a report the seconds of copies that the caller waits for; see `_Flight` for `is_untimed`."""
        self._unaccounted.append(_Flight(transfer, report, is_untimed=is_untimed))

    def start_refresh(self, records: Mapping[int, StorageRecord], report: TransitionReport) -> None:
        """Start updating the host copy of a group that is only read, so that it can leave without a copy later."""
        self.settle()
        transfer, dirty = self._copy_dirty(records, report)
        if dirty:
            self._flight = _Flight(transfer, report, read=[record.storage for record in dirty])

    def refresh_mirror(self, records: Mapping[int, StorageRecord], report: TransitionReport) -> None:
        """Update the host copy of a group that stays on the device."""
        transfer, _ = self._copy_dirty(records, report)
        transfer.wait_host()
        self.track(transfer, report)

    def restore(self, records: Mapping[int, StorageRecord], report: TransitionReport) -> None:
        """Overwrite the device contents with the host copy."""
        transfer = self._device.copy_in(_copy(record, self.mirror) for record in records.values())
        self.overwrite(transfer, report, self.group.name)

    def overwrite(self, transfer: Transfer, report: TransitionReport, charged_to: str) -> None:
        """Make later work on the device wait for a transfer that overwrites the contents, and charge it."""
        transfer.wait_device()
        report.group(charged_to).bytes_in += transfer.num_bytes
        self.track(transfer, report)

    def _copy_dirty(
        self, records: Mapping[int, StorageRecord], report: TransitionReport
    ) -> tuple[Transfer, list[StorageRecord]]:
        """Start copying out what changed since its last copy."""
        if records:  # without records the host copy keeps its memory: gradients come again
            self.mirror.cover(records)
        clean = [record for key, record in records.items() if self.mirror.is_clean(key, self.version)]
        clean_keys = {record.key for record in clean}
        dirty = [record for key, record in records.items() if key not in clean_keys and record.storage.nbytes()]
        if self._verify:
            self._check_clean(clean)
        transfer = self._device.copy_out(_copy(record, self.mirror) for record in dirty)
        self.mirror.mark_clean((record.key for record in dirty), self.version)
        report.group(self.group.name).bytes_out += transfer.num_bytes
        return transfer, dirty

    def _check_clean(self, records: Sequence[StorageRecord]) -> None:
        for record in records:
            copy = _copy(record, self.mirror)
            if not torch.equal(copy.device.cpu(), copy.host):
                raise ResidencyError(
                    f"group {self.group.name!r}: {record.names[0]} was written on the device without mark_written, so "
                    "its host copy is stale; call mark_written wherever it is written"
                )

    def _start_leaving(self, records: Mapping[int, StorageRecord], report: TransitionReport) -> None:
        refresh = self._flight
        transfer, dirty = self._copy_dirty({} if self._is_foreign else records, report)
        # From here on storages may lose their contents; if anything fails, `arrive` restores them.
        self.location = Placement.HOST
        to_release = [record.storage for record in dirty] if refresh is None else refresh.read
        self._flight = refresh or _Flight(transfer, report)
        self._flight.to_release = to_release
        dirty_keys, kept_keys = {record.key for record in dirty}, {storage_key(storage) for storage in to_release}
        for key, record in records.items():
            if key not in dirty_keys:
                report.group(self.group.name).bytes_clean += record.storage.nbytes()
            if key not in kept_keys:
                self._device.release(record.storage)
        if self.release_finished():
            self._finish()

    def _start_arriving(
        self, absent: Mapping[int, StorageRecord], source: FrozenCopy | None, report: TransitionReport
    ) -> None:
        spans, num_needed = self._order.of(absent)
        ordered = list({span.record.key: span.record for span in spans}.values())
        rooms = {record.key: Room(record.storage, self.mirror.bytes_of(record.key).numel()) for record in ordered}
        self._device.allocate(list(rooms.values()))
        self._brought = {record.key: record.weak_ref for record in ordered}
        targets = {key: storage_bytes(room.storage, room.num_bytes) for key, room in rooms.items()}
        if source is None:
            hosts = {key: self.mirror.bytes_of(key) for key in targets}
            pairs = ((span.of(targets[span.record.key]), span.of(hosts[span.record.key])) for span in spans)
            transfer = self._device.copy_in(Copy(target, host) for target, host in pairs)
        else:
            transfer, num_needed = self._device.copy_in(source.copies_to(targets)), [len(targets)]
        report.group(self.group.name).bytes_in += transfer.num_bytes
        self._flight = _Flight(transfer, report, num_needed=num_needed)
        if transfer.finished:
            self._finish()

    @property
    def _is_released(self) -> bool:
        return self._flight is None or self._flight.num_released == len(self._flight.to_release)

    def _is_refreshing(self, records: Mapping[int, StorageRecord]) -> bool:
        """Tell whether the copies under way update the host copy, so that the group can leave with them."""
        flight = self._flight
        if flight is None or not flight.read or self._is_foreign or self._verify:
            return False
        return all(self.mirror.is_clean(key, self.version) for key in records)

    def _is_whole(self, records: Mapping[int, StorageRecord]) -> bool:
        """Tell whether the group is leaving and all of its contents are still on the device."""
        flight = self._flight
        if flight is None or not self.is_leaving or self._is_foreign or not flight.to_release or flight.num_released:
            return False
        return all(record.storage.nbytes() or not self.mirror.has(key) for key, record in records.items())

    def _stay(self) -> None:
        """Stop leaving: the copies go on as an update of the host copy, and no memory is released."""
        assert self._flight is not None
        self._flight.to_release = ()
        self.location = Placement.DEVICE

    def _finish(self) -> None:
        if self._flight is not None:
            # Kept for its seconds only; its storages would outlive tensors that their owner drops.
            self._flight.to_release = self._flight.read = ()
            self._unaccounted.append(self._flight)
            self._flight = None


def _copy(record: StorageRecord, mirror: HostMirror) -> Copy:
    host = mirror.bytes_of(record.key)
    return Copy(storage_bytes(record.storage, host.numel()), host)


class LayerWaits:
    """Hooks that make each layer wait for its own parameters, whichever groups hold them.

    They run before a layer's existing hooks, since FSDP's hook reads the layer's parameters.

    Args:
        states: All groups of a worker.
    """

    def __init__(self, states: Iterable[GroupState]) -> None:
        self._layers: dict[nn.Module, list[tuple[GroupState, int]]] = {}
        for state in states:
            for place, layer in enumerate(state.group.layers, start=1):
                self._layers.setdefault(layer, []).append((state, place))
        self._hooks = [layer.register_forward_pre_hook(self._before, prepend=True) for layer in self._layers]

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, layer: nn.Module, inputs: tuple[object, ...]) -> None:
        late = [(state, place) for state, place in self._layers[layer] if state.is_arriving]
        for state, place in late:
            state.wait_arrival(place)
        if late:
            late[0][0].group.layer_arrived(layer)
