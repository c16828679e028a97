"""The window of a stream: how many of the groups that come to the device in turn are there at once.

Two always may be: the present one and the next. More come as far as a limit allows. What leaves keeps its memory until
its copies have finished, or until what comes needs it: then it is handed over, and the copies in wait for those copies
out on the device. The host waits for neither, so both directions of the link stay busy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from nemo_offload_rl.residency.state.group_state import GroupState
from nemo_offload_rl.residency.table.groups import StorageRecord
from nemo_offload_rl.residency.table.ledger import TransitionReport
from nemo_offload_rl.residency.table.plan import Placement

type Bundle = Sequence[GroupState]
"""Groups that are on the device together."""


class Window:
    """Brings groups to the device in turn, some of them ahead of their use.

    Args:
        bundles: In the order of use. Those that are on the device already stay there.
        records: A group's present storages.
        limit_bytes: Bytes of these groups, leaving ones included, beyond which nothing comes ahead but the next bundle.
        report: What is charged.

    Attributes:
        most_held_bytes: Most device memory that the groups held at a time so far.
    """

    def __init__(
        self,
        bundles: Sequence[Bundle],
        records: Callable[[GroupState], Mapping[int, StorageRecord]],
        limit_bytes: int,
        report: TransitionReport,
    ) -> None:
        self._bundles = bundles
        self._records = records
        self._limit_bytes = limit_bytes
        self._report = report
        self.most_held_bytes = self.held_bytes

    @property
    def held_bytes(self) -> int:
        """Device memory that the groups hold."""
        return sum(state.held_bytes for state in self._states())

    def bring(self, index: int) -> None:
        """Have a bundle on the device for what runs there next.

        Raises:
            DeviceOutOfMemoryError: There is no room for it, even with all others away.
        """
        bundle = self._bundles[index]
        if not any(state.mirror.num_bytes for state in bundle):
            # What is made in its first update needs the room of those before.
            self._make_room(self._limit_bytes, index, bundle)
        for state in bundle:
            if state.location is Placement.HOST and not self._try_bring(state, index, bundle):
                self._send_back(bundle)
                state.arrive_alone(self._records(state), self._report)
        for state in bundle:
            state.wait_arrival()

    def fill(self, first: int, at_least: int = 0, most_new: int | None = None) -> int:
        """Start to bring bundles from `first` on, as many as fit.

        Args:
            first: The first that is wanted.
            at_least: So many are tried even beyond the limit.
            most_new: Start no more than these now; None for no limit.

        Returns:
            How many of them are on the device or on their way.
        """
        wanted = self._within_limit(first, at_least)
        kept = list(itertools.chain(*wanted))
        num_new = 0
        for num_ahead, bundle in enumerate(wanted):
            if any(state.location is Placement.HOST for state in bundle):
                if num_new == most_new:
                    return num_ahead
                num_new += 1
            for state in bundle:
                if state.location is Placement.HOST and not self._try_bring(state, first, kept):
                    # Free memory may be in pieces. Each try costs a wait for the whole device.
                    self._limit_bytes = min(self._limit_bytes, self.held_bytes)
                    return num_ahead
        return len(wanted)

    def leave(self, index: int) -> None:
        """A bundle has been used: it goes back to the host."""
        for state in self._bundles[index]:
            # Listed now: an optimizer makes its states in its first update.
            state.leave(Placement.HOST, self._records(state), self._report)
        self._look()

    def settle(self) -> None:
        """Wait for what is leaving and release its memory."""
        for state in self._states():
            if state.is_leaving:
                state.settle()

    def _states(self) -> Iterator[GroupState]:
        return itertools.chain(*self._bundles)

    def _within_limit(self, first: int, at_least: int) -> Sequence[Bundle]:
        """The bundles from `first` on that fit beside those before it, which may be in use."""
        in_use = (state for state in itertools.chain(*self._bundles[:first]) if state.location is Placement.DEVICE)
        free_bytes = self._limit_bytes - sum(state.held_bytes for state in in_use)
        for num_ahead, bundle in enumerate(self._bundles[first:]):
            free_bytes -= sum(state.mirror.num_bytes for state in bundle)
            if free_bytes < 0 and num_ahead >= at_least:
                return self._bundles[first : first + num_ahead]
        return self._bundles[first:]

    def _try_bring(self, state: GroupState, first: int, kept: Bundle) -> bool:
        if not state.held_bytes:  # else it is leaving, and may stay
            self._make_room(state.mirror.num_bytes, first, kept)
        has_come = state.try_arrive(self._records(state), self._report)
        self._look()
        return has_come

    def _look(self) -> None:
        self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)

    def _make_room(self, num_bytes: int, first: int, kept: Bundle) -> None:
        """Have those that leave hand over their memory, as far as the limit demands it: first what left first."""
        held_bytes = self.held_bytes
        # Bundles from `first` on that are leaving were used in the step before.
        for state in itertools.chain(*self._bundles[first:], *self._bundles[:first]):
            if held_bytes + num_bytes <= self._limit_bytes:
                return
            if state.is_leaving and state.held_bytes and state not in kept:
                held_bytes -= state.held_bytes
                state.hand_over()

    def _send_back(self, bundle: Bundle) -> None:
        """Memory ran out: everything else leaves, is waited for, and nothing comes ahead of the next from now on."""
        self._limit_bytes = 0
        for state in self._states():
            if state not in bundle and state.location is Placement.DEVICE:
                state.leave(Placement.HOST, self._records(state), self._report)
        self.settle()
