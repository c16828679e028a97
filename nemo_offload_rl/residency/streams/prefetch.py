"""Brings groups to the device ahead of their phase, if the work of the present one leaves room."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from nemo_offload_rl.residency.state.group_set import GroupSet, Mover, Records
from nemo_offload_rl.residency.streams.snapshot import Snapshot, Snapshots
from nemo_offload_rl.residency.streams.stream import Bundle, Stream
from nemo_offload_rl.residency.streams.work_memory import WorkMemory
from nemo_offload_rl.residency.table.ledger import TransitionReport
from nemo_offload_rl.residency.table.plan import OPTIMIZER, OPTIMIZER_PART, Phase, Placement, ResidencyPlan, row_of


class Prefetcher:
    """Starts copies to the device before the phase that needs them, while the present phase works.

    The need of a phase's work is known once the phase has passed; until then nothing is prefetched.

    Args:
        plan: Where each group must be in each phase.
        groups: All groups of the worker.
        parts: Parts of a streamed optimizer, in the order of their updates, each with the other groups of its update.
        parts_come_ahead: Parts may come before the step. False where passes bring parameters and decide which parts
            come: copies run in the order in which they are started, and passes would wait for states.
        work: Memory needs of the phases' work.

    Attributes:
        is_paused: Nothing is prefetched until the next phase.
        has_brought: Something was prefetched in this phase.
        parts_limit_bytes: Bytes that parts may hold on the device from here to the end of the step.
    """

    def __init__(
        self,
        plan: ResidencyPlan,
        groups: GroupSet,
        parts: Sequence[Bundle],
        parts_come_ahead: bool,
        work: WorkMemory,
    ) -> None:
        self._plan = plan
        self._groups = groups
        self._parts = parts
        self._parts_come_ahead = parts_come_ahead
        self._work = work
        self.is_paused = self.has_brought = False
        self.parts_limit_bytes = 0

    def begin(self, phase: Phase) -> None:
        """Begin a phase, in which nothing has been prefetched yet."""
        self.is_paused = self.has_brought = False
        if phase is not Phase.OPTIM_STEP:
            self.parts_limit_bytes = 0

    def evict(self, now: Phase, snapshots: Snapshots, report: TransitionReport) -> int:
        """Offload prefetched state and the optimizer, prefetch nothing until the next phase, and return the bytes.

        A group leaves only if the plan has host memory for it, and if it is the optimizer's or `now` does not need it.
        """
        self.is_paused, self.has_brought = True, False
        self.parts_limit_bytes = 0
        with self._work.moving():
            num_bytes = snapshots.release_staged()
            num_bytes += sum(state.held_bytes for state in self._groups.states.values() if state.is_leaving)
            wanted = {
                name: Placement.HOST
                for name, state in self._groups.states.items()
                if (
                    row_of(name) in (OPTIMIZER, OPTIMIZER_PART)
                    or self._plan.placement(name, now) is Placement.UNCHANGED
                )
                and state.location is Placement.DEVICE
                and self._plan.leaves_the_device(name)
            }
            self._groups.move(wanted, report)
            self._groups.settle(release_cache=True, report=report)
        return num_bytes + report.bytes_freed

    def bring(
        self,
        now: Phase,
        target: Phase,
        names: Iterable[str],
        records: Records,
        report: TransitionReport,
        snapshots: Mapping[str, Snapshot] | None = None,
    ) -> None:
        """Start bringing, during `now`, snapshots to their groups and then the groups that `target` needs."""
        if self.is_paused or not self._work.is_known(now):
            return
        mover = Mover(self._groups.device, report, lambda state: records[state.group.name])
        for name, snapshot in (snapshots or {}).items():
            if snapshot.state.location is Placement.DEVICE:
                start = partial(snapshot.stage, records[snapshot.state.group.name], report)
                self._start(name, start, report, has_room=snapshot.device_bytes <= self._work.room_bytes(now))
        for name in names:
            state = self._groups.states[name]
            if self._plan.placement(name, target) is Placement.DEVICE and state.location is Placement.HOST:
                start = partial(mover.try_bring, state)
                self._start(name, start, report, has_room=state.mirror.num_bytes <= self._work.room_bytes(now))
        if target is Phase.OPTIM_STEP and self._parts and self._work.is_known(target):
            limit_bytes = self.limit_parts(now)
            if self._parts_come_ahead:
                self._start(self._parts[0][0].group.name, Stream(self._parts, mover, limit_bytes).fill, report)

    def limit_parts(self, now: Phase) -> int:
        """Bytes that parts may hold from here to the end of the step: what the work of `now` and the step leaves.

        0 before both phases have passed once. Does not decrease within a pass.
        """
        if self.is_paused or not self._work.is_known(now, Phase.OPTIM_STEP):
            return self.parts_limit_bytes
        held_bytes = sum(state.held_bytes for part in self._parts for state in part)
        limit_bytes = held_bytes + self._work.room_bytes(now, Phase.OPTIM_STEP)
        sizes_bytes = [sum(state.mirror.num_bytes for state in part) for part in self._parts]
        if sum(sizes_bytes) > limit_bytes:
            # Memory that parts hand over may be in pieces; this leaves the driver room for a part that needs it whole.
            limit_bytes -= max(sizes_bytes)
        # During a pass, its allocations are no longer free and still count as needed.
        self.parts_limit_bytes = max(self.parts_limit_bytes, limit_bytes)
        return self.parts_limit_bytes

    def _start(self, name: str, start: Callable[[], int], report: TransitionReport, *, has_room: bool = True) -> None:
        with self._work.moving():
            if has_room and start():
                self.has_brought = True
            else:
                report.without_room.append(name)
