"""Streams bundles of groups through the device, each around its own use only.

While one bundle is used, the next ones come and those before it leave. The present one and the next may always be
there; more come as far as a limit allows. A leaving bundle keeps its memory until its copies have finished or arriving
groups need it. In that case the memory is handed over: the copies in wait on the device for the copies out. The host
waits for neither, so both directions of the link stay busy.

The idea of staging an optimizer's states in chunks around the step comes from Megatron-LM's
ChunkedOptimizerStateOffloader (megatron/core/optimizer/cpu_offloading).
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain

from nemo_offload_rl.residency.state.group_set import GroupSet, Mover, records_of
from nemo_offload_rl.residency.state.group_state import GroupState
from nemo_offload_rl.residency.streams.work_memory import WorkMemory
from nemo_offload_rl.residency.table.ledger import TransitionReport
from nemo_offload_rl.residency.table.plan import Phase, Placement

type Bundle = Sequence[GroupState]
"""Groups that are on the device together."""

# Bundles started at a time in an update. Starting the copies of one takes the host a millisecond or two. Starting all
# that fit would hold up the first update, and with it the first copy out.
STARTED_AT_ONCE = 2


class Stream:
    """Brings bundles to the device in turn, some of them ahead of their use, and sends them back.

    Args:
        bundles: Bundles in the order of use. Those on the device already stay there until they have been used.
        mover: Moves them.
        limit_bytes: Most bytes of these groups, leaving ones included; beyond it only the next bundle comes ahead.
        overlap: Other bundles come and leave while the present one is used.
    """

    def __init__(self, bundles: Sequence[Bundle], mover: Mover, limit_bytes: int, *, overlap: bool = True) -> None:
        self._bundles = bundles
        self._mover = mover
        self._limit_bytes = limit_bytes
        self._overlap = overlap
        self._counted_bytes = self._most_held_bytes = self._held_bytes

    def through(self) -> Iterator[Bundle]:
        """Yield each bundle while it is on the device. It leaves once the next is asked for.

        Raises:
            DeviceOutOfMemoryError: There is no room for a bundle, even with all others away.
        """
        for index, bundle in enumerate(self._bundles):
            with self._mover.held_up():
                self._bring(index)
                if self._overlap:
                    self.fill(index + 1, at_least=1, most_new=STARTED_AT_ONCE)
            yield bundle
            with self._mover.held_up():
                for state in bundle:
                    self._mover.leave(state)
                self._look()
                if not self._overlap:
                    self._settle()

    def begin(self) -> None:
        """Start bringing the first bundles ahead of `through`, which may yet not be run."""
        with self._mover.held_up():
            self.fill(0, at_least=STARTED_AT_ONCE, most_new=STARTED_AT_ONCE)

    def fill(self, first: int = 0, at_least: int = 0, most_new: int | None = None) -> int:
        """Start bringing bundles from `first` on, as many as fit.

        Args:
            first: Index of the first bundle.
            at_least: Number of bundles to try even beyond the limit.
            most_new: Most bundles to start now; None for no limit.

        Returns:
            Number of these bundles that are on the device or on their way.
        """
        wanted = self._within_limit(first, at_least)
        kept = list(chain(*wanted))
        num_new = 0
        for num_ahead, bundle in enumerate(wanted):
            if any(state.location is Placement.HOST for state in bundle):
                if num_new == most_new:
                    return num_ahead
                num_new += 1
            if not all(self._try_bring(state, first, kept) for state in bundle):
                # Free memory may be in pieces. Each try costs a wait for the whole device.
                self._limit_bytes = min(self._limit_bytes, self._held_bytes)
                return num_ahead
        return len(wanted)

    def grown_bytes(self) -> int:
        """Growth of the most memory that the groups held at a time, since the last call."""
        grown_bytes = self._most_held_bytes - self._counted_bytes
        self._counted_bytes = self._most_held_bytes
        return grown_bytes

    @property
    def _held_bytes(self) -> int:
        return sum(state.held_bytes for state in chain(*self._bundles))

    def _bring(self, index: int) -> None:
        """Bring a bundle to the device for later work there."""
        bundle = self._bundles[index]
        if not any(state.mirror.num_bytes for state in bundle):
            # States that are made in their first update need the memory of earlier bundles.
            self._make_room(self._limit_bytes, index, bundle)
        for state in bundle:
            if not self._try_bring(state, index, bundle):
                # Everything else leaves, and from now on only the next bundle comes ahead.
                self._limit_bytes = 0
                for other in chain(*self._bundles):
                    if other not in bundle:
                        self._mover.leave(other)
                self._settle()
                self._mover.bring(state)
        for state in bundle:
            state.wait_arrival()

    def _settle(self) -> None:
        """Wait for leaving groups and release their memory."""
        for state in chain(*self._bundles):
            if state.is_leaving:
                state.settle()

    def _within_limit(self, first: int, at_least: int) -> Sequence[Bundle]:
        """Bundles from `first` on that fit together with earlier ones on the device, which may be in use."""
        in_use = (state for state in chain(*self._bundles[:first]) if state.location is Placement.DEVICE)
        free_bytes = self._limit_bytes - sum(state.held_bytes for state in in_use)
        for num_ahead, bundle in enumerate(self._bundles[first:]):
            free_bytes -= sum(state.mirror.num_bytes for state in bundle)
            if free_bytes < 0 and num_ahead >= at_least:
                return self._bundles[first : first + num_ahead]
        return self._bundles[first:]

    def _try_bring(self, state: GroupState, first: int, kept: Bundle) -> bool:
        if state.location is not Placement.HOST:
            return True
        if not state.held_bytes:  # else it is leaving, and may stay
            self._make_room(state.mirror.num_bytes, first, kept)
        has_come = self._mover.try_bring(state)
        self._look()
        return has_come

    def _look(self) -> None:
        self._most_held_bytes = max(self._most_held_bytes, self._held_bytes)

    def _make_room(self, num_bytes: int, first: int, kept: Bundle) -> None:
        """Have leaving groups hand over memory until the limit is met, in the order in which they left."""
        held_bytes = self._held_bytes
        # Leaving bundles from `first` on left first: they were used in the step before.
        for state in chain(*self._bundles[first:], *self._bundles[:first]):
            if held_bytes + num_bytes <= self._limit_bytes:
                return
            if state.is_leaving and state.held_bytes and state not in kept:
                held_bytes -= state.held_bytes
                state.hand_over()


class Streams:
    """The streams of a worker: an optimizer's parts in updates, and the layers of a teacher.

    Args:
        groups: All groups; their `failure` is set if the state was written only in part.
        updated: Groups on the device for the update of each part, its optimizer states first.
        teacher_layers: The layers of a teacher.
        work: Learns by how much the memory of updated groups grew.
    """

    def __init__(
        self,
        groups: GroupSet,
        updated: Sequence[Bundle],
        teacher_layers: Sequence[GroupState],
        work: WorkMemory,
    ) -> None:
        self._groups = groups
        self._updated = updated
        self._teacher_layers = [(layer,) for layer in teacher_layers]
        self._work = work
        self._num_written = 0

    def optimizer(self, phase: Phase | None, limit_bytes: int, release_cache: bool) -> Iterator[str]:
        """Stream the optimizer's parts; see `ResidencyManager.streamed`.

        Args:
            phase: Present phase. In OPTIM_STEP the first parts start coming now; the caller may yet ask for none.
            limit_bytes: Limit of the `Stream`.
            release_cache: Release cached memory to the driver first, if that has to wait for no copy.
        """
        opened = partial(self._open, self._updated, phase, Phase.OPTIM_STEP, limit_bytes, release_cache)
        # Parameters come only when asked for: a skipped update would leave them there for passes to find.
        if not (self._groups.overlap and phase is Phase.OPTIM_STEP and self._updated and self._writes_states_only):
            return self._updates(opened)
        stream = opened()
        stream.begin()
        self._work.add(stream.grown_bytes())
        return self._updates(lambda: stream)

    def _updates(self, opened: Callable[[], Stream]) -> Iterator[str]:
        if not self._updated:
            return
        stream = opened()
        try:
            for bundle in stream.through():
                # Counted here too, not only as the step begins: a part that came ahead and had to leave again has a
                # host copy that would count as up to date after the update.
                for state in bundle:
                    state.version += 1
                self._num_written += 1
                yield bundle[0].group.name
        finally:
            self._work.add(stream.grown_bytes())

    @property
    def _writes_states_only(self) -> bool:
        """Tell whether parameters stay on the device while their states stream."""
        return all(len(bundle) == 1 for bundle in self._updated)

    @property
    def has_updated(self) -> bool:
        """Tell whether the last update of the state came to its first part; a skipped one asks for none."""
        return self._num_written > 0

    def teacher(self, phase: Phase | None) -> Iterator[str]:
        """Stream the teacher's layers; see `ResidencyManager.streamed_layers`."""
        if self._teacher_layers:
            for (layer,) in self._open(self._teacher_layers, phase, Phase.TEACHER_INFERENCE).through():
                yield layer.group.name

    @contextmanager
    def writing(self, *, loads: bool) -> Generator[None]:
        """Guard writes of the state; see `ResidencyManager.writing_state`."""
        self._num_written = 0
        try:
            yield
        except BaseException as error:
            # An update that streams nothing writes everything at once; whether it had begun is not known.
            is_partial = self._num_written > 0 or not self._updated
            if is_partial and not (loads and self._writes_states_only):
                part = f" in part {self._num_written} of {len(self._updated)}" if self._updated else ""
                self._groups.failure = f"an update of the state broke off{part} ({type(error).__name__}: {error})"
            raise

    def _open(
        self,
        bundles: Sequence[Bundle],
        phase: Phase | None,
        target: Phase,
        limit_bytes: int = 0,
        release_cache: bool = False,
    ) -> Stream:
        report = TransitionReport(phase, phase or target)
        self._groups.ledger.add(report)
        if release_cache and not any(state.is_moving for state in self._groups.states.values()):
            self._groups.release_cache_for(report)
        streamed = {state.group.name for bundle in bundles for state in bundle}
        # Weak references reserve the keys while this runs: gradients end in between, states begin.
        others = {
            key: record.weak_ref
            for name, found in self._groups.records().items()
            if name not in streamed
            for key, record in found.items()
        }
        device = self._groups.device
        mover = Mover(device, report, partial(records_of, device=device, others=others))
        return Stream(bundles, mover, limit_bytes, overlap=self._groups.overlap)
