"""Folders that appear only when complete: all ranks write under another name, then rank 0 renames the folder."""

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

# Errors of a failed write; torch's zip writer hides the system's error in a RuntimeError.
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)

_PROBE_BYTES = 1 << 16
_NOT_WRITTEN = "{path} cannot be written{where} ({reason}); free space there, or choose another folder"


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a folder for all ranks to write to; rank 0 names it `path` after the last rank has finished.

    Raises:
        CheckpointError: A rank could not write; the folder is removed.
    """
    new_partial(path)
    with completed_by_all(path):
        yield partial_of(path)
    publish(path)


def partial_of(path: Path) -> Path:
    """Return the temporary path under which the folder `path` is written."""
    return path.with_name(path.name + PARTIAL)


def replace_folder(path: Path) -> None:
    """Rename `partial_of(path)` to `path`, in place of an older folder; a folder at `path` is always complete.

    The order matters: if the process dies in between, `recover_folders` restores the older folder.
    """
    replaced = path.with_name(path.name + REPLACED)
    if path.exists():
        path.rename(replaced)
    partial_of(path).rename(path)
    sync_folder(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover_folders(parent: Path, pattern: str) -> None:
    """Clean up after saves whose process died: remove partial folders, restore replaced ones.

    Args:
        parent: The folder that holds them.
        pattern: Pattern of their names, such as `step_*`.
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
    """Flush a folder's entries to disk, so that its names survive a power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def not_written(error: BaseException, folder: Path) -> str:
    """Return a one-line message for the user about a failed write into `folder`."""
    return _NOT_WRITTEN.format(path=folder, where="", reason=_why_not_written(error, folder))


def _why_not_written(error: BaseException, folder: Path) -> str:
    """Return the system's reason for a failed write; tries another write if the error lacks it."""
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
    """Wait for every rank to leave the body; if any rank failed, remove the partial folder and raise on all ranks.

    An error outside of `WRITE_ERRORS` is a bug: its own rank raises it unchanged.
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
