"""What a model is, where that can be known without fetching it: from a local config.json, or by its name."""

from __future__ import annotations

import json
import re
from pathlib import Path

from nemo_offload_rl.models.families import FAMILIES

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
# Names of published models, and the type in the config.json of each, by their model cards; the first one counts.
_TYPES = (
    (r"Qwen3-\d+B-A\d+B|Qwen3-235B", "qwen3_moe"),
    (r"Qwen3-[\d.]+B", "qwen3"),
    (r"Qwen2\.5-(Math-)?[\d.]+B|DeepSeek-R1-Distill-Qwen-1\.5B|DeepSeek-R1-Distill-Qwen-7B", "qwen2"),
    (r"Llama-3(\.[1-3])?-(Tulu-3-)?\d+B(?!-Vision)|DeepSeek-R1-Distill-Llama", "llama"),
    (r"Mistral-(7B|Nemo)", "mistral"),
    (r"SmolLM3", "smollm3"),
    (r"gemma-3-1b", "gemma3_text"),
    (r"gemma-3-\d+b", "gemma3"),
    (r"gemma-4", "gemma4"),
    (r"gpt-oss", "gpt_oss"),
    (r"Moonlight|DeepSeek-V3|deepseek\.md", "deepseek_v3"),
    (r"Nemotron-(3|Nano|Super)", "nemotron_h"),
    (r"Qwen3\.5-", "qwen3_5"),
    (r"GLM-4-\d+B-0414", "glm4"),
    (r"GLM-4-9B", "glm"),
    (r"GLM-4\.7-Flash", "glm4_moe_lite"),
    (r"GLM-4\.[5-9]", "glm4_moe"),
    (r"GLM-5", "glm_moe_dsa"),
    (r"MiniMax", "minimax"),
)
_WITH_EXPERT_BIASES = ("deepseek_v3", "glm4_moe", "nemotron_h")
_WITHOUT_EXPERTS = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "gemma3", "gemma3_text")


def model_type(model_name: object) -> str | None:
    """`model_type` of a local folder's config.json or of a published model; None where it is not known."""
    if not isinstance(model_name, str):
        return None
    config = Path(model_name).expanduser() / "config.json"
    if config.is_file():
        return str(json.loads(config.read_text(encoding="utf-8")).get("model_type"))
    found = (kind for pattern, kind in _TYPES if re.search(pattern, model_name, re.IGNORECASE))
    return next(found, None)


def has_experts(model_name: object) -> bool | None:
    """True or False for a local folder or a known family; None where it is not known."""
    if isinstance(model_name, str) and (config := Path(model_name).expanduser() / "config.json").is_file():
        values = json.loads(config.read_text(encoding="utf-8"))
        return any(values.get(key) for key in _EXPERT_KEYS)
    return False if model_type(model_name) in _WITHOUT_EXPERTS else None


def has_expert_biases(model_name: object) -> bool:
    """Whether a local folder or a published model is known to choose experts with biases of theirs."""
    return model_type(model_name) in _WITH_EXPERT_BIASES


def is_trained(model_name: object, backend: str) -> bool:
    """Whether a model is known to be of a family that a backend trains.

    Args:
        model_name: A folder, or a name of the hub.
        backend: "dtensor" or "megatron".
    """
    family = FAMILIES.get(str(model_type(model_name)))
    return family is not None and backend in family.trained_by
