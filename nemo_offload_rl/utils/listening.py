"""Who may talk to the ports that a run opens: this machine alone, or whoever bears the token.

Every port is opened with `listening`, and every request that comes is asked for `Listening.admits`.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
from dataclasses import dataclass, field, replace

from nemo_offload_rl.errors import ConfigError

TOKEN_VARIABLE = "NEMO_OFFLOAD_RL_TOKEN"
MIN_TOKEN_LENGTH = 16


@dataclass(frozen=True)
class Listening:
    """Where to listen, and what a request must bear.

    Attributes:
        host: The address to bind.
        port: 0 for any that is free.
        token: What requests must bear; None where none is asked for. Not part of `repr`.
    """

    host: str
    port: int
    token: str | None = field(repr=False)

    def admits(self, authorization: str | None) -> bool:
        """Whether to answer a request with this `Authorization` header: `Bearer TOKEN`, where there is a token."""
        if self.token is None:
            return True
        return hmac.compare_digest((authorization or "").encode(), f"Bearer {self.token}".encode())

    def further(self, number: int) -> Listening:
        """The same `number` ports further on, where the port is not any that is free."""
        return replace(self, port=self.port + number) if self.port else self

    def bound(self) -> socket.socket:
        """A socket bound there, whose number of the port is known before anything listens.

        Raises:
            ConfigError: The address is not of this machine, or the port is taken.
        """
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((self.host, self.port))
        except OSError as error:
            bound.close()
            raise ConfigError(
                f"cannot listen on {self.host} port {self.port} ({error.strerror or error}); choose an address of this "
                "machine and a port that is free, or port 0 for any"
            ) from error
        return bound


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
