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
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from nemo_offload_rl.errors import CheckpointError
from nemo_offload_rl.policy.ray_memory import host_limits
from nemo_offload_rl.residency import HostShare, ResidencyManager, local_tensor, reserve_host_memory

logger = logging.getLogger(__name__)

PARTIAL, REPLACED = ".partial", ".replaced"

# How a writer fails: torch's zip writer hides the system's error in a RuntimeError.
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)

_PROBE_BYTES = 1 << 16
_NOTABLE_WAIT_S = 0.1
_NOT_WRITTEN = "{path} cannot be written{where} ({reason}); free space there, or choose another folder"


class StagedSave(Protocol):
    """One rank's part of a checkpoint, ready to be written."""

    def write(self) -> None:
        """Write this rank's files. Calls no collective, and may run in another thread."""
        ...

    def finish(self) -> None:
        """Complete the folder once every rank has written; may call collectives."""
        ...

    @property
    def checksums(self) -> Mapping[str, str]:
        """Of each file that this rank has written, by its path in the folder; complete after `finish`."""
        ...


class HostCopies:
    """Host memory that holds a checkpoint while it is written, kept from one save to the next."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def missing_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        """Bytes that copies of these would take beyond what is held under their names."""
        return sum(tensor.nbytes for name, tensor in tensors.items() if self._fitting(name, tensor) is None)

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of `tensor` on the CPU, in the memory that the last copy under this name had if it fits."""
        held = self._fitting(name, tensor)
        if held is None:
            held = self._tensors[name] = tensor.new_empty(tensor.shape, device="cpu")
        return held.copy_(tensor)

    def _fitting(self, name: str, tensor: Tensor) -> Tensor | None:
        held = self._tensors.get(name)
        return held if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype else None


class StateReader:
    """What a backend reads its tensors with while it stages a save, wherever residency keeps them.

    Args:
        residency: Knows which tensors are on the host.

    Attributes:
        reads_host_copies: Something that was fetched is residency's own host copy, which later writes of the state
            overwrite.
    """

    def __init__(self, residency: ResidencyManager) -> None:
        self._residency = residency
        self._tensors: dict[str, Tensor] = {}
        self.reads_host_copies = False

    def fetch(self, name: str, tensor: Tensor) -> Callable[[], Tensor]:
        """What gives the present contents of this rank's part of a tensor, on the CPU.

        Nothing is brought to the device for it: where a group is on the host, its host copy is read.

        Args:
            name: Unique in the checkpoint.
            tensor: A tensor, or a DTensor.
        """
        view = self._residency.host_view(tensor)
        if view is not None:
            self.reads_host_copies = True
            return lambda: view
        self._tensors[name] = local_tensor(tensor.detach())
        return lambda: self._tensors[name].cpu()

    def missing_bytes(self, copies: HostCopies) -> int:
        """Bytes that `copies` would grow by in `copy_to`."""
        return copies.missing_bytes(self._tensors)

    def copy_to(self, copies: HostCopies) -> None:
        """Copy what residency has no host copy of: from now on, that is read in the place of the tensors."""
        for name, tensor in self._tensors.items():
            self._tensors[name] = copies.copy(name, tensor)


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
        _new_partial(path)
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
        with _completed_by_all(job.path):
            if job.error is not None:
                raise job.error
        with _completed_by_all(job.path):
            job.staged.finish()
        _publish(job.path)
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


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A folder for all ranks to write to, named `path` by rank 0 after the last rank has finished.

    Raises:
        CheckpointError: A rank could not write; nothing is left of the folder.
    """
    _new_partial(path)
    with _completed_by_all(path):
        yield partial_of(path)
    _publish(path)


def partial_of(path: Path) -> Path:
    """Where a folder is written before it has its name."""
    return path.with_name(path.name + PARTIAL)


def replace_folder(path: Path) -> None:
    """Give the folder `partial_of(path)` its name, in place of an older one; what is under the name is always whole.

    The order matters to a process that dies in between: `recover_folders` undoes what it left.
    """
    replaced = path.with_name(path.name + REPLACED)
    if path.exists():
        path.rename(replaced)
    partial_of(path).rename(path)
    sync_folder(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover_folders(parent: Path, pattern: str) -> None:
    """Undo what saves left when their process died: drop partial folders, bring replaced ones back.

    Args:
        parent: Where the folders are.
        pattern: Which names they have, such as `step_*`.
    """
    for partial in parent.glob(pattern + PARTIAL):
        shutil.rmtree(partial, ignore_errors=True)
    for replaced in parent.glob(pattern + REPLACED):
        path = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if path.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(path)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def not_written(error: BaseException, folder: Path) -> str:
    """What to tell a user about a failed write into `folder`, in one line."""
    return _NOT_WRITTEN.format(path=folder, where="", reason=_why_not_written(error, folder))


def _why_not_written(error: BaseException, folder: Path) -> str:
    """The system's reason for a failed write, in words; from another write where the error does not have it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        seen = seen.__cause__ or seen.__context__
    probe = folder / "probe"
    try:
        probe.write_bytes(bytes(_PROBE_BYTES))
    except OSError as refused:
        return refused.strerror or str(refused)
    finally:
        probe.unlink(missing_ok=True)
    return " ".join(str(error).split()) or type(error).__name__


def _new_partial(path: Path) -> None:
    with _completed_by_all(path):
        if dist.get_rank() == 0:
            shutil.rmtree(partial_of(path), ignore_errors=True)
            partial_of(path).mkdir(parents=True)


def _publish(path: Path) -> None:
    with _completed_by_all(path):
        if dist.get_rank() == 0:
            replace_folder(path)


@contextmanager
def _completed_by_all(path: Path) -> Iterator[None]:
    """Wait for every rank to leave the body. If one of them failed to write, all raise and the partial folder goes.

    What is no failure to write is a bug: its rank raises it as it is.
    """
    failure: BaseException | None = None
    text: str | None = None
    try:
        yield
    except WRITE_ERRORS as error:
        failure, text = error, _why_not_written(error, partial_of(path))
    except BaseException as error:
        failure, text = error, f"{type(error).__name__}: {error}"
    texts: list[str | None] = [text] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    failed: Mapping[int, str] = {rank: reason for rank, reason in enumerate(texts) if reason is not None}
    if not failed:
        return
    if dist.get_rank() == 0:
        shutil.rmtree(partial_of(path), ignore_errors=True)
    if failure is not None and not isinstance(failure, WRITE_ERRORS):
        raise failure
    rank, reason = next(iter(failed.items()))
    where = f" by rank {rank}" if len(texts) > 1 else ""
    raise CheckpointError(_NOT_WRITTEN.format(path=path, where=where, reason=reason)) from failure
