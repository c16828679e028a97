"""What of a model's config.json the Megatron backend would get wrong or leave out. Imports no library.

Rules ask it before Ray starts, the backend once more when it has the config, which a hub's name leaves until then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Those whose logprobs, gradients and exports are tested against Hugging Face.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
# What each type of rotary embedding needs beside its base.
ROPE_TYPES: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
YARN = "yarn"
_SILU = ("silu", "swish")


def unsupported_family(config: Mapping[str, Any]) -> str | None:
    """Why models of this type are refused, or None.

    Args:
        config: The contents of a config.json.
    """
    family = config.get("model_type")
    if family in FAMILIES:
        return None
    return f"model_type {family}, and that backend trains {', '.join(FAMILIES)}"


def unsupported_layers(config: Mapping[str, Any]) -> str | None:
    """Which setting stands for tensors or a function that the backend would leave out, or None."""
    family = config.get("model_type")
    biases = ("attention_bias", "mlp_bias") if family == "llama" else ("attention_bias",)
    for name in biases:
        if family != "qwen2" and config.get(name):
            return f"{name} true, whose biases that backend would leave out"
    if family == "qwen3_moe" and config.get("mlp_only_layers"):
        return f"mlp_only_layers {config['mlp_only_layers']}, and that backend has experts in every layer"
    if family == "qwen3_moe" and config.get("decoder_sparse_step") not in (None, 1):
        return f"decoder_sparse_step {config['decoder_sparse_step']}, and that backend has experts in every layer"
    if config.get("hidden_act") not in (None, *_SILU):
        return f"hidden_act {config['hidden_act']}, and that backend computes silu"
    if config.get("quantization_config"):
        return "quantization_config, and that backend reads no quantized weights"
    return None


def unsupported_rope(config: Mapping[str, Any]) -> str | None:
    """Which setting of rotary embeddings the backend cannot reproduce, or None."""
    given = config.get("rope_parameters") or config.get("rope_scaling")
    if given and not isinstance(given, Mapping):
        return f"rotary embeddings {given!r}, which is no mapping"
    rope = rope_settings(config)
    if any(isinstance(value, Mapping) for value in rope.values()):
        return "rotary embeddings by layer type, and that backend has one for all layers"
    kind = rope_type(config)
    if kind == "dynamic":
        return "rope_type dynamic, whose frequencies change with the longest row of a batch"
    if kind not in ROPE_TYPES:
        return f"rope_type {kind}, and that backend knows {', '.join(ROPE_TYPES)}"
    missing = [name for name in ROPE_TYPES[kind] if rope.get(name) is None and config.get(name) is None]
    if missing:
        return f"rope_type {kind} without {missing[0]}, which it needs"
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (None, 1):
        return f"partial_rotary_factor {part}, and that backend rotates whole heads"
    return None


def rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of rotary embeddings: `rope_parameters`, or `rope_scaling` of before transformers 5; else {}."""
    given = config.get("rope_parameters") or config.get("rope_scaling")
    return given if isinstance(given, Mapping) else {}


def rope_type(config: Mapping[str, Any]) -> str:
    """The type of rotary embeddings; "default" where none is set."""
    rope = rope_settings(config)
    return str(rope.get("rope_type") or rope.get("type") or "default")
