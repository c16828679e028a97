"""The groups of one worker together: which storages they have, and moving some of them, all or none."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from nemo_offload_rl.residency.device import Device
from nemo_offload_rl.residency.errors import ResidencyError
from nemo_offload_rl.residency.group_state import GroupState
from nemo_offload_rl.residency.ledger import TransitionReport
from nemo_offload_rl.residency.plan import Phase, Placement
from nemo_offload_rl.residency.storage import StorageRecord, unique_storages

type Records = dict[str, dict[int, StorageRecord]]


class GroupMover:
    """Moves groups as one transaction: on a failure every group goes back where it was, or nothing moves ever again.

    Args:
        states: The groups, in the order in which a storage that several of them list is counted.
        device: Where they live.

    Attributes:
        failure: Why nothing may move any more; None while all is well.
    """

    def __init__(self, states: Mapping[str, GroupState], device: Device) -> None:
        self.failure: str | None = None
        self._states = states
        self._device = device

    def refuse_if_failed(self, purpose: str) -> None:
        """Raise if an earlier failure could not be undone.

        Raises:
            ResidencyError: It says what failed.
        """
        if self.failure is not None:
            raise ResidencyError(
                f"residency refuses to {purpose}: {self.failure}. Restart this worker from its last checkpoint."
            )

    @torch.no_grad()
    def records(self) -> Records:
        """Storages on this device by group; one that several groups list belongs to the first.

        Good for one transition: what a group replaces, or makes later, is not in it.
        """
        claimed: set[int] = set()
        records: Records = {}
        for name, state in self._states.items():
            mine = {
                key: record
                for key, record in unique_storages(state.group.tensors()).items()
                if key not in claimed and self._device.owns(record.storage)
            }
            claimed.update(mine)
            records[name] = mine
        return records

    def prepare(self, wanted: Mapping[str, Placement]) -> Records:
        """Have the groups that will move drop their temporary copies; the storages after that."""
        for name, place in wanted.items():
            if place not in (Placement.UNCHANGED, self._states[name].location):
                self._states[name].group.prepare()
        return self.records()

    def apply(
        self, wanted: Mapping[str, Placement], records: Records, report: TransitionReport, *, trim: bool = False
    ) -> None:
        """Bring groups to where they are wanted, all or none.

        Args:
            wanted: Placement by group.
            records: From `prepare`.
            report: What is charged.
            trim: Give cached memory back to the driver, unless copies out are still under way.
        """
        before = {name: state.location for name, state in self._states.items()}
        moving = {n: place for n, place in wanted.items() if place not in (Placement.UNCHANGED, before[n])}
        with report.held_up():
            self._device.observe([record.storage for record in _each(records) if record.storage.nbytes()])
            report.device_used_before_bytes = self._device.used_bytes()
            try:
                self._move(moving, records, report, trim)
            except BaseException as error:
                self._roll_back(before, error)
                raise
            report.device_used_after_bytes = self._device.used_bytes()

    @contextmanager
    def visiting(self, wanted: Mapping[str, Placement], report: TransitionReport) -> Iterator[None]:
        """Groups where they are wanted inside the body, with all copies in waited for; on the host after it."""
        self.apply(wanted, self.prepare(wanted), report)
        for state in self._states.values():
            # What was on its way already is read now too.
            state.wait_arrival()
        try:
            yield
        finally:
            back = dict.fromkeys(wanted, Placement.HOST)
            self.apply(back, self.prepare(back), report)
            self.settle(trim=True)

    def poll(self, *, trim: bool) -> None:
        """Give up the memory of copies out that have finished; does not block.

        Args:
            trim: Give it back to the driver when the last of them has.
        """
        for state in self._states.values():
            if state.is_leaving and state.release_finished():
                report = state.settle_and_charge()
                if trim:
                    self._give_back(report)

    def settle(self, *, arrivals: bool = True, trim: bool, report: TransitionReport | None = None) -> None:
        """Wait for every copy under way and give up all memory that was to be freed.

        Args:
            arrivals: Wait for copies in too.
            trim: Give cached memory back to the driver.
            report: What giving back is charged to; without it, what the copies belong to.
        """
        waiting = [state for state in self._states.values() if arrivals or not state.is_arriving]
        settled = [charged for state in waiting if (charged := state.settle_and_charge()) is not None]
        if trim:
            self._give_back(report or (settled[-1] if settled else None))
        for charged in settled:
            charged.device_used_after_bytes = self._device.used_bytes()

    def _move(self, moving: Mapping[str, Placement], records: Records, report: TransitionReport, trim: bool) -> None:
        leaving = [name for name, place in moving.items() if place is not Placement.DEVICE]
        arriving = [name for name, place in moving.items() if place is Placement.DEVICE]
        for name in leaving:
            self._states[name].leave(moving[name], records[name], report)
            if moving[name] is Placement.FREED:
                # The list must not keep alive what the group has just dropped.
                records[name].clear()
        if arriving:
            # What arrives may need the memory of what leaves.
            for state in self._states.values():
                if state.location is not Placement.DEVICE:
                    state.settle()
        if trim:
            report.give_back_s += self._trim_unless_leaving()
        for name in arriving:
            self._states[name].arrive(records[name], report)

    def _give_back(self, report: TransitionReport | None) -> None:
        took_s = self._trim_unless_leaving()
        if report is not None:
            report.give_back_s += took_s
            report.exposed_s += took_s

    def _trim_unless_leaving(self) -> float:
        """Returns the seconds that it took."""
        # Giving memory back to the driver (cudaFree) waits for everything that runs on the GPU, copies included: done
        # while a group is leaving, it would make the caller wait for what was to be hidden.
        if any(state.is_leaving for state in self._states.values()):
            return 0.0
        start = time.perf_counter()
        self._device.trim()
        return time.perf_counter() - start

    def _roll_back(self, before: Mapping[str, Placement], error: BaseException) -> None:
        """Put groups back. What arrived leaves first, so that what left has room to return."""
        self.failure = f"an earlier transition failed ({type(error).__name__}: {error}) and could not be undone"
        scrap = TransitionReport(None, Phase.TRAINING)
        try:
            records = self.records()
            for name, state in self._states.items():
                if state.location is Placement.HOST:
                    state.undo_arrival(records[name])
            changed = {name: place for name, place in before.items() if self._states[name].location is not place}
            self._move(changed, records, scrap, trim=False)
        except BaseException as second:
            self.failure += f" ({type(second).__name__}: {second})"
            error.add_note(self.failure)
            return
        self.failure = None


def device_bytes(records: Records) -> dict[str, int]:
    """Bytes of each group that are on the device."""
    return {name: sum(record.storage.nbytes() for record in group.values()) for name, group in records.items()}


def _each(records: Records) -> Iterator[StorageRecord]:
    for group in records.values():
        yield from group.values()
