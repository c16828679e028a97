"""The YAML keys `logger.*`, `cluster.*` and `checkpointing.*`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from nemo_offload_rl.schema import doc, section


@section
class WandbConfig:
    """`logger.wandb`: Weights & Biases, with the names of `wandb.init`. A resumed run goes on as the same run there."""

    project: Annotated[str, doc("Project that the run appears in.")]
    name: Annotated[str, doc("Name of the run.")]
    entity: Annotated[str | None, doc("User or team that the run belongs to; null for the login's default.")]
    group: Annotated[str | None, doc("Group of runs that it appears in; null for none.")]
    tags: Annotated[tuple[str, ...], doc("Labels of the run.")]
    mode: Annotated[
        Literal["online", "offline", "disabled"],
        doc("`offline` writes into the run folder for a later `wandb sync`; `online` needs a login."),
    ]


@section
class MlflowConfig:
    """`logger.mlflow`: MLflow. A resumed run goes on as the same run there."""

    experiment_name: Annotated[str, doc("Experiment that the run appears in; made if need be.", min_length=1)]
    run_name: Annotated[str, doc("Name of the run.")]
    tracking_uri: Annotated[
        str,
        doc(
            "Address of the tracking server; or `sqlite:///PATH`, which needs the package `mlflow` where a server does "
            "with `mlflow-skinny`; or `file:PATH`, which MLflow 3 takes with `MLFLOW_ALLOW_FILE_STORE=true` only.",
            min_length=1,
        ),
    ]


@section
class PrometheusConfig:
    """`logger.prometheus`: where a Prometheus server finds the metrics of the run, at `/metrics`."""

    host: Annotated[
        str,
        doc(
            "Address to listen on. Others than this machine's own, 127.0.0.1, need a token in the environment variable "
            "`NEMO_OFFLOAD_RL_TOKEN`, which the server sends as `Authorization: Bearer TOKEN`.",
            min_length=1,
        ),
    ]
    port: Annotated[int, doc("Port to listen on; 0 for any that is free, which the log names.", ge=0, le=65535)]


@section
class SinkConfig:
    """An entry of `logger.sinks`: code of your own that gets every metric."""

    target: Annotated[
        str,
        doc(
            "`package.module.Name` or `path/to/file.py:name`: a function of step and metrics, or a class with `write`.",
            min_length=1,
        ),
    ]
    kwargs: Annotated[
        dict[str, Any] | None, doc("Further arguments of the function, or those of the class; null or absent: none.")
    ] = None


@section
class LoggerConfig:
    """`logger`: where a run writes. metrics.jsonl and the resolved configuration are always written."""

    log_dir: Annotated[
        str, doc("Run folder. An older metrics.jsonl in it is renamed, never overwritten.", min_length=1)
    ]
    numbered_runs: Annotated[
        bool,
        doc(
            "Each start makes a run folder of its own below `log_dir`, exp_001, exp_002 and so on, a resumed run too. "
            "false: `log_dir` itself is the run folder."
        ),
    ]
    num_val_samples_to_print: Annotated[
        int, doc("Validation samples shown at each validation, and written to `log_dir`/samples.", ge=0)
    ]
    memory_sample_period_s: Annotated[
        float, doc("Seconds from one line of `log_dir`/memory.jsonl to the next; a longer one may miss a peak.", gt=0)
    ]
    tensorboard_enabled: Annotated[bool, doc("Also write TensorBoard events into `log_dir`/tensorboard.")]
    wandb_enabled: Annotated[bool, doc("Also write to Weights & Biases; needs the section `logger.wandb`.")]
    wandb: Annotated[WandbConfig, doc("Weights & Biases; may be deleted with `~logger.wandb`.")] | None = None
    mlflow_enabled: Annotated[bool, doc("Also write to MLflow; needs the section `logger.mlflow`.")]
    mlflow: Annotated[MlflowConfig, doc("MLflow; may be deleted with `~logger.mlflow`.")] | None = None
    prometheus_enabled: Annotated[
        bool, doc("Also answer a Prometheus server while the run goes on; needs the section `logger.prometheus`.")
    ]
    prometheus: Annotated[PrometheusConfig, doc("Prometheus; may be deleted with `~logger.prometheus`.")] | None = None
    sinks: Annotated[tuple[SinkConfig, ...], doc("Code of your own that metrics go to too; absent: none.")] | None = (
        None
    )


@section
class ClusterConfig:
    """`cluster`: the machines. Policy workers and colocated engines share each device."""

    gpus_per_node: Annotated[int, doc("GPUs to use on each node; 0 runs on CPU.", ge=0)]
    cpu_workers_per_node: Annotated[
        int, doc("Policy workers on each node when `gpus_per_node` is 0; not read otherwise.", ge=1)
    ]
    num_nodes: Annotated[int, doc("Nodes of the Ray cluster to use.", ge=1)]
    master_port_range_low: Annotated[
        int, doc("First port that the policy workers' rendezvous may take.", ge=1024, le=65535)
    ]
    master_port_range_high: Annotated[int, doc("Last port that it may take.", ge=1024, le=65535)]

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


@section
class CheckpointingConfig:
    """`checkpointing`: when and where a run is saved."""

    enabled: Annotated[bool, doc("Save checkpoints.")]
    checkpoint_dir: Annotated[str, doc("Folder of the checkpoints, one `step_N` folder each.", min_length=1)]
    metric_name: Annotated[
        str | None,
        doc(
            "Metric that ranks checkpoints, such as `val:accuracy` or `train:reward_mean`; null ranks them by "
            "step, so that the newest are kept."
        ),
    ]
    higher_is_better: Annotated[bool, doc("Whether a greater metric is the better one.")]
    keep_top_k: Annotated[
        int | None,
        doc(
            "Number of best checkpoints that stay on disk, in addition to the newest and the newest that has "
            "the optimizer; null keeps all.",
            ge=1,
        ),
    ]
    save_period: Annotated[int, doc("Steps from one checkpoint to the next.", ge=1)]
    save_optimizer: Annotated[bool, doc("Save the optimizer too. Without it a run can be used but not continued.")]
    save_consolidated: Annotated[
        bool, doc("Also write a Hugging Face folder `hf` into each checkpoint, which transformers and vLLM load.")
    ]
    async_save: Annotated[
        bool,
        doc(
            "Write to disk while training goes on. What is on the GPU is copied into host memory first; where that "
            "is not free, the run waits for the disk and logs a warning. What is on the host already is written from "
            "there, and the next optimizer step waits until it has been."
        ),
    ]
    checkpoint_must_save_by: Annotated[
        str | None,
        doc(
            "For machines that are lent for a time: days:hours:minutes:seconds after the first step begins, such as "
            "00:03:45:00. Before a step that could end later the run saves and ends; started again, it goes on. null "
            "for no limit."
        ),
    ]
