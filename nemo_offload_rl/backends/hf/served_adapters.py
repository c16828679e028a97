"""Decides whether an engine applies the policy's adapters itself, or gets weights with adapters merged into them.

vLLM can apply adapters (LoRA) next to the model's own weights. A refit then sends the adapters alone, and the engine
reads the model's weights from its folder, once. An engine that sleeps discards them, so that the host does not hold
them a second time, and gets them from each refit too.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from nemo_offload_rl.backends.hf.model_folder import local_model_config
from nemo_offload_rl.keys.dtensor import DTensorLoraConfig
from nemo_offload_rl.keys.engine import ServedAdapters
from nemo_offload_rl.keys.master import RolloutMasterConfig
from nemo_offload_rl.keys.megatron import MEGATRON_ADAPTED_LAYERS, MegatronConfig, MegatronLoraConfig
from nemo_offload_rl.keys.policy import PolicyConfig
from nemo_offload_rl.models.families import family_of
from nemo_offload_rl.models.shape import ModelShape
from nemo_offload_rl.models.towers import PART_OF

_KEY = "policy.generation.enable_lora"
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes buffers; adapters of another rank use part of the next larger buffer."""
_UNKNOWN = "the model's config.json has not been downloaded"
_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj", "gate_up_proj"),
    "linear_fc2": ("down_proj",),
}


def adapters_of(policy: PolicyConfig) -> DTensorLoraConfig | MegatronLoraConfig | None:
    """Return the settings of the adapters that are trained; None if the whole model is."""
    backend = policy.backend
    settings = backend.peft if isinstance(backend, MegatronConfig) else policy.dtensor_cfg.lora_cfg
    return settings if settings.enabled else None


def served_adapters(cfg: RolloutMasterConfig) -> ServedAdapters | str | None:
    """Return the adapters that the engine applies, or why it gets merged weights; None if no adapters are trained."""
    policy, settings = cfg.policy, adapters_of(cfg.policy)
    if settings is None:
        return None
    if policy.generation.enable_lora is False:
        return f"{_KEY} is false"
    if policy.generation.enable_lora is None and policy.generation.colocated.enabled:
        return (
            "the engine shares the policy's devices and discards all weights when it sleeps, so each refit sends every "
            f"weight, and sending adapters apart saves no bytes ({_KEY}=true does it nevertheless)"
        )
    vllm = policy.generation.vllm_cfg
    if vllm.is_quantized:
        return "the engine's weights are in 8 bits (policy.generation.vllm_cfg.precision)"
    if cfg.cluster.gpus_per_node and vllm.precision == "float32":
        return "vLLM's kernels for adapters do not compute in float32 (policy.generation.vllm_cfg.precision)"
    if settings.dim > RANKS[-1]:
        return f"vLLM applies adapters of rank {RANKS[-1]} at most, and theirs is {settings.dim}"
    if (model := local_model_config(cfg)) is None:
        return _UNKNOWN
    family = family_of(model)
    if ModelShape.of(model).num_experts:
        return "the model is a mixture of experts"
    if PART_OF in model:
        return "the model's folder reads images too, and the engine builds the language model alone"
    if family is None or not family.serves_adapters or family.state_mixer is not None:
        return f"vLLM 0.25.1 has no adapters for model_type {model.get('model_type')}, or for layers that it fuses"
    if "quantization_config" in model:
        return "the weights in the model's folder are quantized, and the policy trains with plain ones"
    if isinstance(settings, MegatronLoraConfig):
        modules = _of_megatron(settings)
    elif _names_output_layer(settings):
        return "the output layer has an adapter"
    else:
        modules = _of_dtensor(settings)
    rank = next(rank for rank in RANKS if rank >= settings.dim)
    return ServedAdapters(rank, modules, with_weights=policy.generation.engines_sleep)


def the_engine_can_apply_adapters(cfg: RolloutMasterConfig) -> str | None:
    """`enable_lora: true` needs adapters that are trained, and that vLLM applies to this model."""
    if cfg.policy.generation.enable_lora is not True:
        return None
    found = served_adapters(cfg)
    if found is None:
        return (
            f"{_KEY} is true, but no adapters are trained; set policy.dtensor_cfg.lora_cfg.enabled or "
            "policy.megatron_cfg.peft.enabled to true, or this key to null"
        )
    if not isinstance(found, str) or found == _UNKNOWN:
        return None
    return f"{_KEY} is true, but {found}; set it to null, and refits send merged weights"


def _of_dtensor(settings: DTensorLoraConfig) -> tuple[str, ...]:
    """Name the layers that get adapters, or all of `_LAYERS` if patterns choose them; each takes vLLM time."""
    named = settings.target_modules
    known = [name for names in _LAYERS.values() for name in names]
    if settings.match_all_linear or any("*" in name for name in named):
        return tuple(known)
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in named))


def _of_megatron(settings: MegatronLoraConfig) -> tuple[str, ...]:
    wanted = settings.target_modules or [
        name for name in MEGATRON_ADAPTED_LAYERS if name not in settings.exclude_modules
    ]
    found = [names for own_name, names in _LAYERS.items() if any(own_name in pattern for pattern in wanted)]
    return tuple(name for names in found or _LAYERS.values() for name in names)


def _names_output_layer(settings: DTensorLoraConfig) -> bool:
    return (
        not settings.match_all_linear
        and _is_output(settings.target_modules)
        and not _is_output(settings.exclude_modules)
    )


def _is_output(patterns: Sequence[str]) -> bool:
    return any(fnmatchcase("lm_head", pattern) for pattern in patterns)
