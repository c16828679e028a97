"""The plan of a run on its own GPUs: metrics to compare with what is measured, and what the plan chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nemo_offload_rl.backends.hf.model_folder import local_model_config
from nemo_offload_rl.backends.hf.served_adapters import served_adapters, the_engine_can_apply_adapters
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.engine import ServedAdapters
from nemo_offload_rl.keys.master import GrpoConfig, RolloutConfig, RunConfig
from nemo_offload_rl.memory.account import Account
from nemo_offload_rl.memory.gpus import Gpu, gpu_here
from nemo_offload_rl.memory.machine import Machine
from nemo_offload_rl.memory.seconds import copying_kv_is_faster, step_seconds, total_seconds, work_of
from nemo_offload_rl.models.families import state_mixer

_GIB = 2**30


def planned_metrics(config: RunConfig, gpu: Gpu | None = None) -> Mapping[str, float]:
    """Return the planned peak of a GPU in each phase, and the planned seconds of a step and its stages.

    Seconds are those of sequences of the longest length. Empty without GPUs or if the model's size is unknown; no
    seconds for a GPU of unknown rates.

    Args:
        config: The run.
        gpu: The GPU to plan for; None for the smallest of this machine.
    """
    gpu = gpu or gpu_here()
    if gpu is None or not config.cluster.gpus_per_node:
        return {}
    account = Account(config, Machine(gpu.memory_bytes), without_weights=True)
    planned = {f"{use.phase.value}_gib": use.peak_bytes / _GIB for use in account.phases}
    stages = step_seconds(account, gpu.rates, work_of(account)) if gpu.rates is not None and planned else None
    if stages is None:
        return planned
    planned |= {f"{stage.value}_s": seconds.total_s for stage, seconds in stages.items()}
    return planned | {"step_s": total_seconds(account, stages)}


def with_chosen_kv(config: RolloutConfig, gpu: Gpu | None = None) -> RolloutConfig:
    """Choose for `grpo.async_grpo.paused_kv: auto` whether engines keep KV blocks on the host.

    They do if the estimated copies take less time than computing the blocks again. Without a GPU of known rates, if the
    model's size is unknown, or if it has layers with states, they keep none.

    Args:
        config: The run.
        gpu: The GPU to plan for; None for the smallest of this machine.
    """
    if not _chooses_kv(config):
        return config
    gpu, model = gpu or gpu_here(), local_model_config(config)
    is_attention = model is not None and state_mixer(model) is None
    if is_attention and gpu is not None and gpu.rates is not None:
        account = Account(config, Machine(gpu.memory_bytes), without_weights=True)
        if copying_kv_is_faster(account, gpu.rates):
            return config
    worker, engine = replace(config.worker, engine_kept_kv_gib=0.0), replace(config.engine, kept_kv_bytes=None)
    return replace(config, worker=worker, engine=engine)


def chosen_kv_line(config: RolloutConfig) -> str | None:
    """Return what `with_chosen_kv` chose for this configuration, in words; None if a key says it."""
    if not _chooses_kv(config):
        return None
    kept = "copied to the host and back" if config.engine.kept_kv_bytes else "computed again"
    return f"grpo.async_grpo.paused_kv=auto: KV caches of unfinished responses are {kept} while the policy trains"


def with_adapters(config: RolloutConfig) -> RolloutConfig:
    """Decide again whether the engine applies adapters: a hub's config.json was unknown before the download."""
    served = served_adapters(config)
    if isinstance(served, str) and config.policy.generation.enable_lora:
        raise ConfigError(the_engine_can_apply_adapters(config) or served)
    adapters = served if isinstance(served, ServedAdapters) else None
    worker = replace(config.worker, sends_adapters=adapters is not None)
    return replace(config, worker=worker, engine=replace(config.engine, adapters=adapters))


def adapters_line(config: RolloutConfig) -> str | None:
    """Return how adapters reach the engine, in words; None if none are trained."""
    served = served_adapters(config)
    if isinstance(served, ServedAdapters):
        sent = "the adapters and the model's own weights" if served.with_weights else "the adapters alone"
        return f"the engine applies the policy's adapters itself: refits send {sent}"
    return None if served is None else f"refits send weights with the adapters merged into them, since {served}"


def _chooses_kv(config: RolloutConfig) -> bool:
    ahead = config.grpo.async_grpo if isinstance(config, GrpoConfig) else None
    return ahead is not None and ahead.enabled and ahead.paused_kv == "auto"
