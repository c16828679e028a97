"""Tiny folders of models that also read images, made in code: a language model of `model_families`, and a tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from model_families import FAMILIES, add_unread_tensors, family_config
from tiny_models import make_tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

from nemo_offload_rl.backends.dtensor.state_mixers import norms_in_torch, without_kernels
from nemo_offload_rl.models.families import state_mixer, unread_tensors

_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_QWEN_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "depth": 1, "num_position_embeddings": 16}
_TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": _VISION | {"num_hidden_layers": 1},
    "gemma4": _VISION | {"num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16},
    "mistral3": _VISION | {"num_hidden_layers": 1, "head_dim": 16},
    "qwen3_5": _QWEN_VISION | {"out_hidden_size": 128},
    "qwen3_5_moe": _QWEN_VISION | {"out_hidden_size": 128},
    "qwen3_vl": {
        **{"hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "depth": 2, "num_position_embeddings": 16},
        **{"out_hidden_size": 64, "deepstack_visual_indexes": [1]},
    },
}
_TOWERS["qwen3_vl_moe"] = _TOWERS["qwen3_vl"]
_ROPE_OF_QWEN3_VL = {"rope_theta": 5e6, "rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
WHOLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3-tied": ("gemma3", "gemma3-tied", {"vision_config": _TOWERS["gemma3"], "mm_tokens_per_image": 4}),
    "gemma4-experts-tied": ("gemma4", "gemma4-experts-tied", {}),
    "gemma4-shared-tied": ("gemma4", "gemma4-shared-tied", {}),
    "mistral3": ("mistral3", "mistral", {}),
    "mistral3-ministral3-tied": ("mistral3", "ministral3-tied", {}),
    "qwen3_5-tied": ("qwen3_5", "qwen3_5-tied", {}),
    "qwen3_5_moe": ("qwen3_5_moe", "qwen3_5_moe", {}),
    "qwen3_vl": ("qwen3_vl", "qwen3-tied", {"text_config": {"rope_parameters": _ROPE_OF_QWEN3_VL}}),
    "qwen3_vl_moe": ("qwen3_vl_moe", "qwen3_moe", {"text_config": {"rope_parameters": _ROPE_OF_QWEN3_VL}}),
    "qwen3_vl-tied": ("qwen3_vl", "qwen3-tied", {"text_config": {"rope_parameters": _ROPE_OF_QWEN3_VL}}),
}
"""By name: model type of the whole, a name of `model_families.FAMILIES`, and changes of the config."""
_TEXT_TYPES = {"qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text"}


def save_whole_folder(path: Path, name: str, *, newer_names: bool = False, **sizes: Any) -> Any:
    """Write weights, config, processor and tokenizer of a drawn model, under the hub's names or newer ones.

    `sizes` replace settings of the language model.
    """
    kind, family, changes = WHOLE[name]
    is_tied = name.endswith("-tied")
    text = family_config(family).to_dict() | {"model_type": _TEXT_TYPES.get(kind, FAMILIES[family][0])}
    text |= changes.get("text_config", {})
    text |= {"tie_word_embeddings": is_tied, **sizes}
    whole = {"vision_config": _TOWERS[kind], **changes, "text_config": text, "tie_word_embeddings": is_tied}
    config = AutoConfig.for_model(kind, **whole)
    if state_mixer(text) is not None:
        norms_in_torch(config.text_config)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        for own_name, buffer in model.named_buffers():
            if own_name.endswith("layer_scalar"):
                buffer.add_(0.2 * torch.randn_like(buffer))
    model.float().eval().save_pretrained(path, save_original_format=not newer_names)
    make_tokenizer().save_pretrained(path)
    if unread_tensors(text) is not None:
        add_unread_tensors(path / "model.safetensors")
    (path / "preprocessor_config.json").write_text('{"of": "images"}')
    without_kernels(model)
    return model


def whole_model(folder: Path) -> Any:
    """The multimodal class of `transformers` with a folder's weights: all of its tensors, and no others."""
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model, report = loaded
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    without_kernels(model)
    return model.eval()
