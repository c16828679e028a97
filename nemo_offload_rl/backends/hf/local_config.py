"""Reads a model's local config.json, for the rules between keys (in the backends and in `config/rules`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.backends.hf.model_folder import local_folder
from nemo_offload_rl.keys.master import PolicyRun


def local_model_config(cfg: PolicyRun) -> Mapping[str, Any] | None:
    """Return the model's config.json with `policy.hf_config_overrides`; None for a broken folder.

    Also None for a hub's model that has not been downloaded yet.
    """
    folder = local_folder(cfg.policy.model_name)
    if folder is None or not (path := folder / "config.json").is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return {**config, **cfg.policy.hf_config_overrides} if isinstance(config, dict) else None
