"""The residency manager: moves all groups to their places in the plan when a phase is entered, or none.

An `enter`, in order:
1. refuse if an earlier transition could not be undone, or if gradients of an open step would be dropped;
2. let groups leave: copy out what changed since its last copy, drop what is only freed, release device memory;
3. let groups arrive: allocate, copy in; groups that the phase does not read at once are waited for where they are read;
4. on any failure, put every group back or mark the manager failed; raise the failure either way.
"""

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor

from nemo_offload_rl.residency.device.device import Device
from nemo_offload_rl.residency.host.arena import HostArena, HostMirror
from nemo_offload_rl.residency.needs import PassKind, PassNeed
from nemo_offload_rl.residency.state.frozen_copy import FrozenCopy
from nemo_offload_rl.residency.state.group_set import GroupSet, Records, device_bytes
from nemo_offload_rl.residency.state.group_state import GroupState, LayerWaits
from nemo_offload_rl.residency.streams.passing import PassingParts
from nemo_offload_rl.residency.streams.prefetch import Prefetcher
from nemo_offload_rl.residency.streams.snapshot import Snapshots
from nemo_offload_rl.residency.streams.stream import Streams
from nemo_offload_rl.residency.streams.work_memory import NO_ESTIMATES, WorkMemory
from nemo_offload_rl.residency.table.errors import OpenStepError, ResidencyError
from nemo_offload_rl.residency.table.groups import StateGroup
from nemo_offload_rl.residency.table.ledger import Ledger, TransitionReport
from nemo_offload_rl.residency.table.plan import (
    BASE,
    GRADS_PART,
    OPTIMIZER,
    OPTIMIZER_PART,
    PARAMS,
    PARAMS_PART,
    PHASES,
    TEACHER_LAYER,
    Phase,
    Placement,
    ResidencyPlan,
    row_of,
)

logger = logging.getLogger(__name__)


class ResidencyManager:
    """Moves the state groups of one worker between a device and the host.

    Args:
        plan: Where each group must be in each phase.
        groups: The groups; a storage that several of them list is counted for the first.
        device: The device; everything is on it until the first `enter`.
        arena: Host memory for all groups, perhaps reserved already; the manager closes it. None makes one.
        overlap: Let copies run while the caller works, if the device can; False waits for each inside `enter`.
        verify: Compare host copies that count as up to date with the device, byte by byte. Slow; for finding bugs.
        left_by_engine_bytes: Device memory that this process may hold while an engine is awake.
        estimates: Device memory that passes need in addition to state, as estimated; what is measured corrects it.

    Attributes:
        passing: Moves parameters and gradients that pass through the device part by part; None if none do.
        work: Device memory that the work of each phase needs in addition to state.
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
        left_by_engine_bytes: int = 0,
        estimates: Mapping[PassKind, PassNeed] = NO_ESTIMATES,
    ) -> None:
        if unknown := [group.name for group in groups if row_of(group.name) not in plan.table]:
            raise ValueError(f"state groups {unknown} have no row in the residency plan ({', '.join(plan.table)})")
        self.plan = plan
        self.phase: Phase | None = None
        self._device = device
        self._arena = held = arena or HostArena(device.new_region)

        # Not a method: a manager in a reference cycle would live until a garbage collection, and keep a Megatron model
        # from being freed in that one.
        def new_copy[Mirror: HostMirror](kind: type[Mirror], name: str) -> Mirror:
            return kind(name, held, pinned=row_of(name) in plan.pinned_groups)

        mirrors = {group: new_copy(HostMirror, group.name) for group in groups}
        self._states = {group.name: GroupState(group, device, mirror, verify) for group, mirror in mirrors.items()}
        self._layer_waits = LayerWaits(self._states.values())
        self._overlap = overlap and device.asynchronous
        self._groups = GroupSet(self._states, device, overlap=self._overlap)
        self.work = WorkMemory(device, estimates)
        self._left_by_engine_bytes = left_by_engine_bytes if self._overlap and plan.shares_device else 0
        params, grads, self._parts = (self._of_row(row) for row in (PARAMS_PART, GRADS_PART, OPTIMIZER_PART))
        passing = list(zip(self._parts, params, grads, strict=True)) if params else []
        bundles = passing or [(part,) for part in self._parts]
        self._prefetcher = Prefetcher(plan, self._groups, bundles, not params, self.work)
        self._streams = Streams(self._groups, bundles, self._of_row(TEACHER_LAYER), self.work)
        limit = self._prefetcher.limit_parts
        self.passing = PassingParts(self._groups, passing, self.work, limit) if params else None
        self._snapshots = Snapshots(self._groups, self.passing, plan, partial(new_copy, FrozenCopy))
        self._open_step, self._num_steps = False, 0

    # -- phases

    def enter(self, phase: Phase, *, waits_for_all: bool = True) -> TransitionReport:
        """Make `phase` the present phase. Entering the present phase again moves nothing.

        Without `waits_for_all`, up to `left_by_engine_bytes` still leave as GENERATION begins; see `finish_leaving`.

        Raises:
            OpenStepError: Gradients that no optimizer step has used would be dropped.
            ResidencyError: A snapshot is swapped in, or the move failed. It was undone, or nothing moves any more.
        """
        wanted = {name: self.plan.placement(name, phase) for name in self._states}
        report = TransitionReport(self.phase, phase)
        self._check(wanted, phase)
        is_new, settles = phase is not self.phase, self._settles(phase)
        rest_bytes = 0 if waits_for_all or phase is not Phase.GENERATION else self._left_by_engine_bytes
        records: Records = {}
        if is_new:
            has_worked = self.phase is not Phase.OPTIM_STEP or self._streams.has_updated
            report.peak_bytes = self.work.end(is_whole=has_worked)
            report.cache_flushes = self._device.drain_cache_flushes()
            self._snapshots.release_staged()
            self._prefetcher.begin(phase)
            keeps_pace = rest_bytes or phase is Phase.REFIT or self.phase is Phase.OPTIM_STEP
            if self._device.is_paced and not keeps_pace:
                if self.plan.releases_cache(phase):  # before other copies start: releasing would wait for them
                    self._groups.release_finished(release_cache=False)
                    self._groups.release_cache_for(report)
                self._device.pace_out(False)
            release_cache = self.plan.releases_cache(phase) and not settles
            records = self._groups.move(wanted, report, release_cache=release_cache)
        by_layer = self._overlap and PHASES[phase].begins_with_forward
        for name, state in self._states.items():
            if name in PHASES[phase].touches:
                state.wait_arrival(0 if by_layer else None)
        before, self.phase = self.phase, phase
        if self.passing is not None:
            self.passing.phase = phase
        if rest_bytes:
            self._groups.leave_at_most(rest_bytes, report)
        elif settles:
            release_cache = is_new and self.plan.releases_cache(phase)
            self._groups.settle(arrivals=not by_layer, release_cache=release_cache, report=report)
        if is_new:
            self._begin(wanted, records, report)
            # Between an update and the next pass no work changes tensors.
            lasts = phase in (Phase.REFIT, Phase.GENERATION) or before is Phase.OPTIM_STEP
            self._groups.keep(records if lasts else {})
        self._groups.ledger.add(report)
        logger.debug("%s", report.line())
        return report

    def _begin(self, wanted: Mapping[str, Placement], records: Records, report: TransitionReport) -> None:
        """Look for leftovers after entering the present phase, and start the copies that may run while it works."""
        phase = report.target
        if self._settles(phase):
            report.leftovers = self._groups.leftovers(records, cache_released=self.plan.releases_cache(phase))
        self.work.begin(phase, sum(device_bytes(records).values()), self._states.values())
        if not self._overlap:
            return
        reads_before = PHASES[phase].reads_before
        with self._device.held_up(report):  # for as long as the copies take if host memory is not page-locked
            for name, state in self._states.items():
                leaves = reads_before is not None and self.plan.placement(name, reads_before) is Placement.HOST
                if leaves and name in PHASES[phase].touches and state.location is Placement.DEVICE:
                    state.start_refresh(records[name], report)
            allowed = [name for name, place in wanted.items() if place is Placement.UNCHANGED]
            if (target := PHASES[phase].prefetches_for) is not None:
                snapshots = self._snapshots.all if PHASES[phase].prefetches_snapshots else {}
                self._prefetcher.bring(phase, target, allowed, records, report, snapshots)

    def prefetch(self, phase: Phase) -> None:
        """Start bringing what `phase` will need, if copies can overlap and the present work leaves room.

        The need of that work is known once its phase has passed; until then `phase` copies and waits itself.
        """
        if self._overlap and self.phase is not None:
            self._device.pace_out(False)
            report = TransitionReport(self.phase, phase)
            with self._device.held_up(report):
                self._prefetcher.bring(self.phase, phase, self._states, self._groups.records(), report)
            self._groups.ledger.add_if_moved(report)

    def expect_work(self, kind: PassKind, size: int) -> None:
        """Announce a pass. Call it before every pass, with sizes in the same unit (tokens).

        Prefetched state is evicted if it and the pass may not both fit, and the pass is larger than any of its kind
        before it or the first of its kind in this phase.
        """
        self._make_way(kind, size)
        self.work.expect(kind, size)

    def too_large_size(self, kind: PassKind, size: int) -> int:
        """Return the smallest size of a pass that is expected to run out of memory; `sys.maxsize` if `size` is not.

        Ask before announcing the pass. Prefetched state is evicted first.
        """
        self._make_way(kind, size)
        found = self.work.too_large_size(kind, size)
        if found > size or self._prefetcher.is_paused or not self.evict():
            return found
        return self.work.too_large_size(kind, size)

    def _make_way(self, kind: PassKind, size: int) -> None:
        self._groups.forget()
        prefetcher = self._prefetcher
        if not prefetcher.is_paused and self.work.is_too_tight(kind, size, has_prefetched=prefetcher.has_brought):
            self.evict()

    def evict(self, *, after_failure: bool = False) -> int:
        """Offload prefetched state and the optimizer; phases that read them reload them. Return the bytes.

        Args:
            after_failure: The present pass ran out of memory. If it is run again at its size, later phases of this kind
                prefetch nothing into the memory that it then had.
        """
        if self.phase is None:
            return 0
        if after_failure:
            self.work.ran_out()
        report = TransitionReport(self.phase, self.phase)
        num_bytes = self._prefetcher.evict(self.phase, self._snapshots, report)
        self._groups.ledger.add(report)
        return num_bytes

    @contextmanager
    def during(self, phase: Phase) -> Generator[None]:
        """Enter `phase` for the body and return to the present one afterwards, even if the body raises."""
        previous = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            if previous is not None and self._groups.failure is None:
                self.enter(previous)

    def step_opened(self) -> None:
        """Record that gradients were produced that an optimizer step is still to use."""
        self._groups.forget()
        self._open_step = True

    def step_closed(self) -> None:
        """Record that the optimizer step has used the gradients, or that they were dropped on purpose."""
        self._open_step = False
        self._num_steps += 1

    def mark_written(self, *names: str) -> None:
        """Record that the device contents of these groups changed, so that their host copies are out of date."""
        self._groups.forget()
        parts = self._parts if OPTIMIZER in names else ()
        for state in (*(self._states[name] for name in names), *parts):
            state.version += 1

    def streamed(self, *, before_refit: bool = False) -> Iterator[str]:
        """Yield the name of each optimizer part while its states are on the device; use it inside `writing_state`.

        Two parts are on the device at once, and more if passes left room (`prefetch`). Parameters and gradients that
        pass through the device part by part come with their states.

        Args:
            before_refit: Release cached memory to the driver now; after the step that would wait for copies. Also pace
                copies out until `finish_leaving`, so that the driver gets memory back before the last of them.
        """
        release_cache = before_refit and self.plan.releases_cache(Phase.REFIT)
        self._device.pace_out(release_cache and bool(self._parts))
        return self._streams.optimizer(self.phase, self._prefetcher.parts_limit_bytes, release_cache)

    def streamed_layers(self) -> Iterator[str]:
        """Yield the name of each teacher layer, in order, while it is on the device; for one forward pass."""
        return self._streams.teacher(self.phase)

    @contextmanager
    def writing_state(self, *, loads: bool = False) -> Generator[None]:
        """Guard writes to parameters and optimizer in the body.

        If the body raises after writing has begun, the state is neither old nor new, and the manager refuses to go on.

        Args:
            loads: The body reads a checkpoint. If that fails, another may be read, unless parameters are in parts.
        """
        # Before the update: an update that fails half-way has written too.
        self.mark_written(PARAMS, OPTIMIZER)
        with self._streams.writing(loads=loads):
            yield

    # -- asynchronous copies

    def release_finished(self, *, to_driver: bool = True, starts_more: bool = True) -> None:
        """Release the memory of finished copies out. Call it between pieces of other work; does not block.

        `to_driver`: in an engine's phase, also release memory to the driver, which waits for the paced copies that run.
        """
        with self.work.releasing():
            self._groups.release_finished(release_cache=to_driver and self._releases_cache, starts_more=starts_more)

    def settle(self) -> None:
        """Wait for every copy under way and release the memory of what left."""
        with self.work.releasing(waits=True):
            self._groups.settle(release_cache=self._releases_cache)

    def finish_leaving(self) -> None:
        """Finish copies that `enter(waits_for_all=False)` left running; their seconds do not count as exposed."""
        self._device.pace_out(False)
        if self.phase is not None and self._groups.is_leaving:
            self._groups.settle(release_cache=self._releases_cache, is_exposed=False)
            report = TransitionReport(self.phase, self.phase)
            report.leftovers = self._groups.leftovers(None, cache_released=self._releases_cache)
            self._groups.ledger.add(report)

    def wait_parameters(self) -> None:
        """Make later work on the device wait for all parameters, for reads outside of passes."""
        for name, state in self._states.items():
            if name in (PARAMS, BASE) and state.is_arriving:
                state.wait_arrival()

    @property
    def reports(self) -> Ledger:
        """The ledger, with all seconds known by now filled in."""
        self._groups.account()
        return self._groups.ledger

    # -- snapshots

    def snapshot(self, group: str, name: str) -> None:
        """Keep a frozen copy of a group's present contents on the host.

        Raises:
            HostBudgetError: There is no host memory for it.
            ResidencyError: The group is not on the device, or the name is taken.
        """
        self._snapshots.take(group, name)

    @contextmanager
    def swapped_in(self, name: str) -> Generator[None]:
        """Put a snapshot's bytes into its group's storages for the body, and the group's own bytes back after it.

        If there is room, the snapshot is on the device beforehand. The group's own bytes are copied out only if the
        plan has a host copy of them that is needed and out of date. They are restored after an exception too.

        Raises:
            ResidencyError: The group is not on the device, or its own bytes could not be brought back.
        """
        if self.phase is None:
            raise ResidencyError(f"cannot swap in {name!r}: no phase has been entered yet; enter LP_INFERENCE first")
        report = TransitionReport(self.phase, self.phase)
        try:
            with self._snapshots.swapped_in(name, report):
                yield
        finally:
            self._groups.ledger.add(report)

    @contextmanager
    def checkpoint_view(self, *names: str) -> Generator[None]:
        """Bring state that is read or loaded to the device for the body, and back to the host after it.

        Args:
            names: Groups that come to the device; all if none are given. If given, parts of a streamed optimizer leave
                it for good, and staged snapshots are released, so that `streamed` finds the room that it has in a step.

        Raises:
            ResidencyError: A snapshot is swapped in, so that the policy's own contents are not on the device.
        """
        self._groups.refuse_if_failed("read or load a checkpoint's state")
        if self._snapshots.present is not None:
            raise ResidencyError(
                f"cannot read or load a checkpoint's state while snapshot {self._snapshots.present!r} is swapped in; "
                "leave `swapped_in` first"
            )
        away = [name for name, state in self._states.items() if state.location is Placement.HOST]
        wanted = {name: Placement.DEVICE for name in away if not names or name in names}
        if names:
            wanted |= {state.group.name: Placement.HOST for state in self._parts}
            self._snapshots.release_staged()
        report = TransitionReport(self.phase, self.phase or Phase.TRAINING)
        try:
            self._groups.move(wanted, report)
            for state in self._states.values():
                state.wait_arrival()  # groups that were already arriving are read too
            try:
                yield
            finally:
                self._groups.move(dict.fromkeys(wanted, Placement.HOST), report)
                self._groups.settle(release_cache=True)
        finally:
            self._groups.ledger.add_if_moved(report)

    def host_view(self, tensor: Tensor) -> Tensor | None:
        """View of this rank's contents of a tensor in its host copy; None if its group is on the device.

        The view shares the host copy's memory, which the next transition may overwrite. Device contents may be read
        afterwards: device work waits for arriving groups.
        """
        self._groups.refuse_if_failed("read or load a checkpoint's state")
        return self._groups.host_view(tensor)

    # -- memory

    def reserve(self, expected_bytes: Mapping[str, int]) -> None:
        """Take host memory for these groups or snapshots now, off the hot path.

        Raises:
            HostBudgetError: It does not fit; the message has the numbers.
        """
        for pinned, num_bytes in self.plan.host_bytes(expected_bytes).items():
            self._arena.reserve(num_bytes, pinned=pinned)

    def device_bytes(self) -> dict[str, int]:
        """Bytes of each group that are on the device now."""
        return device_bytes(self._groups.records())

    def host_bytes(self) -> dict[str, int]:
        """Bytes of host copies by group and snapshot."""
        sizes = {name: state.mirror.num_bytes for name, state in self._states.items()}
        return {**sizes, **self._snapshots.host_bytes()}

    def location(self, group: str) -> Placement:
        """Present place of a group."""
        return self._states[group].location

    def close(self) -> None:
        """Wait for copies and free all host memory. Groups that are on the host lose their contents."""
        self._groups.failure = "the manager was closed"
        self._layer_waits.remove()
        with ExitStack() as ends:
            # A failure, such as a copy's, is raised once the rest has been freed.
            ends.callback(self._arena.close)
            for state in self._states.values():
                ends.callback(state.mirror.close)
            ends.callback(self._snapshots.close)
            for state in self._states.values():  # before any memory is freed
                ends.callback(state.wait_copies)

    # -- inside

    def _of_row(self, row: str) -> list[GroupState]:
        return [state for name, state in self._states.items() if row_of(name) == row]

    def _settles(self, phase: Phase) -> bool:
        """Tell whether all copies out have finished once the phase has been entered."""
        return not self._overlap or PHASES[phase].settles

    @property
    def _releases_cache(self) -> bool:
        return self.phase is not None and self.plan.releases_cache(self.phase)

    def _check(self, wanted: Mapping[str, Placement], target: Phase) -> None:
        self._groups.refuse_if_failed(f"enter {target.value}")
        if self._snapshots.present is not None and target is not self.phase:
            raise ResidencyError(
                f"cannot enter {target.value} while snapshot {self._snapshots.present!r} is swapped in, because the "
                "group's own contents are not on the device; leave `swapped_in` first"
            )
        freed = [name for name, place in wanted.items() if place is Placement.FREED]
        if self._open_step and freed:
            raise OpenStepError(
                f"entering {target.value} would drop group {freed[0]!r} in training step {self._num_steps + 1}: no "
                "optimizer step has used its gradients yet. Call optim_step first, or zero_grad to give them up."
            )
