"""A frozen copy in a file: it takes two pieces of host memory, whatever its size.

The file has no name, so nothing is left of it once its process has ended, however that ends. Its bytes are written
once, as the device has them, and read into one piece of page-locked memory while the other one crosses the link. What
the kernel keeps of the file in its page cache it drops as soon as memory is needed.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_offload_rl.residency.device.device import Device, FinishedTransfer, Transfer
from nemo_offload_rl.residency.device.pieces import Copy
from nemo_offload_rl.residency.host.arena import ALIGNMENT_BYTES, HostArena, aligned
from nemo_offload_rl.residency.state.frozen import Content, FrozenCopy
from nemo_offload_rl.residency.table.errors import ResidencyError

PIECE_BYTES = 64 << 20  # read at once; large enough for the speed of disk and link
_NUM_BUFFERS = 2  # a piece is read while the one before it crosses
_NUM_READERS = 8  # one thread copies less from the page cache than the link takes
_READ_BYTES = 4 << 20  # of one thread at a time, at least
# File systems whose files are main memory.
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


def staging_bytes(num_bytes: int) -> int:
    """Host memory of a disk copy of `num_bytes`."""
    return _NUM_BUFFERS * _piece_bytes(num_bytes)


def _piece_bytes(num_bytes: int) -> int:
    return min(PIECE_BYTES, aligned(-(-num_bytes // _NUM_BUFFERS)))


def disk_problem(folder: Path, num_bytes: int) -> str | None:
    """Why a folder cannot take files of `num_bytes` together; None where it can, as far as can be seen now."""
    if not folder.is_dir():
        return f"{folder} is no folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} cannot be written to"
    if (kind := _file_system(folder)) in _MEMORY_FILE_SYSTEMS:
        return f"{folder} is main memory ({kind})"
    found = os.statvfs(folder)
    if (free_bytes := found.f_bavail * found.f_frsize) < num_bytes:
        return f"{folder} has {free_bytes / 2**30:.2f} GiB free of the {num_bytes / 2**30:.2f} GiB that are needed"
    return None


def _file_system(folder: Path) -> str | None:
    """Kind of the file system that a folder is on, by its device number; None where the kernel does not say."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if mount.split(" ")[2] == number:
            return kind.split(" ")[0]
    return None


@dataclass(frozen=True)
class _Place:
    storage: StorageWeakRef  # keeps the key from being used again
    offset_bytes: int
    num_bytes: int


@dataclass
class _Piece:
    """Neighbours in the file: where each goes, and where it is in the piece."""

    offset_bytes: int
    num_bytes: int = 0
    targets: list[tuple[Tensor, int]] = field(default_factory=list)


class Reading:
    """Copies to the device that a thread starts as it reads their bytes. Done once they have arrived.

    Only `wait_device` raises what went wrong: memory that was to be filled may be released all the same.
    """

    def __init__(self, future: Future[float], num_bytes: int, num_copies: int) -> None:
        self.num_bytes = num_bytes
        self._future = future
        self._num_copies = num_copies

    def num_finished(self) -> int:
        return self._num_copies if self.finished else 0

    @property
    def finished(self) -> bool:
        return self._future.done()

    def wait_some(self) -> None:
        self.wait_host()

    def wait_host(self) -> float:
        start = time.perf_counter()
        wait([self._future])
        return time.perf_counter() - start

    def wait_device(self, num_copies: int | None = None) -> None:
        """Blocks, unlike that of other transfers: what is not read yet the device cannot wait for."""
        self._future.result()

    def seconds(self) -> float:
        return 0.0 if self._future.exception() else self._future.result()


class DiskCopy(FrozenCopy):
    """Bytes in a file without a name.

    Args:
        name: For messages.
        folder: Where the file is.
        num_bytes: Of everything that is to be kept, about; smaller copies need less host memory.
        arena: Host memory for two pieces.

    Raises:
        ResidencyError: No file can be made there.
        HostBudgetError: There is no host memory for the pieces.
    """

    def __init__(self, name: str, folder: Path, num_bytes: int, arena: HostArena) -> None:
        self._name = name
        self._folder = folder
        self._places: dict[int, _Place] = {}
        self._end_bytes = 0
        self._piece_bytes = _piece_bytes(max(1, num_bytes))
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  (`close` ends it)
        except OSError as error:
            raise self._failure("made", error) from error
        self._arena = arena
        try:
            self._block = arena.alloc(_NUM_BUFFERS * self._piece_bytes, name)
        except BaseException:
            self._file.close()
            raise
        self._buffers = list(self._block.buffer.split(self._piece_bytes))
        self._copier = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix=f"{name} reader")

    def keep(self, device: Device, contents: Sequence[Content]) -> None:
        try:
            self._keep(device, contents)
        except OSError as error:
            raise self._failure("written", error) from error

    def _keep(self, device: Device, contents: Sequence[Content]) -> None:
        start, fd = self._end_bytes, self._file.fileno()
        places = {}
        for content in contents:
            places[content.record.key] = _Place(content.record.weak_ref, self._end_bytes, content.kept_bytes)
            self._end_bytes += aligned(content.kept_bytes)
        if self._end_bytes > start:
            os.posix_fallocate(fd, start, self._end_bytes - start)  # a full disk is known before anything is copied
        for content in contents:
            offset = places[content.record.key].offset_bytes
            for own in content.own.split(max(1, self._piece_bytes // content.kept.itemsize)):
                kept = own.to(content.kept).view(torch.uint8)
                host = self._buffers[0][: kept.numel()]
                device.copy_out([Copy(kept, host)]).wait_host()
                _write(fd, host, offset)
                offset += kept.numel()
        os.fdatasync(fd)  # else an error of the disk would be known to nobody
        self._places |= places

    def has(self, key: int) -> bool:
        return key in self._places

    def size_bytes(self, key: int) -> int:
        return self._places[key].num_bytes

    def copy_in(self, device: Device, places: Iterable[tuple[int, Tensor]], *, behind: bool = False) -> Transfer:
        pieces = self._pieces(places)
        if not pieces:
            return FinishedTransfer(0, 0, 0.0)
        future = self._copier.submit(self._bring, device.copier_in(), pieces)
        num_bytes = sum(target.numel() for piece in pieces for target, _ in piece.targets)
        reading = Reading(future, num_bytes, sum(len(piece.targets) for piece in pieces))
        if not behind:
            reading.wait_device()
        return reading

    @property
    def num_bytes(self) -> int:
        return self._block.buffer.numel()

    def close(self) -> None:
        self._copier.shutdown()
        self._readers.shutdown()
        self._file.close()
        self._arena.free(self._block)

    # -- inside

    def _pieces(self, places: Iterable[tuple[int, Tensor]]) -> list[_Piece]:
        """Neighbours together, as far as they fit a buffer, and large ones divided."""
        pieces: list[_Piece] = []
        for key, place in places:
            offset = self._places[key].offset_bytes
            for target in place.split(self._piece_bytes):
                last = pieces[-1] if pieces else None
                gap = offset - (last.offset_bytes + last.num_bytes) if last is not None else -1
                end = offset + target.numel()
                if last is None or not 0 <= gap < ALIGNMENT_BYTES or end - last.offset_bytes > self._piece_bytes:
                    last = _Piece(offset)
                    pieces.append(last)
                last.targets.append((target, offset - last.offset_bytes))
                last.num_bytes = end - last.offset_bytes
                offset = end
        return pieces

    def _bring(self, copy_in: Callable[[Iterable[Copy]], Transfer], pieces: Sequence[_Piece]) -> float:
        """Read and copy all pieces, on the copier's thread; returns the seconds."""
        start = time.perf_counter()
        started: list[Transfer] = []
        try:
            for index, piece in enumerate(pieces):
                if index >= _NUM_BUFFERS:
                    started[index - _NUM_BUFFERS].wait_host()
                buffer = self._buffers[index % _NUM_BUFFERS]
                self._read(piece, buffer)
                started.append(copy_in([Copy(it, buffer[at : at + it.numel()]) for it, at in piece.targets]))
        finally:
            for transfer in started[-_NUM_BUFFERS:]:
                transfer.wait_host()
        return time.perf_counter() - start

    def _read(self, piece: _Piece, buffer: Tensor) -> None:
        step = max(_READ_BYTES, aligned(-(-piece.num_bytes // _NUM_READERS)))
        parts = buffer[: piece.num_bytes].split(step)
        offsets = [piece.offset_bytes + index * step for index in range(len(parts))]
        try:
            # All of them end before this does: the buffer is used again.
            wait(
                tasks := [
                    self._readers.submit(_read, self._file.fileno(), *it) for it in zip(parts, offsets, strict=True)
                ]
            )
            for task in tasks:
                task.result()
        except OSError as error:
            raise self._failure("read", error) from error

    def _failure(self, what: str, error: OSError) -> ResidencyError:
        return ResidencyError(
            f"the file of {self._name!r} in {self._folder} could not be {what}: {error.strerror or error}; choose "
            "another policy.reference_dir, or null to keep it in host memory"
        )


def _write(fd: int, host: Tensor, offset_bytes: int) -> None:
    rest = memoryview(host.numpy())
    while rest:
        count = os.pwrite(fd, rest, offset_bytes)
        rest, offset_bytes = rest[count:], offset_bytes + count


def _read(fd: int, host: Tensor, offset_bytes: int) -> None:
    rest = memoryview(host.numpy())
    while rest:
        count = os.preadv(fd, [rest], offset_bytes)
        if count == 0:
            raise OSError(f"it ends at byte {offset_bytes}")
        rest, offset_bytes = rest[count:], offset_bytes + count
