"""Rotary embeddings in config.json, and how the model library and the engine read them.

Cosine and sine are multiplied by `attention_factor`. transformers 5.12.1 reads that key; vLLM 0.25.1 has its own:
`attn_factor` and `apply_yarn_scaling` of YaRN, `short_mscale` and `long_mscale` of LongRoPE. Each ignores the other's
keys silently. `with_published_factor` and `for_engine` give policy and engine the same factor.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

_LONG = ("longrope", "su")  # the second in old folders of Phi-3
_KNOWN = ("default", "linear", "dynamic", "yarn", "llama3", "proportional", *_LONG)  # of transformers 5.12.1
_CHANGING = ("dynamic", *_LONG)
_YARN = "yarn"
_NUMBERS = ("factor", "attention_factor", "attn_factor", "extrapolation_factor", "mscale", "mscale_all_dim", "alpha")
_MSCALES = ("short_mscale", "long_mscale")
# Keys of engines; without them transformers computes the published function.
_OF_ENGINES = ("attn_factor", "apply_yarn_scaling", *_MSCALES)
_WITHOUT_ROTATION = ("olmo_hybrid",)  # families that rotate nothing if the base is null
IMAGE_AXES = ("mrope_section", "mrope_interleaved")
"""Settings that deal out frequencies to time, height and width of images."""


def rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of rotary embeddings: `rope_parameters`, or the older `rope_scaling`, or {}."""
    given = config.get("rope_parameters") or config.get("rope_scaling")
    return given if isinstance(given, Mapping) else {}


def rope_type(config: Mapping[str, Any]) -> str:
    """Return the type of rotary embeddings; `default` if none is set."""
    rope = rope_settings(config)
    return str(rope.get("rope_type") or rope.get("type") or "default")


def each_rope(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List the settings of all layers, or of each type of layers (Gemma 3)."""
    rope = rope_settings(config)
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    return nested or [rope]


def rotated_parts(config: Mapping[str, Any]) -> set[float]:
    """Return all values that a config has for the rotated share of each head."""
    said = [config.get("partial_rotary_factor"), *(rope.get("partial_rotary_factor") for rope in each_rope(config))]
    return {part for part in (*said, _rotated_part(config)) if part is not None}


def _rotated_part(config: Mapping[str, Any]) -> float | None:
    """Return the share that `rotary_dim` means (MiniMax-M2), which transformers 5.12.1 does not read; None without."""
    size, head_dim = config.get("rotary_dim"), config.get("head_dim")
    return size / head_dim if isinstance(size, int) and isinstance(head_dim, int) and head_dim else None


def malformed_rope(config: Mapping[str, Any]) -> str | None:
    """Return why the settings of rotary embeddings cannot be read, or None."""
    given = config.get("rope_parameters") or config.get("rope_scaling")
    if given and not isinstance(given, Mapping):
        return f"rotary embeddings {given!r}, which is not a mapping"
    for rope in each_rope(config):
        if (kind := rope_type({"rope_parameters": rope})) not in _KNOWN:
            return f"rope_type {kind}, but transformers knows {', '.join(_KNOWN)}"
        if "rope_theta" in rope and rope["rope_theta"] is None and config.get("model_type") not in _WITHOUT_ROTATION:
            return "rope_theta null, but it is the base of the frequencies"
        for key in (*_NUMBERS, *_MSCALES):
            if not isinstance(value := rope.get(key) or 0.0, int | float):
                return f"{key} {value!r} of rotary embeddings, which is not a number"
    return None


def uncomputed_rope(config: Mapping[str, Any], *, by_layer_type: bool) -> str | None:
    """Return the setting of rotary embeddings that the model library does not compute, or None.

    Args:
        config: The contents of a config.json.
        by_layer_type: Whether the family's models read settings for each type of layers.
    """
    if _is_by_layer_type(config) and not by_layer_type:
        return "rotary embeddings by layer type, which the model library does not read for its family"
    for rope in each_rope(config):
        if (value := rope.get("extrapolation_factor")) not in (None, 1):
            return f"extrapolation_factor {value} of rotary embeddings, but the model library takes 1"
        short, long = (rope.get(key) for key in _MSCALES)
        if short != long:
            return f"short_mscale {short} and long_mscale {long}, but the model library has one for all rows"
    return None


def attention_factor(config: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    """Return the published factor of cosine and sine for one `rope` of `each_rope`."""
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    kind = rope_type({"rope_parameters": rope})
    if kind == _YARN:
        factor, scale, scale_all = _factor(config, rope), rope.get("mscale"), rope.get("mscale_all_dim")
        usual = _yarn_scale(factor)
        if rope.get("apply_yarn_scaling") is False:
            usual = 1.0
        elif scale and scale_all:
            usual = _yarn_scale(factor, scale) / _yarn_scale(factor, scale_all)
        return usual * _attn_factor(rope)
    if kind in _LONG:
        if (scale := rope.get(_MSCALES[0])) is not None:
            return float(scale)
        factor = _factor(config, rope)
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(_original_length(config, rope)))
    return 1.0


def yarn_score_factor(config: Mapping[str, Any]) -> float:
    """Return the factor of latent attention's scores that YaRN's `mscale_all_dim` means (DeepSeek-V2 and later)."""
    rope = rope_settings(config)
    scale = rope.get("mscale_all_dim")
    return _yarn_scale(_factor(config, rope), scale) ** 2 if rope_type(config) == _YARN and scale else 1.0


def with_published_factor(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return settings with which transformers computes the published factor and share; None if the config's own do."""
    part = _rotated_part(config)

    def complete(rope: Mapping[str, Any]) -> Mapping[str, Any]:
        if part is not None and rope.get("partial_rotary_factor") is None:
            rope = {**rope, "partial_rotary_factor": part}
        if rope.get("attention_factor") is not None or all(rope.get(key) is None for key in _OF_ENGINES):
            return rope
        return {**rope, "attention_factor": attention_factor(config, rope)}

    settings = _changed(config, complete)
    return None if settings == rope_settings(config) else settings


def for_engine(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return settings with which vLLM computes the published factor; None if the config's own do."""
    is_latent = bool(config.get("kv_lora_rank"))

    def translated(rope: Mapping[str, Any]) -> Mapping[str, Any]:
        kind, published = rope_type({"rope_parameters": rope}), attention_factor(config, rope)
        given = {key: value for key, value in rope.items() if value is not None}
        if kind in _LONG:
            return given | dict.fromkeys(_MSCALES, published)
        if kind != _YARN:
            return rope
        given.pop("apply_yarn_scaling", None)
        factor = _factor(config, rope)
        usual = _yarn_scale(factor)
        if is_latent:
            usual = _yarn_scale(factor, given.get("mscale", 1.0)) / _yarn_scale(factor, given.get("mscale_all_dim", 0))
        betas = {"beta_fast": rope.get("beta_fast") or 32, "beta_slow": rope.get("beta_slow") or 1}
        return given | betas | {"factor": factor, "attn_factor": published / usual}

    settings = _changed(config, translated)
    if has_image_axes(config):
        settings = {key: value for key, value in settings.items() if key not in IMAGE_AXES}
    return None if settings == rope_settings(config) else settings


def has_image_axes(config: Mapping[str, Any]) -> bool:
    """Tell whether frequencies are dealt out to time, height and width of images; all three are equal for text."""
    return config.get("model_type") in ("qwen3_5_text", "qwen3_5_moe_text")


def query_scaling_for_engine(config: Mapping[str, Any]) -> dict[str, float] | None:
    """Return vLLM's form of the growth of queries with positions (Ministral 3), which transformers reads with rope."""
    rope = rope_settings(config)
    if (beta := rope.get("llama_4_scaling_beta")) is None or config.get("model_type") != "ministral3":
        return None
    return {"beta": beta, "original_max_position_embeddings": rope["original_max_position_embeddings"]}


def is_usual_factor(config: Mapping[str, Any], rope: Mapping[str, Any]) -> bool:
    """Tell whether YaRN's attention factor is the one that follows from its scaling factor."""
    return math.isclose(attention_factor(config, rope), _yarn_scale(_factor(config, rope)))


def _changed(config: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings with each of `each_rope` changed."""
    rope = rope_settings(config)
    if _is_by_layer_type(config):
        return {key: change(value) if isinstance(value, Mapping) else value for key, value in rope.items()}
    return dict(change(rope))


def _is_by_layer_type(config: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in rope_settings(config).values())


def _attn_factor(rope: Mapping[str, Any]) -> float:
    return 1.0 if (given := rope.get("attn_factor")) is None else float(given)


def _factor(config: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    """Return the ratio of the longest row to the longest row of the first training."""
    if (given := rope.get("factor")) is not None:
        return float(given)
    original = _original_length(config, rope)
    return (_length(config, "max_position_embeddings") or original) / original


def _original_length(config: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    """Return the tokens of the longest row of the first training; 2 if the config does not say."""
    key = "original_max_position_embeddings"
    return _length(config, key) or _length(rope, key) or _length(config, "max_position_embeddings") or 2.0


def _length(settings: Mapping[str, Any], key: str) -> float | None:
    """Return a number of tokens above 1; None for other values, which the model library refuses or replaces."""
    value = settings.get(key)
    return float(value) if isinstance(value, int | float) and value > 1 else None


def _yarn_scale(factor: float, scale: float = 1.0) -> float:
    """Compute YaRN's scale of attention for longer rows (arXiv 2309.00071), with DeepSeek's `mscale`."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def changing_rope_type(config: Mapping[str, Any], longest: int) -> str | None:
    """Return the type of rotary embeddings if their frequencies depend on the longest row of a batch, else None.

    Args:
        config: The contents of a config.json.
        longest: Tokens of the longest possible row; frequencies change only beyond `unchanged_length`.
    """
    kind = rope_type(config)
    return kind if kind in _CHANGING and longest > unchanged_length(config) else None


def unchanged_length(config: Mapping[str, Any]) -> int:
    """Return the row length in tokens up to which frequencies stay the same; 0 if there is none."""
    key = "original_max_position_embeddings"
    if rope_type(config) in _LONG:
        return int(config.get(key) or rope_settings(config).get(key) or 0)
    return int(config.get("max_position_embeddings") or 0) if has_fixed_base(config) else 0


def has_fixed_base(config: Mapping[str, Any]) -> bool:
    """Tell whether type `dynamic` means a larger but fixed base of the frequencies, as with Hunyuan's `alpha`.

    transformers and vLLM multiply the base by a power of `alpha` for rows of any length, up to the model's positions.
    """
    is_hunyuan = config.get("model_type") in ("hunyuan_v1_dense", "hunyuan_v1_moe")
    return is_hunyuan and rope_type(config) == "dynamic" and bool(rope_settings(config).get("alpha"))


def older_rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` as keys that transformers 4 reads; {} if there are none.

    If layer types have separate settings, transformers 4 reads base and scaling of full attention, and
    `rope_local_base_freq` for layers with a window.
    """
    given = config.get("rope_parameters")
    if not isinstance(given, Mapping) or not given:
        return {}
    rope, found = given.get("full_attention", given), dict[str, Any]()
    if "rope_theta" not in rope or rope_type({"rope_parameters": rope}) == "proportional":  # too new for it
        return {}
    if "sliding_attention" in given:
        found["rope_local_base_freq"] = given["sliding_attention"]["rope_theta"]
    if "partial_rotary_factor" in rope:
        found["partial_rotary_factor"] = rope["partial_rotary_factor"]
    kind = rope_type({"rope_parameters": rope})
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    if kind in _LONG and rope.get("attention_factor") is None:  # transformers 4 refuses any other key there
        scaling = {"type": kind, **{key: scaling[key] for key in ("short_factor", "long_factor")}}
    return {**found, "rope_theta": rope["rope_theta"], "rope_scaling": None if kind == "default" else scaling}


def has_rotary_base(rope_parameters: object) -> bool:
    """Tell whether settings that replace a model's own have the base of the frequencies."""
    return isinstance(rope_parameters, Mapping) and rope_parameters.get("rope_theta") is not None
