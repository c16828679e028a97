"""Sliding windows in config.json, as the model library reads them for each family."""

from collections.abc import Mapping
from typing import Any

type ModelConfig = Mapping[str, Any]
"""The contents of a config.json, overrides included."""


def is_used(config: ModelConfig, *, if_absent: bool = False) -> bool:
    """Tell whether `sliding_window` has an effect: Qwen's families ignore it without `use_sliding_window`.

    Args:
        config: The contents of a config.json.
        if_absent: The result if the file leaves the size to the model library's default.
    """
    if str(config.get("model_type")).startswith("qwen") and not config.get("use_sliding_window"):
        return False
    return bool(config["sliding_window"]) if "sliding_window" in config else if_absent


def nowhere(config: ModelConfig) -> bool:
    """Rule of families without windows."""
    return False


def everywhere(config: ModelConfig) -> bool:
    """Rule of families with windows in all layers."""
    return config.get("sliding_window") is not None


def where_used(config: ModelConfig) -> bool:
    """Rule of Qwen families with windows in all layers, which ignore `max_window_layers` and `layer_types`."""
    return is_used(config, if_absent=True)


def by_layer(config: ModelConfig) -> bool:
    """Rule of families with windows in the layers from `max_window_layers` on."""
    if config.get("layer_types") is not None:
        return "sliding_attention" in config["layer_types"]
    # As transformers fills `layer_types` of the Qwen families.
    in_use = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
    return in_use and (config.get("max_window_layers") or 0) < (config.get("num_hidden_layers") or 0)


def in_some_layers(config: ModelConfig) -> bool:
    """Tell whether a model of such a family has both layers with and layers without a window."""
    if config.get("layer_types") is not None:
        return len(set(config["layer_types"])) > 1
    return by_layer(config) and (config.get("max_window_layers") or 0) > 0


def unless_types_say_no(config: ModelConfig) -> bool:
    """Rule of families with windows in some layers, unless `layer_types` has none."""
    types = config.get("layer_types")
    return config.get("sliding_window") is not None and (types is None or "sliding_attention" in types)


def in_turns(config: ModelConfig) -> bool:
    """Tell whether layers with and without a window alternate, as in gpt-oss by default."""
    types, turns = config.get("layer_types"), ("sliding_attention", "full_attention")
    return types is None or list(types) == [turns[layer % 2] for layer in range(len(types))]
