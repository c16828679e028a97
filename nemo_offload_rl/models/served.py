"""Settings of models that vLLM 0.25.1 and `transformers` compute differently; runs with an engine refuse them.

With such a setting the engine would sample from another function than the one that is trained. A refit only notices
tensors that one side lacks, and only after all processes have started.
"""

import math
from collections.abc import Mapping

from nemo_offload_rl.models import windows
from nemo_offload_rl.models.families import ModelFamily, Refusal, family_of
from nemo_offload_rl.models.rope import (
    attention_factor,
    each_rope,
    has_image_axes,
    is_usual_factor,
    rope_settings,
    rope_type,
    rotated_parts,
)
from nemo_offload_rl.models.shape import ModelShape
from nemo_offload_rl.models.windows import ModelConfig

_LEFT_OUT = "which the engine would leave out"
_ADDED = "for which the engine would add biases that the model does not have"
_BIASES_LEFT_OUT = Refusal("attention_bias", (None, False), _LEFT_OUT)
_BIASES_ADDED = Refusal("attention_bias", (None, False), _ADDED)
_OTHER_BIASES = Refusal("qkv_bias", (None, False), _ADDED)
_ONE_MATRIX = Refusal("tie_word_embeddings", (None, True), "but the engine has one matrix for both")
_ONE_EMBEDDING = Refusal("tie_embedding", (None, True), "but the engine has one matrix for both")
_TWO_MATRICES = Refusal("tie_word_embeddings", (None, False), "but the engine would have two matrices")
_NO_TIME_LIMIT = Refusal("time_step_limit", (None, [0.0, math.inf], (0.0, math.inf)), _LEFT_OUT)
_PAIRS = Refusal("rope_interleave", (None, True), "but the engine rotates pairs of neighbours")
_ROPE_OF_ENGINE = ("mrope_section", "rope_dim", "use_fope")  # of vLLM's `get_rope`

_WITH_MAMBA = ("falcon_h1", "granitemoehybrid", "nemotron_h")
_UNTOLD = ("gemma4_text", "hunyuan_v1_moe")

SETTINGS: Mapping[str, tuple[Refusal, ...]] = {
    "afmoe": (
        _BIASES_LEFT_OUT,
        *(
            Refusal(key, (), "without which the engine does not start", refused=(None,))
            for key in ("layer_types", "n_group", "route_norm", "score_func", "topk_group")
        ),
        _TWO_MATRICES,
    ),
    "cohere": (_ONE_MATRIX, _BIASES_LEFT_OUT),
    "cohere2": (_ONE_MATRIX, _BIASES_LEFT_OUT),
    "cwm": (_BIASES_ADDED,),
    "deepseek_v2": (_BIASES_LEFT_OUT, Refusal("mlp_bias", (None, False), _LEFT_OUT), _TWO_MATRICES),
    "ernie4_5": (_BIASES_ADDED, Refusal("use_bias", (None, False), _LEFT_OUT)),
    "ernie4_5_moe": (
        Refusal("moe_norm_min", (None, 1e-12), "but the engine has no such limit"),
        Refusal("use_bias", (None, False), _LEFT_OUT),
    ),
    "exaone4": (_BIASES_ADDED, Refusal("mlp_bias", (None, False), _ADDED)),
    "falcon_h1": (
        _BIASES_LEFT_OUT,
        Refusal("mamba_norm_before_gate", (False,), "but the engine applies the gate first"),
        *(Refusal(key, (None, False), _LEFT_OUT) for key in ("mamba_proj_bias", "mlp_bias", "projectors_bias")),
        _NO_TIME_LIMIT,
    ),
    "gemma": (_ONE_MATRIX, _BIASES_LEFT_OUT),
    "gemma2": (_ONE_MATRIX,),
    "gemma3_text": (_ONE_MATRIX,),
    "glm4_moe": (_TWO_MATRICES,),
    "glm4_moe_lite": (
        _BIASES_LEFT_OUT,
        Refusal("first_k_dense_replace", (), "without which the engine does not start", refused=(None,)),
        _PAIRS,
        _TWO_MATRICES,
    ),
    "granitemoehybrid": (
        Refusal("mamba_n_groups", (None, 1), "each of which the engine would normalize on its own"),
        _NO_TIME_LIMIT,
    ),
    "hunyuan_v1_moe": (
        _BIASES_LEFT_OUT,
        Refusal("moe_intermediate_size", (), "without which the engine does not start", refused=(None,)),
        Refusal("num_shared_expert", (1,), "without which the engine does not start"),
        Refusal("use_mixed_mlp_moe", (True,), "without which the engine does not start"),
        Refusal("use_qk_norm", (True,), "without which the engine has no norms of queries and keys"),
    ),
    "lfm2": (
        *(
            Refusal(key, (), "without which the engine does not start", refused=(None,))
            for key in ("block_dim", "conv_dim")
        ),
        _ONE_MATRIX,
        _ONE_EMBEDDING,
    ),
    "lfm2_moe": (_ONE_MATRIX, _ONE_EMBEDDING),
    "ministral3": (_BIASES_ADDED,),
    "minimax_m2": (
        Refusal("rotary_dim", (), "without which the engine does not start", refused=(None,)),
        Refusal("scoring_func", ("sigmoid",), "but the engine needs sigmoid by name"),
        _TWO_MATRICES,
        Refusal("use_routing_bias", (True,), "but without it the engine has no bias to choose experts with"),
    ),
    "mistral": (_BIASES_ADDED,),
    "nemotron_h": (
        Refusal("n_shared_experts", (None, 1), "whose sizes the engine would add up"),
        _NO_TIME_LIMIT,
        _TWO_MATRICES,
    ),
    "olmo2": (_BIASES_LEFT_OUT,),
    "olmo_hybrid": (_BIASES_LEFT_OUT,),
    "olmo3": (_BIASES_LEFT_OUT,),
    "phi3": (_BIASES_ADDED,),
    "qwen3": (_BIASES_LEFT_OUT,),
    "qwen3_5_moe_text": (_BIASES_LEFT_OUT, _OTHER_BIASES),
    "qwen3_5_text": (_BIASES_LEFT_OUT, _OTHER_BIASES),
    "qwen3_moe": (_BIASES_LEFT_OUT,),
    "qwen3_next": (_BIASES_LEFT_OUT, _OTHER_BIASES, _TWO_MATRICES),
    "seed_oss": (
        Refusal("attention_bias", (None, True), _ADDED),
        Refusal("attention_out_bias", (None, False), _LEFT_OUT),
        Refusal("mlp_bias", (None, False), _LEFT_OUT),
    ),
}
"""By model type."""


def unserved(config: ModelConfig, longest: int) -> str | None:
    """Return the first setting that the engine computes differently, and how, or None.

    Args:
        config: The contents of a config.json.
        longest: Tokens of the longest possible row; windows of that size have no effect.
    """
    family = family_of(config)
    if family is None:
        return None
    if not family.is_served:
        return f"model_type {family.model_type}, which vLLM 0.25.1 does not serve (SFT and DPO train it)"
    problems = (
        _window(config, family, longest),
        _activation(config, family),
        _rotary(config, family),
        *(refusal.problem(config) for refusal in SETTINGS.get(family.model_type, ())),
    )
    return next((problem for problem in problems if problem is not None), None)


def untold_experts(config: ModelConfig) -> str | None:
    """Return why vLLM 0.25.1 does not say which experts a model's tokens were sent to, or None."""
    shape = ModelShape.of(config)
    if not shape.num_experts:
        return "no experts"
    if shape.num_active_experts == 1:
        return "one expert for each token, which cannot be told from none"
    if (kind := config.get("model_type")) in _UNTOLD:
        return f"model_type {kind}, for which vLLM 0.25.1 does not find the number of experts per token"
    family = family_of(config)
    everywhere = (windows.everywhere, windows.where_used)
    if family is not None and family.has_window in everywhere and family.has_window(config):
        return "a sliding window in all layers, with which vLLM 0.25.1 cannot keep a record of experts"
    return None


def is_served_on_gpus_only(config: ModelConfig) -> bool:
    """Tell whether a model has layers that vLLM 0.25.1 computes with Triton alone (Mamba-2)."""
    types = config.get("layer_types")
    return config.get("model_type") in _WITH_MAMBA and (types is None or "mamba" in types)


def longest_served(config: ModelConfig) -> float | None:
    """Return the most tokens of a row with which vLLM starts (its `_get_and_verify_max_len`); None if unknown."""
    longest, factor = config.get("max_position_embeddings"), 1.0
    if longest is None or config.get("model_max_length") is not None:
        return None
    for rope in each_rope(config) if config.get("model_type") != "gemma3_text" else ():
        kind = rope_type({"rope_parameters": rope})
        if kind in ("su", "longrope", "llama3"):
            continue
        factor = rope.get("factor") or factor
        if kind == "yarn":
            longest = rope.get("original_max_position_embeddings") or longest
    return float(longest * factor)


def _window(config: ModelConfig, family: ModelFamily, longest: int) -> str | None:
    """Check windows: the engine gives `sliding_window` to all layers, unless `layer_types` differ."""
    if family.has_sinks and not windows.in_turns(config):
        return "layer_types other than sliding_attention and full_attention in turns, which is what the engine assumes"
    types = config.get("layer_types")
    if not windows.is_used(config):
        return None
    size = config["sliding_window"]
    if not family.has_window(config) and size < longest:
        return f"sliding_window {size} that no layer has, but the engine would give it to some"
    if family.model_type in ("qwen2", "qwen3") and windows.in_some_layers(config):
        return "layers with and without a sliding window, which the engine does not serve for its family"
    differ = types is not None and len(set(types)) > 1
    if family.model_type in ("mixtral", "phi3", "starcoder2") and differ and size < longest:
        return "layer_types that differ: the engine would give only some layers a window, the model library all"
    return None


def _activation(config: ModelConfig, family: ModelFamily) -> str | None:
    found = config.get(family.activation_key)
    if not family.activations or found is None or found in family.activations:
        return None
    return f"{family.activation_key} {found}, and the engine computes {family.activations[0]} in its family"


def _rotary(config: ModelConfig, family: ModelFamily) -> str | None:
    """Check rotary embeddings; the engine gets their attention factor from `rope.for_engine`."""
    if family.model_type == "gpt_oss":
        if rope_type(config) != "yarn":
            return f"rope_type {rope_type(config)}, but the engine knows only yarn for its family"
        if not is_usual_factor(config, rope_settings(config)):
            factor = attention_factor(config, rope_settings(config))
            return f"rope_type yarn with an attention factor of {factor:g}, {_LEFT_OUT}"
    if family.model_type == "glm" and (part := rotated_parts(config) - {0.5}):
        return f"partial_rotary_factor {part.pop()}, but the engine rotates half of each head in its family"
    for rope in each_rope(config):
        read = [key for key in _ROPE_OF_ENGINE if rope.get(key) is not None]
        if read and not (read == ["mrope_section"] and has_image_axes(config)):
            return f"{read[0]} of rotary embeddings, which only the engine would read"
        if rope_type({"rope_parameters": rope}) == "proportional" and family.model_type != "gemma4_text":
            return "rope_type proportional, which the engine and the model library compute differently"
        if config.get("kv_lora_rank") and rope.get("truncate") is False:
            return f"truncate false of rotary embeddings, {_LEFT_OUT}"
        if config.get("kv_lora_rank") and rope.get("apply_yarn_scaling") is False:
            return "apply_yarn_scaling false, for which the engine would scale attention scores differently"
    return None
