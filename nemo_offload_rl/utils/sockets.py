"""Who may talk to the ports that a run opens: this machine alone, or whoever bears the token.

Every port is opened with `listening`, and every request that comes is asked for `Listening.admits`.
"""

from __future__ import annotations

import ipaddress
import os

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.engine import Listening

TOKEN_VARIABLE = "NEMO_OFFLOAD_RL_TOKEN"
MIN_TOKEN_LENGTH = 16


def listening(host: str, port: int, *, key: str) -> Listening:
    """Where a port is opened. The token is the environment variable `NEMO_OFFLOAD_RL_TOKEN`, never a key of the YAML.

    On a loopback address a token is asked for only where the variable is set.

    Args:
        host: An address of this machine, or `0.0.0.0` or `::` for all of them.
        port: 0 for any that is free.
        key: The key that `host` comes from, for messages.

    Raises:
        ConfigError: The port would be open to other machines without a token, or with one that is easily guessed.
    """
    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is not None and (len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable()):
        raise ConfigError(
            f"the environment variable {TOKEN_VARIABLE} has fewer than {MIN_TOKEN_LENGTH} characters, or others than "
            "printable ASCII; set another, as `openssl rand -hex 32` prints one"
        )
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{key}={host} can be reached from other machines, and no token is set; set the environment variable "
            f"{TOKEN_VARIABLE} to a secret, as `openssl rand -hex 32` prints one, or use 127.0.0.1"
        )
    return Listening(host, port, token)


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own, which no other reaches; other names than `localhost` are not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


MAX_SOCKET_PATH_BYTES = 107


def short_folder(folder: str, longest_name: str) -> str:
    """Return `folder`, or `/tmp` if the path of a socket in `folder` would be too long.

    Args:
        folder: Where sockets go by default, such as TMPDIR.
        longest_name: The longest path of a socket below it.
    """
    fits = len(os.fsencode(os.path.join(folder, longest_name))) <= MAX_SOCKET_PATH_BYTES
    return folder if fits else "/tmp"
