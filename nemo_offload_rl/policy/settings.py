"""Frozen settings of a policy worker: what `policy/config.py` (the YAML border) is turned into, once.

Field names and meanings are those of the YAML keys, documented there. None has a default: YAML is the only source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Which torch optimizer, and its arguments."""

    name: str  # dotted path of a torch optimizer class
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """One phase of the learning-rate schedule: a torch LRScheduler class and how many optimizer steps it lasts."""

    name: str
    kwargs: Mapping[str, Any]
    until_step: int | None  # None for the last one


@dataclass(frozen=True, kw_only=True)
class DTensorSettings:
    """How the DTensor backend splits and stores a model."""

    enabled: bool
    tensor_parallel_size: int
    context_parallel_size: int
    sequence_parallel: bool
    activation_checkpointing: bool
    cpu_offload: bool
    offload_optimizer_states: bool


@dataclass(frozen=True, kw_only=True)
class BatchingSettings:
    """Sequence packing or dynamic batching: how many tokens (padding included) a micro-batch may hold."""

    enabled: bool
    train_mb_tokens: int
    logprob_mb_tokens: int
    sequence_length_round: int


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """Everything a policy worker needs to know."""

    model_name: str
    hf_config_overrides: Mapping[str, Any]
    precision: str  # of compute: "float32", "bfloat16" or "float16" (without loss scaling); the rest is float32
    train_global_batch_size: int
    train_micro_batch_size: int
    logprob_batch_size: int
    logprob_chunk_size: int | None
    logprob_temperature: float  # what logits are divided by: the rollouts' sampling temperature, 1.0 without rollouts
    max_total_sequence_length: int
    make_sequence_length_divisible_by: int
    max_grad_norm: float | None
    optimizer: OptimizerSettings
    scheduler: tuple[SchedulerSettings, ...]
    dynamic_batching: BatchingSettings
    sequence_packing: BatchingSettings
    dtensor_cfg: DTensorSettings
    refit_buffer_size_gib: float
    residency: str  # "always" or "auto"
    residency_overrides: Mapping[str, str]  # group -> "device" or "host"
    engine_memory_share: float  # of the device that the colocated engine may take; 0 where it takes none of it
    residency_overlap: bool
    residency_verify: bool
    host_memory_budget_gib: float | None
    memory_snapshot_dir: str | None
    use_pinned_optimizer_offload: bool
    offload_optimizer_states_for_logprob: bool
    colocated: bool  # generation shares this worker's devices
    seed: int
