from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

import pytest

from nemo_offload_rl.algorithms.config import ClippedPGLossConfig, GrpoSectionConfig
from nemo_offload_rl.algorithms.settings import ClippedPGLossSettings, GrpoSettings
from nemo_offload_rl.config.keys import known_keys, walk_keys
from nemo_offload_rl.config.schema import GrpoMasterConfig
from nemo_offload_rl.data.config import (
    ArithmeticConfig,
    DataConfig,
    DataDefaultConfig,
    EnvConfig,
    OpenMathInstruct2Config,
    ResponseDatasetConfig,
)
from nemo_offload_rl.data.settings import (
    ArithmeticSettings,
    DataSettings,
    EnvSettings,
    OpenMathInstruct2Settings,
    ResponseDatasetSettings,
    TaskSettings,
    TokenizerSettings,
)
from nemo_offload_rl.generation.config import GenerationConfig, VllmConfig
from nemo_offload_rl.generation.interfaces import SamplingSettings
from nemo_offload_rl.generation.settings import GenerationSettings, VllmSettings
from nemo_offload_rl.policy.config import PolicyConfig, SchedulerPhaseConfig, TokenizerConfig
from nemo_offload_rl.policy.settings import PolicySettings, SchedulerSettings
from nemo_offload_rl.utils.schema import CheckpointingConfig, ClusterConfig, LoggerConfig
from nemo_offload_rl.utils.settings import CheckpointingSettings, ClusterSettings, LoggerSettings

# Fields that come from a key elsewhere, or from more than one.
DERIVED: dict[type, dict[str, str]] = {
    PolicySettings: {
        "colocated": "policy.generation.colocated.enabled",
        "seed": "grpo.seed",
        "logprob_temperature": "policy.generation.temperature",
        "engine_memory_share": "policy.generation.vllm_cfg.gpu_memory_utilization",
        "engine_kv_cache_gib": "policy.generation.vllm_cfg.kv_cache_memory_gib",
    },
    SchedulerSettings: {"until_step": "policy.scheduler[].milestones"},
    VllmSettings: {
        "model_name": "policy.model_name",
        "hf_config_overrides": "policy.hf_config_overrides",
        "seed": "grpo.seed",
        "vllm_kwargs": "policy.generation.vllm_kwargs",
    },
    SamplingSettings: {"seed": "grpo.seed"},
    GenerationSettings: {
        "engine_gpus_per_node": "policy.generation.colocated.resources.gpus_per_node",
        "engine_num_nodes": "policy.generation.colocated.resources.num_nodes",
        "colocated": "policy.generation.colocated.enabled",
        "sampling": "policy.generation.temperature",
        "val_sampling": "policy.generation.val_temperature",
        "vllm": "policy.generation.vllm_cfg",
    },
    ArithmeticSettings: {"task": "data.default"},
    ResponseDatasetSettings: {"task": "data.default"},
    OpenMathInstruct2Settings: {"task": "data.default"},
}

PAIRS = [
    (GrpoSettings, GrpoSectionConfig),
    (ClippedPGLossSettings, ClippedPGLossConfig),
    (PolicySettings, PolicyConfig),
    (SchedulerSettings, SchedulerPhaseConfig),
    (TokenizerSettings, TokenizerConfig),
    (GenerationSettings, GenerationConfig),
    (SamplingSettings, GenerationConfig),
    (VllmSettings, VllmConfig),
    (DataSettings, DataConfig),
    (TaskSettings, DataDefaultConfig),
    (ArithmeticSettings, ArithmeticConfig),
    (ResponseDatasetSettings, ResponseDatasetConfig),
    (OpenMathInstruct2Settings, OpenMathInstruct2Config),
    (EnvSettings, EnvConfig),
    (LoggerSettings, LoggerConfig),
    (ClusterSettings, ClusterConfig),
    (CheckpointingSettings, CheckpointingConfig),
]


def nested_dataclass(hint: Any) -> type | None:
    return next((kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind)), None)


def field_names(settings: type, prefix: str = "") -> list[str]:
    """Names of all fields, those of nested settings dataclasses included, unless they have a pair of their own."""
    names = []
    paired = {kind for kind, _ in PAIRS}
    hints = get_type_hints(settings)
    for field in dataclasses.fields(settings):
        names.append(f"{prefix}{field.name}")
        nested = nested_dataclass(hints[field.name])
        if nested is not None and nested not in paired:
            names += field_names(nested, f"{prefix}{field.name}.")
    return names


def test_every_key_is_documented() -> None:
    keys = list(walk_keys(GrpoMasterConfig))
    assert len(keys) > 200
    undocumented = [key.path for key in keys if not key.description]
    assert undocumented == []
    assert [key.path for key in keys if key.description and not key.description.endswith((".", "`"))] == []


@pytest.mark.parametrize(("settings", "typed_dict"), PAIRS, ids=lambda kind: kind.__name__)
def test_every_settings_field_has_a_documented_key(settings: type, typed_dict: Any) -> None:
    documented = {key.path for key in walk_keys(typed_dict) if key.description}
    everywhere = set(known_keys(GrpoMasterConfig))
    derived = DERIVED.get(settings, {})
    assert set(derived.values()) <= everywhere
    assert [name for name in field_names(settings) if name not in documented and name not in derived] == []


def test_settings_have_no_default_values_beside_sampling() -> None:
    for settings, _ in PAIRS:
        if settings is SamplingSettings:
            continue  # also built by hand, where it stands for vLLM's own defaults
        with_default = [f.name for f in dataclasses.fields(settings) if f.default is not dataclasses.MISSING]
        assert with_default == [], settings.__name__


def test_settings_are_frozen() -> None:
    for settings, _ in PAIRS:
        assert settings.__dataclass_params__.frozen, settings.__name__


def test_values_are_told_in_words() -> None:
    values = {key.path: key.values for key in walk_keys(GrpoMasterConfig)}
    assert values["loss_fn.ratio_clip_min"] == "number >= 0 and <= 1"
    assert values["policy.generation.stop_token_ids"] == "list of integer or null"
    assert values["policy.scheduler[].milestones"] == "list of integer"
    assert values["env.NAME.num_workers"] == "integer >= 0"
