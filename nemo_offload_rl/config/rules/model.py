"""Rules on the model's config.json; they are silent if it is on the hub and not in the local cache."""

import os
from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.backends.hf.model_folder import local_model_config
from nemo_offload_rl.backends.hf.served_adapters import the_engine_can_apply_adapters
from nemo_offload_rl.errors import division_problem
from nemo_offload_rl.generation.vllm.fp8_loading import BLOCK
from nemo_offload_rl.keys.master import RolloutMasterConfig, RunConfig, rules_in
from nemo_offload_rl.models.families import dropout_rates
from nemo_offload_rl.models.rope import changing_rope_type, has_rotary_base, unchanged_length
from nemo_offload_rl.models.served import is_served_on_gpus_only, longest_served, unserved, untold_experts
from nemo_offload_rl.models.shape import ModelShape, odd_blocks

_VLLM = "policy.generation.vllm_cfg"
_REPLAY = "policy.router_replay.enabled is true"


def rotary_embeddings_keep_their_base(cfg: RunConfig) -> str | None:
    """An override of `rope_parameters` has a `rope_theta`."""
    overrides = cfg.policy.hf_config_overrides
    if "rope_parameters" not in overrides or has_rotary_base(overrides["rope_parameters"]):
        return None
    return (
        "policy.hf_config_overrides.rope_parameters has no rope_theta, but replaces all that config.json says about "
        "rotary embeddings; add it"
    )


def dropout_that_is_asked_for_is_trained_with(cfg: RunConfig) -> str | None:
    """An override of a dropout rate needs `policy.dropout`."""
    if cfg.policy.dropout or not (rates := dropout_rates(cfg.policy.hf_config_overrides)):
        return None
    key, rate = next(iter(rates.items()))
    return (
        f"policy.hf_config_overrides.{key} is {rate}, but policy.dropout is false, which trains without dropout; set "
        "policy.dropout to true, or remove the override"
    )


def rotary_frequencies_of_engine_and_policy_agree(cfg: RolloutMasterConfig) -> str | None:
    """Rotary frequencies do not depend on the longest row of a batch, which is another one in the engine."""
    model = local_model_config(cfg)
    if model is None or (kind := changing_rope_type(model, _longest(cfg))) is None:
        return None
    if (limit := unchanged_length(model)) > 0:
        return (
            f"config.json of {cfg.policy.model_name} has rope_type {kind}, whose frequencies change in rows of more "
            f"than {limit} tokens; set policy.max_total_sequence_length and policy.generation.vllm_cfg.max_model_len "
            f"to {limit} at most"
        )
    return (
        f"config.json of {cfg.policy.model_name} has rope_type {kind}, whose frequencies change with the longest "
        "row of a batch in training, but not in the engine; use another model, or another type in "
        "policy.hf_config_overrides.rope_parameters"
    )


def the_engine_serves_the_model(cfg: RolloutMasterConfig) -> str | None:
    """The engine serves the model as it is trained."""
    model = local_model_config(cfg)
    if model is not None and is_served_on_gpus_only(model) and not cfg.cluster.gpus_per_node:
        return (
            f"config.json of {cfg.policy.model_name} has Mamba layers ({model['model_type']}), which vLLM computes on "
            "GPUs only; set cluster.gpus_per_node, or train it with SFT or DPO"
        )
    if model is None or (reason := unserved(model, _longest(cfg))) is None:
        return None
    return (
        f"config.json of {cfg.policy.model_name} has {reason}; use another model, or another value in "
        "policy.hf_config_overrides if it fits the weights"
    )


def eight_bit_layers_have_whole_blocks(cfg: RolloutMasterConfig) -> str | None:
    """With `vllm_cfg.precision: fp8`, layers divide into blocks of 128 on each device of an engine.

    Not checked with `quantization_ignored_layer_kws`, which may name the layers that do not.
    """
    vllm, model = cfg.policy.generation.vllm_cfg, local_model_config(cfg)
    if not vllm.is_quantized or vllm.quantization_ignored_layer_kws or model is None:
        return None
    size = vllm.tensor_parallel_size
    whole = vllm.expert_parallel_size > 1
    if (found := odd_blocks(model, size, BLOCK, whole_experts=whole)) is None:
        return None
    smaller = f"lower {_VLLM}.tensor_parallel_size from {size}, or " if odd_blocks(model, 1, BLOCK) is None else ""
    if not whole and odd_blocks(model, size, BLOCK, whole_experts=True) is None:
        smaller = f"set {_VLLM}.expert_parallel_size to {size}, so that experts stay whole, or "
    return (
        f"{_VLLM}.precision is fp8, whose blocks have {BLOCK} rows and columns, but {found[0]} of "
        f"{cfg.policy.model_name} has {found[1]} on each device; {smaller}set precision to bfloat16, or "
        "name such layers in quantization_ignored_layer_kws"
    )


def replayed_experts_are_told(cfg: RolloutMasterConfig) -> str | None:
    """`router_replay` needs a mixture of experts, and an engine that says which experts it chose."""
    if not cfg.policy.router_replay.enabled:
        return None
    if cfg.policy.generation.vllm_cfg.is_quantized and not cfg.cluster.gpus_per_node:
        return (
            f"{_REPLAY}, but an engine on a CPU with {_VLLM}.precision fp8 does not say which experts it chose; set "
            "precision to bfloat16, or enabled to false"
        )
    model = local_model_config(cfg)
    if model is None or (reason := untold_experts(model)) is None:
        return None
    return f"{_REPLAY}, but config.json of {cfg.policy.model_name} has {reason}; set enabled to false"


def engines_share_out_experts_over_their_devices(cfg: RolloutMasterConfig) -> str | None:
    """`vllm_cfg.expert_parallel_size` is 1 or the engine's tensor-parallel size, and divides the model's experts."""
    vllm, model = cfg.policy.generation.vllm_cfg, local_model_config(cfg)
    if (problem := vllm.problem_of_experts) is not None:
        return f"{_VLLM}.{problem}"
    size, key = vllm.expert_parallel_size, f"{_VLLM}.expert_parallel_size"
    if size == 1 or model is None:
        return None
    if not (num_experts := ModelShape.of(model).num_experts):
        return f"{key} is {size}, but {cfg.policy.model_name} has no experts; set it to 1"
    what = f"experts of {cfg.policy.model_name}, and each device takes the same number"
    return division_problem({key: size}, num_experts, what, "set it to 1, or change it with tensor_parallel_size")


def rows_fit_the_model_s_positions(cfg: RolloutMasterConfig) -> str | None:
    """`vllm_cfg.max_model_len` is at most the number of positions that the model allows."""
    model, asked = local_model_config(cfg), cfg.policy.generation.vllm_cfg.max_model_len
    problem = beyond_positions(model, asked, cfg.policy.model_name)
    if problem is None:
        return None
    return (
        f"policy.generation.vllm_cfg.max_model_len {problem}; lower it with policy.max_total_sequence_length, or set "
        "rope_parameters for longer rows in policy.hf_config_overrides"
    )


def beyond_positions(model: Mapping[str, Any] | None, asked: int, name: str) -> str | None:
    """Say that the engine's longest row, in tokens, is above what the model's config.json allows."""
    if model is None or (longest := longest_served(model)) is None or asked <= longest or _vllm_allows_more():
        return None
    return (
        f"{asked} is above the {longest:.0f} tokens that config.json of {name} allows (max_position_embeddings and its "
        "rotary embeddings), which vLLM refuses"
    )


def _vllm_allows_more() -> bool:
    return os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0").strip().lower() in ("1", "true")


def _longest(cfg: RolloutMasterConfig) -> int:
    return max(cfg.policy.max_total_sequence_length, cfg.policy.generation.vllm_cfg.max_model_len)


RULES = rules_in(__name__, RunConfig)
ROLLOUT_RULES = (*rules_in(__name__, RolloutMasterConfig), the_engine_can_apply_adapters)
