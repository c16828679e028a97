from __future__ import annotations

from pathlib import Path

import pytest

from nemo_offload_rl.config import load_grpo_config
from nemo_offload_rl.config.schema import GrpoMasterConfig
from nemo_offload_rl.config.validate import validate_keys
from nemo_offload_rl.utils.config import load_config

CONFIGS = sorted(
    path for name in ("grpo*", "dapo*", "gspo*") for path in Path("examples/configs").rglob(f"{name}.yaml")
)


def test_there_are_configurations_to_check() -> None:
    assert {path.name for path in CONFIGS} >= {
        "grpo_math_1B.yaml",
        "grpo_math_1B_megatron.yaml",
        "grpo_arithmetic_cpu.yaml",
        "dapo_math_1B.yaml",
        "gspo_math_1B.yaml",
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_passes_every_check(path: Path) -> None:
    load_grpo_config(path)


def test_the_exemplar_sets_every_required_key() -> None:
    """So that `defaults: grpo_math_1B.yaml` is always enough to begin with."""
    validate_keys(load_config("examples/configs/grpo_math_1B.yaml"), GrpoMasterConfig)


def test_files_that_configurations_name_exist() -> None:
    for path in CONFIGS:
        default = load_config(path)["data"]["default"]
        for key in ("prompt_file", "system_prompt_file"):
            assert default[key] is None or Path(default[key]).is_file(), f"{path}: data.default.{key}"
