"""The residency manager: entering a phase moves what the plan's column says, all of it or nothing.

An `enter`, in order:
1. refuse if an earlier transition could not be undone, or if gradients of an open step would be dropped;
2. let groups leave: copy out what changed since its last copy, free what only needs freeing, give memory back;
3. let groups arrive: allocate, copy in; groups that the phase does not touch first are waited for later;
4. on any failure put every group back where it was, or mark the manager failed; the failure is raised either way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from nemo_offload_rl.residency.arena import HostArena
from nemo_offload_rl.residency.auditor import Auditor
from nemo_offload_rl.residency.device import Device
from nemo_offload_rl.residency.errors import OpenStepError, ResidencyError
from nemo_offload_rl.residency.group_state import GroupState
from nemo_offload_rl.residency.groups import StateGroup
from nemo_offload_rl.residency.ledger import Ledger, TransitionReport
from nemo_offload_rl.residency.mirror import HostMirror
from nemo_offload_rl.residency.phase import Phase, Placement
from nemo_offload_rl.residency.plan import PREFETCHED, READ_BEFORE, SETTLED, TOUCHED, ResidencyPlan
from nemo_offload_rl.residency.storage import StorageRecord, unique_storages
from nemo_offload_rl.residency.work_memory import WorkMemory

logger = logging.getLogger(__name__)


class ResidencyManager:
    """Moves the state groups of one worker between a device and the host.

    Args:
        plan: Where each group must be in each phase.
        groups: The groups, in the order in which a storage that several of them list is counted.
        device: The device; everything is on it until the first `enter`.
        arena: Host memory for all groups. None takes a page-locked and a pageable one from the device.
        overlap: Let copies run beside the caller's work where the device can; False waits for each inside `enter`.
        verify: Compare host copies that count as right with the device, byte by byte. Slow; for finding bugs.
    """

    def __init__(
        self,
        *,
        plan: ResidencyPlan,
        groups: Sequence[StateGroup],
        device: Device,
        arena: HostArena | None = None,
        overlap: bool = True,
        verify: bool = False,
    ) -> None:
        unknown = [group.name for group in groups if group.name not in plan.table]
        if unknown:
            raise ValueError(f"state groups {unknown} have no row in the residency plan ({', '.join(plan.table)})")
        self.plan = plan
        self.phase: Phase | None = None
        self._device = device
        self._given_arena = arena
        self._arenas: dict[bool, HostArena] = {}
        self._states = {
            group.name: GroupState(group, device, HostMirror(group.name, self._arena_for(group.name)), verify)
            for group in groups
        }
        self._snapshots: dict[str, tuple[str, HostMirror]] = {}
        self._ledger = Ledger()
        self._overlap = overlap and device.asynchronous
        self._work = WorkMemory(device)
        self._auditor = Auditor(device)
        self._open_step = False
        self._num_steps = 0
        self._failure: str | None = None

    # -- phases

    def enter(self, phase: Phase) -> TransitionReport:
        """Make `phase` the present phase. Entering the present phase again moves nothing.

        Raises:
            OpenStepError: Gradients that no optimizer step has used would be dropped.
            ResidencyError: The move failed; groups are where they were, or the manager refuses from now on.
        """
        wanted = {name: self.plan.placement(name, phase) for name in self._states}
        report = TransitionReport(self.phase, phase)
        self._check(wanted, phase)
        is_new = phase is not self.phase
        if is_new:
            self._work.end(self.phase)
            self._apply(wanted, report)
        for name, state in self._states.items():
            if name in TOUCHED[phase]:
                state.wait_arrival()
        self.phase = phase
        if not self._overlap or phase in SETTLED:
            self.settle()
            here = {name for name, state in self._states.items() if state.location is Placement.DEVICE}
            report.leftovers = self._auditor.check(self._records(), here)
        if is_new and self._overlap:
            self._work.begin(sum(self.device_bytes().values()))
            for name in self._leaving_next(phase):
                self._states[name].start_refresh(self._records()[name], report)
            if phase in PREFETCHED:
                self._prefetch(PREFETCHED[phase], report, [n for n, p in wanted.items() if p is Placement.UNCHANGED])
        self._ledger.add(report)
        logger.debug("%s", report.line())
        return report

    def prefetch(self, phase: Phase) -> None:
        """Start to bring what `phase` will need, if copies can overlap and there is room beside the present work.

        How much that work needs is known once a phase has been passed through; until then nothing is prefetched, and
        the copies are waited for when `phase` is entered.
        """
        if self._overlap and self.phase is not None:
            report = TransitionReport(self.phase, phase)
            self._prefetch(phase, report, list(self._states))
            if report.groups:
                self._ledger.add(report)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Enter `phase` for the body and come back to the present one afterwards, also when the body raises."""
        previous = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            if previous is not None and self._failure is None:
                self.enter(previous)

    def step_opened(self) -> None:
        """Gradients have been produced that an optimizer step is still to use."""
        self._open_step = True

    def step_closed(self) -> None:
        """The optimizer step has used the gradients, or they were given up on purpose."""
        self._open_step = False
        self._num_steps += 1

    def mark_written(self, *names: str) -> None:
        """The device contents of these groups changed; their host copies are out of date."""
        for name in names:
            self._states[name].generation += 1

    # -- asynchronous copies

    def poll(self) -> None:
        """Hand over the memory of copies that have finished. Call between pieces of other work; does not block."""
        for state in self._states.values():
            if state.is_leaving and state.release_finished():
                state.settle_and_charge()
                self._trim_unless_leaving()

    def settle(self) -> None:
        """Wait for every copy under way and hand over all memory that was to be freed."""
        settled = [report for state in self._states.values() if (report := state.settle_and_charge()) is not None]
        if settled:
            self._device.trim()
        for report in settled:
            report.device_used_after_bytes = self._device.used_bytes()

    @property
    def reports(self) -> Ledger:
        """The ledger, with the seconds of finished copies filled in."""
        for state in self._states.values():
            state.account()
        return self._ledger

    def _leaving_next(self, phase: Phase) -> list[str]:
        """Groups that `phase` only reads and that leave the device after it."""
        if phase not in READ_BEFORE:
            return []
        return [
            name
            for name, state in self._states.items()
            if state.location is Placement.DEVICE
            and name in TOUCHED[phase]
            and self.plan.placement(name, READ_BEFORE[phase]) is Placement.HOST
        ]

    def _prefetch(self, phase: Phase, report: TransitionReport, allowed: Sequence[str]) -> None:
        records = self._records()
        for name in allowed:
            state = self._states[name]
            wanted = state.location is Placement.HOST and self.plan.placement(name, phase) is Placement.DEVICE
            if not wanted or not self._work.is_known(self.phase):
                continue
            if self._work.has_room(self.phase, state.mirror.num_bytes):
                state.arrive(records[name], report)
                self._work.add(state.mirror.num_bytes)
            else:
                report.without_room.append(name)

    # -- snapshots

    def snapshot(self, group: str, name: str) -> None:
        """Keep a frozen host copy of a group's present contents (the reference policy's parameters).

        Raises:
            ResidencyError: The group is not on the device, or the name is taken.
        """
        if name in self._snapshots:
            raise ResidencyError(f"snapshot {name!r} exists already; take it under another name")
        state = self._on_device(group, f"take the snapshot {name!r}")
        mirror = HostMirror(name, self._arena_for(name))
        state.copy_to(mirror, self._records()[group])
        self._snapshots[name] = (group, mirror)

    @contextmanager
    def swapped_in(self, name: str) -> Iterator[None]:
        """Have the snapshot's bytes in its group's own storages inside the body, and the group's own bytes after it.

        Costs no device memory and two copies to the device; the group's own bytes are copied out first only where
        its host copy is out of date. They are back after an exception too.

        Raises:
            ResidencyError: The group is not on the device, or its own bytes could not be brought back.
        """
        group, mirror = self._snapshots[name]
        state = self._on_device(group, f"swap in {name!r}")
        if self.phase is None:
            raise ResidencyError(f"swap in {name!r}: no phase has been entered yet; enter LP_INFERENCE first")
        report = TransitionReport(self.phase, self.phase)
        state.group.prepare()
        records = self._records()[group]
        start = time.perf_counter()
        state.refresh_mirror(records, report)
        try:
            state.copy_from(mirror, records, report, name)
            report.exposed_s += time.perf_counter() - start
            yield
        finally:
            start = time.perf_counter()
            self._failure = f"the contents of {group!r} were lost while {name!r} was swapped in"
            state.group.prepare()
            state.copy_from(state.mirror, records, report, group)
            self._failure = None
            report.exposed_s += time.perf_counter() - start
            self._ledger.add(report)

    @contextmanager
    def checkpoint_view(self) -> Iterator[None]:
        """Have everything that can be saved on the device inside the body, and back where it was after it."""
        self._refuse_if_failed("show the state for a checkpoint")
        before = {name: state.location for name, state in self._states.items()}
        phase = self.phase
        wanted = {name: Placement.DEVICE for name, place in before.items() if place is Placement.HOST}
        if phase is None or not wanted:
            yield
            return
        report = TransitionReport(phase, phase)
        self._apply(wanted, report)
        for name in wanted:
            self._states[name].wait_arrival()
        try:
            yield
        finally:
            self._apply({name: before[name] for name in wanted}, report)
            self.settle()
            self._ledger.add(report)

    # -- memory

    def reserve(self, expected_bytes: Mapping[str, int]) -> None:
        """Take host memory for these groups or snapshots now, off the hot path.

        Raises:
            HostBudgetError: It does not fit; the message says by how much.
        """
        totals: dict[int, tuple[HostArena, int]] = {}
        for name, num_bytes in expected_bytes.items():
            arena = self._arena_for(name)
            totals[id(arena)] = (arena, totals.get(id(arena), (arena, 0))[1] + num_bytes)
        for arena, num_bytes in totals.values():
            arena.reserve(num_bytes)

    def device_bytes(self) -> dict[str, int]:
        """Bytes of each group that are on the device now."""
        return {
            name: sum(record.storage.nbytes() for record in records.values())
            for name, records in self._records().items()
        }

    def host_bytes(self) -> dict[str, int]:
        """Bytes of host copies by group and snapshot."""
        sizes = {name: state.mirror.num_bytes for name, state in self._states.items()}
        sizes.update({name: mirror.num_bytes for name, (_, mirror) in self._snapshots.items()})
        return sizes

    def location(self, group: str) -> Placement:
        """Where a group is now."""
        return self._states[group].location

    def close(self) -> None:
        """Wait for copies and free all host memory. Groups that are on the host lose their contents."""
        self.settle()
        for state in self._states.values():
            state.mirror.close()
        for _, mirror in self._snapshots.values():
            mirror.close()
        self._snapshots.clear()
        if self._given_arena is None:
            for arena in self._arenas.values():
                arena.close()
        self._failure = "the manager was closed"

    # -- inside

    def _arena_for(self, name: str) -> HostArena:
        if self._given_arena is not None:
            return self._given_arena
        pinned = name in self.plan.pinned_groups
        if pinned not in self._arenas:
            self._arenas[pinned] = self._device.new_arena(pinned)
        return self._arenas[pinned]

    @torch.no_grad()
    def _records(self) -> dict[str, dict[int, StorageRecord]]:
        """Storages on this device by group; one that several groups list belongs to the first."""
        claimed: set[int] = set()
        records: dict[str, dict[int, StorageRecord]] = {}
        for name, state in self._states.items():
            mine = {
                key: record
                for key, record in unique_storages(state.group.tensors()).items()
                if key not in claimed and self._device.owns(record.storage)
            }
            claimed.update(mine)
            records[name] = mine
        return records

    def _on_device(self, group: str, purpose: str) -> GroupState:
        self._refuse_if_failed(purpose)
        state = self._states[group]
        if state.location is not Placement.DEVICE:
            raise ResidencyError(f"cannot {purpose}: group {group!r} is {state.location.value}; enter a phase first")
        return state

    def _refuse_if_failed(self, purpose: str) -> None:
        if self._failure is not None:
            raise ResidencyError(
                f"residency refuses to {purpose}: {self._failure}. Restart this worker from its last checkpoint."
            )

    def _check(self, wanted: Mapping[str, Placement], target: Phase) -> None:
        self._refuse_if_failed(f"enter {target.value}")
        freed = [name for name, place in wanted.items() if place is Placement.FREED]
        if self._open_step and freed:
            raise OpenStepError(
                f"entering {target.value} would drop group {freed[0]!r} in the middle of training step "
                f"{self._num_steps + 1}: its gradients have not been used by an optimizer step yet. Call optim_step "
                "first, or zero_grad to give them up."
            )

    def _apply(self, wanted: Mapping[str, Placement], report: TransitionReport) -> None:
        """Bring groups to where they are wanted, all or none."""
        start = time.perf_counter()
        before = {name: state.location for name, state in self._states.items()}
        moving = {n: place for n, place in wanted.items() if place not in (Placement.UNCHANGED, before[n])}
        for name in moving:
            self._states[name].group.prepare()
        records = self._records()
        present = [record.storage for group in records.values() for record in group.values()]
        self._device.observe([storage for storage in present if storage.nbytes()])
        report.device_used_before_bytes = self._device.used_bytes()
        try:
            self._move(moving, records, report)
        except BaseException as error:
            self._roll_back(before, error)
            raise
        report.device_used_after_bytes = self._device.used_bytes()
        report.exposed_s += time.perf_counter() - start

    def _move(
        self,
        moving: Mapping[str, Placement],
        records: Mapping[str, Mapping[int, StorageRecord]],
        report: TransitionReport,
    ) -> None:
        leaving = [name for name, place in moving.items() if place is not Placement.DEVICE]
        arriving = [name for name, place in moving.items() if place is Placement.DEVICE]
        for name in leaving:
            self._states[name].leave(moving[name], records[name], report)
        if arriving:
            # What arrives may need the memory of what leaves.
            for state in self._states.values():
                if state.location is not Placement.DEVICE:
                    state.settle()
        if leaving:
            self._trim_unless_leaving()
        for name in arriving:
            self._states[name].arrive(records[name], report)

    def _trim_unless_leaving(self) -> None:
        # Giving memory back to the driver (cudaFree) waits for everything that runs on the GPU, copies included: done
        # while a group is leaving, it would make the caller wait for what was to be hidden.
        if not any(state.is_leaving for state in self._states.values()):
            self._device.trim()

    def _roll_back(self, before: Mapping[str, Placement], error: BaseException) -> None:
        """Put groups back. What arrived leaves first, so that what left has room to return."""
        self._failure = f"an earlier transition failed ({type(error).__name__}: {error}) and could not be undone"
        scrap = TransitionReport(self.phase, self.phase or Phase.TRAINING)
        try:
            records = self._records()
            for name, state in self._states.items():
                if state.location is Placement.HOST:
                    state.undo_arrival(records[name])
            changed = {name: place for name, place in before.items() if self._states[name].location is not place}
            self._move(changed, records, scrap)
        except BaseException as second:
            self._failure += f" ({type(second).__name__}: {second})"
            error.add_note(self._failure)
            return
        self._failure = None
