"""Checksums of files: XXH3 with 128 bits, as fast as memory. They find damage by storage, not changes made on purpose.

Bytes are summed on their way into the file (`SummedStream`), so that a checksum also covers damage by page cache and
disk. Files that another library writes are read back (`file_checksums`).
"""

from collections.abc import Buffer, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import xxhash

from nemo_offload_rl.utils.liveness import show_progress

_CHUNK_BYTES = 8 << 20
_NUM_THREADS = 4  # xxhash and the reads release the GIL


class SummedStream:
    """An append-only binary file, given open and empty, with a checksum of the written bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sum = xxhash.xxh3_128()
        # torch writes through these.
        self.tell, self.flush, self.fileno, self.close = file.tell, file.flush, file.fileno, file.close

    def write(self, data: Buffer) -> int:
        self._sum.update(data)
        return self._file.write(data)

    def checksum(self) -> str:
        """Checksum of all written bytes."""
        return self._sum.hexdigest()


def bytes_checksum(data: Buffer) -> str:
    """Checksum of bytes in memory."""
    return xxhash.xxh3_128_hexdigest(data)


def file_checksum(path: Path) -> str:
    """Checksum of a file, read in chunks.

    Raises:
        OSError: It cannot be read.
    """
    found, chunk = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(chunk):
            found.update(chunk[:size])
            show_progress()
    return found.hexdigest()


def file_checksums(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Checksums of files by their paths in `folder`, several read at a time.

    Raises:
        OSError: One cannot be read.
    """
    names = list(names)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        return dict(zip(names, threads.map(lambda name: file_checksum(folder / name), names), strict=True))


def files_below(folder: Path) -> list[str]:
    """Paths in `folder` of all files below it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def damaged_files(folder: Path, checksums: Mapping[str, str]) -> dict[str, str]:
    """Faults of files that differ from their checksums when they were written, by path in `folder`."""

    def fault(name: str) -> str | None:
        try:
            found = file_checksum(folder / name)
        except OSError as error:
            return f"cannot be read ({error.strerror or error})"
        return None if found == checksums[name] else f"has the checksum {found} instead of {checksums[name]}"

    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        faults = zip(checksums, threads.map(fault, checksums), strict=True)
    return {name: text for name, text in faults if text is not None}
