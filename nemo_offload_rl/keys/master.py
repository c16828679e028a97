"""The whole configuration of a run: one section of sections for each algorithm, and what they have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Protocol

from nemo_offload_rl.keys.data import (
    DataConfig,
    DpoDataConfig,
    EnvConfig,
    EvalDataConfig,
    SftDataConfig,
    TokenizerConfig,
)
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


@section
class GrpoMasterConfig:
    """Every key of a GRPO run."""

    grpo: Annotated[GrpoSectionConfig, doc("The loop.")]
    loss_fn: Annotated[ClippedPGLossConfig, doc("The loss.")]
    policy: Annotated[PolicyConfig, doc("The model and its training.")]
    data: Annotated[DataConfig, doc("Prompts.")]
    env: Annotated[dict[str, EnvConfig], doc("Environments by name.")]
    logger: Annotated[LoggerConfig, doc("What is logged, and where.")]
    cluster: Annotated[ClusterConfig, doc("The machines.")]
    checkpointing: Annotated[CheckpointingConfig, doc("When to save checkpoints.")]

    @property
    def algorithm(self) -> tuple[str, GrpoSectionConfig]:
        """Name and keys of the section of the algorithm."""
        return "grpo", self.grpo


@section
class DistillationMasterConfig:
    """Every key of a run of on-policy distillation."""

    distillation: Annotated[DistillationSectionConfig, doc("The loop.")]
    loss_fn: Annotated[DistillationLossConfig, doc("The loss.")]
    policy: Annotated[PolicyConfig, doc("The student and its training.")]
    teacher: Annotated[TeacherConfig, doc("The teacher.")]
    data: Annotated[DataConfig, doc("Prompts.")]
    env: Annotated[dict[str, EnvConfig], doc("Environments by name.")]
    logger: Annotated[LoggerConfig, doc("What is logged, and where.")]
    cluster: Annotated[ClusterConfig, doc("The machines.")]
    checkpointing: Annotated[CheckpointingConfig, doc("When to save checkpoints.")]

    @property
    def algorithm(self) -> tuple[str, DistillationSectionConfig]:
        """Name and keys of the section of the algorithm."""
        return "distillation", self.distillation


type RolloutMasterConfig = GrpoMasterConfig | DistillationMasterConfig
"""Those of runs whose policy answers prompts."""
WITH_ROLLOUTS = (GrpoMasterConfig, DistillationMasterConfig)


@section
class SftMasterConfig:
    """Every key of an SFT run."""

    sft: Annotated[SftSectionConfig, doc("The loop.")]
    loss_fn: Annotated[OwnLossConfig, doc("A custom loss; if omitted, the mean negative logprob.")] | None = None
    policy: Annotated[TrainedPolicyConfig, doc("The model and its training.")]
    data: Annotated[SftDataConfig, doc("Conversations.")]
    logger: Annotated[LoggerConfig, doc("What is logged, and where.")]
    cluster: Annotated[ClusterConfig, doc("The machines.")]
    checkpointing: Annotated[CheckpointingConfig, doc("When to save checkpoints.")]

    @property
    def algorithm(self) -> tuple[str, SftSectionConfig]:
        """Name and keys of the section of the algorithm."""
        return "sft", self.sft


@section
class DpoMasterConfig:
    """Every key of a DPO run."""

    dpo: Annotated[DpoSectionConfig, doc("The loop and the loss.")]
    loss_fn: Annotated[OwnLossConfig, doc("A custom loss; if omitted, the DPO loss.")] | None = None
    policy: Annotated[TrainedPolicyConfig, doc("The model and its training.")]
    data: Annotated[DpoDataConfig, doc("Pairs.")]
    logger: Annotated[LoggerConfig, doc("What is logged, and where.")]
    cluster: Annotated[ClusterConfig, doc("The machines.")]
    checkpointing: Annotated[CheckpointingConfig, doc("When to save checkpoints.")]

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


type Rule[Config] = Callable[[Config], str | None]
"""From a configuration whose keys all have their documented type to one message (fact, reason, fix) or None."""


class PolicyRun(Protocol):
    """The part of a run's configuration that the rules of a backend read."""

    @property
    def policy(self) -> TrainedPolicyConfig:
        """The section `policy`."""
        ...

    @property
    def cluster(self) -> ClusterConfig:
        """The section `cluster`."""
        ...


class RunConfig(PolicyRun, Protocol):
    """The part that the configurations of all runs that train have, for rules that serve all."""

    @property
    def algorithm(self) -> tuple[str, RolloutSectionConfig | SupervisedSectionConfig]:
        """Name and keys of the section of the algorithm: `grpo`, `distillation`, `sft` or `dpo`."""
        ...

    @property
    def logger(self) -> LoggerConfig:
        """The section `logger`."""
        ...

    @property
    def checkpointing(self) -> CheckpointingConfig:
        """The section `checkpointing`."""
        ...


EXEMPLARS: dict[type, str] = {
    GrpoMasterConfig: "grpo_math_1B.yaml",
    DistillationMasterConfig: "distillation_math.yaml",
    SftMasterConfig: "sft.yaml",
    DpoMasterConfig: "dpo.yaml",
    EvalMasterConfig: "eval.yaml",
}
"""Under examples/configs: the file of each kind of run that sets every key."""
