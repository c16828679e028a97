"""The arenas of one worker, page-locked and pageable; they can be filled while other things load."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from nemo_offload_rl.residency.arena import HostAllowance, HostArena
from nemo_offload_rl.residency.device import Device


class HostArenas:
    """Makes each arena when it is first wanted.

    Args:
        device: Says what its host memory is made of.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._allowance = HostAllowance()
        self._arenas: dict[bool, HostArena] = {}
        self._filling: Future[None] | None = None

    def limit(self, num_bytes: int) -> None:
        """Take no more than this from the system, of both kinds together; what is planned must fit."""
        self._allowance.num_bytes = num_bytes

    def arena(self, pinned: bool) -> HostArena:
        """The page-locked arena, or the pageable one; waits for what `begin_reserve` has started."""
        self.wait()
        return self._arena(pinned)

    def reserve(self, num_bytes: Mapping[bool, int]) -> None:
        """Take this much host memory now (page-locked under True), if it is not there yet.

        Raises:
            HostBudgetError: It does not fit; the message says by how much.
        """
        self.wait()
        self._reserve(num_bytes)

    def begin_reserve(self, num_bytes: Mapping[bool, int]) -> None:
        """Start to take this much in another thread: pinning runs at memory speed and needs no Python."""
        self.wait()
        pool = ThreadPoolExecutor(1, thread_name_prefix="arena")
        self._filling = pool.submit(self._reserve, dict(num_bytes))
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until what was started is there.

        Raises:
            HostBudgetError: It did not fit.
        """
        if self._filling is not None:
            filling, self._filling = self._filling, None
            filling.result()

    @property
    def reserved_bytes(self) -> int:
        """Bytes taken from the system, of both kinds."""
        self.wait()
        return sum(arena.reserved_bytes for arena in self._arenas.values())

    def close(self) -> None:
        """Give all memory back to the system.

        Raises:
            ResidencyError: Blocks are still in use.
        """
        self.wait()
        for arena in self._arenas.values():
            arena.close()

    def _arena(self, pinned: bool) -> HostArena:
        if pinned not in self._arenas:
            self._arenas[pinned] = self._device.new_arena(pinned, self._allowance)
        return self._arenas[pinned]

    def _reserve(self, num_bytes: Mapping[bool, int]) -> None:
        for pinned, size in num_bytes.items():
            self._arena(pinned).reserve(size)
