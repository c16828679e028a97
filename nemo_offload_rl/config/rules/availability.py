"""What a later version will accept. These rules go first: the others would only add noise."""

from __future__ import annotations

from nemo_offload_rl.config.rules.base import Rule
from nemo_offload_rl.config.schema import GrpoMasterConfig


def exactly_one_backend_is_enabled(cfg: GrpoMasterConfig) -> str | None:
    """Exactly one of `dtensor_cfg` and `megatron_cfg` is enabled."""
    dtensor = cfg["policy"]["dtensor_cfg"]["enabled"]
    megatron = "megatron_cfg" in cfg["policy"] and cfg["policy"]["megatron_cfg"]["enabled"]
    if dtensor == megatron:
        both = "both" if dtensor else "neither"
        return (
            f"{both} of policy.dtensor_cfg.enabled and policy.megatron_cfg.enabled are true, but one backend trains "
            "the model; enable exactly one"
        )
    return None


def megatron_backend_is_available(cfg: GrpoMasterConfig) -> str | None:
    """The Megatron backend is not available yet."""
    if "megatron_cfg" in cfg["policy"] and cfg["policy"]["megatron_cfg"]["enabled"]:
        return (
            "policy.megatron_cfg.enabled is true, but the Megatron backend is not available in this version; use "
            "policy.dtensor_cfg.enabled=true policy.megatron_cfg.enabled=false with policy.optimizer set"
        )
    return None


def rollouts_have_one_turn(cfg: GrpoMasterConfig) -> str | None:
    """Rollouts of several turns are not available yet."""
    turns = cfg["grpo"]["max_rollout_turns"]
    if turns != 1:
        return f"grpo.max_rollout_turns is {turns}, but only single-turn rollouts are available; set it to 1"
    return None


def generation_is_colocated(cfg: GrpoMasterConfig) -> str | None:
    """Engines on devices of their own are not available yet."""
    if not cfg["policy"]["generation"]["colocated"]["enabled"]:
        return (
            "policy.generation.colocated.enabled is false, but engines on devices of their own are not available in "
            "this version; set it to true"
        )
    return None


def sequences_are_not_split_over_devices(cfg: GrpoMasterConfig) -> str | None:
    """Context parallelism is not available yet."""
    size = cfg["policy"]["dtensor_cfg"]["context_parallel_size"]
    if size != 1:
        return (
            f"policy.dtensor_cfg.context_parallel_size is {size}, but context parallelism is not available in this "
            "version; set it to 1"
        )
    return None


def sequence_parallelism_is_off(cfg: GrpoMasterConfig) -> str | None:
    """Sequence parallelism is not available yet."""
    if cfg["policy"]["dtensor_cfg"]["sequence_parallel"]:
        return _unavailable("policy.dtensor_cfg.sequence_parallel")
    return None


def host_held_training_is_off(cfg: GrpoMasterConfig) -> str | None:
    """FSDP2's CPU offload is not available yet."""
    if cfg["policy"]["dtensor_cfg"]["cpu_offload"]:
        return _unavailable("policy.dtensor_cfg.cpu_offload")
    return None


def batch_multiplier_is_one(cfg: GrpoMasterConfig) -> str | None:
    """Generation batches larger than a step are not available yet."""
    multiplier = cfg["grpo"]["batch_multiplier"]
    if multiplier != 1:
        return f"grpo.batch_multiplier is {multiplier:g}, but only 1 is available in this version; set it to 1"
    return None


def _unavailable(key: str) -> str:
    return f"{key} is true, but this is not available in this version; set it to false"


RULES: tuple[Rule, ...] = (
    exactly_one_backend_is_enabled,
    megatron_backend_is_available,
    rollouts_have_one_turn,
    generation_is_colocated,
    sequences_are_not_split_over_devices,
    sequence_parallelism_is_off,
    host_held_training_is_off,
    batch_multiplier_is_one,
)
