"""All groups of one worker and their storages; moves of several together or none, and of single ones."""

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from nemo_offload_rl.residency.device.device import Device
from nemo_offload_rl.residency.state.frozen_copy import FrozenCopy
from nemo_offload_rl.residency.state.group_state import GroupState
from nemo_offload_rl.residency.table.errors import DeviceOutOfMemoryError, ResidencyError
from nemo_offload_rl.residency.table.groups import StorageRecord, local_tensor, storage_key, unique_storages
from nemo_offload_rl.residency.table.ledger import REPORTED_FROM_BYTES, Ledger, Leftover, TransitionReport
from nemo_offload_rl.residency.table.plan import Phase, Placement

type Records = dict[str, dict[int, StorageRecord]]
"""Storages by group and key."""


class GroupSet:
    """All groups of a worker.

    Args:
        states: The groups; a storage that several of them list belongs to the first.
        device: Where they live.
        overlap: Let copies run while the caller works.

    Attributes:
        failure: Why nothing may move any more, or None.
        ledger: Reports of all moves.
    """

    def __init__(self, states: Mapping[str, GroupState], device: Device, *, overlap: bool) -> None:
        self.failure: str | None = None
        self.ledger = Ledger()
        self.states = states
        self.device = device
        self.overlap = overlap
        self._kept: Records = {}
        self._unexplained_bytes = 0  # most so far, on the device

    def refuse_if_failed(self, purpose: str) -> None:
        """Raise a ResidencyError if an earlier failure could not be undone."""
        if self.failure is not None:
            raise ResidencyError(
                f"residency refuses to {purpose}: {self.failure}. Restart this worker from its last checkpoint."
            )

    def account(self) -> None:
        """Add the seconds that are known by now to the reports. Does not block."""
        self.device.account()
        for state in self.states.values():
            state.account()

    @torch.no_grad()
    def records(self) -> Records:
        """Storages on this device by group.

        Valid for one transition, unless kept: storages that a group replaces or makes later are missing.
        """
        claimed: set[int] = set()
        records: Records = {}
        for name, state in self.states.items():
            if name in self._kept:
                mine = self._kept[name]
            else:
                mine = {
                    key: record
                    for key, record in unique_storages(state.group.tensors()).items()
                    if key not in claimed and self.device.owns(record.storage)
                }
            claimed.update(mine)
            records[name] = mine
        return records

    def keep(self, records: Records) -> None:
        """Have `records` return these until `forget`: an MoE model has tens of thousands, slow to list."""
        self._kept = {n: found for n, found in records.items() if self.states[n].location is not Placement.FREED}

    def forget(self) -> None:
        """Drop kept records, since groups may have other tensors now."""
        self._kept = {}

    def host_view(self, tensor: Tensor) -> Tensor | None:
        """View of a tensor's contents in its group's host copy; None if they are on the device.

        The result has the tensor's shape and strides and shares the host copy's memory.
        """
        for state in self.states.values():
            state.wait_arrival()
        local = local_tensor(tensor.detach())
        key = storage_key(local.untyped_storage())
        for state in self.states.values():
            if state.location is Placement.HOST and state.mirror.has(key):
                state.settle()
                flat = state.mirror.bytes_of(key).view(local.dtype)
                # `as_strided` counts its offset from the start of the block that the host copy is part of.
                return flat.as_strided(local.size(), local.stride(), flat.storage_offset() + local.storage_offset())
        return None

    def release_finished(
        self, *, release_cache: bool, starts_more: bool = True, report: TransitionReport | None = None
    ) -> None:
        """Release the memory of copies out that have finished. Does not block.

        With `release_cache`, also release cached memory to the driver once all copies have finished or, if paced, any.
        With `starts_more`, start further paced copies. A given `report` is charged instead of those of the copies.
        """
        settled = None
        for state in self.states.values():
            if state.is_leaving and state.release_finished():
                settled = state.settle_and_charge(is_exposed=report is None)
        if settled is not None and release_cache:
            self.release_cache_for(report or settled)
        if starts_more:
            self.device.advance_out()

    @property
    def is_leaving(self) -> bool:
        """Tell whether any group is leaving."""
        return any(state.is_leaving for state in self.states.values())

    def leftovers(self, records: Records | None, *, cache_released: bool) -> list[Leftover]:
        """Find device memory that no group which may be there explains; usually none.

        Looks only while no group is leaving, and only if unexplained memory is well above its maximum so far. Memory
        that is still cached counts if `cache_released`. Without `records`, storages are listed now.
        """
        if self.is_leaving:
            return []
        records = records or self.records()
        here = {name for name, state in self.states.items() if state.location is Placement.DEVICE}
        explained_bytes = sum(record.storage.nbytes() for name in here for record in records[name].values())
        unexplained_bytes = self.device.allocated_bytes() - explained_bytes
        if cache_released:
            unexplained_bytes += self.device.cached_bytes()
        if unexplained_bytes <= self._unexplained_bytes + REPORTED_FROM_BYTES:
            return []
        self._unexplained_bytes = unexplained_bytes
        return self.device.leftovers(records, here)

    def leave_at_most(self, limit_bytes: int, report: TransitionReport) -> None:
        """Wait for copies out, in order, until torch's allocator holds at most `limit_bytes` of the device.

        Starts no more paced copies then: the engine maps memory next, which waits for all running copies.
        """
        with report.held_up():
            self.release_finished(release_cache=False, starts_more=False, report=report)
            # The cache is released once, not after each tensor: that waits for running copies and delays the next ones.
            self._wait_for(lambda: self.device.allocated_bytes() <= limit_bytes, report, release_cache=False)
            self.release_cache_for(report)
            # Blocks that are partly in use may need further copies.
            self._wait_for(lambda: self.device.reserved_bytes() <= limit_bytes, report, release_cache=True)

    def _wait_for(self, is_enough: Callable[[], bool], report: TransitionReport, *, release_cache: bool) -> None:
        """Wait for copies out, in order, until `is_enough` or all have finished."""
        while not is_enough() and (leaving := [state for state in self.states.values() if state.is_leaving]):
            self.device.advance_out()
            min(leaving, key=lambda state: state.order).wait_some()
            self.release_finished(release_cache=release_cache, starts_more=False, report=report)

    def settle(
        self,
        *,
        arrivals: bool = True,
        release_cache: bool,
        report: TransitionReport | None = None,
        is_exposed: bool = True,
    ) -> None:
        """Wait for every copy under way, with `arrivals` also for copies in, and release the memory of what left.

        With `release_cache`, also release cached memory to the driver, and charge its seconds to `report`; without one
        to a report of the copies. Without `is_exposed`, no report is charged.
        """
        waiting = [state for state in self.states.values() if arrivals or not state.is_arriving]
        reports = (state.settle_and_charge(is_exposed=is_exposed) for state in waiting)
        settled = [charged for charged in reports if charged is not None]
        if release_cache:
            self.release_cache_for(report or (settled[-1] if settled and is_exposed else None))

    def release_cache_for(self, report: TransitionReport | None) -> None:
        """Release cached memory to the driver, unless that waits for many copies out; charge a report its seconds.

        `cudaFree` waits for everything on the GPU, copies included. Called while a group is leaving, it would expose
        copies that are meant to be hidden. If copies are paced, few run at a time.
        """
        if not self.device.lets_memory_go and self.is_leaving:
            return
        start = time.perf_counter()
        self.device.release_cache()
        if report is not None:
            took_s = time.perf_counter() - start
            report.give_back_s += took_s
            report.exposed_s += took_s

    # -- moves of several groups

    def move(
        self, wanted: Mapping[str, Placement], report: TransitionReport, *, release_cache: bool = False
    ) -> Records:
        """Move groups to where they are wanted: all of them, or none.

        On failure every group goes back to its old place. If that fails too, `failure` is set.

        Args:
            wanted: Placement by group.
            report: The report to charge.
            release_cache: Release cached memory to the driver too; see `release_cache_for`.

        Returns:
            Storages of all groups, listed before the move.
        """
        before = {name: state.location for name, state in self.states.items()}
        moving = {n: place for n, place in wanted.items() if place not in (Placement.UNCHANGED, before[n])}
        if not self._kept:
            self.device.advance_out()  # paced copies go on while the storages are listed
        for name in moving:
            self.states[name].group.prepare()  # drops temporary copies
            self._kept.pop(name, None)
        records = self.records()
        with report.held_up():
            self.device.observe(r.storage for found in records.values() for r in found.values())
            try:
                self._move(moving, records, report, release_cache)
            except BaseException as error:
                self._roll_back(before, error)
                raise
        return records

    def _move(
        self, moving: Mapping[str, Placement], records: Records, report: TransitionReport, release_cache: bool
    ) -> None:
        leaving = [name for name, place in moving.items() if place is not Placement.DEVICE]
        arriving = [name for name, place in moving.items() if place is Placement.DEVICE]
        for name in leaving:
            self.states[name].leave(moving[name], records[name], report)
            if moving[name] is Placement.FREED:
                records[name].clear()  # it must not keep alive what the group has just dropped
        if arriving:
            # Arriving groups may need the memory of leaving ones.
            for state in self.states.values():
                if state.location is not Placement.DEVICE:
                    state.settle()
        if release_cache:
            self.release_cache_for(report)
        for name in arriving:
            self.states[name].arrive(records[name], report)

    def _roll_back(self, before: Mapping[str, Placement], error: BaseException) -> None:
        """Put groups back. Those that arrived leave first, so that the others have room to return."""
        self.forget()
        self.failure = f"an earlier transition failed ({type(error).__name__}: {error}) and could not be undone"
        scrap = TransitionReport(None, Phase.TRAINING)
        try:
            records = self.records()
            for name, state in self.states.items():
                if state.location is Placement.HOST:
                    state.undo_arrival(records[name])
            changed = {name: place for name, place in before.items() if self.states[name].location is not place}
            self._move(changed, records, scrap, release_cache=False)
        except BaseException as second:
            self.failure += f" ({type(second).__name__}: {second})"
            error.add_note(self.failure)
            return
        self.failure = None


def device_bytes(records: Records) -> dict[str, int]:
    """Bytes of each group that are on the device."""
    return {name: sum(record.storage.nbytes() for record in group.values()) for name, group in records.items()}


class Mover:
    """Moves single groups outside of transactions. A failed move leaves its group as it was.

    Args:
        device: Device of the groups.
        report: Report to charge.
        records: Returns a group's present storages; by default all of its own on the device.
    """

    def __init__(
        self,
        device: Device,
        report: TransitionReport,
        records: Callable[[GroupState], Mapping[int, StorageRecord]] | None = None,
    ) -> None:
        self.report = report
        self._device = device
        self.records = records or partial(records_of, device=device)

    def held_up(self) -> AbstractContextManager[None]:
        """Charge this mover's report; see `Device.held_up`."""
        return self._device.held_up(self.report)

    def bring(self, state: GroupState, source: FrozenCopy | None = None) -> None:
        """Start bringing a group, unless it is on the device.

        Raises:
            DeviceOutOfMemoryError: There is no room.
        """
        if state.location is Placement.DEVICE:
            return
        records = self.records(state)
        try:
            state.arrive(records, self.report, source)
        except BaseException:
            state.undo_arrival(records)
            raise

    def try_bring(self, state: GroupState, source: FrozenCopy | None = None) -> bool:
        """Start bringing a group; return False if there is no room: free memory may be in pieces."""
        try:
            self.bring(state, source)
        except DeviceOutOfMemoryError:
            return False
        return True

    def leave(self, state: GroupState, place: Placement = Placement.HOST) -> None:
        """Have a group leave, unless it is away."""
        if state.location is Placement.DEVICE:
            # Listed now: an optimizer makes its states in its first update.
            state.leave(place, self.records(state), self.report)


@torch.no_grad()
def records_of(state: GroupState, device: Device, others: Collection[int] = ()) -> dict[int, StorageRecord]:
    """Present storages of a group on a device, by key, without `others`."""
    found = unique_storages(state.group.tensors())
    return {key: record for key, record in found.items() if key not in others and device.owns(record.storage)}
