"""Folders whose models also read images: the language model in them is trained, and the rest, the towers, is frozen.

A policy builds the language model alone, from `text_config` of config.json, and reads only its tensors: towers take
memory neither of a device nor of the host. Engines that get their weights from a policy serve the language model alone,
too. Exports are whole folders: towers are copied from `policy.model_name`, tensor by tensor.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_offload_rl.models.rope import IMAGE_AXES
from nemo_offload_rl.models.windows import ModelConfig

PART_OF = "part_of_model_type"
"""Key that `language_config` adds: the `model_type` of the whole model."""

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of such a folder that turn images into inputs."""

_TEXT, _TIED, _QUANTIZED = "text_config", "tie_word_embeddings", "quantization_config"


@dataclass(frozen=True)
class WholeModel:
    """A family of models that read images too.

    Attributes:
        model_type: Its name in config.json.
        title: Common name of its models.
        language: `model_type` in `text_config` -> family of the language model, and its class in `transformers`.
        usual: What is meant where `text_config` leaves it out.
        of_images: Keys of rotary embeddings that matter only in rows with images.
    """

    model_type: str
    title: str
    language: Mapping[str, tuple[str, str]]
    usual: Mapping[str, Any] = field(default_factory=dict)
    of_images: tuple[str, ...] = ()


_GEMMA_3 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

WHOLE_MODELS: Mapping[str, WholeModel] = {
    whole.model_type: whole
    for whole in (
        WholeModel("gemma3", "Gemma 3", {"gemma3_text": ("gemma3_text", "Gemma3ForCausalLM")}, usual=_GEMMA_3),
        WholeModel("gemma4", "Gemma 4", {"gemma4_text": ("gemma4_text", "Gemma4ForCausalLM")}),
        WholeModel(
            "mistral3",
            "Mistral Small 3.1 and 3.2, Ministral 3",
            {"mistral": ("mistral", "MistralForCausalLM"), "ministral3": ("ministral3", "Ministral3ForCausalLM")},
        ),
        WholeModel(
            "qwen3_5", "Qwen3.5", {"qwen3_5_text": ("qwen3_5_text", "Qwen3_5ForCausalLM")}, of_images=IMAGE_AXES
        ),
        WholeModel(
            "qwen3_5_moe",
            "Qwen3.5 (experts)",
            {"qwen3_5_moe_text": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM")},
            of_images=IMAGE_AXES,
        ),
        WholeModel(
            "qwen3_vl",
            "Qwen3-VL",
            {"qwen3_vl_text": ("qwen3", "Qwen3ForCausalLM")},
            of_images=IMAGE_AXES,
        ),
        WholeModel(
            "qwen3_vl_moe",
            "Qwen3-VL (experts)",
            {"qwen3_vl_moe_text": ("qwen3_moe", "Qwen3MoeForCausalLM")},
            usual={"norm_topk_prob": True},  # transformers normalizes in any case
            of_images=IMAGE_AXES,
        ),
    )
}
"""By model type."""


def language_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of the language model in a folder; that of a folder with text alone as it is.

    The result has the keys of the family that is trained, its class as `architectures`, and `PART_OF`.
    """
    whole = WHOLE_MODELS.get(str(config.get("model_type")))
    text = config.get(_TEXT)
    if whole is None or not isinstance(text, Mapping):
        return dict(config)
    given = text.get("model_type", next(iter(whole.language)))
    if given not in whole.language:
        return dict(config)
    model_type, name = whole.language[given]
    found = {**whole.usual, **text, "model_type": model_type, "architectures": [name], PART_OF: whole.model_type}
    if _TIED not in text and _TIED in config:
        found[_TIED] = config[_TIED]
    if config.get(_QUANTIZED):
        found[_QUANTIZED] = config[_QUANTIZED]
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := found.get(key), Mapping):
            found[key] = {name: value for name, value in rope.items() if name not in whole.of_images}
    return found


def whole_config(config: ModelConfig, changes: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of an exported folder whose language model was trained.

    Args:
        config: That of the original folder.
        changes: Changed keys of the language model.
        dtype: Type of the language model's weights.
    """
    whole, text = WHOLE_MODELS[config["model_type"]], config[_TEXT]
    is_tied = {**language_config(config), **changes}.get(_TIED)
    tied = {} if is_tied is None else {_TIED: is_tied}
    rope = changes.get("rope_parameters")
    if rope is not None:  # replaces the older key too
        kept = {key: value for key, value in (text.get("rope_parameters") or {}).items() if key in whole.of_images}
        changes = {**changes, "rope_parameters": {**kept, **rope}}
        text = {key: value for key, value in text.items() if key != "rope_scaling"}
    named = {"dtype": dtype, "torch_dtype": dtype}
    rest = {key: value for key, value in config.items() if key != _QUANTIZED}
    return {**rest, **named, **tied, _TEXT: {**text, **changes, **named, **tied}}


def place_in_whole(names: Iterable[str]) -> dict[str, str]:
    """Return beginnings of a language model's names -> beginnings in the files of the whole model.

    The hub has older names (Gemma 3, Mistral Small) and newer ones (Qwen3-VL).

    Args:
        names: Names in the files.
    """
    if any(name.startswith("language_model.") for name in names):
        return {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    return MODULES


MODULES = {"model.": "model.language_model.", "lm_head.": "lm_head."}
"""The same for the names of modules in `transformers`."""


def placed(name: str, place: Mapping[str, str]) -> str:
    """Return the name that a tensor of the language model has in the whole model.

    Args:
        name: In either.
        place: A result of `place_in_whole`; empty for a folder with text alone.
    """
    begin = next((begin for begin in place if name.startswith(begin)), None)
    if begin is None or not is_of_towers(name, place):
        return name
    return place[begin] + name.removeprefix(begin)


def is_of_towers(name: str, place: Mapping[str, str]) -> bool:
    """Tell whether a tensor of the whole model is outside of the language model."""
    return not any(name.startswith(begin) for begin in place.values())
