"""What config.json says of rotary embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LONG = ("longrope", "su")  # the second is what old folders of Phi-3 call it
_KNOWN = ("default", "linear", "dynamic", "yarn", "llama3", "proportional", *_LONG)  # of transformers 5.12.1
_CHANGING = ("dynamic", *_LONG)


def rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of rotary embeddings: `rope_parameters`, or `rope_scaling` of before transformers 5; else {}."""
    given = config.get("rope_parameters") or config.get("rope_scaling")
    return given if isinstance(given, Mapping) else {}


def rope_type(config: Mapping[str, Any]) -> str:
    """The type of rotary embeddings; "default" where none is set."""
    rope = rope_settings(config)
    return str(rope.get("rope_type") or rope.get("type") or "default")


def each_rope(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The settings of all layers, or those of each type of layers (Gemma 3)."""
    rope = rope_settings(config)
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]


def rotated_parts(config: Mapping[str, Any]) -> set[float]:
    """What is said of the share of each head that is rotated."""
    said = [config.get("partial_rotary_factor"), *(rope.get("partial_rotary_factor") for rope in each_rope(config))]
    return {part for part in said if part is not None}


def malformed_rope(config: Mapping[str, Any]) -> str | None:
    """Why the settings of rotary embeddings cannot be read, or None."""
    given = config.get("rope_parameters") or config.get("rope_scaling")
    if given and not isinstance(given, Mapping):
        return f"rotary embeddings {given!r}, which is no mapping"
    for rope in each_rope(config):
        if (kind := rope_type({"rope_parameters": rope})) not in _KNOWN:
            return f"rope_type {kind}, which is none of transformers' {', '.join(_KNOWN)}"
        if "rope_theta" in rope and rope["rope_theta"] is None:
            return "rope_theta null, which is the base of the frequencies"
    return None


def changing_rope_type(config: Mapping[str, Any], longest: int) -> str | None:
    """The type of rotary embeddings whose frequencies change with the longest row of a batch, if the model has it.

    Args:
        config: The contents of a config.json.
        longest: Tokens that no row exceeds; frequencies of `longrope` change beyond `unchanged_length` only.
    """
    kind = rope_type(config)
    return kind if kind in _CHANGING and longest > unchanged_length(config) else None


def unchanged_length(config: Mapping[str, Any]) -> int:
    """Tokens up to which rows have the same rotary frequencies, where `changing_rope_type` is some; 0 for none."""
    key = "original_max_position_embeddings"
    return int(config.get(key) or rope_settings(config).get(key) or 0) if rope_type(config) in _LONG else 0


def older_rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys by which readers of before transformers 5 know what `rope_parameters` says; {} where it says nothing.

    Where layer types have settings of their own, those readers take the base and the scaling for full attention, and
    `rope_local_base_freq` for layers with a window.
    """
    given = config.get("rope_parameters")
    if not isinstance(given, Mapping) or not given:
        return {}
    rope, found = given.get("full_attention", given), dict[str, Any]()
    if "rope_theta" not in rope:
        return {}
    if "sliding_attention" in given:
        found["rope_local_base_freq"] = given["sliding_attention"]["rope_theta"]
    if "partial_rotary_factor" in rope:
        found["partial_rotary_factor"] = rope["partial_rotary_factor"]
    kind = rope_type({"rope_parameters": rope})
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    if kind in _LONG:  # transformers 4 refuses any other key there
        scaling = {"type": kind, **{key: scaling[key] for key in ("short_factor", "long_factor")}}
    return {**found, "rope_theta": rope["rope_theta"], "rope_scaling": None if kind == "default" else scaling}


def has_rotary_base(rope_parameters: object) -> bool:
    """Whether settings that replace a model's own have the base of its frequencies."""
    return isinstance(rope_parameters, Mapping) and rope_parameters.get("rope_theta") is not None
