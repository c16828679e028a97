"""From the checked TypedDicts to frozen dataclasses. After this nothing reads configuration by string."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from nemo_offload_rl.algorithms.settings import ClippedPGLossSettings, DpoSettings, GrpoSettings, SftSettings
from nemo_offload_rl.config.schema import DpoMasterConfig, GrpoMasterConfig, SftMasterConfig
from nemo_offload_rl.data.settings import (
    ArithmeticSettings,
    BinaryPreferenceSettings,
    DatasetSettings,
    DataSettings,
    EnvSettings,
    MixtureSettings,
    OpenAIFormatSettings,
    OpenMathInstruct2Settings,
    PreferenceSettings,
    ResponseDatasetSettings,
    SupervisedDataSettings,
    TokenizerSettings,
)
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.generation.interfaces import SamplingSettings
from nemo_offload_rl.generation.settings import GenerationSettings, VllmSettings
from nemo_offload_rl.policy.config import PolicyConfig, TrainedPolicyConfig
from nemo_offload_rl.policy.settings import PolicySettings
from nemo_offload_rl.utils.settings import CheckpointingSettings, ClusterSettings, LoggerSettings

_DATASETS: Mapping[str, type] = {
    "arithmetic": ArithmeticSettings,
    "ResponseDataset": ResponseDatasetSettings,
    "OpenMathInstruct-2": OpenMathInstruct2Settings,
    "OpenAIFormatDataset": OpenAIFormatSettings,
    "BinaryPreferenceDataset": BinaryPreferenceSettings,
    "PreferenceDataset": PreferenceSettings,
}
_NO_RETRY = {"retry_message": None}
_LEFT_OUT = {"split": None, "tool_key": "tools"}  # what a data set's keys mean where they are left out
_NO_TASK = {"prompt_file": None, "system_prompt_file": None, "processor": None, "env_name": None}


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


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """What an SFT and a DPO run both need to know."""

    policy: PolicySettings
    tokenizer: TokenizerSettings
    data: SupervisedDataSettings
    logger: LoggerSettings
    cluster: ClusterSettings
    checkpointing: CheckpointingSettings
    resolved: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SftConfig(SupervisedConfig):
    """Everything an SFT run needs to know."""

    sft: SftSettings


@dataclass(frozen=True, kw_only=True)
class DpoConfig(SupervisedConfig):
    """Everything a DPO run needs to know. Batch sizes of `policy` count rows, of which a pair has two."""

    dpo: DpoSettings


# What a policy worker has of `policy` where nothing generates.
NO_ROLLOUTS: Mapping[str, Any] = {
    "logprob_temperature": 1.0,
    "engine_memory_share": 0.0,
    "engine_kv_cache_gib": None,
    "colocated": False,
    "residency": "always",
    "residency_overrides": {},
    "refit_buffer_size_gib": 0.0,
}


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
    data = cfg["data"]
    return GrpoConfig(
        grpo=freeze(GrpoSettings, cfg["grpo"], "grpo"),
        loss_fn=freeze(ClippedPGLossSettings, cfg["loss_fn"], "loss_fn"),
        policy=to_policy_settings(cfg["policy"], rollout_fields(cfg["policy"]) | {"seed": seed}),
        tokenizer=freeze(TokenizerSettings, cfg["policy"]["tokenizer"], "policy.tokenizer"),
        generation=to_generation_settings(cfg["policy"], seed),
        data=DataSettings(
            max_input_seq_length=data["max_input_seq_length"],
            overlong_rows=data["overlong_rows"],
            add_bos=data["add_bos"],
            shuffle=data["shuffle"],
            **_train_and_validation(data),
        ),
        env={name: freeze(EnvSettings, _NO_RETRY | section, f"env.{name}") for name, section in cfg["env"].items()},
        logger=freeze(LoggerSettings, {"wandb": None, "mlflow": None, **cfg["logger"]}, "logger"),
        cluster=freeze(ClusterSettings, cfg["cluster"], "cluster"),
        checkpointing=freeze(CheckpointingSettings, cfg["checkpointing"], "checkpointing"),
        resolved=cast(Mapping[str, Any], cfg),
    )


def to_sft_config(cfg: SftMasterConfig) -> SftConfig:
    """Convert a configuration that passed `validate_keys` and `check_rules`."""
    return SftConfig(sft=freeze(SftSettings, cfg["sft"], "sft"), **_supervised_fields(cfg, cfg["sft"]["seed"], 1))


def to_dpo_config(cfg: DpoMasterConfig) -> DpoConfig:
    """Convert a configuration that passed `validate_keys` and `check_rules`."""
    return DpoConfig(dpo=freeze(DpoSettings, cfg["dpo"], "dpo"), **_supervised_fields(cfg, cfg["dpo"]["seed"], 2))


def _supervised_fields(cfg: SftMasterConfig | DpoMasterConfig, seed: int, rows_per_item: int) -> dict[str, Any]:
    """The fields of `SupervisedConfig`; batch sizes in the YAML count items, those of the policy rows."""
    sizes = ("train_global_batch_size", "train_micro_batch_size", "logprob_batch_size")
    in_rows = {name: rows_per_item * cfg["policy"][name] for name in sizes}
    data = cfg["data"]
    own = {key: data[key] for key in ("max_input_seq_length", "shuffle", "overlong_rows", "add_bos", "add_eos")}
    return {
        "policy": to_policy_settings(cfg["policy"], {**NO_ROLLOUTS} | in_rows | {"seed": seed}),
        "tokenizer": freeze(TokenizerSettings, cfg["policy"]["tokenizer"], "policy.tokenizer"),
        "data": SupervisedDataSettings(**own, **_train_and_validation(data)),
        "logger": freeze(LoggerSettings, {"wandb": None, "mlflow": None, **cfg["logger"]}, "logger"),
        "cluster": freeze(ClusterSettings, cfg["cluster"], "cluster"),
        "checkpointing": freeze(CheckpointingSettings, cfg["checkpointing"], "checkpointing"),
        "resolved": cast(Mapping[str, Any], cfg),
    }


def to_policy_settings(policy: TrainedPolicyConfig, derived: Mapping[str, Any]) -> PolicySettings:
    """The keys `policy.*` that a worker reads.

    Args:
        policy: The section.
        derived: Fields that do not stand in it, or not in the worker's form.
    """
    elsewhere = {"generation", "scheduler"}
    values: dict[str, Any] = {key: value for key, value in policy.items() if key not in elsewhere}
    values["scheduler"] = scheduler_phases(policy["scheduler"])
    values["megatron_cfg"] = policy.get("megatron_cfg")  # the section may be left out
    return freeze(PolicySettings, {**values, **derived}, "policy")


def rollout_fields(policy: PolicyConfig) -> dict[str, Any]:
    """What an engine is to a policy worker."""
    generation = policy["generation"]
    vllm = generation["vllm_cfg"]
    return {
        "logprob_temperature": generation["temperature"],
        "engine_memory_share": vllm["gpu_memory_utilization"],
        "engine_kv_cache_gib": vllm["kv_cache_memory_gib"],
        "colocated": generation["colocated"]["enabled"] and vllm["enable_sleep_mode"],
    }


def scheduler_phases(entries: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The phases of `policy.scheduler`, each with its end as `until_step`; None where no milestone ends it."""
    phases = [entry for entry in entries or () if "name" in entry]
    milestones = [step for entry in entries or () if "milestones" in entry for step in entry["milestones"]]
    ends = [*milestones, *[None] * len(phases)]
    return [{**phase, "until_step": end} for phase, end in zip(phases, ends, strict=False)]


def to_generation_settings(policy: PolicyConfig, seed: int) -> GenerationSettings:
    """The keys `policy.generation.*`, with one `SamplingSettings` for rollouts and one for validation."""
    generation = policy["generation"]
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
    model = {key: policy[key] for key in ("model_name", "hf_config_overrides")}
    vllm = {**generation["vllm_cfg"], "vllm_kwargs": generation["vllm_kwargs"], **model, "seed": seed}
    return GenerationSettings(
        backend=generation["backend"],
        colocated=generation["colocated"]["enabled"],
        engine_gpus_per_node=generation["colocated"]["resources"]["gpus_per_node"],
        engine_num_nodes=generation["colocated"]["resources"]["num_nodes"],
        sampling=freeze(SamplingSettings, common | rollout, "policy.generation"),
        val_sampling=freeze(SamplingSettings, common | validation, "policy.generation"),
        vllm=freeze(VllmSettings, vllm, "policy.generation.vllm_cfg"),
    )


def _train_and_validation(data: Any) -> dict[str, Any]:
    default, validation = data["default"], data["validation"]
    return {
        "train": to_dataset_settings(data["train"], default, "data.train"),
        "validation": None if validation is None else to_dataset_settings(validation, default, "data.validation"),
    }


def to_dataset_settings(section: Any, default: Mapping[str, Any], where: str) -> DatasetSettings | MixtureSettings:
    """One data set or mixture; the task keys that a data set does not set are those of `data.default`."""
    if section["dataset_name"] == "mixture":
        parts = enumerate(section["datasets"])
        datasets = tuple(to_dataset_settings(part, default, f"{where}.datasets.{index}") for index, part in parts)
        return MixtureSettings(datasets=cast(Any, datasets), weights=tuple(map(float, section["weights"])))
    kind = _DATASETS[section["dataset_name"]]
    task = {**_NO_TASK, **default, **{key: value for key, value in section.items() if key in _NO_TASK}}
    own = {key: value for key, value in section.items() if key not in _NO_TASK and key != "dataset_name"}
    fields = {field.name for field in dataclasses.fields(kind)}
    left_out = {name: value for name, value in _LEFT_OUT.items() if name in fields}
    return freeze(kind, {**left_out, **own, "task": task}, where)
