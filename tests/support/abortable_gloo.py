"""Gloo whose collectives can be aborted, as NCCL's can: torch's own gloo ignores `abort`."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


class AbortableGloo(dist.ProcessGroupGloo):
    """Ends all collectives with an error, here and on connected ranks, when it is aborted.

    No other thread may open sockets while one is made.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        before = _sockets()
        super().__init__(*args, **kwargs)
        self._sockets = {name: number for name, number in _sockets().items() if name not in before}
        _ALL.append(self)  # torch would forget the subclass

    def abort(self) -> None:
        now = _sockets()
        for name, number in self._sockets.items():
            if now.get(name) != number:
                continue  # closed
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # raises for the one that listens
                connection.shutdown(socket.SHUT_RDWR)


_ALL: list[AbortableGloo] = []


def _sockets() -> dict[str, int]:
    """Number of each open socket of this process, by the system's name."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{number}")
            if name.startswith("socket:"):
                found[name] = int(number)
    return found


def use_abortable_gloo() -> None:
    """Make groups of this process with it from now on."""
    distributed_c10d.ProcessGroupGloo = AbortableGloo  # type: ignore[misc]
