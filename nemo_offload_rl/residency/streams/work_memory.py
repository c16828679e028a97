"""Measures the device memory that the work of each phase needs in addition to state.

A need is the largest difference in a phase between allocated bytes and those of state groups at the same time. State
that comes early leaves free, in addition, what passes have at the end of the phase: allocated bytes, and cached pieces.
If it took these, the allocator would return its whole cache to the CUDA driver and ask for memory again in every
micro-batch, or run out of memory with gibibytes free.
"""

import sys
from bisect import bisect_right
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from nemo_offload_rl.residency.device.device import Device
from nemo_offload_rl.residency.needs import RESERVE_BYTES, LearnedNeed, PassKind, PassNeed
from nemo_offload_rl.residency.state.group_state import GroupState
from nemo_offload_rl.residency.table.plan import PHASES, Phase, Placement

NO_ESTIMATES: Mapping[PassKind, PassNeed] = MappingProxyType({})


class WorkMemory:
    """Learns how much device memory the work of each phase needs in addition to the state groups.

    The methods under "answers" change nothing. Those under "events" record what happens.

    Args:
        device: Device whose peaks are read. If it has none, the work counts as needing nothing.
        estimates: Needs of passes as estimated before the run; measurements correct them.
    """

    def __init__(self, device: Device, estimates: Mapping[PassKind, PassNeed] = NO_ESTIMATES) -> None:
        self._device = device
        self._estimates = estimates
        self._phase: Phase | None = None
        self._held_bytes = 0  # of state groups, now
        self._leaving: dict[GroupState, int] = {}  # leaving since before the phase; bytes still in `_held_bytes`
        self._other_bytes = 0  # allocated when the phase began, without state groups
        self._peak_bytes = 0  # of the phase, before the last `restart_peak`
        self._kind: PassKind | None = None  # of the present pass; None before the first one of a phase
        self._size = 0  # of the present pass
        self._ran_out = False  # the present pass ran out of memory
        self._present: dict[PassKind | None, LearnedNeed] = {}  # of the present phase
        self._seen: dict[Phase, dict[PassKind | None, LearnedNeed]] = {}

    # -- answers

    def is_known(self, *phases: Phase) -> bool:
        """Tell whether the need of each phase is known.

        The present kind of pass must have been seen, and the kind that needs most twice: the first pass of a kind
        compiles, and divides its memory into other pieces than later ones.
        """
        return all(self._is_known(phase) for phase in phases)

    def room_bytes(self, *phases: Phase) -> int:
        """Memory that the work of these known phases leaves free; negative if one needs more.

        What work of the present phase has allocated, such as gradients, is part of its need and not free any more.
        """
        left_bytes = max(map(self._bytes_to_leave, phases)) - self._allocated_by_work_bytes()
        return self._device.room_bytes(max(0, left_bytes)) - RESERVE_BYTES

    def is_too_tight(self, kind: PassKind, size: int, *, has_prefetched: bool) -> bool:
        """Tell whether a pass in the present phase may need more than is free.

        A pass no larger than others of its kind does not. A pass of an unseen kind may if state was prefetched and its
        estimate, with a margin, is more than is free, or if there is no estimate.
        """
        need = self._seen.get(self._phase, {}).get(kind) if self._phase is not None else None
        if need is not None:
            return size > need.most_tokens and self._device.free_bytes() < need.expected_bytes(size)
        need = self._new_need(kind)
        is_short = not need.is_known or self._device.free_bytes() < need.expected_with_margin(size)
        return has_prefetched and is_short

    def too_large_size(self, kind: PassKind, size: int) -> int:
        """Return the smallest size of a pass, up to `size`, that is expected to need more than is free.

        `sys.maxsize` if there is none. Measured needs have a margin, but sizes that were seen are never too large.
        """
        need = self._seen.get(self._phase, {}).get(kind) if self._phase is not None else None
        need = need or self._new_need(kind)
        if not need.is_known or size <= need.most_tokens:
            return sys.maxsize
        needed_bytes = need.expected_with_margin if need.most_tokens else need.expected_bytes
        found = bisect_right(range(size + 1), self._device.free_bytes(), key=needed_bytes)
        return sys.maxsize if found > size else max(found, need.most_tokens + 1)

    def needed_bytes(self, phase: Phase) -> int:
        """Most memory that a phase's work has taken in addition to state; 0 before the phase has been seen once."""
        return max((need.most_bytes for need in self._seen.get(phase, {}).values()), default=0)

    # -- events

    def begin(self, phase: Phase, held_bytes: int, states: Iterable[GroupState] = ()) -> None:
        """Begin a phase with `held_bytes` of these groups on the device; some groups may still be leaving."""
        self._phase, self._kind, self._size, self._present = phase, None, 0, {}
        self._ran_out = False
        self._held_bytes = held_bytes
        # An engine's phase takes most at its start, and there is no time to look at each release.
        followed = () if PHASES[phase].is_for_engine else states
        self._leaving = {state: state.leaving_bytes for state in followed if state.leaving_bytes}
        self._peak_bytes = 0
        self._device.drain_peak_bytes()
        self._other_bytes = max(0, self._device.allocated_bytes() - held_bytes)

    def expect(self, kind: PassKind, size: int) -> None:
        """Begin a pass of this kind and size in tokens, in the present phase.

        A pass that is run again at its size, after it ran out of memory, counts as needing all that it has now.
        """
        self.restart_peak()
        is_again = self._ran_out and (kind, size) == (self._kind, self._size)
        self._kind, self._size, self._ran_out = kind, size, False
        has_bytes = self._device.free_bytes() + self._device.allocated_bytes() - self._held_bytes if is_again else 0
        self._include(has_bytes)
        self._present_need.num_passes += 1

    def ran_out(self) -> None:
        """Record that memory ran out in the present pass, so that it needs more than was counted as allocated.

        The peak of allocated bytes may be low nevertheless, if the allocator holds memory in pieces too small for the
        pass.
        """
        self._ran_out = True

    def end(self, *, is_whole: bool = True) -> int:
        """End the phase; remember the most that its work took, and return the peak of everything in it.

        Args:
            is_whole: The work was done. If not, its need is not remembered.
        """
        self.restart_peak()
        if self._phase is not None and is_whole:
            if not PHASES[self._phase].is_for_engine:  # an engine's phase has no passes
                # Without a pass what is allocated are parts that an update has left behind.
                used_bytes = self._allocated_by_work_bytes() if self._kind else 0
                self._present_need.include_kept(used_bytes + self._device.cached_for_work_bytes())
            seen = self._seen.setdefault(self._phase, {})
            for kind, need in self._present.items():
                known = seen.setdefault(kind, self._new_need(kind))
                known.include(need.most_bytes, need.most_tokens)
                known.include_kept(need.most_kept_bytes)
                known.num_passes += need.num_passes
        return self._peak_bytes

    @contextmanager
    def moving(self) -> Generator[None]:
        """Let state groups come or leave in the body, in which nothing else takes or releases memory.

        Work before the body is compared with the bytes held then, work after it with those held now.
        """
        self.restart_peak()
        before_bytes = self._device.allocated_bytes()
        try:
            yield
        finally:
            self._held_bytes += self._device.allocated_bytes() - before_bytes
            self._leaving = {state: state.leaving_bytes for state in self._leaving if state.leaving_bytes}
            self._drain_peak()

    @contextmanager
    def releasing(self, *, waits: bool = False) -> Generator[None]:
        """Let groups that were leaving when the phase began release memory in the body; see `moving`.

        Other groups may too: parts that pass through the device within a pass count as its work. If `waits`, the body
        waits for unfinished copies.
        """
        if not (self._leaving if waits else any(state.can_release for state in self._leaving)):
            yield
            return
        self.restart_peak()
        try:
            yield
        finally:
            self._subtract_what_left()
            self._drain_peak()

    def add(self, num_bytes: int) -> None:
        """Count more bytes as held by groups, for all work since the last `moving` or `restart_peak`."""
        self._held_bytes += num_bytes

    def restart_peak(self) -> int:
        """Return the most bytes allocated since the last call or the start of the phase; 0 if unknown."""
        peak_bytes = self._drain_peak()
        self._subtract_what_left()  # memory released outside of `releasing` counts as gone from the start
        if self._phase is not None:
            self._include(peak_bytes - self._not_of_work_bytes)
        return peak_bytes

    # -- inside

    def _is_known(self, phase: Phase) -> bool:
        seen = self._seen.get(phase)
        if seen is None or (phase is self._phase and self._kind is not None and self._kind not in seen):
            return False
        of_passes = [need for kind, need in seen.items() if kind is not None]
        return not of_passes or max(of_passes, key=lambda need: need.most_bytes).num_passes > 1

    def _drain_peak(self) -> int:
        peak_bytes = self._device.drain_peak_bytes()
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        return peak_bytes

    def _subtract_what_left(self) -> None:
        for state, before_bytes in list(self._leaving.items()):
            # A group that stays after all is held. One that has left and come back within a pass is that pass's work.
            is_back = state.location is Placement.DEVICE
            left_bytes = 0 if is_back else min(before_bytes, state.leaving_bytes)
            self._held_bytes -= 0 if is_back else before_bytes - left_bytes
            self._leaving[state] = left_bytes
            if not left_bytes:
                del self._leaving[state]

    @property
    def _not_of_work_bytes(self) -> int:
        """Allocated bytes that the present work has not taken: groups, and what an engine's phase began with."""
        is_for_engine = self._phase is not None and PHASES[self._phase].is_for_engine
        return self._held_bytes + (self._other_bytes if is_for_engine else 0)

    def _allocated_by_work_bytes(self) -> int:
        return max(0, self._device.allocated_bytes() - self._not_of_work_bytes)

    def _include(self, num_bytes: int) -> None:
        self._present_need.include(num_bytes, self._size)

    @property
    def _present_need(self) -> LearnedNeed:
        """Need of the present kind of pass in the present phase."""
        return self._present.setdefault(self._kind, self._new_need(self._kind))

    def _new_need(self, kind: PassKind | None) -> LearnedNeed:
        return LearnedNeed(None if kind is None else self._estimates.get(kind))

    def _bytes_to_leave(self, phase: Phase) -> int:
        """Bytes that state leaves to the present pass, or, for passes still to come, to the largest that was seen."""
        size_of = {self._kind: self._size} if phase is self._phase else {}
        return max(need.bytes_to_leave(size_of.get(kind, 0)) for kind, need in self._seen[phase].items())
