"""What an engine is told: its section of the YAML, and what it needs from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.data.config import TokenizerConfig
from nemo_offload_rl.generation.config import VllmConfig
from nemo_offload_rl.utils.listening import Listening


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """What an engine serves over HTTP, and to whom.

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
