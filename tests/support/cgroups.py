"""A memory cgroup of a test's own: a real one where the machine lets us make one, else files that look like one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

from nemo_offload_rl.memory import limits

NAME = "nemo_offload_rl_test"
VERSIONS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def write_tree(root: Path, folders: dict[str, dict[str, str]], own: str, version: int = 2) -> Path:
    """A fake /proc with a cgroup hierarchy beside it.

    Args:
        root: An empty folder.
        folders: Files by folder of the hierarchy, "/" among them.
        own: The folder that the process is in.
        version: Of the cgroups.

    Returns:
        The fake /proc.
    """
    proc, mount = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    for folder, files in folders.items():
        path = mount / folder.strip("/")
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name).write_text(text)
    (proc / "meminfo").write_text(f"MemTotal: {1 << 30} kB\nMemAvailable: {1 << 30} kB\n")
    kind, line = ("cgroup2", f"0::{own}") if version == 2 else ("cgroup", f"4:memory:{own}\n1:name=systemd:/other")
    (proc / "self" / "cgroup").write_text(line + "\n")
    (proc / "self" / "mountinfo").write_text(f"35 31 0:32 / {mount} rw,relatime - {kind} {kind} rw,memory\n")
    return proc


class OwnCgroup:
    """A cgroup that processes join; `limit` sets what they may take together."""

    def __init__(self, folder: Path, maximum: str) -> None:
        self.folder = folder
        self.maximum = maximum

    def limit(self, num_bytes: int) -> None:
        """Set the limit."""
        (self.folder / self.maximum).write_text(str(num_bytes))


def make_cgroup(fallback: Path) -> OwnCgroup:
    """Make one below this process's own, or fake files in the folder `fallback`; it says which."""
    for parent in limits._cgroup_folders(limits.PROC):
        folder = parent / f"{NAME}_{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        for maximum, _ in VERSIONS:
            if (folder / maximum).exists():
                sys.stdout.write(f"a real cgroup: {folder}\n")
                return OwnCgroup(folder, maximum)
        folder.rmdir()
    sys.stdout.write("no cgroup can be made here: files stand in for one\n")
    write_tree(fallback, {"/job": {"memory.max": "max", "memory.current": "0"}}, "/job")
    return OwnCgroup(fallback / "cgroup" / "job", "memory.max")


@contextmanager
def joined(cgroup: OwnCgroup, fallback: Path) -> Iterator[None]:
    """This process in the cgroup; back in its old one afterwards."""
    procs = cgroup.folder / "cgroup.procs"
    if not procs.exists():
        fake = partial(limits.read_host_limits, fallback / "proc")
        with patch.object(limits, "read_host_limits", fake):
            yield
        return
    procs.write_text(str(os.getpid()))
    try:
        yield
    finally:
        (cgroup.folder.parent / "cgroup.procs").write_text(str(os.getpid()))


def remove(cgroup: OwnCgroup) -> None:
    """Once all have left it."""
    if (cgroup.folder / "cgroup.procs").exists():
        cgroup.folder.rmdir()
