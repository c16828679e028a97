"""What an engine is told: its section of the YAML, and what it needs from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.generation.config import VllmConfig


@dataclass(frozen=True, kw_only=True)
class VllmSettings(VllmConfig):
    """One vLLM engine: `policy.generation.vllm_cfg` with what stands elsewhere."""

    model_name: str  # of `policy`
    hf_config_overrides: Mapping[str, Any]  # of `policy`
    vllm_kwargs: Mapping[str, Any]  # of `policy.generation`, handed to vllm.LLM as they are
    seed: int  # of `grpo`
