"""From the checked TypedDicts to frozen dataclasses. After this nothing reads configuration by string."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from nemo_offload_rl.algorithms.settings import ClippedPGLossSettings, GrpoSettings
from nemo_offload_rl.config.schema import GrpoMasterConfig
from nemo_offload_rl.data.config import (
    ArithmeticConfig,
    DataDefaultConfig,
    OpenMathInstruct2Config,
    ResponseDatasetConfig,
)
from nemo_offload_rl.data.settings import (
    ArithmeticSettings,
    DatasetSettings,
    DataSettings,
    EnvSettings,
    OpenMathInstruct2Settings,
    ResponseDatasetSettings,
    TokenizerSettings,
)
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.generation.config import GenerationConfig
from nemo_offload_rl.generation.interfaces import SamplingSettings
from nemo_offload_rl.generation.settings import GenerationSettings, VllmSettings
from nemo_offload_rl.policy.config import PolicyConfig
from nemo_offload_rl.policy.settings import PolicySettings
from nemo_offload_rl.utils.settings import CheckpointingSettings, ClusterSettings, LoggerSettings

_DATASETS: Mapping[str, type] = {
    "arithmetic": ArithmeticSettings,
    "ResponseDataset": ResponseDatasetSettings,
    "OpenMathInstruct-2": OpenMathInstruct2Settings,
}


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """Everything a GRPO run needs to know; `resolved` is the plain dictionary for the records of the run."""

    grpo: GrpoSettings
    loss_fn: ClippedPGLossSettings
    policy: PolicySettings
    tokenizer: TokenizerSettings
    generation: GenerationSettings
    data: DataSettings
    env: Mapping[str, EnvSettings]
    logger: LoggerSettings
    cluster: ClusterSettings
    checkpointing: CheckpointingSettings
    resolved: Mapping[str, Any]


def freeze[T](target: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Build a frozen dataclass from a mapping, recursively and strictly.

    Nested mappings become the dataclass that the field names, lists become tuples where the field is one.

    Raises:
        ConfigError: A field is missing or the mapping has one too many; `where` is the dotted place in the message.
    """
    fields = {field.name for field in dataclasses.fields(cast(Any, target))}
    place = where or target.__name__
    if missing := sorted(fields - values.keys()):
        raise ConfigError(f"{place}: {', '.join(missing)} missing; {target.__name__} needs every field")
    if extra := sorted(values.keys() - fields):
        raise ConfigError(f"{place}: {', '.join(extra)} not known to {target.__name__}; remove it")
    hints = get_type_hints(target)
    return target(**{name: _convert(hints[name], values[name], f"{place}.{name}") for name in fields})


def _convert(hint: Any, value: Any, where: str) -> Any:
    kind = _strip_none(hint)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return freeze(cast(type, kind), value, where)
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        inner = get_args(kind)[0]
        return tuple(_convert(inner, entry, where) for entry in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value


def _strip_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else hint
    return hint


def to_grpo_config(cfg: GrpoMasterConfig) -> GrpoConfig:
    """Convert a configuration that passed `validate_keys` and `check_rules`."""
    seed = cfg["grpo"]["seed"]
    logger = {"wandb": None, **cfg["logger"]}
    return GrpoConfig(
        grpo=freeze(GrpoSettings, cfg["grpo"], "grpo"),
        loss_fn=freeze(ClippedPGLossSettings, cfg["loss_fn"], "loss_fn"),
        policy=to_policy_settings(cfg["policy"], seed),
        tokenizer=freeze(TokenizerSettings, cfg["policy"]["tokenizer"], "policy.tokenizer"),
        generation=to_generation_settings(cfg["policy"]["generation"], cfg["policy"]["model_name"], seed),
        data=_to_data_settings(cfg),
        env={name: freeze(EnvSettings, section, f"env.{name}") for name, section in cfg["env"].items()},
        logger=freeze(LoggerSettings, logger, "logger"),
        cluster=freeze(ClusterSettings, cfg["cluster"], "cluster"),
        checkpointing=freeze(CheckpointingSettings, cfg["checkpointing"], "checkpointing"),
        resolved=cast(Mapping[str, Any], cfg),
    )


def to_policy_settings(policy: PolicyConfig, seed: int) -> PolicySettings:
    """The keys `policy.*` that a DTensor worker reads."""
    elsewhere = {"tokenizer", "generation", "megatron_cfg", "scheduler"}
    values: dict[str, Any] = {key: value for key, value in policy.items() if key not in elsewhere}
    values["scheduler"] = _scheduler_phases(policy)
    values["logprob_temperature"] = policy["generation"]["temperature"]
    generation = policy["generation"]
    values["engine_memory_share"] = generation["vllm_cfg"]["gpu_memory_utilization"]
    values["colocated"] = policy["generation"]["colocated"]["enabled"]
    values["seed"] = seed
    return freeze(PolicySettings, values, "policy")


def _scheduler_phases(policy: PolicyConfig) -> list[dict[str, Any]]:
    entries = policy["scheduler"] or []
    phases = [entry for entry in entries if "name" in entry]
    milestones = [step for entry in entries if "milestones" in entry for step in entry["milestones"]]
    ends = [*milestones, None]
    return [{**phase, "until_step": end} for phase, end in zip(phases, ends[: len(phases)], strict=True)]


def to_generation_settings(generation: GenerationConfig, model_name: str, seed: int) -> GenerationSettings:
    """The keys `policy.generation.*`, with one `SamplingSettings` for rollouts and one for validation."""
    common = {
        "max_new_tokens": generation["max_new_tokens"],
        "stop_token_ids": generation["stop_token_ids"] or (),
        "stop_strings": generation["stop_strings"] or (),
        "seed": None,
    }
    rollout = {key: generation[key] for key in ("temperature", "top_p", "top_k")}
    validation = {
        "temperature": generation["val_temperature"],
        "top_p": generation["val_top_p"],
        "top_k": generation["val_top_k"],
    }
    vllm = {**generation["vllm_cfg"], "vllm_kwargs": generation["vllm_kwargs"], "model_name": model_name, "seed": seed}
    return GenerationSettings(
        backend=generation["backend"],
        colocated=generation["colocated"]["enabled"],
        sampling=freeze(SamplingSettings, common | rollout, "policy.generation"),
        val_sampling=freeze(SamplingSettings, common | validation, "policy.generation"),
        vllm=freeze(VllmSettings, vllm, "policy.generation.vllm_cfg"),
    )


def _to_data_settings(cfg: GrpoMasterConfig) -> DataSettings:
    data = cfg["data"]
    validation = data["validation"]
    return DataSettings(
        max_input_seq_length=data["max_input_seq_length"],
        shuffle=data["shuffle"],
        train=to_dataset_settings(data["train"], data["default"], "data.train"),
        validation=None if validation is None else to_dataset_settings(validation, data["default"], "data.validation"),
    )


def to_dataset_settings(
    section: ArithmeticConfig | ResponseDatasetConfig | OpenMathInstruct2Config, default: DataDefaultConfig, where: str
) -> DatasetSettings:
    """One data set; the task keys that it does not set are those of `data.default`."""
    task_keys = default.keys()
    task = {**default, **{key: value for key, value in section.items() if key in task_keys}}
    own = {key: value for key, value in section.items() if key not in task_keys and key != "dataset_name"}
    return freeze(_DATASETS[section["dataset_name"]], {**own, "task": task}, where)
