"""What a later version will accept. These rules go first: the others would only add noise."""

from __future__ import annotations

from nemo_offload_rl.config.rules.base import Rule
from nemo_offload_rl.config.schema import GrpoMasterConfig, RunConfig


def exactly_one_backend_is_enabled(cfg: RunConfig) -> str | None:
    """Exactly one of `dtensor_cfg` and `megatron_cfg` is enabled."""
    dtensor = cfg.policy.dtensor_cfg.enabled
    megatron = cfg.policy.megatron_cfg is not None and cfg.policy.megatron_cfg.enabled
    if dtensor == megatron:
        both = "both" if dtensor else "neither"
        return (
            f"{both} of policy.dtensor_cfg.enabled and policy.megatron_cfg.enabled are true, but one backend trains "
            "the model; enable exactly one"
        )
    return None


def megatron_trains_on_gpus(cfg: RunConfig) -> str | None:
    """Megatron trains on GPUs."""
    if cfg.policy.megatron_cfg is None or not cfg.policy.megatron_cfg.enabled:
        return None
    if cfg.cluster.gpus_per_node == 0:
        return (
            "policy.megatron_cfg.enabled is true, but cluster.gpus_per_node is 0 and megatron-core needs GPUs; use "
            "policy.dtensor_cfg.enabled=true policy.megatron_cfg.enabled=false with policy.optimizer set"
        )
    return None


def sequences_are_not_split_over_devices(cfg: RunConfig) -> str | None:
    """Context parallelism is not available yet."""
    size = cfg.policy.dtensor_cfg.context_parallel_size
    if size != 1:
        return (
            f"policy.dtensor_cfg.context_parallel_size is {size}, but context parallelism is not available in this "
            "version; set it to 1"
        )
    return None


def sequence_parallelism_is_off(cfg: RunConfig) -> str | None:
    """Sequence parallelism is not available yet."""
    if cfg.policy.dtensor_cfg.sequence_parallel:
        return _unavailable("policy.dtensor_cfg.sequence_parallel")
    return None


def host_held_training_is_off(cfg: RunConfig) -> str | None:
    """FSDP2's CPU offload is not available yet."""
    if cfg.policy.dtensor_cfg.cpu_offload:
        return _unavailable("policy.dtensor_cfg.cpu_offload")
    return None


def batch_multiplier_is_one(cfg: GrpoMasterConfig) -> str | None:
    """Generation batches larger than a step are not available yet."""
    multiplier = cfg.grpo.batch_multiplier
    if multiplier != 1:
        return f"grpo.batch_multiplier is {multiplier:g}, but only 1 is available in this version; set it to 1"
    return None


def _unavailable(key: str) -> str:
    return f"{key} is true, but this is not available in this version; set it to false"


RULES: tuple[Rule[RunConfig], ...] = (
    exactly_one_backend_is_enabled,
    megatron_trains_on_gpus,
    sequences_are_not_split_over_devices,
    sequence_parallelism_is_off,
    host_held_training_is_off,
)

GRPO_RULES: tuple[Rule[GrpoMasterConfig], ...] = (batch_multiplier_is_one,)
