"""Folders for Unix sockets, whose paths the kernel limits."""

from __future__ import annotations

import os

MAX_SOCKET_PATH_BYTES = 107


def short_folder(folder: str, longest_name: str) -> str:
    """Return `folder`, or `/tmp` if the path of a socket in `folder` would be too long.

    Args:
        folder: Where sockets go by default, such as TMPDIR.
        longest_name: The longest path of a socket below it.
    """
    fits = len(os.fsencode(os.path.join(folder, longest_name))) <= MAX_SOCKET_PATH_BYTES
    return folder if fits else "/tmp"
