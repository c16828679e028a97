"""Frozen settings of a policy worker: what `policy/config.py` (the YAML border) is turned into, once.

Field names and meanings are those of the YAML keys, documented there. None has a default: YAML is the only source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.data.settings import TokenizerSettings


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """Which torch optimizer, and its arguments."""

    name: str  # dotted path of a torch optimizer class
    kwargs: Mapping[str, Any]
    decay_norm_and_bias: bool


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    """One phase of the learning-rate schedule: a torch LRScheduler class and how many steps of the run it lasts."""

    name: str
    kwargs: Mapping[str, Any]
    until_step: int | None  # None for the last one


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Low-rank adapters: which layers get them, and their size."""

    enabled: bool
    target_modules: tuple[str, ...]
    exclude_modules: tuple[str, ...]
    match_all_linear: bool
    dim: int
    alpha: int
    dropout: float
    lora_A_init: str  # "xavier" or "uniform"


@dataclass(frozen=True, kw_only=True)
class DTensorSettings:
    """How the DTensor backend splits and stores a model."""

    enabled: bool
    tensor_parallel_size: int
    context_parallel_size: int
    sequence_parallel: bool
    activation_checkpointing: bool
    torch_compile: bool
    cpu_offload: bool
    offload_optimizer_states: bool
    offload_optimizer_states_chunk_mib: float | None  # None for one part
    lora_cfg: LoraSettings


@dataclass(frozen=True, kw_only=True)
class MegatronOptimizerSettings:
    """Megatron's optimizer and where it lives."""

    optimizer: str
    lr: float
    min_lr: float
    weight_decay: float
    bf16: bool
    fp16: bool
    params_dtype: str
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    sgd_momentum: float
    use_distributed_optimizer: bool
    use_precision_aware_optimizer: bool
    clip_grad: float | None  # 0 or None for no limit
    optimizer_cpu_offload: bool
    optimizer_offload_fraction: float
    overlap_cpu_optimizer_d2h_h2d: bool
    offload_optimizer_states: bool
    offload_optimizer_states_fraction: float
    offload_optimizer_states_chunk_mib: float | None  # None for one part


@dataclass(frozen=True, kw_only=True)
class MegatronSchedulerSettings:
    """Megatron's schedule of learning rate and weight decay; iterations are steps of the run."""

    start_weight_decay: float
    end_weight_decay: float
    weight_decay_incr_style: str
    lr_decay_style: str
    lr_decay_iters: int
    lr_warmup_iters: int
    lr_warmup_init: float


@dataclass(frozen=True, kw_only=True)
class MegatronDdpSettings:
    """How Megatron reduces gradients and gathers parameters."""

    grad_reduce_in_fp32: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool


@dataclass(frozen=True, kw_only=True)
class MegatronFp8Settings:
    """8-bit matrix products of Transformer Engine."""

    enabled: bool
    fp8: str
    fp8_recipe: str
    force_clear_fp8_caches: bool


# Megatron's linear layers of attention and of dense MLPs, which adapters are made for.
MEGATRON_ADAPTED_LAYERS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True, kw_only=True)
class MegatronLoraSettings:
    """Low-rank adapters beside Megatron's layers."""

    enabled: bool
    target_modules: tuple[str, ...]  # empty for all linear layers but those of `exclude_modules`
    exclude_modules: tuple[str, ...]
    dim: int
    alpha: int
    dropout: float
    dropout_position: str  # "pre" or "post"
    lora_A_init_method: str
    lora_B_init_method: str


@dataclass(frozen=True, kw_only=True)
class MegatronSettings:
    """How the Megatron backend builds, splits and trains a model."""

    enabled: bool
    transformer_impl: str  # "transformer_engine" or "local"
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    num_layers_in_first_pipeline_stage: int | None
    num_layers_in_last_pipeline_stage: int | None
    context_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    pipeline_dtype: str
    sequence_parallel: bool
    activation_checkpointing: bool
    recompute_granularity: str
    recompute_modules: tuple[str, ...] | None
    fine_grained_activation_offloading: bool
    offload_modules: tuple[str, ...] | None
    min_offloaded_tensor_size: int  # elements
    activation_offload_fraction: float
    activation_offload_host_limit_gib: float
    cuda_graph_impl: str
    clear_memory_caches_before_refit: bool
    empty_unused_memory_level: int
    freeze_moe_router: bool
    moe_router_dtype: str | None
    moe_permute_fusion: bool
    moe_token_dispatcher_type: str
    apply_rope_fusion: bool
    bias_activation_fusion: bool
    defer_fp32_logits: bool
    env_vars: Mapping[str, str] | None
    fp8_cfg: MegatronFp8Settings
    peft: MegatronLoraSettings
    optimizer: MegatronOptimizerSettings
    scheduler: MegatronSchedulerSettings
    distributed_data_parallel_config: MegatronDdpSettings


@dataclass(frozen=True)
class ModelParallel:
    """Over how many ranks one copy of the model is spread, and how ranks are numbered.

    Numbers of tensor-parallel ranks are neighbours; context-, data- and pipeline-parallel ones follow in this order.
    """

    tensor: int
    context: int = 1
    pipeline: int = 1

    @property
    def ranks_per_copy(self) -> int:
        """Ranks that share one shard of the data."""
        return self.tensor * self.context * self.pipeline

    def data_parallel_rank(self, rank: int, world_size: int) -> int:
        """Which shard of the data a rank gets."""
        return rank % (world_size // self.pipeline) // (self.tensor * self.context)


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
    tokenizer: TokenizerSettings  # goes into exports
    precision: str  # of compute: "float32", "bfloat16" or "float16" (without loss scaling); the rest is float32
    train_global_batch_size: int
    train_micro_batch_size: int
    logprob_batch_size: int
    logprob_chunk_size: int | None
    logprob_temperature: float  # what logits are divided by: the rollouts' sampling temperature, 1.0 without rollouts
    max_total_sequence_length: int
    make_sequence_length_divisible_by: int
    deterministic: bool
    max_grad_norm: float | None
    max_skipped_updates: int
    optimizer: OptimizerSettings | None  # of the DTensor backend
    scheduler: tuple[SchedulerSettings, ...]
    dynamic_batching: BatchingSettings
    sequence_packing: BatchingSettings
    dtensor_cfg: DTensorSettings
    megatron_cfg: MegatronSettings | None
    refit_buffer_size_gib: float
    residency: str  # "always" or "auto"
    residency_overrides: Mapping[str, str]  # group -> "device" or "host"
    engine_memory_share: float  # of the device that the colocated engine may take; 0 where it takes none of it
    engine_kv_cache_gib: float | None  # of a fixed size, which that share does not bound
    residency_overlap: bool
    residency_verify: bool
    host_memory_budget_gib: float | None
    memory_snapshot_dir: str | None
    use_pinned_optimizer_offload: bool
    offload_optimizer_states_for_logprob: bool
    colocated: bool  # an engine that sleeps meanwhile shares this worker's devices
    seed: int

    @property
    def megatron(self) -> MegatronSettings | None:
        """The Megatron backend's settings where it trains the model, else None."""
        return self.megatron_cfg if self.megatron_cfg is not None and self.megatron_cfg.enabled else None

    @property
    def offload_optimizer_states(self) -> bool:
        """Whether the backend that is on streams optimizer states around the step."""
        cfg = self.dtensor_cfg if self.megatron is None else self.megatron.optimizer
        return cfg.offload_optimizer_states

    @property
    def optimizer_cpu_offload(self) -> bool:
        """Whether the backend that is on keeps all of its optimizer on the host."""
        cfg = None if self.megatron is None else self.megatron.optimizer
        return cfg is not None and cfg.optimizer_cpu_offload and cfg.optimizer_offload_fraction >= 1.0

    @property
    def model_parallel(self) -> ModelParallel:
        """Of the backend that is on."""
        if self.megatron is None:
            return ModelParallel(self.dtensor_cfg.tensor_parallel_size)
        return ModelParallel(
            self.megatron.tensor_model_parallel_size,
            self.megatron.context_parallel_size,
            self.megatron.pipeline_model_parallel_size,
        )
