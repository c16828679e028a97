"""Frozen settings of logging, the cluster and checkpoints: what their YAML keys are turned into, once.

Field names and meanings are those of the YAML keys, documented in `utils/schema.py`. None has a default: YAML is the
only source.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WandbSettings:
    """The keys `logger.wandb.*`."""

    project: str
    name: str
    entity: str | None  # None: the default of the logged-in user
    group: str | None
    tags: tuple[str, ...]
    mode: str  # "online", "offline" or "disabled"


@dataclass(frozen=True, kw_only=True)
class MlflowSettings:
    """The keys `logger.mlflow.*`."""

    experiment_name: str
    run_name: str
    tracking_uri: str


@dataclass(frozen=True, kw_only=True)
class LoggerSettings:
    """The keys `logger.*`; `log_dir` is the run folder."""

    log_dir: str
    num_val_samples_to_print: int
    tensorboard_enabled: bool
    wandb_enabled: bool
    wandb: WandbSettings | None  # None when the section was deleted
    mlflow_enabled: bool
    mlflow: MlflowSettings | None  # None when the section was deleted


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """The keys `cluster.*`. `gpus_per_node` 0 means a CPU run with `cpu_workers_per_node` workers."""

    gpus_per_node: int
    cpu_workers_per_node: int
    num_nodes: int
    master_port_range_low: int
    master_port_range_high: int

    @property
    def device_type(self) -> str:
        """`"cuda"` or `"cpu"`."""
        return "cuda" if self.gpus_per_node > 0 else "cpu"

    @property
    def workers_per_node(self) -> int:
        """Policy workers on each node: one for each GPU, or as many as asked for on CPU."""
        return self.gpus_per_node if self.gpus_per_node > 0 else self.cpu_workers_per_node

    @property
    def world_size(self) -> int:
        """Policy workers in all."""
        return self.workers_per_node * self.num_nodes


@dataclass(frozen=True, kw_only=True)
class CheckpointingSettings:
    """The keys `checkpointing.*`."""

    enabled: bool
    checkpoint_dir: str
    metric_name: str | None
    higher_is_better: bool
    keep_top_k: int | None
    save_period: int  # steps
    save_optimizer: bool
    save_consolidated: bool
    async_save: bool
