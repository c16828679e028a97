"""Whether a model has experts, where that can be known without fetching it."""

from __future__ import annotations

import json
import re
from pathlib import Path

# Families whose members of these names have no experts, by what their model cards say.
_DENSE = re.compile(
    r"Llama-3\.[123]-\d+B|Llama-3\.3|Qwen2\.5-(Math-)?\d+(\.\d+)?B|Qwen3-(0\.6|1\.7|4|8|14|32)B|gemma-3-\d+b|"
    r"Mistral-(7B|Nemo)|DeepSeek-R1-Distill-|SmolLM",
    re.IGNORECASE,
)
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def has_experts(model_name: object) -> bool | None:
    """True or False for a local folder or a known family; None where it is not known."""
    if not isinstance(model_name, str):
        return None
    config = Path(model_name).expanduser() / "config.json"
    if config.is_file():
        values = json.loads(config.read_text(encoding="utf-8"))
        return any(values.get(key) for key in _EXPERT_KEYS)
    return False if _DENSE.search(model_name) else None
