"""Saves the state of the policy's ranks, in the same way for every backend.

1. `CheckpointSaver.start`: rank 0 makes the folder `PATH.partial`, and the backend stages its state. For a save in the
   background, state on the device is copied into host memory. State on the host is read in place, so the next write of
   the state waits until the save has been written (`wait_before_write`).
2. The staged state is written; in the background, by a thread that calls no collective.
3. `CheckpointSaver.finish`: when every rank has written, rank 0 completes the folder and gives it its final name.

A failure on any rank is raised on every rank, as one line with its cause, and leaves no folder behind.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from nemo_offload_rl.backends.saving.folders import completed_by_all, new_partial, partial_of, publish
from nemo_offload_rl.memory.limits import HostShare, host_limits, reserve_host_memory
from nemo_offload_rl.protocols.saving import HostCopies, StagedSave, StateReader
from nemo_offload_rl.residency import ResidencyManager

logger = logging.getLogger(__name__)


_NOTABLE_WAIT_S = 0.1


class _Job:
    """One save: its folder, the state to write, and its error if it failed."""

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
    """Makes the saves of one rank, one at a time. Every rank makes the same calls.

    A save that is never finished leaves a `.partial` folder, which `recover_folders` removes.

    Args:
        residency: Manager of the rank's state.
    """

    def __init__(self, residency: ResidencyManager) -> None:
        self._residency = residency
        self._copies = HostCopies()
        self._job: _Job | None = None

    def start(self, path: Path, stage: Callable[[Path, StateReader], StagedSave], in_background: bool) -> None:
        """Begin a save, after the previous one has ended.

        Args:
            path: Final folder, created by `finish`.
            stage: The backend's `stage_save`.
            in_background: Copy the state on the device now, and write while the caller goes on. If host memory has no
                room for the copy, the state is written before this returns.

        Raises:
            CheckpointError: The folder cannot be made, or the previous save failed.
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
        """Wait for a save that reads host copies of the state, before that state is written or freed.

        Calls no collective; `finish` reports errors of the save.
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
        """Tell whether this rank has nothing left to write, also after an error."""
        return self._job is None or self._job.thread is None or not self._job.thread.is_alive()

    def finish(self) -> Mapping[str, str]:
        """Wait for the save under way, if any, and give its folder its final name.

        Returns:
            Checksum of each file that this rank has written, by its path in the folder.

        Raises:
            CheckpointError: The save failed; its files are removed.
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
        """Tell whether host memory has room for copies of the state that has none, for all ranks of this host."""
        verdict = reserve_host_memory({"copies for a save": missing_bytes}, host_limits())
        if isinstance(verdict, HostShare):
            return True
        logger.warning(
            "copies of %.2f GiB for a save in the background do not fit the %.2f GiB that %s leaves; the step "
            "waits for this save",
            verdict.needed_bytes / 2**30,
            verdict.limit.left_bytes / 2**30,
            verdict.limit.name,
        )
        return False
