"""Makes a run's configuration from checked keys, with the settings of workers and engines."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from nemo_offload_rl.backends.hf.model_folder import local_config
from nemo_offload_rl.backends.hf.served_adapters import served_adapters
from nemo_offload_rl.config.rules.model import beyond_positions
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.data_source import TaskKeys
from nemo_offload_rl.keys.engine import EndpointSettings, ServedAdapters, VllmSettings
from nemo_offload_rl.keys.generation import VllmConfig
from nemo_offload_rl.keys.master import (
    DistillationConfig,
    DistillationMasterConfig,
    DpoConfig,
    DpoMasterConfig,
    EvalConfig,
    EvalMasterConfig,
    GrpoConfig,
    GrpoMasterConfig,
    RolloutMasterConfig,
    SftConfig,
    SftMasterConfig,
)
from nemo_offload_rl.keys.run import ClusterConfig
from nemo_offload_rl.keys.section import as_written, extend, from_mapping, keys_of
from nemo_offload_rl.keys.worker import PolicySettings, TeacherSettings, grpo_worker, supervised_worker, teacher_model
from nemo_offload_rl.utils.sockets import listening

CPU_KV_CACHE_GIB = 1.0


def with_cpu_cache[Config](cfg: Config) -> Config:
    """Give the KV cache of an engine on a CPU a size, if no key does: a share of a GPU's memory says nothing there."""
    if isinstance(cfg, EvalMasterConfig):
        vllm = _with_cache(cfg.generation.vllm_cfg, cfg.cluster)
        return replace(cfg, generation=replace(cfg.generation, vllm_cfg=vllm))
    if isinstance(cfg, RolloutMasterConfig):
        generation = cfg.policy.generation
        generation = replace(generation, vllm_cfg=_with_cache(generation.vllm_cfg, cfg.cluster))
        return replace(cfg, policy=replace(cfg.policy, generation=generation))
    return cfg


def _with_cache(vllm: VllmConfig, cluster: ClusterConfig) -> VllmConfig:
    is_set = bool(cluster.gpus_per_node) or vllm.kv_cache_memory_gib is not None
    return vllm if is_set else replace(vllm, kv_cache_memory_gib=CPU_KV_CACHE_GIB)


def to_grpo_config(cfg: GrpoMasterConfig, resolved: Mapping[str, Any]) -> GrpoConfig:
    """Make a run's configuration from checked keys, and the plain dictionaries that they come from."""
    return _of_run(GrpoConfig, cfg, resolved, worker=_worker(cfg), engine=_engine(cfg))


def to_distillation_config(cfg: DistillationMasterConfig, resolved: Mapping[str, Any]) -> DistillationConfig:
    """Make the configuration of a distillation run; arguments as in `to_grpo_config`."""
    worker = _worker(cfg)
    model, topk = teacher_model(worker, cfg.teacher), cfg.distillation.topk_logits_k
    teacher = TeacherSettings(model=model, topk=topk, streams_layers=cfg.teacher.stream_layers)
    return _of_run(DistillationConfig, cfg, resolved, worker=worker, teacher_worker=teacher, engine=_engine(cfg))


def _worker(cfg: RolloutMasterConfig) -> PolicySettings:
    sends_adapters = isinstance(served_adapters(cfg), ServedAdapters)
    return grpo_worker(cfg.policy, cfg.algorithm[1], sends_adapters=sends_adapters)


def _engine(cfg: RolloutMasterConfig) -> VllmSettings:
    policy, (_, section), served = cfg.policy, cfg.algorithm, served_adapters(cfg)
    return extend(
        VllmSettings,
        policy.generation.vllm_cfg,
        model_name=policy.model_name,
        hf_config_overrides=policy.hf_config_overrides,
        vllm_kwargs=policy.generation.vllm_kwargs,
        seed=section.seed,
        endpoint=_endpoint(cfg),
        kept_kv_bytes=int(section.kept_kv_gib * 2**30) or None,
        adapters=served if isinstance(served, ServedAdapters) else None,
        returns_routed_experts=policy.router_replay.enabled,
    )


def _endpoint(cfg: RolloutMasterConfig) -> EndpointSettings | None:
    vllm = cfg.policy.generation.vllm_cfg
    if not vllm.expose_http_server:
        return None
    key = "policy.generation.vllm_cfg.http_server_host"
    return EndpointSettings(
        listening=listening(vllm.http_server_host, vllm.http_server_port, key=key),
        tokenizer=cfg.policy.tokenizer,
        add_bos=cfg.data.add_bos,
        serving_chat_kwargs=vllm.http_server_serving_chat_kwargs or {},
    )


def to_sft_config(cfg: SftMasterConfig, resolved: Mapping[str, Any]) -> SftConfig:
    """Make the configuration of an SFT run; arguments as in `to_grpo_config`."""
    return _of_run(SftConfig, cfg, resolved, worker=supervised_worker(cfg.policy, cfg.sft.seed))


def to_dpo_config(cfg: DpoMasterConfig, resolved: Mapping[str, Any]) -> DpoConfig:
    """Make the configuration of a DPO run; arguments as in `to_grpo_config`."""
    return _of_run(DpoConfig, cfg, resolved, worker=supervised_worker(cfg.policy, cfg.dpo.seed, rows_per_item=2))


def to_eval_config(cfg: EvalMasterConfig, resolved: Mapping[str, Any]) -> EvalConfig:
    """Make the configuration of an evaluation; the name of a checkpoint becomes that of its model folder.

    Raises:
        ConfigError: There is no model in the checkpoint, or it allows fewer tokens than `max_model_len`.
    """
    generation, model_name = cfg.generation, model_folder(cfg.generation.model_name)
    config = local_config(model_name, generation.hf_config_overrides)
    if (problem := beyond_positions(config, generation.vllm_cfg.max_model_len, model_name)) is not None:
        raise ConfigError(f"generation.vllm_cfg.max_model_len {problem}; lower it")
    engine = extend(
        VllmSettings,
        generation.vllm_cfg,
        model_name=model_name,
        hf_config_overrides=generation.hf_config_overrides,
        vllm_kwargs={**generation.vllm_kwargs, "load_format": "auto"},
        seed=cfg.eval.seed,
    )
    is_models = cfg.tokenizer.name == generation.model_name
    tokenizer = replace(cfg.tokenizer, name=model_name) if is_models else cfg.tokenizer
    return _of_run(EvalConfig, cfg, resolved, tokenizer=tokenizer, engine=engine)


def model_folder(name: str) -> str:
    """Return the Hugging Face folder for a name: `hf/` of a checkpoint, or of the newest one in a folder.

    Raises:
        ConfigError: A folder is neither a model nor a checkpoint with a model.
    """
    folder = Path(name)
    if not folder.is_dir() or (folder / "config.json").is_file():
        return name
    numbered = {path.name.removeprefix("step_"): path for path in folder.glob("step_*") if path.is_dir()}
    steps = sorted((int(number), path) for number, path in numbered.items() if number.isdigit())
    checkpoint = steps[-1][1] if steps else folder
    if (checkpoint / "hf" / "config.json").is_file():
        return str(checkpoint / "hf")
    if (checkpoint / "progress.json").is_file():
        raise ConfigError(
            f"generation.model_name {name}: the checkpoint {checkpoint.name} has no model folder hf/; continue its run "
            "with checkpointing.save_consolidated=true, or name a checkpoint that has one"
        )
    raise ConfigError(
        f"generation.model_name {name} is a folder without config.json and no checkpoint; name a model folder, a "
        "checkpoint or a model on the hub"
    )


def _of_run[Config](target: type[Config], cfg: Any, resolved: Mapping[str, Any], **more: Any) -> Config:
    """Make a run's configuration: its keys, data sets with all their keys, the dictionaries for records, and `more`."""
    data = with_task_keys(cast("type[Any]", type(cfg.data)), resolved["data"])
    return extend(target, cfg, data=data, resolved=as_written(resolved), **more)


def with_task_keys[Data](kind: type[Data], data: Mapping[str, Any]) -> Data:
    """Make the section `data`, of `kind`; each data set takes keys that it leaves out from `data.default`."""
    default = {key: value for key, value in data["default"].items() if key in keys_of(TaskKeys)}

    def fill(source: Any) -> Any:
        if source is None:
            return None
        if source["dataset_name"] == "mixture":
            return {**source, "datasets": [fill(part) for part in source["datasets"]]}
        return {**default, **source}

    sources = {key: fill(data[key]) for key in ("train", "validation") if key in data}
    return from_mapping(kind, {**data, **sources})
