"""Prefetching: what comes to the device before its phase, where there is room beside the present phase's work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from nemo_offload_rl.residency.device import Device
from nemo_offload_rl.residency.group_state import GroupState
from nemo_offload_rl.residency.ledger import TransitionReport
from nemo_offload_rl.residency.plan import OPTIMIZER, OPTIMIZER_PART, Phase, Placement, ResidencyPlan, row_of
from nemo_offload_rl.residency.snapshot import Snapshot, Snapshots
from nemo_offload_rl.residency.transaction import GroupSet, Records, Transaction, device_bytes
from nemo_offload_rl.residency.window import Window

RESERVE_BYTES = 1 << 30
MARGIN = 1.1  # later batches may be somewhat larger than those seen


class WorkMemory:
    """What each phase's own work takes beside the state groups, learned from the phases as they pass.

    Args:
        device: Whose peaks are read. Where it has none, the work counts as needing nothing.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._held_bytes = 0
        self._needed_bytes: dict[Phase, int] = {}
        self._size = 0
        self._seen_sizes: dict[Phase, int] = {}

    def begin(self, held_bytes: int) -> None:
        """A phase begins with `held_bytes` of state groups on the device."""
        self._held_bytes = held_bytes
        self._device.drain_peak_bytes()

    def add(self, num_bytes: int) -> None:
        """More of the groups came to the device during the phase."""
        self._held_bytes += num_bytes

    def expect(self, size: int) -> None:
        """A pass of this size, in any unit, is about to begin in the present phase."""
        self._size = max(self._size, size)

    def end(self, phase: Phase | None) -> int:
        """The phase ends; remember the most that its work took, and return the peak of everything in it."""
        peak = self._device.drain_peak_bytes()
        if phase is not None:
            self._needed_bytes[phase] = max(0, peak - self._held_bytes, self._needed_bytes.get(phase, 0))
            self._seen_sizes[phase] = max(self._size, self._seen_sizes.get(phase, 0))
        self._size = 0
        return peak

    def is_known(self, phase: Phase | None) -> bool:
        """Whether the phase has been seen once."""
        return phase in self._needed_bytes

    def has_room(self, phase: Phase | None, num_bytes: int) -> bool:
        """Whether `num_bytes` fit beside the work of `phase`; never before the phase has been seen once."""
        return phase is not None and phase in self._needed_bytes and num_bytes <= self.room_bytes(phase)

    def room_bytes(self, phase: Phase) -> int:
        """What is free beside the work of `phase`, which has been seen once; negative where that may need more."""
        return self._device.free_bytes() - int(MARGIN * self._expected_bytes(phase)) - RESERVE_BYTES

    def is_too_tight(self, phase: Phase) -> bool:
        """Whether a pass that is larger than any before it may need more than is free beside what was prefetched."""
        if phase not in self._needed_bytes or self._size <= self._seen_sizes[phase]:
            return False
        return self._device.free_bytes() < self._expected_bytes(phase)

    def _expected_bytes(self, phase: Phase) -> int:
        """What the present pass needs: as much as was seen, and in proportion for a larger one."""
        seen = self._seen_sizes[phase]
        return int(self._needed_bytes[phase] * max(1.0, self._size / seen if seen else 1.0))


class Prefetcher:
    """Starts copies to the device before the phase that needs them, beside the present phase's work.

    What a phase's work needs is known once the phase has been passed through; until then nothing is prefetched.

    Args:
        plan: Where each group must be in each phase.
        groups: The groups.
        parts: Those of a streamed optimizer, in the order of their updates.
        parts_come_ahead: They may come before the step. Where passes bring parameters they may not: copies go in the
            order in which they are started, and passes would wait for states.
        work: What the phases' work needs.

    Attributes:
        is_paused: Nothing is prefetched until the next phase.
        parts_limit_bytes: What parts may hold of the device from here to the end of the step, beside the passes' work.
    """

    def __init__(
        self,
        plan: ResidencyPlan,
        groups: GroupSet,
        parts: Sequence[GroupState],
        parts_come_ahead: bool,
        work: WorkMemory,
    ) -> None:
        self._plan = plan
        self._groups = groups
        self._parts = parts
        self._parts_come_ahead = parts_come_ahead
        self._work = work
        self.is_paused = False
        self.parts_limit_bytes = 0

    def begin(self, phase: Phase) -> None:
        """A phase is entered."""
        self.is_paused = False
        if phase is not Phase.OPTIM_STEP:
            self.parts_limit_bytes = 0

    def evict(self, now: Phase, snapshots: Snapshots, report: TransitionReport) -> int:
        """Offload what was prefetched, and the optimizer; prefetch nothing until the next phase. Returns the bytes.

        A group leaves only where the plan has host memory for it, and if it is the optimizer's or `now` has no need of
        it.
        """
        self.is_paused = True
        self.parts_limit_bytes = 0
        num_bytes = snapshots.release_staged()
        num_bytes += sum(state.held_bytes for state in self._groups.states.values() if state.is_leaving)
        wanted = {
            name: Placement.HOST
            for name, state in self._groups.states.items()
            if (row_of(name) in (OPTIMIZER, OPTIMIZER_PART) or self._plan.placement(name, now) is Placement.UNCHANGED)
            and state.location is Placement.DEVICE
            and self._plan.leaves_the_device(name)
        }
        Transaction(self._groups, wanted, report).run()
        self._groups.settle(release_cache=True, report=report)
        self._work.begin(sum(device_bytes(self._groups.records()).values()))
        return num_bytes + report.bytes_freed

    def bring(
        self, now: Phase, target: Phase, names: Iterable[str], records: Records, report: TransitionReport
    ) -> None:
        """Start to bring those of the groups that `target` needs, during `now`."""
        if self.is_paused or not self._work.is_known(now):
            return
        for name in names:
            state = self._groups.states[name]
            if self._plan.placement(name, target) is Placement.DEVICE and state.location is Placement.HOST:
                size = state.mirror.num_bytes
                self._if_room(now, name, size, partial(state.try_arrive, records[name], report), report)
        if target is Phase.OPTIM_STEP and self._parts:
            self._bring_parts(now, records, report)

    def _bring_parts(self, now: Phase, records: Records, report: TransitionReport) -> None:
        """Begin to bring parts of the optimizer, as many as fit beside the work of `now` and the step."""
        if not self._work.is_known(Phase.OPTIM_STEP):
            return
        held_bytes = sum(state.held_bytes for state in self._parts)
        limit_bytes = held_bytes + min(self._work.room_bytes(phase) for phase in (now, Phase.OPTIM_STEP))
        sizes_bytes = [state.mirror.num_bytes for state in self._parts]
        if sum(sizes_bytes) > limit_bytes:
            # Memory that parts hand over may be in pieces; then the driver has room for one that needs it whole.
            limit_bytes -= max(sizes_bytes)
        # Once a pass has begun, what it has allocated is no longer free and still counts as needed.
        self.parts_limit_bytes = max(self.parts_limit_bytes, limit_bytes)
        if self._parts_come_ahead:
            window = Window(
                [(state,) for state in self._parts],
                lambda state: records[state.group.name],
                self.parts_limit_bytes,
                report,
            )
            if not window.fill(0):
                report.without_room.append(self._parts[0].group.name)
            self._work.add(window.held_bytes - held_bytes)

    def stage(self, now: Phase, snapshots: Mapping[str, Snapshot], records: Records, report: TransitionReport) -> None:
        """Bring snapshots beside their groups while the policy's own logprobs are computed."""
        if self.is_paused or not self._work.is_known(now):
            return
        for name, snapshot in snapshots.items():
            if snapshot.state.location is Placement.DEVICE:
                own = records[snapshot.state.group.name]
                self._if_room(now, name, snapshot.device_bytes, partial(snapshot.stage, own, report), report)

    def _if_room(
        self, now: Phase, name: str, num_bytes: int, start: Callable[[], bool], report: TransitionReport
    ) -> None:
        if self._work.has_room(now, num_bytes) and start():
            self._work.add(num_bytes)
        else:
            report.without_room.append(name)
