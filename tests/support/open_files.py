"""Files that this process holds open, with or without a name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def open_files(folder: Path) -> list[Path]:
    """Descriptors whose files are, or were, in a folder."""
    return [path for path, target in _descriptors() if target.startswith(str(folder))]


def _descriptors() -> Iterator[tuple[Path, str]]:
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # another thread has closed it since it was listed, as the listing itself is
            yield path, os.readlink(path)
