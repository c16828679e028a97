"""Rules on the Megatron backend's low-rank adapters. Each returns None if there are no adapters."""

from __future__ import annotations

from fnmatch import fnmatchcase

from nemo_offload_rl.backends.hf.local_config import local_model_config
from nemo_offload_rl.backends.megatron.rules.section import megatron_section
from nemo_offload_rl.keys.master import PolicyRun, Rule
from nemo_offload_rl.keys.megatron import MEGATRON_ADAPTED_LAYERS, MegatronConfig
from nemo_offload_rl.models.shape import ModelShape

KEY = "policy.megatron_cfg"
PEFT = f"{KEY}.peft"


def _section(cfg: PolicyRun) -> MegatronConfig | None:
    megatron = megatron_section(cfg)
    return megatron if megatron is not None and megatron.peft.enabled else None


def megatron_adapters_need_whole_models(cfg: PolicyRun) -> str | None:
    """Megatron's adapters need layers and models that are not split over devices."""
    megatron = _section(cfg)
    if megatron is None:
        return None
    sizes = {
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "context_parallel_size": megatron.context_parallel_size,
    }
    split = [name for name, size in sizes.items() if size != 1]
    if split:
        return (
            f"{PEFT}.enabled is true and {KEY}.{split[0]} is {sizes[split[0]]}, but adapters of models that are split "
            f"over devices are not available; set {' and '.join(split)} to 1"
        )
    return None


def megatron_adapters_are_of_dense_models(cfg: PolicyRun) -> str | None:
    """Mixture-of-experts models get no adapters."""
    model = local_model_config(cfg)
    if _section(cfg) is None or model is None or not ModelShape.of(model).num_experts:
        return None
    return (
        f"{PEFT}.enabled is true, but config.json of {cfg.policy.model_name} has experts, which get no adapters; "
        "set it to false"
    )


def megatron_adapters_stand_alone(cfg: PolicyRun) -> str | None:
    """Adapters are not combined with 8-bit layers or activations that leave the GPU."""
    megatron = _section(cfg)
    if megatron is None:
        return None
    others = {
        "fp8_cfg.enabled": megatron.fp8_cfg.enabled,
        "fine_grained_activation_offloading": megatron.fine_grained_activation_offloading,
    }
    for name, is_on in others.items():
        if is_on:
            return (
                f"{PEFT}.enabled and {KEY}.{name} are both true, which is not available together; set one of them to "
                "false"
            )
    return None


def megatron_adapters_have_their_layers(cfg: PolicyRun) -> str | None:
    """Megatron's adapters name their layers in one way, and at least one layer is left."""
    megatron = _section(cfg)
    if megatron is None or not megatron.peft.exclude_modules:
        return None
    excluded = megatron.peft.exclude_modules
    if megatron.peft.target_modules:
        return (
            f"{PEFT}.target_modules and exclude_modules are both set, but the second takes layers away from all four; "
            "empty one of them"
        )
    unknown = [name for name in excluded if name not in MEGATRON_ADAPTED_LAYERS]
    if unknown:
        return (
            f"{PEFT}.exclude_modules has {unknown[0]}, which is none of {', '.join(MEGATRON_ADAPTED_LAYERS)}; use "
            "those names, or list the layers that get adapters in target_modules"
        )
    if set(excluded) == set(MEGATRON_ADAPTED_LAYERS):
        return f"{PEFT}.exclude_modules has every layer, so none would be trained; take one out"
    return None


def megatron_adapters_name_their_layers(cfg: PolicyRun) -> str | None:
    """Each name or pattern of Megatron's adapters fits some of the four layers, and patterns fit nothing else."""
    megatron, model = _section(cfg), local_model_config(cfg)
    if megatron is None:
        return None
    num_layers = None if model is None else ModelShape.of(model).num_layers
    for target in megatron.peft.target_modules:
        if target in MEGATRON_ADAPTED_LAYERS or ("*" in target and num_layers is None):
            continue
        if "*" in target and _fits_layers_only(target, num_layers or 0):
            continue
        return (
            f"{PEFT}.target_modules has {target}, which is neither one of {', '.join(MEGATRON_ADAPTED_LAYERS)} nor a "
            "pattern that fits full names of those alone; write such a name, or a pattern such as "
            "'*.layers.0.*.linear_qkv'"
        )
    return None


def _fits_layers_only(pattern: str, num_layers: int) -> bool:
    """Return whether a pattern matches adaptable layers only. Megatron-Bridge has no adapters for other modules."""
    others, layers = ["embedding", "decoder", "decoder.layers", "output_layer"], []
    for index in range(num_layers):
        place = f"decoder.layers.{index}"
        others += [place, f"{place}.self_attention", f"{place}.self_attention.core_attention", f"{place}.mlp"]
        layers += [f"{place}.self_attention.{name}" for name in ("linear_qkv", "linear_proj")]
        layers += [f"{place}.mlp.{name}" for name in ("linear_fc1", "linear_fc2")]
    return any(fnmatchcase(name, pattern) for name in layers) and not any(fnmatchcase(name, pattern) for name in others)


RULES: tuple[Rule[PolicyRun], ...] = (
    megatron_adapters_need_whole_models,
    megatron_adapters_are_of_dense_models,
    megatron_adapters_stand_alone,
    megatron_adapters_have_their_layers,
    megatron_adapters_name_their_layers,
)
