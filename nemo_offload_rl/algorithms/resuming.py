"""How long a run is, and where it begins."""

from __future__ import annotations

from nemo_offload_rl.algorithms.checkpoints import Checkpoint, CheckpointKeeper
from nemo_offload_rl.errors import ConfigError


def resume_point(checkpoints: CheckpointKeeper, num_steps: int, key: str) -> Checkpoint | None:
    """The checkpoint that a run of `num_steps` steps goes on from; None to begin with the first step.

    Args:
        checkpoints: Where to look.
        num_steps: Number of the last step.
        key: The setting that would make the run longer, for the message.

    Raises:
        ConfigError: The newest checkpoint is the end of this run already.
        CheckpointError: It cannot be continued.
    """
    newest = checkpoints.newest()
    if newest is not None and newest.step >= num_steps:
        raise ConfigError(
            f"{newest.folder} is as far as this run of {num_steps} steps goes; raise {key} to go on, or change "
            "checkpointing.checkpoint_dir to start anew"
        )
    return newest
