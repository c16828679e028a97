"""The whole configuration of each kind of run.

`GrpoMasterConfig` and its siblings have the keys of a YAML file. `GrpoConfig` and its siblings add the settings of
workers and engines, which are made of those keys, and the plain dictionary for the records of a run (`resolved`).
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import isfunction
from typing import Annotated, Any, get_type_hints

from nemo_offload_rl.keys.data import (
    DataConfig,
    DpoDataConfig,
    EnvConfig,
    EvalDataConfig,
    SftDataConfig,
    TokenizerConfig,
)
from nemo_offload_rl.keys.engine import VllmSettings
from nemo_offload_rl.keys.evaluation import EvalGenerationConfig, EvalSectionConfig
from nemo_offload_rl.keys.grpo import (
    ClippedPGLossConfig,
    DistillationLossConfig,
    DistillationSectionConfig,
    GrpoSectionConfig,
    OwnLossConfig,
    RolloutSectionConfig,
)
from nemo_offload_rl.keys.policy import PolicyConfig, TeacherConfig, TrainedPolicyConfig
from nemo_offload_rl.keys.run import CheckpointingConfig, ClusterConfig, LoggerConfig
from nemo_offload_rl.keys.section import doc, section
from nemo_offload_rl.keys.supervised import DpoSectionConfig, SftSectionConfig, SupervisedSectionConfig
from nemo_offload_rl.keys.worker import PolicySettings, TeacherSettings


@section
class RunConfig:
    """Keys of all runs that train."""

    policy: Annotated[TrainedPolicyConfig, doc("The model and its training.")]
    logger: Annotated[LoggerConfig, doc("What is logged, and where.")]
    cluster: Annotated[ClusterConfig, doc("The machines.")]
    checkpointing: Annotated[CheckpointingConfig, doc("When to save checkpoints.")]

    @property
    def algorithm(self) -> tuple[str, RolloutSectionConfig | SupervisedSectionConfig]:
        """Name and keys of the section of the algorithm: `grpo`, `distillation`, `sft` or `dpo`."""
        raise NotImplementedError


@section
class RolloutMasterConfig(RunConfig):
    """Keys of runs whose policy answers prompts."""

    policy: Annotated[PolicyConfig, doc("The model and its training.")]
    data: Annotated[DataConfig, doc("Prompts.")]
    env: Annotated[dict[str, EnvConfig], doc("Environments by name.")]

    @property
    def algorithm(self) -> tuple[str, RolloutSectionConfig]:
        """Name and keys of the section of the algorithm."""
        raise NotImplementedError


@section
class GrpoMasterConfig(RolloutMasterConfig):
    """Every key of a GRPO run."""

    grpo: Annotated[GrpoSectionConfig, doc("The loop.")]
    loss_fn: Annotated[ClippedPGLossConfig, doc("The loss.")]

    @property
    def algorithm(self) -> tuple[str, GrpoSectionConfig]:
        """Name and keys of the section of the algorithm."""
        return "grpo", self.grpo


@section
class DistillationMasterConfig(RolloutMasterConfig):
    """Every key of a run of on-policy distillation; `policy` is the student."""

    distillation: Annotated[DistillationSectionConfig, doc("The loop.")]
    loss_fn: Annotated[DistillationLossConfig, doc("The loss.")]
    teacher: Annotated[TeacherConfig, doc("The teacher.")]

    @property
    def algorithm(self) -> tuple[str, DistillationSectionConfig]:
        """Name and keys of the section of the algorithm."""
        return "distillation", self.distillation


@section
class SftMasterConfig(RunConfig):
    """Every key of an SFT run."""

    sft: Annotated[SftSectionConfig, doc("The loop.")]
    loss_fn: Annotated[OwnLossConfig, doc("A custom loss; if omitted, the mean negative logprob.")] | None = None
    data: Annotated[SftDataConfig, doc("Conversations.")]

    @property
    def algorithm(self) -> tuple[str, SftSectionConfig]:
        """Name and keys of the section of the algorithm."""
        return "sft", self.sft


@section
class DpoMasterConfig(RunConfig):
    """Every key of a DPO run."""

    dpo: Annotated[DpoSectionConfig, doc("The loop and the loss.")]
    loss_fn: Annotated[OwnLossConfig, doc("A custom loss; if omitted, the DPO loss.")] | None = None
    data: Annotated[DpoDataConfig, doc("Pairs.")]

    @property
    def algorithm(self) -> tuple[str, DpoSectionConfig]:
        """Name and keys of the section of the algorithm."""
        return "dpo", self.dpo


@section
class EvalMasterConfig:
    """Every key of an evaluation."""

    eval: Annotated[EvalSectionConfig, doc("What is measured.")]
    generation: Annotated[EvalGenerationConfig, doc("The model and its sampling.")]
    tokenizer: Annotated[TokenizerConfig, doc("The tokenizer, with the keys of `policy.tokenizer`.")]
    data: Annotated[EvalDataConfig, doc("Prompts.")]
    env: Annotated[dict[str, EnvConfig], doc("Environments by name.")]
    cluster: Annotated[ClusterConfig, doc("The machines.")]


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(GrpoMasterConfig):
    """Everything a GRPO run needs to know."""

    worker: PolicySettings
    engine: VllmSettings
    resolved: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(DistillationMasterConfig):
    """Everything a run of distillation needs to know."""

    worker: PolicySettings
    teacher_worker: TeacherSettings
    engine: VllmSettings
    resolved: Mapping[str, Any]


type RolloutConfig = GrpoConfig | DistillationConfig


@dataclass(frozen=True, kw_only=True)
class SftConfig(SftMasterConfig):
    """Everything an SFT run needs to know."""

    worker: PolicySettings
    resolved: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class DpoConfig(DpoMasterConfig):
    """Everything a DPO run needs to know. Batch sizes of `policy` count pairs; those of `worker` count rows."""

    worker: PolicySettings
    resolved: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class EvalConfig(EvalMasterConfig):
    """Everything an evaluation needs to know."""

    engine: VllmSettings
    resolved: Mapping[str, Any]


type SupervisedConfig = SftConfig | DpoConfig

type Rule[Config] = Callable[[Config], str | None]
"""From a configuration whose keys all have their documented type to one message (fact, reason, fix) or None."""


def rules_in(module: str, *kinds: Any) -> tuple[Callable[..., str | None], ...]:
    """List the rules of a module, given by name, in order: its public functions from these types to `str | None`."""

    def is_rule(function: Any) -> bool:
        *taken, made = get_type_hints(function).values()
        return taken == list(kinds) and made == str | None

    own = {name: value for name, value in vars(sys.modules[module]).items() if not name.startswith("_")}
    functions = [value for value in own.values() if isfunction(value) and value.__module__ == module]
    return tuple(filter(is_rule, functions))


EXEMPLARS: dict[type, str] = {
    GrpoMasterConfig: "grpo_math_1B.yaml",
    DistillationMasterConfig: "distillation_math.yaml",
    SftMasterConfig: "sft.yaml",
    DpoMasterConfig: "dpo.yaml",
    EvalMasterConfig: "eval.yaml",
}
"""Under examples/configs: the file of each kind of run that sets every key."""
