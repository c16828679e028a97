"""Files that this process holds open, with or without a name."""

from __future__ import annotations

import os
from pathlib import Path


def open_files(folder: Path) -> list[Path]:
    """Descriptors whose files are, or were, in a folder."""
    descriptors = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [path for path in descriptors if os.readlink(path).startswith(str(folder))]
