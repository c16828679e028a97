"""Notices when more stays on the device than the plan says."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nemo_offload_rl.residency.audit import REPORTED_FROM_BYTES, Leftover
from nemo_offload_rl.residency.device import Device
from nemo_offload_rl.residency.storage import StorageRecord


class Auditor:
    """Looks for leftovers only when the unexplained memory has become notably more than it ever was."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._unexplained_bytes = 0

    def check(
        self, records: Mapping[str, Mapping[int, StorageRecord]], expected: Collection[str], trimmed: bool
    ) -> list[Leftover]:
        """Leftovers of this transition, usually none.

        Args:
            records: Storages by group.
            expected: Groups that may be on the device now.
            trimmed: Cached memory has just been given back, so that what is still cached belongs to the leftovers.
        """
        explained = sum(record.storage.nbytes() for name in expected for record in records[name].values())
        unexplained = self._device.allocated_bytes() - explained
        if trimmed:
            unexplained += self._device.cached_bytes()
        if unexplained <= self._unexplained_bytes + REPORTED_FROM_BYTES:
            return []
        self._unexplained_bytes = unexplained
        return self._device.leftovers(records, expected)
