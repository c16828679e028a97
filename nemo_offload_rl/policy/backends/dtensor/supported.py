"""What of a model's config.json the DTensor backend would get wrong. Imports no library.

Rules ask it before Ray starts, the backend once more when it has the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Those whose logprobs, gradients and exports are tested against Hugging Face.
FAMILIES = ("llama", "qwen2", "qwen3")
_CHANGING = ("dynamic", "longrope")


def unsupported(config: Mapping[str, Any]) -> str | None:
    """What of the config is refused and why, or None.

    Args:
        config: The contents of a config.json.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        return f"model_type {family}, and that backend trains {', '.join(FAMILIES)}"
    architectures = config.get("architectures") or ()
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        return f"architectures {', '.join(architectures)}, which is no causal language model"
    if config.get("quantization_config"):
        return "quantization_config, and that backend reads no quantized weights"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        return f"rotary embeddings {rope!r}, which is no mapping"
    return None


def changing_rope_type(config: Mapping[str, Any]) -> str | None:
    """The type of rotary embeddings whose frequencies change with the longest row of a batch, if the model has it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, Mapping) else None
    return kind if kind in _CHANGING else None


def has_rotary_base(rope_parameters: object) -> bool:
    """Whether settings that replace a model's own have the base of its frequencies."""
    return isinstance(rope_parameters, Mapping) and rope_parameters.get("rope_theta") is not None
