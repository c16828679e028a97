"""What comes to the device before its phase, beside the present phase's work, where there is room for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from nemo_offload_rl.residency.group_state import GroupState
from nemo_offload_rl.residency.ledger import TransitionReport
from nemo_offload_rl.residency.moves import GroupMover, Records, device_bytes
from nemo_offload_rl.residency.plan import OPTIMIZER, OPTIMIZER_PART, Phase, Placement, ResidencyPlan, row_of
from nemo_offload_rl.residency.snapshot import Snapshot, Snapshots
from nemo_offload_rl.residency.streaming import settle_leaving
from nemo_offload_rl.residency.work_memory import WorkMemory

FIRST_PARTS = 2  # of a streamed optimizer: as many as are ever on the device at once


class Prefetcher:
    """Starts copies that nobody waits for yet.

    What a phase's work needs is known once the phase has been passed through; until then nothing comes early.

    Args:
        plan: Where each group must be in each phase.
        states: The groups.
        parts: Those of a streamed optimizer, in the order of their updates.
        work: What the phases' work needs.

    Attributes:
        is_held_back: Nothing comes early for now.
    """

    def __init__(
        self, plan: ResidencyPlan, states: Mapping[str, GroupState], parts: Sequence[GroupState], work: WorkMemory
    ) -> None:
        self._plan = plan
        self._states = states
        self._parts = parts
        self._work = work
        self.is_held_back = False

    def take_back(self, now: Phase, mover: GroupMover, snapshots: Snapshots, report: TransitionReport) -> int:
        """Have leave what passes of `now` do not read; nothing comes early until the next phase. Returns the bytes.

        The optimizer leaves only where the plan has host memory for it.
        """
        self.is_held_back = True
        num_bytes = snapshots.drop_staged()
        wanted = {
            name: Placement.HOST
            for name, state in self._states.items()
            if row_of(name) in (OPTIMIZER, OPTIMIZER_PART)
            and state.location is Placement.DEVICE
            and any(self._plan.placement(name, phase) is Placement.HOST for phase in Phase)
        }
        mover.apply(wanted, mover.prepare(wanted), report)
        mover.settle(trim=True, report=report)
        self._work.begin(sum(device_bytes(mover.records()).values()))
        return num_bytes + report.bytes_freed

    def bring(
        self, now: Phase, target: Phase, names: Iterable[str], records: Records, report: TransitionReport
    ) -> None:
        """Start to bring those of the groups that `target` needs, during `now`."""
        if self.is_held_back or not self._work.is_known(now):
            return
        settle_leaving(self._parts)
        first_parts = [state.group.name for state in self._parts[:FIRST_PARTS]] if target is Phase.OPTIM_STEP else []
        for name in names:
            state = self._states[name]
            wanted = self._plan.placement(name, target) is Placement.DEVICE or name in first_parts
            if wanted and state.location is Placement.HOST:
                size = state.mirror.num_bytes
                self._if_room(now, name, size, partial(state.try_arrive, records[name], report), report)

    def stage(self, now: Phase, snapshots: Mapping[str, Snapshot], records: Records, report: TransitionReport) -> None:
        """Bring snapshots beside their groups while the policy's own logprobs are computed."""
        if self.is_held_back or not self._work.is_known(now):
            return
        for name, snapshot in snapshots.items():
            if snapshot.state.location is Placement.DEVICE:
                own = records[snapshot.state.group.name]
                self._if_room(now, name, snapshot.mirror.num_bytes, partial(snapshot.stage, own, report), report)

    def _if_room(
        self, now: Phase, name: str, num_bytes: int, start: Callable[[], bool], report: TransitionReport
    ) -> None:
        if self._work.has_room(now, num_bytes) and start():
            self._work.add(num_bytes)
        else:
            report.without_room.append(name)
