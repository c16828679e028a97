"""Checks of a model's config.json: the DTensor backend must be able to train it, split it and share its rows.

Rules call them before Ray starts, and the backend again once it has the config. Everywhere `config` is the contents of
a config.json, and `plan` the result of `declared_plan`, the only function that imports `transformers`.
"""

import re
from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.errors import division_problem
from nemo_offload_rl.keys.dtensor import DTensorConfig
from nemo_offload_rl.models.families import (
    DTENSOR,
    attention_softcap,
    has_attention_sinks,
    state_mixer,
    unsupported_family,
    unsupported_settings,
)
from nemo_offload_rl.models.rope import changing_rope_type, malformed_rope, unchanged_length
from nemo_offload_rl.models.shape import ModelShape

_ALIGNED = 8  # 16-bit numbers in 16 bytes, the alignment that `torch.nn.functional.grouped_mm` needs for rows

DROPS_AT_RANDOM = (
    "policy.dtensor_cfg.cpu_offload is true, but the model has dropout, and layers that are computed again "
    "would drop other values; set policy.dropout to false"
)

# Styles of transformers 5.12.1's plans; `tensor_parallel.py` maps them to torch's.
COLUMNS, COLUMNS_GATHERED = "colwise", "colwise_gather_output"
ROWS, ROWS_OF_WHOLE_INPUT = "rowwise", "rowwise_split_input"
WHOLE_AMONG_HEADS = "replicated_with_grad_allreduce"
STYLES = (COLUMNS, COLUMNS_GATHERED, ROWS, ROWS_OF_WHOLE_INPUT, WHOLE_AMONG_HEADS)

_PART_OF_A_LAYER = re.compile(r"\w+\.\*\.\w+")
_HEADS, _KV_HEADS, _INNER, _VOCAB = "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"
# Sizes that must be divisible, by module of a plan.
_SPLIT_SIZES = {
    "q_proj": (_HEADS,),
    "k_proj": (_KV_HEADS,),
    "v_proj": (_KV_HEADS,),
    "qkv_proj": (_HEADS, _KV_HEADS),
    "o_proj": (_HEADS,),
    "gate_proj": (_INNER,),
    "up_proj": (_INNER,),
    "gate_up_proj": (_INNER,),
    "down_proj": (_INNER,),
    "c_fc": (_INNER,),
    "c_proj": (_INNER,),
}


def unsupported(config: Mapping[str, Any]) -> str | None:
    """Return the part of the config that is refused, and why; None if nothing is."""
    if (reason := unsupported_family(config, DTENSOR)) is not None:
        return reason
    architectures = config.get("architectures") or ()
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        return f"architectures {', '.join(architectures)}, none of which is a causal language model"
    return unsupported_settings(config, DTENSOR) or malformed_rope(config) or _uneven_experts(config)


def _uneven_experts(config: Mapping[str, Any]) -> str | None:
    """Return the size of experts that torch's grouped products do not support; None if they support all."""
    if not ModelShape.of(config).num_experts:
        return None
    inner = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
    for key in ("hidden_size", inner):
        sizes = given if isinstance(given := config.get(key), list) else [given]  # Hunyuan has one for each layer
        for size in (size for size in sizes if size is not None and size % _ALIGNED):
            return f"{key} {size}, but that backend's products of experts need multiples of {_ALIGNED}"
    return None


def sizes_problem(cfg: DTensorConfig, num_workers: int) -> str | None:
    """Return why the parallel sizes do not divide the policy workers, and what to do; None if they do."""
    sizes = {"policy.dtensor_cfg.tensor_parallel_size": cfg.tensor_parallel_size}
    if cfg.context_parallel_size != 1:
        sizes["context_parallel_size"] = cfg.context_parallel_size
    what = "policy workers of `cluster`, so some would be left over"
    problem = division_problem(sizes, num_workers, what, "change one of them")
    if problem is not None:
        return problem
    num_ranks = num_workers // cfg.tensor_parallel_size
    divisors = [str(divisor) for divisor in range(1, num_ranks + 1) if num_ranks % divisor == 0]
    return division_problem(
        {"policy.dtensor_cfg.expert_parallel_size": cfg.expert_parallel_size},
        num_ranks,
        "data-parallel workers of `cluster`, which share the experts",
        f"use one of {', '.join(divisors)}, or more devices",
    )


def declared_plan(model_type: str) -> Mapping[str, str]:
    """Return the tensor-parallel style by name pattern inside the base model; empty if the family declares none."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type].base_model_tp_plan or {}


def split_problem(config: Mapping[str, Any], plan: Mapping[str, str], size: int) -> str | None:
    """Return why a model cannot be split over `size` ranks, and what to do; None if it can."""
    key = f"policy.dtensor_cfg.tensor_parallel_size={size}"
    if size == 1:
        return None
    if ModelShape.of(config).num_experts:
        return f"{key}, but it does not split models with experts; set it to 1, and use expert_parallel_size"
    if state_mixer(config) is not None:
        return f"{key}, but it does not split layers with states, which {config['model_type']} has; set it to 1"
    if not plan:
        return f"{key}, but transformers declares no tensor-parallel plan for {config['model_type']}; set it to 1"
    if config.get("use_qk_norm") and not any(pattern.endswith("q_norm") for pattern in plan):
        return (
            f"{key}, but transformers' tensor-parallel plan for {config['model_type']} has no norms of queries and "
            "keys, which use_qk_norm asks for; set it to 1"
        )
    shape = ModelShape.of(config)
    sizes = {
        _HEADS: (shape.num_heads, "attention heads"),
        _KV_HEADS: (shape.num_kv_heads, "key-value heads"),
        _INNER: (shape.intermediate_size, "channels of MLPs"),
        _VOCAB: (shape.vocab_size, "tokens of the vocabulary"),
    }
    to_divide: dict[str, None] = {}  # in the plan's order
    for pattern, style in plan.items():
        names = () if style == WHOLE_AMONG_HEADS else _SPLIT_SIZES.get(pattern.rpartition(".")[2])
        if style not in STYLES or names is None:
            return (
                f"{key}, but transformers splits {pattern} of {config['model_type']} as {style}, which the DTensor "
                "backend does not know; set it to 1"
            )
        to_divide |= dict.fromkeys(names)
    for length, what in (sizes[name] for name in (*to_divide, _VOCAB)):
        each = f"{what} of the model, and each device takes the same number"
        problem = division_problem(
            {"policy.dtensor_cfg.tensor_parallel_size": size}, length or 0, each, "use a divisor"
        )
        if problem is not None:
            return problem
    return None


def sequence_problem(config: Mapping[str, Any], plan: Mapping[str, str]) -> str | None:
    """Return why sequence parallelism cannot split a model, and what to do; None if it can.

    The sequence is gathered before attention and before the MLP, so each must end with its only row-wise split.
    """
    rows_of: dict[str, int] = {}
    for pattern, style in plan.items():
        part = pattern.rpartition(".")[0]
        rows_of[part] = rows_of.get(part, 0) + (style in (ROWS, ROWS_OF_WHOLE_INPUT))
    for part, number in rows_of.items():
        if number != 1 or not _PART_OF_A_LAYER.fullmatch(part):
            return (
                f"policy.dtensor_cfg.sequence_parallel is true, but transformers' tensor-parallel plan for "
                f"{config['model_type']} does not end {part or 'the model'} with one row-wise split, as it ends "
                "attention and MLPs; set it to false"
            )
    return None


def context_problem(config: Mapping[str, Any], size: int, longest: int) -> str | None:
    """Return why ranks cannot share rows of a model, and what to do; None if they can."""
    key = f"policy.dtensor_cfg.context_parallel_size={size}"
    if size == 1:
        return None
    for what, has_it in {
        "soft-caps attention scores": attention_softcap(config) is not None,
        "has attention sinks": has_attention_sinks(config),
        "carries states along rows": state_mixer(config) is not None,
    }.items():
        if has_it:
            return (
                f"{key}, but the model ({config['model_type']}) {what}, which does not work if devices share "
                "rows; set it to 1"
            )
    if (kind := changing_rope_type(config, longest)) is None:
        return None
    length = unchanged_length(config)
    shorter = f", or policy.max_total_sequence_length to at most {length}" if length else ""
    return (
        f"{key}, but frequencies of the model's rotary embeddings ({kind}) change with the longest row of a batch, and "
        f"no device sees whole rows; set it to 1{shorter}"
    )


def experts_problem(config: Mapping[str, Any], tensor_parallel_size: int, expert_parallel_size: int) -> str | None:
    """Return why a model's experts cannot be divided over ranks, and what to do; None if they can."""
    name, num_experts = "policy.dtensor_cfg.expert_parallel_size", ModelShape.of(config).num_experts
    key = f"{name}={expert_parallel_size}"
    if expert_parallel_size == 1:
        return None
    if not num_experts:
        return f"{key}, but the model ({config.get('model_type')}) has no experts; set it to 1"
    if config.get("model_type") == "granitemoehybrid":
        return f"{key}, but it does not divide experts of granitemoehybrid over devices; set it to 1"
    if tensor_parallel_size > 1:
        return f"{key} and tensor_parallel_size={tensor_parallel_size} do not work together; set one of them to 1"
    what = "experts of the model, and each device takes the same number"
    divisors = [str(size) for size in range(1, num_experts + 1) if num_experts % size == 0]
    return division_problem({name: expert_parallel_size}, num_experts, what, f"use one of {', '.join(divisors)}")
