"""Checks for settings of a model's config.json that the Megatron backend does not support. Imports no library.

Rules use it before Ray starts. The backend checks again with the loaded config, since models of a hub have none before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.errors import division_problem
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.models import windows
from nemo_offload_rl.models.families import (
    FAMILIES,
    MEGATRON,
    has_attention_sinks,
    unsupported_family,
    unsupported_settings,
)
from nemo_offload_rl.models.rope import attention_factor, malformed_rope, rope_settings, rope_type

# Settings that each type of rotary embedding needs in addition to its base.
ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
YARN = "yarn"
_SILU = ("silu", "swish")


def sizes_problem(cfg: MegatronConfig, num_workers: int) -> str | None:
    """Say why the parallel sizes do not divide the policy workers, and what to do; None if they do."""
    sizes = {
        "policy.megatron_cfg.tensor_model_parallel_size": cfg.tensor_model_parallel_size,
        "pipeline_model_parallel_size": cfg.pipeline_model_parallel_size,
        "context_parallel_size": cfg.context_parallel_size,
    }
    what = "policy workers of `cluster`, so some would be left over"
    return division_problem(sizes, num_workers, what, "change one of them")


def unsupported(config: Mapping[str, Any]) -> str | None:
    """Name the setting that is refused and why, or return None.

    Args:
        config: The contents of a config.json.
    """
    return unsupported_family(config, MEGATRON) or unsupported_layers(config) or unsupported_rope(config)


def unsplit_layers(config: Mapping[str, Any], tensor_parallel_size: int, *, is_local: bool) -> str | None:
    """Say why a model cannot be split by this tensor-parallel size, or return None.

    Args:
        config: The contents of a config.json.
        tensor_parallel_size: The size that is set.
        is_local: The run has `transformer_impl: local`, whose latent attention
            (megatron/core/transformer/multi_latent_attention.py) gathers the rotated part of keys without summing its
            gradient.
    """
    if tensor_parallel_size == 1:
        return None
    problem = f"tensor_model_parallel_size is {tensor_parallel_size}, but "
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and MEGATRON in family.unsplit_by:
        return (
            f"{problem}models of type {family.model_type} have norms over all heads, whose gradients would lack those "
            "of other devices; set it to 1 and spread the experts by expert_model_parallel_size"
        )
    if is_local and config.get("kv_lora_rank") is not None:
        return (
            f"{problem}the gradients of latent attention's keys would lack those of other devices with "
            "transformer_impl=local; set it to 1, or transformer_impl to transformer_engine"
        )
    return None


def unsupported_layers(config: Mapping[str, Any]) -> str | None:
    """Name the setting for tensors or a function that the backend lacks, or return None.

    Args:
        config: The contents of a config.json.
    """
    if (reason := unsupported_settings(config, MEGATRON)) is not None:
        return reason
    family = FAMILIES.get(str(config.get("model_type")))
    activations = _SILU if family is None else family.activations
    if config.get("hidden_act") not in (None, *activations):
        return f"hidden_act {config['hidden_act']}, and that backend computes {activations[0]}"
    if has_attention_sinks(config) and not windows.in_turns(config):
        return "layer_types other than sliding_attention and full_attention in turns, as that backend has them"
    return _unsupported_experts(config)


def _unsupported_experts(config: Mapping[str, Any]) -> str | None:
    """Name the unsupported setting of experts (choice, number or layers), or return None."""
    kind, chosen, groups = (config.get(key) for key in ("model_type", "num_experts_per_tok", "topk_group"))
    if (config.get("n_group") or 1) != 1 and (chosen is None or groups is None or chosen != 2 * groups):
        return (
            f"num_experts_per_tok {chosen} from topk_group {groups}, and that backend rates a group by as many of its "
            "experts as are chosen from each, the model by two"
        )
    if chosen == 1 and kind != "olmoe":  # OLMoE's weights are a softmax over all experts
        return "num_experts_per_tok 1, and that backend does not normalize the weight of a single expert"
    for key in ("n_shared_experts", "num_shared_experts"):
        if config.get(key) == 0:
            return f"{key} 0, and that backend has one at least in models of its family"
    if kind == "hy_v3":
        types, first = config.get("mlp_layer_types"), config.get("first_k_dense_replace")
        dense = 1 if types is None else types.count("dense")
        if first != dense or "dense" in (types or ())[dense:]:
            return f"first_k_dense_replace {first}, but {dense} dense layers by mlp_layer_types"
    return None


def unsupported_rope(config: Mapping[str, Any]) -> str | None:
    """Name the setting of rotary embeddings that the backend cannot reproduce, or return None."""
    if (reason := malformed_rope(config)) is not None:
        return reason
    rope = rope_settings(config)
    kind = rope_type(config)
    if kind == "dynamic":
        return "rope_type dynamic, whose frequencies change with the longest row of a batch"
    if kind not in ROPE_TYPES:
        return f"rope_type {kind}, and that backend knows {', '.join(ROPE_TYPES)}"
    missing = [name for name in ROPE_TYPES[kind] if rope.get(name) is None and config.get(name) is None]
    if missing:
        return f"rope_type {kind} without {missing[0]}, which it needs"
    if config.get("kv_lora_rank") and kind == YARN:
        scales = rope.get("mscale"), rope.get("mscale_all_dim")
        if scales[0] != scales[1] or not scales[0] or attention_factor(config, rope) != 1:
            return f"mscale {scales[0]} and mscale_all_dim {scales[1]}, which latent attention there has alike"
    return None
