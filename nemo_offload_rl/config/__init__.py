"""The configuration border: YAML and overrides in, frozen dataclasses out.

1. `utils.config.load_config` reads, inherits, overrides and resolves.
2. `validate.validate_keys` checks every key by itself (pydantic, unknown keys forbidden).
3. `rules.check_rules` checks what keys demand of each other.
4. `convert.to_grpo_config` makes the frozen dataclasses that the rest of the package reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_offload_rl.config.convert import GrpoConfig


def load_grpo_config(path: str | Path, overrides: Sequence[str] = ()) -> GrpoConfig:
    """Load, check and convert the configuration of a GRPO run.

    Args:
        path: A YAML file such as examples/configs/grpo_math_1B.yaml.
        overrides: Hydra overrides, applied in order.

    Raises:
        ConfigError: One line that says what is wrong and what to change.
    """
    # Imported here so that `--help` of a launch script does not wait for torch.
    from nemo_offload_rl.config.convert import to_grpo_config
    from nemo_offload_rl.config.rules import check_rules
    from nemo_offload_rl.config.validate import validate_keys
    from nemo_offload_rl.utils.config import load_config

    cfg = validate_keys(load_config(path, overrides))
    check_rules(cfg)
    return to_grpo_config(cfg)
