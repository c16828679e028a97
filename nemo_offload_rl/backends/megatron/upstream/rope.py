"""Sets Hugging Face's rotary embeddings in Megatron's modules.

Megatron-Bridge 0.6.2 silently drops some settings: Qwen's `linear`, the original length of `llama3`, YaRN's attention
factor. Here transformers' own functions compute frequencies and factor, and Megatron-core only multiplies by positions.
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nemo_offload_rl.backends.megatron.supported import fusion_problem
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.models.rope import rope_type


@dataclass(frozen=True)
class Rotation:
    """Rotation of queries and keys.

    Attributes:
        inverse_frequencies: [part * head_dim / 2] float32 on the CPU, in radians per position.
        attention_factor: Factor of cosine and sine.
        part: Rotated share of each head.
    """

    inverse_frequencies: Tensor
    attention_factor: float
    part: float = 1.0


def rotation_of(config: Any) -> Rotation | None:
    """Compute the rotation of a model's config as transformers does; None for a family without one (Nemotron-H).

    Args:
        config: A Hugging Face config that `supported.unsupported_rope` accepts.

    Raises:
        ConfigError: The base is missing; an override of `rope_parameters` can drop it.
    """
    if not hasattr(config, "rope_parameters"):
        return None
    config.standardize_rope_params()
    rope = config.rope_parameters
    if rope.get("rope_theta") is None:
        raise ConfigError(
            "policy.hf_config_overrides.rope_parameters has no rope_theta, and replaces the model's; add the "
            "rope_theta of config.json"
        )
    kind, part = rope["rope_type"], float(rope.get("partial_rotary_factor") or 1.0)
    if kind != "default":
        return Rotation(*ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu")), part)
    size = int(part * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads))
    exponents = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float() / size
    return Rotation(1.0 / rope["rope_theta"] ** exponents, 1.0, part)


def without_scaling(config: Any) -> Any:
    """Copy a config with plain rotary embeddings, since Megatron-Bridge fails on some other types."""
    plain = deepcopy(config)
    if hasattr(config, "rope_parameters"):
        plain.rope_parameters = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    return plain


def provider_fields(rotation: Rotation | None) -> dict[str, Any]:
    """Return the provider's fields for plain embeddings; `set_rotation` then sets their frequencies.

    Attention multiplies by 0.1 * yarn_mscale * log(yarn_rotary_scaling_factor) + 1 with any type of embeddings.
    """
    if rotation is None:
        return {"position_embedding_type": "none"}
    return {
        "position_embedding_type": "rope",
        "rotary_percent": rotation.part,
        "rope_scaling": False,
        "seq_len_interpolation_factor": None,
        "yarn_rotary_scaling_factor": math.e,
        "yarn_mscale": 10.0 * (rotation.attention_factor - 1.0),
        "yarn_mscale_all_dim": 0.0,
    }


def check_fusion(config: Any, rotation: Rotation | None, *, is_fused: bool) -> None:
    """Refuse the fused kernel if the rotation has an attention factor, which the kernel ignores.

    Raises:
        ConfigError: The kernel is fused and the factor is not 1.
    """
    problem = (
        fusion_problem(rope_type(config.to_dict()), rotation.attention_factor)
        if is_fused and rotation is not None
        else None
    )
    if problem is not None:
        raise ConfigError(problem)


def set_rotation(chunks: Sequence[Any], rotation: Rotation | None) -> None:
    """Set the frequencies of every stage's embeddings.

    Megatron-core keeps them as a plain attribute and moves them to the device in the first pass.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, RotaryEmbedding) and rotation is not None:
            if module.inv_freq.shape != rotation.inverse_frequencies.shape:
                raise ValueError(
                    f"{module} has {len(module.inv_freq)} frequencies, not {len(rotation.inverse_frequencies)}"
                )
            module.inv_freq = rotation.inverse_frequencies.to(module.inv_freq.device)
