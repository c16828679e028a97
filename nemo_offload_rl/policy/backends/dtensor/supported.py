"""What of a model's config.json the DTensor backend would get wrong. Imports no model library.

Rules ask it before Ray starts, the backend once more when it has the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.models.families import DTENSOR, unsupported_family, unsupported_settings
from nemo_offload_rl.models.rope import malformed_rope


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
    return unsupported_settings(config, DTENSOR) or malformed_rope(config)
