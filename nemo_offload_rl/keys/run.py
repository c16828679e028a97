"""The YAML keys `logger.*`, `cluster.*` and `checkpointing.*`."""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from nemo_offload_rl.keys.section import doc, section

_COMPILE_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "torch", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
"""Environment variable and name of each library's folder in `cluster.compile_cache_dir`."""


def library_without_bytecode() -> Path | None:
    """Return the folder of a large library that was installed without Python's bytecode; None if there is none."""
    for name in ("torch", "transformers", "vllm"):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent
            if not folder.joinpath("__pycache__").is_dir():
                return folder
    return None


@section
class WandbConfig:
    """`logger.wandb`: Weights & Biases, with the names of `wandb.init`. A resumed run continues its run there."""

    project: Annotated[str, doc("Project of the run.")] = "nemo-offload-rl"
    name: Annotated[str, doc("Name of the run.")]
    entity: Annotated[str | None, doc("User or team that owns the run; null for the login's default.")] = None
    group: Annotated[str | None, doc("Group of the run; null for none.")] = None
    tags: Annotated[tuple[str, ...], doc("Tags of the run.")] = ()
    mode: Annotated[
        Literal["online", "offline", "disabled"],
        doc("`offline` writes to the run folder for a later `wandb sync`; `online` needs a login."),
    ] = "online"


@section
class MlflowConfig:
    """`logger.mlflow`: MLflow. A resumed run continues its run there."""

    experiment_name: Annotated[str, doc("Experiment of the run; created if needed.", min_length=1)] = "nemo-offload-rl"
    run_name: Annotated[str, doc("Name of the run.")]
    tracking_uri: Annotated[
        str,
        doc(
            "Address of the tracking server; or `sqlite:///PATH`, which needs the package `mlflow` (`mlflow-skinny` "
            "is enough for a server); or `file:PATH`, which MLflow 3 accepts only with `MLFLOW_ALLOW_FILE_STORE=true`.",
            min_length=1,
        ),
    ] = "http://localhost:5000"


@section
class PrometheusConfig:
    """`logger.prometheus`: the address at which a Prometheus server reads the run's metrics, under `/metrics`."""

    host: Annotated[
        str,
        doc(
            "Address to listen on. Any address other than this machine's own, 127.0.0.1, needs a token in the "
            "environment variable `NEMO_OFFLOAD_RL_TOKEN`; Prometheus sends it as `Authorization: Bearer TOKEN`.",
            min_length=1,
        ),
    ] = "127.0.0.1"
    port: Annotated[int, doc("Port to listen on; 0 for any free port, which is logged.", ge=0, le=65535)] = 9464


@section
class SinkConfig:
    """An entry of `logger.sinks`: code of your own that gets every metric."""

    target: Annotated[
        str,
        doc(
            "A function of step and metrics, or a class with `write`, as `package.module.Name` or "
            "`path/to/file.py:name`.",
            min_length=1,
        ),
    ]
    kwargs: Annotated[dict[str, Any] | None, doc("Further arguments for the function or class; null for none.")] = None


@section
class LoggerConfig:
    """`logger`: where a run writes. It always writes metrics.jsonl and the resolved configuration."""

    log_dir: Annotated[str, doc("Run folder. A metrics.jsonl in it is renamed, never overwritten.", min_length=1)]
    numbered_runs: Annotated[
        bool,
        doc(
            "Create a numbered run folder in `log_dir` (exp_001, exp_002, ...) at each start, also when a run is "
            "resumed. false: `log_dir` itself is the run folder."
        ),
    ] = False
    num_val_samples_to_print: Annotated[
        int, doc("Samples to print at each validation, and to write to `log_dir`/samples.", ge=0)
    ] = 5
    memory_sample_period_s: Annotated[
        float, doc("Seconds between lines of `log_dir`/memory.jsonl; a long period may miss a peak.", gt=0)
    ] = 0.2
    profile_steps: Annotated[
        tuple[int, ...],
        doc(
            "Steps to trace with torch's profiler, such as `[3, 5]`: one file for each worker and engine in "
            "`log_dir`/traces, which https://ui.perfetto.dev shows. Writing them takes seconds to minutes."
        ),
    ] = ()
    tensorboard_enabled: Annotated[bool, doc("Also write TensorBoard events to `log_dir`/tensorboard.")] = False
    wandb_enabled: Annotated[bool, doc("Also write to Weights & Biases; needs the section `logger.wandb`.")] = False
    wandb: Annotated[WandbConfig, doc("Weights & Biases; can be removed with `~logger.wandb`.")] | None = None
    mlflow_enabled: Annotated[bool, doc("Also write to MLflow; needs the section `logger.mlflow`.")] = False
    mlflow: Annotated[MlflowConfig, doc("MLflow; can be removed with `~logger.mlflow`.")] | None = None
    prometheus_enabled: Annotated[
        bool, doc("Also serve metrics to a Prometheus server during the run; needs the section `logger.prometheus`.")
    ] = False
    prometheus: Annotated[PrometheusConfig, doc("Prometheus; can be removed with `~logger.prometheus`.")] | None = None
    sinks: (
        Annotated[tuple[SinkConfig, ...], doc("Your own code that also receives the metrics; if omitted, none.")] | None
    ) = None


@section
class ClusterConfig:
    """`cluster`: the machines. Policy workers and colocated engines share each device."""

    gpus_per_node: Annotated[int, doc("GPUs to use on each node; 0 runs on CPU.", ge=0)] = 1
    cpu_workers_per_node: Annotated[int, doc("Policy workers on each node where `gpus_per_node` is 0.", ge=1)] = 1
    num_nodes: Annotated[int, doc("Nodes of the Ray cluster to use.", ge=1)] = 1
    master_port_range_low: Annotated[
        int, doc("First of the ports for the meeting point (rendezvous) of the policy workers.", ge=1024, le=65535)
    ] = 20000
    master_port_range_high: Annotated[int, doc("Last of these ports.", ge=1024, le=65535)] = 29999
    call_warning_s: Annotated[
        float,
        doc(
            "Seconds without an answer from a worker or an engine after which a warning names the call; further "
            "warnings follow at twice, four times, ... that time. A call that took longer before has twice its "
            "longest time.",
            gt=0,
        ),
    ] = 30
    call_timeout_s: Annotated[
        float | None,
        doc(
            "Seconds without progress after which a call counts as hung: the Python stacks of all workers are logged, "
            "an engine is restarted (`max_restarts`), and a hung policy ends the run. Progress is each micro-batch, "
            "each response, and each tensor that is read or written. Also the time limit of a collective. null for no "
            "limit.",
            gt=0,
        ),
    ] = 7200
    compile_cache_dir: Annotated[
        str | None,
        doc(
            "Folder for the code that workers and engines compile with torch, Triton and vLLM; also for Python's "
            "bytecode of these libraries, if they are installed without. Later runs that name it find it there, also "
            "on other machines of the same kind; several may use it at the same time. null leaves the libraries' own "
            "folders ([where they are](../../guides/performance.md#start)).",
            min_length=1,
        ),
    ] = None

    @property
    def compile_cache_env(self) -> dict[str, str]:
        """Environment variables of workers for `compile_cache_dir`; none without it."""
        if self.compile_cache_dir is None:
            return {}
        folder = Path(self.compile_cache_dir).expanduser().absolute()
        return {name: str(folder / part) for name, part in _COMPILE_CACHES.items()} | self.bytecode_env

    @property
    def bytecode_env(self) -> dict[str, str]:
        """Environment variables for Python's bytecode in `compile_cache_dir`, if libraries are installed without."""
        if self.compile_cache_dir is None or library_without_bytecode() is None:
            return {}
        folder = Path(self.compile_cache_dir).expanduser().absolute() / "python"
        return {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}

    @property
    def device_type(self) -> str:
        """`cuda` or `cpu`."""
        return "cuda" if self.gpus_per_node > 0 else "cpu"

    @property
    def workers_per_node(self) -> int:
        """Policy workers on each node: one per GPU, or `cpu_workers_per_node`."""
        return self.gpus_per_node if self.gpus_per_node > 0 else self.cpu_workers_per_node

    @property
    def world_size(self) -> int:
        """Policy workers on all nodes together."""
        return self.workers_per_node * self.num_nodes


def validates_a_checkpoint(save_period: int, val_period: int, num_steps: int) -> bool:
    """Return whether a step of a run has both a checkpoint and a validation; the last step has a checkpoint."""
    return math.lcm(save_period, val_period) <= num_steps or num_steps % val_period == 0


@section
class CheckpointingConfig:
    """`checkpointing`: when and where a run is saved."""

    enabled: Annotated[bool, doc("Save checkpoints.")] = True
    checkpoint_dir: Annotated[str, doc("Folder for checkpoints, with one `step_N` folder each.", min_length=1)]
    metric_name: Annotated[
        str | None,
        doc(
            "Metric that ranks checkpoints, such as `val:accuracy` or `train:reward_mean`; null ranks by step, so "
            "the newest are kept."
        ),
    ]
    higher_is_better: Annotated[bool, doc("Whether a higher metric is better.")]
    keep_top_k: Annotated[
        int | None,
        doc(
            "Number of best checkpoints to keep, in addition to the newest one and the newest with the optimizer; null "
            "keeps all.",
            ge=1,
        ),
    ] = 3
    save_period: Annotated[int, doc("Steps between checkpoints.", ge=1)]
    save_optimizer: Annotated[
        bool,
        doc("Also save the optimizer. Without it, a checkpoint can be used, but training cannot resume from it."),
    ] = True
    save_consolidated: Annotated[
        bool,
        doc(
            "Also write a Hugging Face folder `hf` to each checkpoint, which transformers and vLLM can load; with "
            "low-rank adapters also `hf/adapter`, which peft can load."
        ),
    ] = False
    async_save: Annotated[
        bool,
        doc(
            "Write to disk while training continues. State on the GPU is first copied to host memory; if there is "
            "no room, the run waits for the disk and logs a warning. Offloaded state is written from its host copy, "
            "and the next optimizer step waits for that write."
        ),
    ] = False
    checkpoint_must_save_by: Annotated[
        str | None,
        doc(
            "For machines with a time limit: days:hours:minutes:seconds from the start of the first step, such as "
            "00:03:45:00. The run saves and ends before a step that might not finish in time, going by the longest "
            "step and save so far and `grace_s`. Started again, it continues. null for no limit."
        ),
    ] = None
    grace_s: Annotated[
        float,
        doc(
            "Seconds that the current step may take to finish after SIGTERM, SIGINT, SIGHUP or SIGUSR1. Then it is "
            "broken off if it is generating or scoring, and the step before it is saved. Workers that still compute "
            "when an error ends the run have the same time.",
            ge=0,
        ),
    ] = 30
    save_at_end: Annotated[
        bool,
        doc(
            "Save the last finished step whenever the run ends early: by a signal, or by an error that leaves the "
            "policy's workers alive."
        ),
    ] = True
