"""Saving from the ranks of a policy, the same for every backend: what is read where, by whom, and when it counts.

1. `CheckpointSaver.start`: rank 0 makes the folder `PATH.partial`; the backend stages its state. For a save in the
   background what is on the device is copied into host memory; of what is on the host the host copy is read, and the
   next write of the state (`wait_before_write`) waits until the save has been written.
2. The staged state is written, in the background by a thread of its own, which calls no collective.
3. `CheckpointSaver.finish`: when every rank has written, rank 0 completes the folder and gives it its name.

A failure on any rank is raised on every rank, as one line with its cause, and leaves no folder behind.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from nemo_offload_rl.backends.saving.folders import completed_by_all, new_partial, partial_of, publish
from nemo_offload_rl.memory.ray_memory import host_limits
from nemo_offload_rl.protocols.saving import HostCopies, StagedSave, StateReader
from nemo_offload_rl.residency import HostShare, ResidencyManager, reserve_host_memory

logger = logging.getLogger(__name__)


_NOTABLE_WAIT_S = 0.1


class _Job:
    """One save: its folder, what is to be written, and how that went."""

    def __init__(self, path: Path, staged: StagedSave) -> None:
        self.path = path
        self.staged = staged
        self.reads_host_copies = False
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def write(self) -> None:
        start = time.perf_counter()
        try:
            self.staged.write()
        except BaseException as error:
            self.error = error  # raised by `finish`, on every rank
        logger.info("%s written in %.1f s", self.path.name, time.perf_counter() - start)


class CheckpointSaver:
    """The saves of one rank, one at a time. Every rank makes the same calls.

    A save that is never finished leaves a folder without a name, which `recover_folders` removes.

    Args:
        residency: The rank's state.
    """

    def __init__(self, residency: ResidencyManager) -> None:
        self._residency = residency
        self._copies = HostCopies()
        self._job: _Job | None = None

    def start(self, path: Path, stage: Callable[[Path, StateReader], StagedSave], in_background: bool) -> None:
        """Begin a save, after the one before it has ended.

        Args:
            path: The folder that `finish` makes appear.
            stage: The backend's `stage_save`.
            in_background: Copy what is on the device now and write while the caller goes on. Where host memory has no
                room for the copy, the state is written before this returns.

        Raises:
            CheckpointError: The folder cannot be made, or the save before this one failed.
        """
        self.finish()
        new_partial(path)
        reader = StateReader(self._residency)
        job = self._job = _Job(path, stage(partial_of(path), reader))
        job.reads_host_copies = reader.reads_host_copies
        if in_background and self._has_room(reader.missing_bytes(self._copies)):
            reader.copy_to(self._copies)
            job.thread = threading.Thread(target=job.write, name=f"save {path.name}", daemon=True)
            job.thread.start()
        else:
            job.write()

    def wait_before_write(self) -> None:
        """Wait for the save under way where it reads host copies of the state, which is about to be written or freed.

        Calls no collective; how the save went is told by `finish`.
        """
        job = self._job
        if job is None or job.thread is None or not job.reads_host_copies:
            return
        start = time.perf_counter()
        job.thread.join()
        waited_s = time.perf_counter() - start
        if waited_s > _NOTABLE_WAIT_S:
            logger.info("the optimizer step waited %.1f s for %s to be written", waited_s, job.path.name)

    def is_done(self) -> bool:
        """Whether this rank has nothing left to write, well or badly."""
        return self._job is None or self._job.thread is None or not self._job.thread.is_alive()

    def finish(self) -> Mapping[str, str]:
        """Wait for the save under way, if there is one, and give its folder its name.

        Returns:
            Checksum of each file that this rank has written, by its path in the folder.

        Raises:
            CheckpointError: It could not be written; nothing of it is left.
        """
        job, self._job = self._job, None
        if job is None:
            return {}
        if job.thread is not None:
            job.thread.join()
        with completed_by_all(job.path):
            if job.error is not None:
                raise job.error
        with completed_by_all(job.path):
            job.staged.finish()
        publish(job.path)
        return job.staged.checksums

    def _has_room(self, missing_bytes: int) -> bool:
        """Whether the ranks of this host can all copy what of their state residency has no host copy of."""
        verdict = reserve_host_memory({"copies for a save": missing_bytes}, host_limits())
        if isinstance(verdict, HostShare):
            return True
        logger.warning(
            "copies of %.2f GiB for a save in the background do not fit the %.2f GiB that %s leaves; this save is "
            "waited for",
            verdict.needed_bytes / 2**30,
            verdict.limit.left_bytes / 2**30,
            verdict.limit.name,
        )
        return False
