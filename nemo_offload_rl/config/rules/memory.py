"""Whether the policy, and an engine beside it, fit the GPU, by the sizes that are known before anything starts.

Known are the model's parameters (a local folder) and the GPU's memory (from the driver). Activations are not: what is
refused here cannot work; what passes may still be too tight. Where either is unknown, nothing is said.
"""

from __future__ import annotations

from typing import cast

from nemo_offload_rl.config.rules.base import Rule, algorithm_section, world_size
from nemo_offload_rl.config.schema import GrpoMasterConfig, RunConfig
from nemo_offload_rl.residency import adam_state_bytes
from nemo_offload_rl.utils.flops import read_model_sizes
from nemo_offload_rl.utils.gpu_memory import read_gpus

_GIB = 2**30
# CUDA contexts, communicators and captured graphs of a resting engine and a resting policy worker: 2.1 GiB seen with
# vLLM 0.25.1 and a 0.6 B model on an H200.
RESTING_BYTES = 3 * _GIB


def engine_leaves_room_for_the_policy(cfg: GrpoMasterConfig) -> str | None:
    """The awake engine and what the policy keeps on the GPU meanwhile fit the GPU."""
    generation = cfg["policy"]["generation"]
    share = generation["vllm_cfg"]["gpu_memory_utilization"]
    known = _known_bytes(cfg)
    if known is None or not generation["colocated"]["enabled"]:
        return None
    total_bytes, group_bytes = known
    kept = [name for name, place in cfg["policy"]["residency_overrides"].items() if place == "device"]
    kept_bytes = sum(group_bytes[name] for name in kept) + RESTING_BYTES
    if share * total_bytes + kept_bytes <= total_bytes:
        return None
    largest = (total_bytes - kept_bytes) / total_bytes
    mend = f"lower it to {int(largest * 100) / 100}" if largest > 0.02 else "keep less in policy.residency_overrides"
    return (
        f"policy.generation.vllm_cfg.gpu_memory_utilization {share} of {total_bytes / _GIB:.1f} GiB leaves less than "
        f"the {kept_bytes / _GIB:.1f} GiB that stay beside the engine ({' and '.join([*kept, 'contexts'])}); {mend}"
    )


def training_state_fits_the_gpu(cfg: RunConfig) -> str | None:
    """Parameters, gradients and optimizer of one worker fit the GPU, beside an engine if there is one."""
    known = _known_bytes(cfg)
    if known is None:
        return None
    total_bytes, group_bytes = known
    dtensor = cfg["policy"]["dtensor_cfg"]
    # Streamed or not, the whole optimizer is there in its step, beside parameters and gradients.
    chunked = dtensor["offload_optimizer_states"] and dtensor["offload_optimizer_states_chunk_mib"] is not None
    resting_bytes = RESTING_BYTES if _shares_its_gpu(cfg) else 0
    awake_bytes = _awake_bytes(cfg, total_bytes)
    needed_bytes = sum(group_bytes.values()) + resting_bytes + awake_bytes
    if needed_bytes <= total_bytes or chunked:
        return None
    has_adapters = dtensor["lora_cfg"]["enabled"]
    sizes = {"frozen params": group_bytes["params"]} if has_adapters else group_bytes
    parts = [f"{name} {size / _GIB:.1f}" for name, size in sizes.items()]
    if resting_bytes:
        parts.append(f"contexts {resting_bytes / _GIB:.0f}")
    if awake_bytes:
        parts.append(f"the awake engine {awake_bytes / _GIB:.1f}")
    mend = "set policy.generation.vllm_cfg.enable_sleep_mode=true, or use more GPUs" if awake_bytes else "use more GPUs"
    if group_bytes["optimizer"]:
        mend += ", or policy.dtensor_cfg.offload_optimizer_states=true with offload_optimizer_states_chunk_mib"
    return (
        f"policy.model_name needs {needed_bytes / _GIB:.1f} GiB on each GPU in training ({', '.join(parts)}) without "
        f"activations, but it has {total_bytes / _GIB:.1f}; {mend}"
    )


def _shares_its_gpu(cfg: RunConfig) -> bool:
    """Whether an engine sleeps on the GPU while the policy trains."""
    if algorithm_section(cfg)[0] != "grpo":
        return False
    return cast(GrpoMasterConfig, cfg)["policy"]["generation"]["colocated"]["enabled"]


def _awake_bytes(cfg: RunConfig, total_bytes: int) -> int:
    """What an engine that never sleeps has of a GPU of `total_bytes` while the policy trains."""
    if not _shares_its_gpu(cfg):
        return 0
    vllm = cast(GrpoMasterConfig, cfg)["policy"]["generation"]["vllm_cfg"]
    if vllm["enable_sleep_mode"]:
        return 0
    cache_gib = vllm["kv_cache_memory_gib"]
    return int(vllm["gpu_memory_utilization"] * total_bytes) if cache_gib is None else int(cache_gib * _GIB)


def _known_bytes(cfg: RunConfig) -> tuple[int, dict[str, int]] | None:
    """Memory of the smallest GPU, and one worker's state groups, both in bytes."""
    if cfg["cluster"]["gpus_per_node"] == 0 or not cfg["policy"]["dtensor_cfg"]["enabled"]:
        return None
    gpus, sizes = read_gpus(), read_model_sizes(cfg["policy"]["model_name"])
    if not gpus or sizes is None:
        return None
    params_bytes = 4 * sizes.num_parameters // world_size(cfg)
    policy = cfg["policy"]
    # With adapters the base has neither gradients nor optimizer, and the adapters' are small.
    trained_bytes = 0 if policy["dtensor_cfg"]["lora_cfg"]["enabled"] else params_bytes
    is_adam = policy["optimizer"] is not None and "adam" in policy["optimizer"]["name"].lower()
    groups = {
        "params": params_bytes,
        "grads": trained_bytes,
        "optimizer": adam_state_bytes(trained_bytes) if is_adam else 0,
    }
    return min(use.total_bytes for use in gpus.values()), groups


RULES: tuple[Rule[RunConfig], ...] = (training_state_fits_the_gpu,)
GRPO_RULES: tuple[Rule[GrpoMasterConfig], ...] = (engine_leaves_room_for_the_policy,)
