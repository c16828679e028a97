"""Settings of a policy worker: the keys of `policy`, and values from other sections in its own terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.keys.policy import (
    PolicyConfig,
    RolloutKeys,
    SchedulerEntry,
    SchedulerMilestonesConfig,
    SchedulerPhaseConfig,
    TrainedPolicyConfig,
)
from nemo_offload_rl.keys.section import extend

# Settings of a policy worker where nothing generates.
_NO_ROLLOUTS: Mapping[str, Any] = {
    "logprob_temperature": 1.0,
    "logprob_filter": None,
    "engine_memory_share": 0.0,
    "engine_kv_cache_gib": None,
    "colocated": False,
    "residency": "always",
    "residency_overrides": {},
    "suspend_nccl_comms": False,
    "refit_buffer_size_gib": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings(SchedulerPhaseConfig):
    """One phase of the learning-rate schedule, with the step of the run that ends it."""

    until_step: int | None  # None for the last one


def scheduler_phases(entries: Sequence[SchedulerEntry] | None) -> tuple[SchedulerSettings, ...]:
    """The phases of `policy.scheduler`, each with its end; None where no milestone ends it."""
    phases = [entry for entry in entries or () if isinstance(entry, SchedulerPhaseConfig)]
    lists = [entry.milestones for entry in entries or () if isinstance(entry, SchedulerMilestonesConfig)]
    ends = [*(step for milestones in lists for step in milestones), *[None] * len(phases)]
    return tuple(
        SchedulerSettings(name=phase.name, kwargs=phase.kwargs, until_step=end)
        for phase, end in zip(phases, ends, strict=False)
    )


@dataclass(frozen=True)
class TokenFilter:
    """Which tokens are drawn: the `top_k` most likely (None for all), and of these the `top_p` of their probability."""

    top_k: int | None
    top_p: float

    @staticmethod
    def of(top_k: int | None, top_p: float) -> TokenFilter | None:
        """None where it leaves every token."""
        return None if top_k is None and top_p == 1.0 else TokenFilter(top_k, top_p)


@dataclass(frozen=True, kw_only=True)
class PolicySettings(RolloutKeys, TrainedPolicyConfig):
    """Everything a policy worker needs to know. Batch sizes count rows, of which a pair has two."""

    logprob_temperature: float  # what logits are divided by: the rollouts' sampling temperature, 1.0 without rollouts
    logprob_filter: (
        TokenFilter | None
    )  # which tokens logprobs are over: those that rollouts are drawn from; None for all
    engine_memory_share: float  # of the device that the colocated engine may take; 0 where it takes none of it
    engine_kv_cache_gib: float | None  # of a fixed size, which that share does not bound
    colocated: bool  # an engine that sleeps meanwhile shares this worker's devices
    seed: int

    @property
    def scheduler_phases(self) -> tuple[SchedulerSettings, ...]:
        """Of the DTensor backend."""
        return scheduler_phases(self.scheduler)

    @property
    def most_train_tokens(self) -> int:
        """Tokens of a training micro-batch at most, padding included."""
        multiple = self.make_sequence_length_divisible_by
        longest = -(-self.max_total_sequence_length // multiple) * multiple
        for batching in (self.sequence_packing, self.dynamic_batching):
            if batching.enabled:
                return max(batching.train_mb_tokens, longest)
        return self.train_micro_batch_size * longest


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """Settings of a worker's teacher.

    Attributes:
        model: The teacher in a policy's terms; what is about training is not read.
        topk: Tokens of its distribution that are known, the likeliest; None for all.
        streams_layers: Its layers are on the device for their own forward only.
    """

    model: PolicySettings
    topk: int | None
    streams_layers: bool = False


def grpo_worker(policy: PolicyConfig, seed: int) -> PolicySettings:
    """The settings of a policy worker where an engine generates."""
    generation = policy.generation
    vllm = generation.vllm_cfg
    return extend(
        PolicySettings,
        policy,
        logprob_temperature=generation.temperature,
        logprob_filter=TokenFilter.of(generation.top_k, generation.top_p),
        engine_memory_share=vllm.gpu_memory_utilization,
        engine_kv_cache_gib=vllm.kv_cache_memory_gib,
        colocated=generation.colocated.enabled and vllm.enable_sleep_mode,
        seed=seed,
    )


def supervised_worker(policy: TrainedPolicyConfig, seed: int, rows_per_item: int = 1) -> PolicySettings:
    """The settings of a policy worker of SFT or DPO; batch sizes in the YAML count items, those of a worker rows."""
    sizes = ("train_global_batch_size", "train_micro_batch_size", "logprob_batch_size")
    in_rows = {name: rows_per_item * getattr(policy, name) for name in sizes}
    return extend(PolicySettings, policy, **_NO_ROLLOUTS, **in_rows, seed=seed)
