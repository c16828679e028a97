"""Ports for rendezvous."""

from __future__ import annotations

import socket

from nemo_offload_rl.errors import ConfigError


def find_free_port(low: int, high: int) -> int:
    """The first port from `low` to `high`, both included, that nothing on this host listens on.

    Raises:
        ConfigError: All are taken.
    """
    for port in range(low, high + 1):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
    raise ConfigError(
        f"No port from {low} to {high} is free; change cluster.master_port_range_low or cluster.master_port_range_high"
    )
