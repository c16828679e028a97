"""Gloo whose collectives can be aborted, as NCCL's can: torch's own gloo ignores `abort`."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


class AbortableGloo(dist.ProcessGroupGloo):
    """Ends this rank's collectives with an error when it is aborted; the other ranks wait until they abort too.

    An abort ends only the reading of a connection. Gloo waits forever for a send whose write failed or was not finished
    (`Pair::signalException` leaves those out), so writes must succeed on both ranks until gloo has closed its end, and
    messages must fit into the sockets' buffers.

    No other thread may open sockets while one is made.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        before = _sockets()
        super().__init__(*args, **kwargs)
        # Copies of gloo's: after gloo has closed its own, the other rank can still write.
        self._connections: list[socket.socket] = []
        for name, number in _sockets().items():
            if name not in before:
                copy = socket.socket(fileno=os.dup(number))
                if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    copy.close()  # it listens, also for later groups
                else:
                    self._connections.append(copy)
        _ALL.append(self)  # torch would forget the subclass

    def abort(self) -> None:
        for connection in self._connections:
            with suppress(OSError):  # the other rank has ended
                connection.shutdown(socket.SHUT_RD)


_ALL: list[AbortableGloo] = []


def release_ended() -> None:
    """Forget those whose groups are destroyed, with their threads and connections."""
    groups = list(distributed_c10d._world.pg_map)
    _ALL[:] = [group._get_backend(torch.device("cpu")) for group in groups]


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
