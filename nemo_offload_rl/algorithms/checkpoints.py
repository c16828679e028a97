"""When to save, where, and which checkpoints to keep.

A checkpoint is a folder `step_<n>` with the policy's own files in `policy/` and `progress.json` beside them, which is
written last: a folder without it was not finished and is never resumed from.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from nemo_offload_rl.data.loader import ShuffledLoader
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.policy.policy import Policy
from nemo_offload_rl.utils.settings import CheckpointingSettings

logger = logging.getLogger(__name__)

PROGRESS_FILE = "progress.json"


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

    def save(self, step: int, policy: Policy, loader: ShuffledLoader, metric: float | None) -> None:
        """Save, then drop the worst of more than `keep_top_k`; the newest is always kept.

        Raises:
            ConfigError: The folder cannot be written.
        """
        target = self._folder / f"step_{step}"
        try:
            target.mkdir(parents=True, exist_ok=True)
            policy.save_checkpoint((target / "policy").absolute())
            progress = {"step": step, "metric": metric, "loader": loader.state_dict()}
            (target / PROGRESS_FILE).write_text(json.dumps(progress))
        except OSError as error:
            raise ConfigError(
                f"checkpoint {target} cannot be written ({error.strerror}); free space or change "
                "checkpointing.checkpoint_dir"
            ) from error
        self._prune(newest=step)

    def resume(self, policy: Policy, loader: ShuffledLoader) -> int:
        """Load the newest finished checkpoint, if there is one; returns the step that it was taken after, else 0."""
        if not self._settings.enabled:
            return 0
        finished = self._finished()
        if not finished:
            return 0
        step, target, progress = max(finished, key=lambda entry: entry[0])
        logger.info("resuming after step %d from %s", step, target)
        policy.load_checkpoint((target / "policy").absolute())
        loader.load_state_dict(progress["loader"])
        return step

    def _finished(self) -> list[tuple[int, Path, dict]]:
        found = []
        for path in self._folder.glob("step_*/" + PROGRESS_FILE):
            progress = json.loads(path.read_text())
            found.append((progress["step"], path.parent, progress))
        return found

    def _prune(self, newest: int) -> None:
        if self._settings.keep_top_k is None:
            return
        sign = 1.0 if self._settings.higher_is_better else -1.0

        def rank(entry: tuple[int, Path, dict]) -> tuple[float, int]:
            step, _, progress = entry
            metric = progress["metric"]
            return (float("-inf") if metric is None else sign * metric, step)

        others = sorted((entry for entry in self._finished() if entry[0] != newest), key=rank, reverse=True)
        for _, path, _ in others[max(0, self._settings.keep_top_k - 1) :]:
            # Its marker goes first: a folder that is half removed must not look finished.
            (path / PROGRESS_FILE).unlink()
            shutil.rmtree(path)
