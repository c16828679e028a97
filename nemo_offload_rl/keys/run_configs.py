"""The configuration of each kind of run: its keys, and what workers and engines are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.keys.engine import VllmSettings
from nemo_offload_rl.keys.master import (
    DistillationMasterConfig,
    DpoMasterConfig,
    EvalMasterConfig,
    GrpoMasterConfig,
    SftMasterConfig,
)
from nemo_offload_rl.keys.worker import PolicySettings, TeacherSettings


@dataclass(frozen=True, kw_only=True)
class GrpoConfig(GrpoMasterConfig):
    """Everything a GRPO run needs to know; `resolved` is the plain dictionary for the records of the run."""

    worker: PolicySettings
    engine: VllmSettings
    resolved: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(DistillationMasterConfig):
    """Everything that a run of distillation needs to know."""

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
