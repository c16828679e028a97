"""A library with NCCL's calls that need no GPU, compiled from `nccl_stand_in.c`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from nemo_offload_rl.policy.communicators import Communicators, Nccl

BROKEN = 7  # a communicator that cannot be resumed


def build_stand_in(folder: Path) -> Path:
    """Compile it into a folder; skips the test where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = folder / "libnccl_stand_in.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source], check=True)
    return library


class StandIn:
    """The compiled library, loaded into this process."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.calls.restype = ctypes.c_char_p
        self.nccl = Nccl(str(library))

    def calls(self) -> list[str]:
        """Those that succeeded so far: "suspend 1" and "resume 1", with the communicator."""
        return self._library.calls().decode().splitlines()


def are_suspended(communicators: Communicators) -> bool:
    """Whether a collective on the device would fail."""
    return bool(communicators._suspended)
