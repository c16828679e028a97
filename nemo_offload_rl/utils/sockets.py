"""Ports that a run opens, for this machine alone or with a token, and folders of Unix sockets.

Every port is opened with `listening`, and every request is checked with `Listening.admits`.
"""

import ipaddress
import os

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.engine import Listening

TOKEN_VARIABLE = "NEMO_OFFLOAD_RL_TOKEN"
MIN_TOKEN_LENGTH = 16


def listening(host: str, port: int, *, key: str) -> Listening:
    """Address and token of a port; the token is the environment variable `NEMO_OFFLOAD_RL_TOKEN`, never a YAML key.

    On a loopback address a token is required only if the variable is set.

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
            f"the environment variable {TOKEN_VARIABLE} has fewer than {MIN_TOKEN_LENGTH} characters, or some that are "
            "not printable ASCII; set it to the output of `openssl rand -hex 32`"
        )
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{key}={host} can be reached from other machines, and no token is set; set the environment variable "
            f"{TOKEN_VARIABLE} to a secret, such as the output of `openssl rand -hex 32`, or use 127.0.0.1"
        )
    return Listening(host, port, token)


def is_loopback(host: str) -> bool:
    """Whether no other machine reaches an address; of names, only `localhost` counts."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


MAX_SOCKET_PATH_BYTES = 107


def short_folder(folder: str, longest_name: str) -> str:
    """Return `folder`, or `/tmp` if the path of a socket would exceed the kernel's limit.

    Args:
        folder: Folder of sockets, such as TMPDIR.
        longest_name: The longest path of a socket below it.
    """
    fits = len(os.fsencode(os.path.join(folder, longest_name))) <= MAX_SOCKET_PATH_BYTES
    return folder if fits else "/tmp"
