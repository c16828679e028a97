"""Recognizes YAML files of NeMo-RL, which `migrate` turns into our keys."""

from collections.abc import Mapping
from typing import Any

_ONLY_THEIRS = (
    "policy.offload_optimizer_for_logprob",
    "policy.use_coalesced_optimizer_offload",
    "policy.generation_batch_size",
    "policy.draft",
    "policy.dtensor_cfg._v2",
    "policy.dtensor_cfg.custom_parallel_plan",
    "policy.megatron_cfg.checkpoint",
    "policy.megatron_cfg.model_overrides",
    "policy.sequence_packing.algorithm",
    "policy.tokenizer.use_fastokens",
    "policy.generation.mcore_generation_config",
    "data.num_workers",
    "data.train.data_path",
    "logger.monitor_gpus",
    "logger.swanlab_enabled",
    "generation.colocated",
    "generation.val_temperature",
    "generation.vllm_cfg.pipeline_parallel_size",
    "data.dataset_name",
)
_ONLY_OURS = (
    "policy.residency_overlap",
    "policy.max_skipped_updates",
    "data.overlong_rows",
    "data.bad_rows",
)
_NEEDED_MARKS = 2


def is_nemo_rl(config: Mapping[str, Any]) -> bool:
    """Tell whether a resolved configuration has keys that only NeMo-RL has, and none that only this package has."""
    if any(_has(config, key) for key in _ONLY_OURS):
        return False
    return sum(_has(config, key) for key in _ONLY_THEIRS) >= _NEEDED_MARKS


def _has(node: Any, path: str) -> bool:
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True
