"""The groups of one worker together: which storages they have, and moving some of them, all or none."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from nemo_offload_rl.residency.device.device import Device
from nemo_offload_rl.residency.state.group_state import GroupState
from nemo_offload_rl.residency.table.errors import ResidencyError
from nemo_offload_rl.residency.table.groups import StorageRecord, local_tensor, storage_key, unique_storages
from nemo_offload_rl.residency.table.ledger import TransitionReport
from nemo_offload_rl.residency.table.leftovers import Leftover, LeftoverCheck
from nemo_offload_rl.residency.table.plan import PHASES, Phase, Placement, ResidencyPlan

type Records = dict[str, dict[int, StorageRecord]]
"""Storages by group and key."""


class GroupSet:
    """All groups of a worker.

    Args:
        states: The groups, in the order in which a storage that several of them list is counted.
        device: Where they live.

    Attributes:
        failure: Why nothing may move any more; None while all is well.
    """

    def __init__(self, states: Mapping[str, GroupState], device: Device) -> None:
        self.failure: str | None = None
        self.states = states
        self.device = device
        self._kept: Records = {}

    def refuse_if_failed(self, purpose: str) -> None:
        """Raise if an earlier failure could not be undone.

        Raises:
            ResidencyError: With what failed.
        """
        if self.failure is not None:
            raise ResidencyError(
                f"residency refuses to {purpose}: {self.failure}. Restart this worker from its last checkpoint."
            )

    def account(self) -> None:
        """Fill the seconds in that are known by now. Does not block."""
        self.device.account()
        for state in self.states.values():
            state.account()

    @torch.no_grad()
    def records(self) -> Records:
        """Storages on this device by group; one that several groups list belongs to the first.

        Good for one transition, unless they are kept: what a group replaces, or makes later, is not in it.
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
        """Take these for the groups' storages until `forget`: a mixture of experts has tens of thousands of tensors."""
        self._kept = {n: found for n, found in records.items() if self.states[n].location is not Placement.FREED}

    def forget(self) -> None:
        """List storages anew from here on: groups may have other tensors by now."""
        self._kept = {}

    def on_host(self, names: Collection[str]) -> list[str]:
        """Those that are on the host; of these names, where any are given."""
        here = [name for name, state in self.states.items() if state.location is Placement.HOST]
        return [name for name in here if not names or name in names]

    def leaving_after(self, phase: Phase, plan: ResidencyPlan) -> list[str]:
        """Groups on the device that `phase` only reads and that leave the device after it."""
        spec = PHASES[phase]
        if spec.reads_before is None:
            return []
        here = [name for name, state in self.states.items() if state.location is Placement.DEVICE]
        return [
            name for name in here if name in spec.touches and plan.placement(name, spec.reads_before) is Placement.HOST
        ]

    def prepare(self, wanted: Mapping[str, Placement]) -> Records:
        """Have the groups that will move drop their temporary copies; the storages after that."""
        if not self._kept:
            self.device.advance_out()  # listing the storages takes a moment, in which paced copies go on
        for name, place in wanted.items():
            if place not in (Placement.UNCHANGED, self.states[name].location):
                self.states[name].group.prepare()
                self._kept.pop(name, None)
        return self.records()

    @contextmanager
    def visiting(self, wanted: Mapping[str, Placement], report: TransitionReport) -> Iterator[None]:
        """Groups where they are wanted inside the body, with all copies in waited for; on the host after it."""
        Transaction(self, wanted, report).run()
        for state in self.states.values():
            # What was on its way already is read now too.
            state.wait_arrival()
        try:
            yield
        finally:
            Transaction(self, dict.fromkeys(wanted, Placement.HOST), report).run()
            self.settle(release_cache=True)

    def wait_arrival(self, names: Collection[str]) -> None:
        """Have the device run nothing more before those of these groups that are arriving are there."""
        for name, state in self.states.items():
            if name in names and state.is_arriving:
                state.wait_arrival()

    def host_view(self, tensor: Tensor) -> Tensor | None:
        """A tensor's contents in its group's host copy; None where they are on the device.

        The result has the tensor's shape and strides, and shares the host copy's memory.
        """
        for state in self.states.values():
            state.wait_arrival()
        local = local_tensor(tensor.detach())
        key = storage_key(local.untyped_storage())
        for state in self.states.values():
            if state.location is Placement.HOST and state.mirror.has(key):
                state.settle()
                flat = state.mirror.bytes_of(key).view(local.dtype)
                # An offset of `as_strided` counts from the start of the block that the host copy is a part of.
                return flat.as_strided(local.size(), local.stride(), flat.storage_offset() + local.storage_offset())
        return None

    def release_finished(
        self, *, release_cache: bool, starts_more: bool = True, report: TransitionReport | None = None
    ) -> None:
        """Release the memory of copies out that have finished; does not block.

        Args:
            release_cache: Release cached memory to the driver too when the last of them has; of paced ones, any.
            starts_more: Start paced copies.
            report: What releasing it is charged to; without it, what the copies belong to.
        """
        settled = None
        for state in self.states.values():
            if state.is_leaving and state.release_finished():
                settled = state.settle_and_charge(is_exposed=report is None)
        if settled is not None and release_cache:
            self.release_cache_for(report or settled)
        if starts_more:
            self.device.advance_out()

    def end_pace(self, report: TransitionReport, *, release_cache: bool) -> None:
        """Start all copies out that were held back.

        Args:
            report: What releasing memory is charged to.
            release_cache: Release what has left by now to the driver first, which would wait for them.
        """
        if release_cache:
            self.release_finished(release_cache=False)
            self.release_cache_for(report)
        self.device.pace_out(False)

    @property
    def is_leaving(self) -> bool:
        """Whether the memory of some group is still to be released."""
        return any(state.is_leaving for state in self.states.values())

    def leftovers(self, records: Records | None, check: LeftoverCheck, cache_released: bool) -> list[Leftover]:
        """See `LeftoverCheck`; none while a group is leaving. The records are those of now, where None is given."""
        if self.is_leaving:
            return []
        here = {name for name, state in self.states.items() if state.location is Placement.DEVICE}
        return check.check(records or self.records(), here, cache_released)

    def leave_at_most(self, limit_bytes: int, report: TransitionReport) -> None:
        """Wait for copies out, in their order, until the driver has all but so much of this process's memory back.

        Other paced copies are not started: who waits for this maps memory next, which waits for copies out.

        Args:
            limit_bytes: What torch's allocator may hold.
            report: Whose exposed seconds these are.
        """
        with report.held_up():
            self.release_finished(release_cache=False, starts_more=False, report=report)
            # Once for all that tensors give up, since it waits for the copies that run and holds up the next ones.
            self._wait_for(lambda: self.device.allocated_bytes() <= limit_bytes, report, release_cache=False)
            self.release_cache_for(report)
            # Of blocks that are in use in part there may be more.
            self._wait_for(lambda: self.device.reserved_bytes() <= limit_bytes, report, release_cache=True)

    def _wait_for(self, is_enough: Callable[[], bool], report: TransitionReport, *, release_cache: bool) -> None:
        """Wait for copies out, in their order, until enough has left or all has."""
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
        """Wait for every copy under way and release the memory of what left.

        Args:
            arrivals: Wait for copies in too.
            release_cache: Release cached memory to the driver too.
            report: What releasing it is charged to; without it, what the copies belong to.
            is_exposed: Somebody waits for this; else it is charged to no report.
        """
        waiting = [state for state in self.states.values() if arrivals or not state.is_arriving]
        reports = (state.settle_and_charge(is_exposed=is_exposed) for state in waiting)
        settled = [charged for charged in reports if charged is not None]
        if release_cache:
            self.release_cache_for(report or (settled[-1] if settled and is_exposed else None))
        for charged in settled:
            charged.device_used_after_bytes = self.device.used_bytes()

    def release_cache(self) -> float:
        """Release cached memory to the driver, unless that waits for many copies out; returns the seconds it took."""
        # Releasing memory to the driver (cudaFree) waits for everything that runs on the GPU, copies included: done
        # while a group is leaving, it would make the caller wait for what was to be hidden. Of paced copies few run.
        if not self.device.lets_memory_go and self.is_leaving:
            return 0.0
        start = time.perf_counter()
        self.device.release_cache()
        return time.perf_counter() - start

    def release_cache_for(self, report: TransitionReport | None) -> None:
        """`release_cache`, whose seconds are charged to a report."""
        took_s = self.release_cache()
        if report is not None:
            report.give_back_s += took_s
            report.exposed_s += took_s


class Transaction:
    """One move of groups to where they are wanted. If any of it fails, every group goes back where it was.

    If that fails too, the groups' `failure` is set, and nothing moves ever again.

    Args:
        groups: All groups of the worker.
        wanted: Placement by group.
        report: What is charged.

    Attributes:
        records: Storages of all groups, as they were listed before the move.
    """

    def __init__(self, groups: GroupSet, wanted: Mapping[str, Placement], report: TransitionReport) -> None:
        self.records = groups.prepare(wanted)
        self._groups = groups
        self._wanted = wanted
        self._report = report

    def run(self, *, release_cache: bool = False) -> None:
        """Make the move.

        Args:
            release_cache: Release cached memory to the driver too, unless copies out are still under way.
        """
        device, report = self._groups.device, self._report
        before = {name: state.location for name, state in self._groups.states.items()}
        moving = {n: place for n, place in self._wanted.items() if place not in (Placement.UNCHANGED, before[n])}
        with report.held_up():
            device.observe([r.storage for found in self.records.values() for r in found.values() if r.storage.nbytes()])
            report.device_used_before_bytes = device.used_bytes()
            try:
                self._move(moving, self.records, report, release_cache)
            except BaseException as error:
                self._roll_back(before, error)
                raise
            report.device_used_after_bytes = device.used_bytes()

    def _move(
        self, moving: Mapping[str, Placement], records: Records, report: TransitionReport, release_cache: bool
    ) -> None:
        states = self._groups.states
        leaving = [name for name, place in moving.items() if place is not Placement.DEVICE]
        arriving = [name for name, place in moving.items() if place is Placement.DEVICE]
        for name in leaving:
            states[name].leave(moving[name], records[name], report)
            if moving[name] is Placement.FREED:
                # The list must not keep alive what the group has just dropped.
                records[name].clear()
        if arriving:
            # What arrives may need the memory of what leaves.
            for state in states.values():
                if state.location is not Placement.DEVICE:
                    state.settle()
        if release_cache:
            report.give_back_s += self._groups.release_cache()
        for name in arriving:
            states[name].arrive(records[name], report)

    def _roll_back(self, before: Mapping[str, Placement], error: BaseException) -> None:
        """Put groups back. What arrived leaves first, so that what left has room to return."""
        groups = self._groups
        groups.forget()
        groups.failure = f"an earlier transition failed ({type(error).__name__}: {error}) and could not be undone"
        scrap = TransitionReport(None, Phase.TRAINING)
        try:
            records = groups.records()
            for name, state in groups.states.items():
                if state.location is Placement.HOST:
                    state.undo_arrival(records[name])
            changed = {name: place for name, place in before.items() if groups.states[name].location is not place}
            self._move(changed, records, scrap, release_cache=False)
        except BaseException as second:
            groups.failure += f" ({type(second).__name__}: {second})"
            error.add_note(groups.failure)
            return
        groups.failure = None


def device_bytes(records: Records) -> dict[str, int]:
    """Bytes of each group that are on the device."""
    return {name: sum(record.storage.nbytes() for record in group.values()) for name, group in records.items()}
