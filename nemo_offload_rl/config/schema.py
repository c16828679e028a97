"""The whole configuration of a run as one TypedDict: one for each algorithm, and what they have in common."""

from __future__ import annotations

from typing import Annotated, TypedDict

from typing_extensions import ReadOnly

from nemo_offload_rl.algorithms.config import (
    ClippedPGLossConfig,
    DpoSectionConfig,
    GrpoSectionConfig,
    SftSectionConfig,
)
from nemo_offload_rl.data.config import DataConfig, DpoDataConfig, EnvConfig, SftDataConfig
from nemo_offload_rl.policy.config import PolicyConfig, TrainedPolicyConfig
from nemo_offload_rl.schema import closed, doc
from nemo_offload_rl.utils.schema import CheckpointingConfig, ClusterConfig, LoggerConfig


@closed
class GrpoMasterConfig(TypedDict):
    """Every key of a GRPO run."""

    grpo: Annotated[GrpoSectionConfig, doc("The loop.")]
    loss_fn: Annotated[ClippedPGLossConfig, doc("The loss.")]
    policy: Annotated[PolicyConfig, doc("The model and its training.")]
    data: Annotated[DataConfig, doc("Prompts.")]
    env: Annotated[dict[str, EnvConfig], doc("Environments by name.")]
    logger: Annotated[LoggerConfig, doc("What is written where.")]
    cluster: Annotated[ClusterConfig, doc("The machines.")]
    checkpointing: Annotated[CheckpointingConfig, doc("When a run is saved.")]


@closed
class SftMasterConfig(TypedDict):
    """Every key of an SFT run."""

    sft: Annotated[SftSectionConfig, doc("The loop.")]
    policy: Annotated[TrainedPolicyConfig, doc("The model and its training.")]
    data: Annotated[SftDataConfig, doc("Conversations.")]
    logger: Annotated[LoggerConfig, doc("What is written where.")]
    cluster: Annotated[ClusterConfig, doc("The machines.")]
    checkpointing: Annotated[CheckpointingConfig, doc("When a run is saved.")]


@closed
class DpoMasterConfig(TypedDict):
    """Every key of a DPO run."""

    dpo: Annotated[DpoSectionConfig, doc("The loop and the loss.")]
    policy: Annotated[TrainedPolicyConfig, doc("The model and its training.")]
    data: Annotated[DpoDataConfig, doc("Pairs.")]
    logger: Annotated[LoggerConfig, doc("What is written where.")]
    cluster: Annotated[ClusterConfig, doc("The machines.")]
    checkpointing: Annotated[CheckpointingConfig, doc("When a run is saved.")]


class RunConfig(TypedDict):
    """What every one of them has: for rules that serve all, not for checking keys."""

    policy: ReadOnly[TrainedPolicyConfig]
    logger: ReadOnly[LoggerConfig]
    cluster: ReadOnly[ClusterConfig]
    checkpointing: ReadOnly[CheckpointingConfig]


EXEMPLARS: dict[type, str] = {
    GrpoMasterConfig: "grpo_math_1B.yaml",
    SftMasterConfig: "sft.yaml",
    DpoMasterConfig: "dpo.yaml",
}
"""Under examples/configs: the file of each kind of run that sets every key."""
