"""What a run of training shows when it begins, and what it returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nemo_offload_rl.algorithms.checkpoints import Checkpoint, CheckpointKeeper
from nemo_offload_rl.keys.master import RunConfig
from nemo_offload_rl.utils.logger import RunLogger
from nemo_offload_rl.utils.progress import RunProgress, shown_path


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a finished run of training leaves.

    Attributes:
        step: Number of the last finished step.
        metrics: All metrics of that step, under the names of metrics.jsonl, such as `train/loss`.
        validation: Metrics of the last validation, such as `validation/accuracy`; empty if this start had none.
        validation_step: The step of that validation, 0 before training; None if there was none.
        checkpoint: Folder of the newest checkpoint; None if there is none.
        log_dir: The run folder, with metrics.jsonl.
    """

    step: int
    metrics: Mapping[str, float]
    validation: Mapping[str, float]
    validation_step: int | None
    checkpoint: Path | None
    log_dir: Path


def result_of(run_logger: RunLogger, checkpoints: CheckpointKeeper) -> RunResult:
    """Return the result of a run whose logger has been closed."""
    step, metrics = run_logger.last
    validation_step, validation = run_logger.last_validation or (None, {})
    return RunResult(
        step=step,
        metrics=metrics,
        validation=validation,
        validation_step=validation_step,
        checkpoint=checkpoints.newest_folder(),
        log_dir=run_logger.run_dir,
    )


def show_beginning(
    progress: RunProgress,
    config: RunConfig,
    *,
    data: str,
    run_dir: Path,
    num_steps: int,
    resume_from: Checkpoint | None,
) -> None:
    """Show model, data and folders, before anything is started.

    Args:
        progress: Shows them.
        config: The run.
        data: From `data_line`.
        run_dir: The run folder.
        num_steps: Number of the last step.
        resume_from: The checkpoint that the run goes on from; None for a new run.
    """
    algorithm, saving = config.algorithm[0], config.checkpointing
    folder = f"{shown_path(saving.checkpoint_dir)}, every {saving.save_period} steps"
    facts = {
        "model": shown_path(config.policy.model_name),
        "data": data,
        "logs": shown_path(run_dir),
        "checkpoints": folder if saving.enabled else "none (checkpointing.enabled is false)",
    }
    if resume_from is not None:
        facts["goes on from"] = shown_path(resume_from.folder)
    title = algorithm.capitalize() if algorithm == "distillation" else algorithm.upper()
    progress.begin(f"{title}, {num_steps} steps", facts)


def data_line(data_sets: Iterable[str], num_validation: int | None, unit: str) -> str:
    """Describe the data by the number of rows of each data set.

    Args:
        data_sets: The data set of each row.
        num_validation: Number of further rows to validate on; None for runs that do not train.
        unit: Name of several rows.
    """
    counts = Counter(data_sets).items()
    listed = "; ".join(f"{name}, {count} {unit}" if name else f"{count} {unit}" for name, count in counts)
    return listed if num_validation is None else f"{listed}; {num_validation} for validation"
