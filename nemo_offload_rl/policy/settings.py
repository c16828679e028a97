"""What a policy worker is told: the keys of `policy`, and what it needs from elsewhere, in its own terms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_offload_rl.policy.backends.megatron.config import MegatronConfig
from nemo_offload_rl.policy.config import (
    RolloutKeys,
    SchedulerEntry,
    SchedulerMilestonesConfig,
    SchedulerPhaseConfig,
    TrainedPolicyConfig,
)


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
class PolicySettings(RolloutKeys, TrainedPolicyConfig):
    """Everything a policy worker needs to know. Batch sizes count rows, of which a pair has two."""

    logprob_temperature: float  # what logits are divided by: the rollouts' sampling temperature, 1.0 without rollouts
    engine_memory_share: float  # of the device that the colocated engine may take; 0 where it takes none of it
    engine_kv_cache_gib: float | None  # of a fixed size, which that share does not bound
    colocated: bool  # an engine that sleeps meanwhile shares this worker's devices
    seed: int

    @property
    def scheduler_phases(self) -> tuple[SchedulerSettings, ...]:
        """Of the DTensor backend."""
        return scheduler_phases(self.scheduler)

    @property
    def megatron(self) -> MegatronConfig | None:
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
