"""The whole configuration of a GRPO run as one TypedDict."""

from __future__ import annotations

from typing import Annotated, TypedDict

from nemo_offload_rl.algorithms.config import ClippedPGLossConfig, GrpoSectionConfig
from nemo_offload_rl.data.config import DataConfig, EnvConfig
from nemo_offload_rl.policy.config import PolicyConfig
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
