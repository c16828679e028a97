"""Settings of a policy worker: the keys of `policy`, and values that it needs from other sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_offload_rl.keys.grpo import RolloutSectionConfig
from nemo_offload_rl.keys.policy import (
    PolicyConfig,
    RolloutKeys,
    RouterReplayConfig,
    SchedulerEntry,
    SchedulerMilestonesConfig,
    SchedulerPhaseConfig,
    TeacherConfig,
    TrainedPolicyConfig,
)
from nemo_offload_rl.keys.section import extend

# Settings of a policy worker in runs without an engine.
_NO_ROLLOUTS: Mapping[str, Any] = {
    "logprob_temperature": 1.0,
    "logprob_filter": None,
    "engine_memory_share": 0.0,
    "engine_kv_cache_gib": None,
    "engine_tensor_parallel_size": 1,
    "engine_kept_kv_gib": 0.0,
    "sends_adapters": False,
    "colocated": False,
    "router_replay": RouterReplayConfig(),
    "residency": "always",
    "residency_overrides": {},
    "suspend_nccl_comms": False,
    "refit_buffer_size_gib": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings(SchedulerPhaseConfig):
    """One phase of the learning-rate schedule, with the step of the run that ends it."""

    until_step: int | None  # None for the last phase


def scheduler_phases(entries: Sequence[SchedulerEntry] | None) -> tuple[SchedulerSettings, ...]:
    """List the phases of `policy.scheduler`, each with the step that ends it."""
    phases = [entry for entry in entries or () if isinstance(entry, SchedulerPhaseConfig)]
    lists = [entry.milestones for entry in entries or () if isinstance(entry, SchedulerMilestonesConfig)]
    ends = [*(step for milestones in lists for step in milestones), *[None] * len(phases)]
    return tuple(
        SchedulerSettings(name=phase.name, kwargs=phase.kwargs, until_step=end)
        for phase, end in zip(phases, ends, strict=False)
    )


@dataclass(frozen=True)
class TokenFilter:
    """Tokens that sampling keeps: the `top_k` most likely (None for all), then a share `top_p` of the probability."""

    top_k: int | None
    top_p: float

    @staticmethod
    def of(top_k: int | None, top_p: float) -> TokenFilter | None:
        """Make the filter; None if it keeps every token."""
        return None if top_k is None and top_p == 1.0 else TokenFilter(top_k, top_p)


@dataclass(frozen=True, kw_only=True)
class PolicySettings(RolloutKeys, TrainedPolicyConfig):
    """Everything that a policy worker needs to know. Batch sizes count rows; a pair of DPO is two rows.

    Attributes:
        logprob_temperature: Divisor of the logits: the sampling temperature of rollouts, 1.0 without rollouts.
        logprob_filter: Logprobs are normalized over the tokens that it keeps, as in sampling; None for all tokens.
        engine_memory_share: Share of the device that the awake engine takes; 0 without a colocated engine.
        engine_kv_cache_gib: Fixed size of the engine's KV cache, which that share does not limit; None if not fixed.
        engine_tensor_parallel_size: Devices that share one engine.
        engine_kept_kv_gib: Most GiB of KV blocks that the engine keeps on the host for this device while it sleeps.
        sends_adapters: Refits send adapters, which the engine applies; otherwise weights with adapters merged.
        colocated: An engine shares this worker's device, and sleeps while the worker uses it.
        seed: Seed of the run.
    """

    logprob_temperature: float
    logprob_filter: TokenFilter | None
    engine_memory_share: float
    engine_kv_cache_gib: float | None
    engine_tensor_parallel_size: int
    engine_kept_kv_gib: float
    sends_adapters: bool
    colocated: bool
    seed: int

    @property
    def sends_weights(self) -> bool:
        """Tell whether refits send the model's weights: merged, or as they are to an engine that lost them in sleep."""
        return not self.sends_adapters or self.colocated

    @property
    def scheduler_phases(self) -> tuple[SchedulerSettings, ...]:
        """Phases of the DTensor backend's learning-rate schedule."""
        return scheduler_phases(self.scheduler)

    @property
    def most_train_tokens(self) -> int:
        """Maximum tokens in a training micro-batch, padding included."""
        multiple = self.make_sequence_length_divisible_by
        longest = -(-self.max_total_sequence_length // multiple) * multiple
        for batching in (self.sequence_packing, self.dynamic_batching):
            if batching.enabled:
                return max(batching.train_mb_tokens, longest)
        return self.train_micro_batch_size * longest

    @property
    def most_logprob_tokens(self) -> int:
        """Maximum tokens in a micro-batch for logprobs, padding included."""
        by_rows = replace(self, train_micro_batch_size=self.logprob_batch_size)
        for name in ("sequence_packing", "dynamic_batching"):
            batching = getattr(self, name)
            by_rows = replace(by_rows, **{name: replace(batching, train_mb_tokens=batching.logprob_mb_tokens)})
        return by_rows.most_train_tokens


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """Settings of a worker's teacher.

    Attributes:
        model: The teacher, described like a policy; settings of training are not read.
        topk: Number of its most likely tokens that the student is compared on; None for the whole distribution.
        streams_layers: Each layer is on the device only for its own forward pass.
    """

    model: PolicySettings
    topk: int | None
    streams_layers: bool = False


def grpo_worker(policy: PolicyConfig, section: RolloutSectionConfig, *, sends_adapters: bool = False) -> PolicySettings:
    """Make the settings of a policy worker in a run with an engine.

    Args:
        policy: The section `policy`.
        section: That of the algorithm.
        sends_adapters: See `PolicySettings`.
    """
    generation = policy.generation
    vllm = generation.vllm_cfg
    return extend(
        PolicySettings,
        policy,
        logprob_temperature=generation.temperature,
        logprob_filter=TokenFilter.of(generation.top_k, generation.top_p),
        engine_memory_share=vllm.gpu_memory_utilization,
        engine_kv_cache_gib=vllm.kv_cache_memory_gib,
        engine_tensor_parallel_size=vllm.tensor_parallel_size,
        engine_kept_kv_gib=section.kept_kv_gib,
        sends_adapters=sends_adapters,
        colocated=generation.engines_sleep,
        seed=section.seed,
    )


def supervised_worker(policy: TrainedPolicyConfig, seed: int, rows_per_item: int = 1) -> PolicySettings:
    """Make the settings of a policy worker of SFT or DPO; the YAML's batch sizes count items, a worker's count rows."""
    sizes = ("train_global_batch_size", "train_micro_batch_size", "logprob_batch_size")
    in_rows = {name: rows_per_item * getattr(policy, name) for name in sizes}
    return extend(PolicySettings, policy, **_NO_ROLLOUTS, **in_rows, seed=seed)


def teacher_model(worker: PolicySettings, teacher: TeacherConfig) -> PolicySettings:
    """Make a teacher's settings: the policy's with the teacher's keys, without adapters and optimizer."""
    size = teacher.dtensor_cfg.tensor_parallel_size
    dtensor = replace(
        worker.dtensor_cfg,
        tensor_parallel_size=size,
        expert_parallel_size=1,  # a teacher of another family may have no experts, or another number
        context_parallel_size=1,  # without gradients there are few activations
        sequence_parallel=False,
        torch_compile=worker.dtensor_cfg.torch_compile and size == 1,
        lora_cfg=replace(worker.dtensor_cfg.lora_cfg, enabled=False),
    )
    megatron = worker.megatron_cfg
    if megatron is not None:
        megatron = replace(
            megatron,
            peft=replace(megatron.peft, enabled=False),
            fp8_cfg=replace(megatron.fp8_cfg, enabled=False),
            fine_grained_activation_offloading=False,
            pipeline_dtype=teacher.precision,
        )
    return replace(
        worker,
        model_name=teacher.model_name,
        hf_config_overrides=teacher.hf_config_overrides,
        precision=teacher.precision,
        logprob_batch_size=teacher.logprob_batch_size,
        logprob_chunk_size=teacher.logprob_chunk_size,
        optimizer=None,
        scheduler=None,
        dtensor_cfg=dtensor,
        megatron_cfg=megatron,
    )
