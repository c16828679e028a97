"""Settings of an engine: its section of the YAML, and values that it needs from other sections."""

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
        listening: Address of the first engine; engine i uses the port i higher, unless any free port will do.
        tokenizer: Its chat template renders the prompts.
        add_bos: As `data.add_bos`.
        serving_chat_kwargs: As `http_server_serving_chat_kwargs`.
    """

    listening: Listening
    tokenizer: TokenizerConfig
    add_bos: bool
    serving_chat_kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class ServedAdapters:
    """Adapters that an engine applies.

    Attributes:
        max_rank: Rank of vLLM's buffers for them.
        modules: Last names of the layers that may have one.
        with_weights: Refits bring the model's own weights too, since the engine discards them when it sleeps.
            Otherwise they come from the model's folder, once.
    """

    max_rank: int
    modules: tuple[str, ...]
    with_weights: bool = False


@dataclass(frozen=True, kw_only=True)
class VllmSettings(VllmConfig):
    """One vLLM engine: `policy.generation.vllm_cfg`, and keys of other sections.

    Attributes:
        model_name: From `policy`.
        hf_config_overrides: From `policy`.
        vllm_kwargs: From `policy.generation`; passed to `vllm.LLM` unchanged.
        seed: From the section of the algorithm.
        endpoint: Settings of the HTTP server; None without `expose_http_server`.
        kept_kv_bytes: Most bytes of unfinished responses' KV blocks that each worker keeps on the host while the engine
            sleeps; None if the engine drops all of them.
        adapters: The policy's adapters, if the engine applies them itself; None if refits bring merged weights.
        returns_routed_experts: Responses come with the routing of their tokens.
    """

    model_name: str
    hf_config_overrides: Mapping[str, Any]
    vllm_kwargs: Mapping[str, Any]
    seed: int
    endpoint: EndpointSettings | None = None
    kept_kv_bytes: int | None = None
    adapters: ServedAdapters | None = None
    returns_routed_experts: bool = False


@dataclass(frozen=True)
class Listening:
    """Address of a server, and the token that requests must have.

    Attributes:
        host: The address to bind.
        port: The port; 0 for any free one.
        token: Token that requests must have; None for none. Not part of `repr`.
    """

    host: str
    port: int
    token: str | None = field(repr=False)

    def admits(self, authorization: str | None) -> bool:
        """Tell whether to answer a request with this `Authorization` header (`Bearer TOKEN` if there is a token)."""
        if self.token is None:
            return True
        return hmac.compare_digest((authorization or "").encode(), f"Bearer {self.token}".encode())

    def further(self, number: int) -> Listening:
        """Return the address `number` ports higher, or the same one if any free port will do."""
        return replace(self, port=self.port + number) if self.port else self

    def bound(self) -> socket.socket:
        """Bind a socket, so that the port is known before the server listens.

        Raises:
            ConfigError: The address does not belong to this machine, or the port is taken.
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
                "machine and a free port, or 0 for any free port"
            ) from error
        return bound
