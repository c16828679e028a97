"""What the work of each phase takes of the device beside state, learned as phases pass.

That is the most that was allocated, or what the allocator holds for passes at the end, where this is more: memory in
pieces that fit nothing else. State that took it would have the allocator give all of its cache back, and ask the driver
again, in every micro-batch.
"""

from __future__ import annotations

from nemo_offload_rl.residency.device import Device
from nemo_offload_rl.residency.plan import PHASES, Phase

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
        self._other_bytes = 0  # allocated when the phase began, beside state groups
        self._peak_bytes = 0  # of the phase, before the last `restart_peak`
        self._needed_bytes: dict[Phase, int] = {}
        self._size = 0
        self._seen_sizes: dict[Phase, int] = {}

    def begin(self, held_bytes: int) -> None:
        """A phase begins with `held_bytes` of state groups on the device."""
        self._held_bytes = held_bytes
        self._peak_bytes = 0
        self._device.drain_peak_bytes()
        self._other_bytes = max(0, self._device.allocated_bytes() - held_bytes)

    def add(self, num_bytes: int) -> None:
        """More of the groups came to the device during the phase."""
        self._held_bytes += num_bytes

    def restart_peak(self) -> int:
        """Most bytes that were allocated since the last call, or since the phase began; 0 where that is not known."""
        peak_bytes = self._device.drain_peak_bytes()
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
        return peak_bytes

    def expect(self, size: int) -> None:
        """A pass of this size, in any unit, is about to begin in the present phase."""
        self._size = max(self._size, size)

    def end(self, phase: Phase | None, *, is_whole: bool = True) -> int:
        """The phase ends; remember the most that its work took, and return the peak of everything in it.

        Args:
            phase: The phase.
            is_whole: Its work was done. If not, it says nothing of what the work takes.
        """
        self.restart_peak()
        peak = self._peak_bytes
        if phase is not None and is_whole:
            if PHASES[phase].is_for_engine:  # no passes; and the engine counts what is free beside all that is there
                needed_bytes = max(0, peak - self._held_bytes - self._other_bytes)
            else:
                needed_bytes = max(0, peak - self._held_bytes, self._device.cached_for_work_bytes())
            self._needed_bytes[phase] = max(needed_bytes, self._needed_bytes.get(phase, 0))
            self._seen_sizes[phase] = max(self._size, self._seen_sizes.get(phase, 0))
        self._size = 0
        return peak

    def needed_bytes(self, phase: Phase) -> int:
        """The most that the work of a phase has taken beside state so far; 0 before the phase has been seen once."""
        return self._needed_bytes.get(phase, 0)

    def is_known(self, phase: Phase | None) -> bool:
        """Whether the phase has been seen once."""
        return phase in self._needed_bytes

    def has_room(self, phase: Phase | None, num_bytes: int) -> bool:
        """Whether `num_bytes` fit beside the work of `phase`; never before the phase has been seen once."""
        return phase is not None and phase in self._needed_bytes and num_bytes <= self.room_bytes(phase)

    def room_bytes(self, *phases: Phase) -> int:
        """What is free beside the work of each of these phases, which have been seen; negative where one needs more."""
        return self._device.room_bytes(int(MARGIN * max(map(self._expected_bytes, phases)))) - RESERVE_BYTES

    def is_too_tight(self, phase: Phase) -> bool:
        """Whether a pass that is larger than any before it may need more than is free beside what was prefetched."""
        if phase not in self._needed_bytes or self._size <= self._seen_sizes[phase]:
            return False
        return self._device.free_bytes() < self._expected_bytes(phase)

    def _expected_bytes(self, phase: Phase) -> int:
        """What the present pass needs: as much as was seen, and in proportion for a larger one."""
        seen = self._seen_sizes[phase]
        return int(self._needed_bytes[phase] * max(1.0, self._size / seen if seen else 1.0))
