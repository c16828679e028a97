"""Settings of an engine: its section of the YAML, and values from other sections."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.data import TokenizerConfig
from nemo_offload_rl.keys.generation import VllmConfig


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """Settings of an engine's HTTP endpoint.

    Attributes:
        listening: Of the first engine; engine i has the port i further on, where it is not any.
        tokenizer: Whose chat template writes the prompts.
        add_bos: As `data.add_bos`.
        serving_chat_kwargs: Of `http_server_serving_chat_kwargs`.
    """

    listening: Listening
    tokenizer: TokenizerConfig
    add_bos: bool
    serving_chat_kwargs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class VllmSettings(VllmConfig):
    """One vLLM engine: `policy.generation.vllm_cfg` with what stands elsewhere."""

    model_name: str  # of `policy`
    hf_config_overrides: Mapping[str, Any]  # of `policy`
    vllm_kwargs: Mapping[str, Any]  # of `policy.generation`, handed to vllm.LLM as they are
    seed: int  # of `grpo`
    endpoint: EndpointSettings | None = None  # with `expose_http_server`


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
