"""Ports for rendezvous."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Collection

from nemo_offload_rl.errors import ConfigError


def find_free_port(low: int, high: int, given: Collection[int] = ()) -> int:
    """A port from `low` to `high`, both included, that nothing on this host listens on.

    The search starts anywhere in the range: jobs that start on one host at the same moment seldom meet, although a
    port is listened on only seconds after it was found.

    Args:
        low: First port of the range.
        high: Last port of the range.
        given: Ports to leave out.

    Raises:
        ConfigError: All are taken.
    """
    size = high - low + 1
    first = secrets.randbelow(size) if size > 0 else 0
    for offset in range(size):
        port = low + (first + offset) % size
        if port in given:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise ConfigError(
        f"No port from {low} to {high} is free; change cluster.master_port_range_low or cluster.master_port_range_high"
    )
