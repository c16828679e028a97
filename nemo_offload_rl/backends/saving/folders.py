"""Folders that are complete or not there: written under another name by all ranks, then renamed by rank 0."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError

from nemo_offload_rl.errors import CheckpointError

PARTIAL = ".partial"
REPLACED = ".replaced"

# How a writer fails: torch's zip writer hides the system's error in a RuntimeError.
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)

_PROBE_BYTES = 1 << 16
_NOT_WRITTEN = "{path} cannot be written{where} ({reason}); free space there, or choose another folder"


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A folder for all ranks to write to, named `path` by rank 0 after the last rank has finished.

    Raises:
        CheckpointError: A rank could not write; nothing is left of the folder.
    """
    new_partial(path)
    with completed_by_all(path):
        yield partial_of(path)
    publish(path)


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


def new_partial(path: Path) -> None:
    """Make the empty folder `partial_of(path)` on rank 0; every rank calls this."""
    with completed_by_all(path):
        if dist.get_rank() == 0:
            shutil.rmtree(partial_of(path), ignore_errors=True)
            partial_of(path).mkdir(parents=True)


def publish(path: Path) -> None:
    """Give the folder `partial_of(path)` its name on rank 0; every rank calls this."""
    with completed_by_all(path):
        if dist.get_rank() == 0:
            replace_folder(path)


@contextmanager
def completed_by_all(path: Path) -> Iterator[None]:
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
