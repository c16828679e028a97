"""Frozen settings of generation: what the YAML keys `policy.generation.*` are turned into, once.

Field names and meanings are those of the YAML keys, documented in `generation/config.py`. None has a default: YAML is
the only source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.generation.interfaces import SamplingSettings


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """One vLLM engine. The first two are keys of `policy`; `seed` is `grpo.seed`; the rest is `vllm_cfg`."""

    model_name: str
    hf_config_overrides: Mapping[str, Any]
    seed: int
    async_engine: bool
    precision: str  # "float32", "bfloat16" or "float16"
    kv_cache_dtype: str
    tensor_parallel_size: int
    gpu_memory_utilization: float  # share of the whole device
    kv_cache_memory_gib: float | None  # a fixed size instead of the share; needed on CPU
    enable_sleep_mode: bool  # false: awake for the whole run
    max_model_len: int  # tokens, prompt and response
    enforce_eager: bool
    per_request_seeds: bool  # false: all samples draw from one generator of the engine
    max_restarts: int  # of all engines together, in a run
    vllm_kwargs: Mapping[str, Any]  # handed to vllm.LLM as they are


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """The keys `policy.generation.*`; one sampling for rollouts and one for validation."""

    backend: str  # "vllm"
    colocated: bool  # the engine shares the trainer's devices
    engine_gpus_per_node: int | None  # devices of engines that do not: beside those of `cluster`, on each of
    engine_num_nodes: int | None  # hosts
    sampling: SamplingSettings
    val_sampling: SamplingSettings
    vllm: VllmSettings
