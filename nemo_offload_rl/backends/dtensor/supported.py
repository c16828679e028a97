"""What of a model's config.json the DTensor backend would get wrong. Imports no model library.

Rules ask it before Ray starts, the backend once more when it has the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.models.families import DTENSOR, unsupported_family, unsupported_settings
from nemo_offload_rl.models.rope import malformed_rope
from nemo_offload_rl.models.shape import ModelShape

_ALIGNED = 8  # 16-bit numbers in the 16 bytes to which `torch.nn.functional.grouped_mm` wants rows aligned

DROPS_AT_RANDOM = (
    "policy.dtensor_cfg.cpu_offload is true, but the model drops at random in training, and layers are computed again "
    "in another order; set policy.dropout to false"
)


def unsupported(config: Mapping[str, Any]) -> str | None:
    """What of the config is refused and why, or None.

    Args:
        config: The contents of a config.json.
    """
    if (reason := unsupported_family(config, DTENSOR)) is not None:
        return reason
    architectures = config.get("architectures") or ()
    if architectures and not any(name.endswith("ForCausalLM") for name in architectures):
        return f"architectures {', '.join(architectures)}, which is no causal language model"
    return unsupported_settings(config, DTENSOR) or malformed_rope(config) or _uneven_experts(config)


def _uneven_experts(config: Mapping[str, Any]) -> str | None:
    """Which size of experts torch's grouped products do not take, or None."""
    if not ModelShape.of(config).num_experts:
        return None
    inner = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
    for key in ("hidden_size", inner):
        if (size := config.get(key)) is not None and size % _ALIGNED:
            return f"{key} {size}, and that backend's products of experts need multiples of {_ALIGNED}"
    return None
