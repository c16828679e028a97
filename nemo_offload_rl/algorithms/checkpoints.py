"""When to save, where, and which checkpoints to keep.

A checkpoint is a folder `step_<n>` with the policy's own files in `policy/` and `progress.json` beside them, which is
written last: a folder without it was not finished and is never resumed from.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_offload_rl.data.loader import LoaderState, ShuffledLoader
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.utils.settings import CheckpointingSettings

logger = logging.getLogger(__name__)

PROGRESS_FILE = "progress.json"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One finished checkpoint on disk.

    Attributes:
        folder: `step_<n>`.
        step: The step that it was taken after.
        metric: What ranks it, None where that was not measured.
        has_optimizer: Whether training can go on from it.
        loader: Where the data stood.
    """

    folder: Path
    step: int
    metric: float | None
    has_optimizer: bool
    loader: LoaderState


class CheckpointKeeper:
    """Saves at the configured steps and keeps the best few.

    Args:
        settings: The keys `checkpointing.*`.
    """

    def __init__(self, settings: CheckpointingSettings) -> None:
        self._settings = settings
        self._folder = Path(settings.checkpoint_dir)

    def is_due(self, step: int, is_last: bool) -> bool:
        """Whether a checkpoint belongs to this step."""
        return self._settings.enabled and (step % self._settings.save_period == 0 or is_last)

    def save(
        self, step: int, policy: Policy, loader: ShuffledLoader[Any], metrics: Mapping[str, Mapping[str, float]]
    ) -> None:
        """Save, then drop the worst of more than `keep_top_k`; the newest is always kept.

        Without `save_optimizer` the policy is saved as a Hugging Face folder, which can be used but not continued.

        Args:
            step: The step just done.
            policy: What to save.
            loader: What gives out the training data.
            metrics: The step's metrics under `train` and `val`.

        Raises:
            ConfigError: The folder cannot be written, or the metric that ranks checkpoints does not exist.
        """
        metric = self._metric(metrics)
        target = self._folder / f"step_{step}"
        save = policy.save_checkpoint if self._settings.save_optimizer else policy.export_hf
        try:
            target.mkdir(parents=True, exist_ok=True)
            # A step that is saved again is unfinished until its new files are there.
            (target / PROGRESS_FILE).unlink(missing_ok=True)
            save((target / "policy").absolute())
            progress = {
                "step": step,
                "metric": metric,
                "has_optimizer": self._settings.save_optimizer,
                "loader": loader.state_dict(),
            }
            (target / PROGRESS_FILE).write_text(json.dumps(progress) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"checkpoint {target} cannot be written ({error.strerror or error}); free space or change "
                "checkpointing.checkpoint_dir"
            ) from error
        self._prune(newest=step)

    def newest(self) -> Checkpoint | None:
        """The newest finished checkpoint, None where there is none or checkpointing is off.

        Raises:
            ConfigError: It cannot be continued.
        """
        finished = self._finished() if self._settings.enabled else []
        if not finished:
            return None
        checkpoint = max(finished, key=lambda entry: entry.step)
        if not checkpoint.has_optimizer:
            raise ConfigError(
                f"{checkpoint.folder} was saved without the optimizer and cannot be continued; use another "
                "checkpointing.checkpoint_dir to start anew"
            )
        return checkpoint

    def load(self, checkpoint: Checkpoint, policy: Policy, loader: ShuffledLoader[Any]) -> None:
        """Bring policy and loader where they were after the checkpoint's step."""
        logger.info("resuming after step %d from %s", checkpoint.step, checkpoint.folder)
        policy.load_checkpoint((checkpoint.folder / "policy").absolute())
        loader.load_state_dict(checkpoint.loader)

    def _metric(self, metrics: Mapping[str, Mapping[str, float]]) -> float | None:
        if self._settings.metric_name is None:
            return None
        prefix, _, name = self._settings.metric_name.partition(":")
        measured = metrics[prefix]
        if measured and name not in measured:
            raise ConfigError(
                f"checkpointing.metric_name is {prefix}:{name}, which this run does not measure; choose one of "
                f"{', '.join(sorted(measured))}"
            )
        # Nothing measured: a step without validation.
        return measured[name] if measured else None

    def _finished(self) -> list[Checkpoint]:
        found = []
        for path in self._folder.glob("step_*/" + PROGRESS_FILE):
            try:
                found.append(Checkpoint(folder=path.parent, **json.loads(path.read_text(encoding="utf-8"))))
            except (OSError, ValueError, TypeError) as error:
                raise ConfigError(
                    f"{path} cannot be read as the record of a checkpoint ({error}); remove the folder {path.parent}"
                ) from error
        return found

    def _prune(self, newest: int) -> None:
        if self._settings.keep_top_k is None:
            return
        sign = 1.0 if self._settings.higher_is_better else -1.0

        def rank(checkpoint: Checkpoint) -> tuple[float, int]:
            metric = checkpoint.metric
            return (float("-inf") if metric is None else sign * metric, checkpoint.step)

        others = sorted((entry for entry in self._finished() if entry.step != newest), key=rank, reverse=True)
        for checkpoint in others[max(0, self._settings.keep_top_k - 1) :]:
            # Its marker goes first: a folder that is half removed must not look finished.
            (checkpoint.folder / PROGRESS_FILE).unlink()
            shutil.rmtree(checkpoint.folder)
