"""What Megatron's rules ask of a configuration and of the model's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from nemo_offload_rl.config.schema import RunConfig
from nemo_offload_rl.models.shape import ModelShape
from nemo_offload_rl.policy.backends.megatron.config import MegatronConfig
from nemo_offload_rl.policy.backends.model_folder import is_hub_name


def megatron_section(cfg: RunConfig) -> MegatronConfig | None:
    """`policy.megatron_cfg` where that backend is the one to run, else None."""
    policy = cfg.policy
    return policy.megatron_cfg if policy.megatron_cfg is not None and policy.megatron_cfg.enabled else None


def local_model_config(cfg: RunConfig) -> Mapping[str, Any] | None:
    """The model's config.json with `policy.hf_config_overrides`; None for a broken folder.

    Of a hub's model it is known once a run has used it, or it was downloaded otherwise; None before.
    """
    name = cfg.policy.model_name
    path = Path(name) / "config.json"
    if is_hub_name(name):
        cached = try_to_load_from_cache(name, "config.json")
        path = Path(cached) if isinstance(cached, str) else path
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return {**config, **cfg.policy.hf_config_overrides} if isinstance(config, dict) else None


def num_experts(model: Mapping[str, Any]) -> int:
    """Experts of each mixture-of-experts layer, 0 in a dense model."""
    return ModelShape.of(model).num_experts
