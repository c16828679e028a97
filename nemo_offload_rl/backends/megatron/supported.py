"""Checks that the Megatron backend supports a model and the settings for it. Imports no library.

Rules use them before Ray starts. The backend checks again with the loaded config, since models of a hub have none
before. Everywhere `config` is the contents of a config.json.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from nemo_offload_rl.errors import division_problem
from nemo_offload_rl.keys.megatron import MegatronConfig
from nemo_offload_rl.models import windows
from nemo_offload_rl.models.families import (
    FAMILIES,
    MEGATRON,
    has_attention_sinks,
    state_mixer,
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
KEY = "policy.megatron_cfg"
PEFT = f"{KEY}.peft"
_SILU = ("silu", "swish")
# By record: what the layers are, packages of their kernels by module, and what installs these.
_KERNELS: Mapping[str, tuple[str, Mapping[str, str], str]] = {
    "GatedDeltaNet": ("linear attention", {"fla": "flash-linear-attention"}, "pip install flash-linear-attention"),
    "Mamba2Mixer": ("Mamba layers", {"causal_conv1d": "causal-conv1d", "mamba_ssm": "mamba-ssm"}, "make mamba"),
}


def sizes_problem(cfg: MegatronConfig, num_workers: int) -> str | None:
    """Say why the parallel sizes do not divide the policy workers, and what to do; None if they do."""
    sizes = {
        "policy.megatron_cfg.tensor_model_parallel_size": cfg.tensor_model_parallel_size,
        "pipeline_model_parallel_size": cfg.pipeline_model_parallel_size,
        "context_parallel_size": cfg.context_parallel_size,
    }
    what = "policy workers of `cluster`, so some would be left over"
    return division_problem(sizes, num_workers, what, "change one of them")


def adapters_problem(cfg: MegatronConfig, *, has_experts: bool) -> str | None:
    """Say why low-rank adapters cannot be added, and what to do; None if they can, or if none are asked for."""
    if not cfg.peft.enabled:
        return None
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        if (size := getattr(cfg, name)) != 1:
            return (
                f"{PEFT}.enabled is true and {KEY}.{name} is {size}, but a model that is split over devices gets no "
                f"adapters; set {name} to 1"
            )
    if has_experts:
        return f"{PEFT}.enabled is true, but a mixture-of-experts model gets no adapters on Megatron; set it to false"
    return None


def fusion_problem(kind: str, factor: float) -> str | None:
    """Say why the fused rotary kernel cannot be used with `rope_type` `kind`, and what to do; None if it can."""
    if factor == 1.0:
        return None
    return (
        f"{KEY}.apply_rope_fusion is true, but the fused kernel ignores the attention factor {factor:g} of the model's "
        f"rope_type {kind}; set it to false"
    )


def unsupported(config: Mapping[str, Any]) -> str | None:
    """Name the setting that is refused and why, or return None."""
    return unsupported_family(config, MEGATRON) or unsupported_layers(config) or unsupported_rope(config)


def tensor_parallel_problem(config: Mapping[str, Any], tensor_parallel_size: int, *, is_local: bool) -> str | None:
    """Say why a model cannot be split by this tensor-parallel size, and what to do; None if it can.

    Args:
        config: The contents of a config.json.
        tensor_parallel_size: The size that is set.
        is_local: The run has `transformer_impl: local`, whose latent attention
            (megatron/core/transformer/multi_latent_attention.py) gathers the rotated part of keys without summing its
            gradient.
    """
    if tensor_parallel_size == 1:
        return None
    problem = f"{KEY}.tensor_model_parallel_size is {tensor_parallel_size}, but "
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and MEGATRON in family.unsplit_by:
        return (
            f"{problem}models of type {family.model_type} have norms over all heads, and each device would compute "
            "only its own heads' part of their gradients; set it to 1, and split the experts by "
            "expert_model_parallel_size"
        )
    if is_local and config.get("kv_lora_rank") is not None:
        return (
            f"{problem}with transformer_impl=local each device would compute only its own heads' part of the gradients "
            "of latent attention's keys; set it to 1, or transformer_impl to transformer_engine"
        )
    return None


def states_problem(config: Mapping[str, Any], cfg: MegatronConfig) -> str | None:
    """Say why layers that carry a state along rows cannot be divided as set, and what to do; None if they can."""
    mixer = state_mixer(config)
    if mixer is None:
        return None
    if (size := cfg.context_parallel_size) > 1:
        return (
            f"{KEY}.context_parallel_size is {size}, but models of type {config['model_type']} carry states along rows "
            f"({_KERNELS[mixer][0]}), and the Megatron backend does not split such rows over devices; set it to 1"
        )
    if (size := cfg.tensor_model_parallel_size) > 1 and not cfg.sequence_parallel and mixer == "GatedDeltaNet":
        return (
            f"{KEY}.tensor_model_parallel_size is {size}, but without sequence parallelism Megatron would not add up "
            "the devices' gradients of the norms after linear attention; set sequence_parallel to true, or the size to "
            "1"
        )
    return None


def missing_kernels(config: Mapping[str, Any], cfg: MegatronConfig) -> str | None:
    """Say which package the layers with states lack on this machine, and what to do; None if it is there."""
    mixer = state_mixer(config)
    if mixer is None or cfg.transformer_impl == "local":
        return None
    what, modules, command = _KERNELS[mixer]
    missing = next((module for module in modules if find_spec(module) is None), None)
    if missing is None:
        return None
    return (
        f"models of type {config['model_type']} have {what}, for which {KEY}.transformer_impl=transformer_engine needs "
        f"{modules[missing]}, but it is not installed; `{command}`, or use policy.dtensor_cfg"
    )


def unsupported_layers(config: Mapping[str, Any]) -> str | None:
    """Name the setting for tensors or a function that the backend lacks, or return None."""
    if (reason := unsupported_settings(config, MEGATRON)) is not None:
        return reason
    family = FAMILIES.get(str(config.get("model_type")))
    activations = _SILU if family is None else family.activations
    if config.get("hidden_act") not in (None, *activations):
        return f"hidden_act {config['hidden_act']}, but that backend computes only {activations[0]}"
    if has_attention_sinks(config) and not windows.in_turns(config):
        return "layer_types that do not alternate between sliding_attention and full_attention, as that backend does"
    return _unsupported_experts(config)


def _unsupported_experts(config: Mapping[str, Any]) -> str | None:
    """Name the unsupported setting of experts (choice, number or layers), or return None."""
    kind, chosen, groups = (config.get(key) for key in ("model_type", "num_experts_per_tok", "topk_group"))
    if (config.get("n_group") or 1) != 1 and (chosen is None or groups is None or chosen != 2 * groups):
        return (
            f"num_experts_per_tok {chosen} and topk_group {groups}, but that backend rates a group of experts by its "
            "best num_experts_per_tok / topk_group experts, and the model by its best two"
        )
    if chosen == 1 and kind != "olmoe":  # OLMoE's weights are a softmax over all experts
        return "num_experts_per_tok 1, but that backend does not normalize the weight of a single expert"
    for key in ("n_shared_experts", "num_shared_experts"):
        if config.get(key) == 0:
            return f"{key} 0, but that backend needs at least one in models of this family"
    if kind == "hy_v3":
        types, first = config.get("mlp_layer_types"), config.get("first_k_dense_replace")
        dense = 1 if types is None else types.count("dense")
        if first != dense or "dense" in (types or ())[dense:]:
            return f"first_k_dense_replace {first}, but mlp_layer_types has {dense} dense layers at the start"
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
        return f"rope_type {kind}, but that backend has only {', '.join(ROPE_TYPES)}"
    missing = [name for name in ROPE_TYPES[kind] if rope.get(name) is None and config.get(name) is None]
    if missing:
        return f"rope_type {kind} without {missing[0]}, which it needs"
    if config.get("kv_lora_rank") and kind == YARN:
        scales = rope.get("mscale"), rope.get("mscale_all_dim")
        if scales[0] != scales[1] or not scales[0] or attention_factor(config, rope) != 1:
            return f"mscale {scales[0]} and mscale_all_dim {scales[1]}, but that backend needs equal values above 0"
    return None
