"""How long a run is, and where it begins."""

from __future__ import annotations

import logging
from typing import Any

from nemo_offload_rl.algorithms.checkpoints import Checkpoint, CheckpointKeeper
from nemo_offload_rl.algorithms.identity import check_identity
from nemo_offload_rl.data.loader import ShuffledLoader
from nemo_offload_rl.errors import ConfigError

logger = logging.getLogger(__name__)


def resume_point(
    checkpoints: CheckpointKeeper, loader: ShuffledLoader[Any], max_num_steps: int, section: str
) -> tuple[Checkpoint | None, int]:
    """The checkpoint that a run goes on from, None to begin with the first step; and the number of its last step.

    Steps and data both bound a run. A step takes one batch of data, or more with dynamic sampling: then the run may
    end before that last step.

    Args:
        checkpoints: Where to look.
        loader: The training data with its number of epochs; left where the checkpoint was taken.
        max_num_steps: Bound of the steps.
        section: Of the keys that bound the run: `grpo`, `sft` or `dpo`.

    Raises:
        ConfigError: The newest checkpoint is the end of this run already.
        CheckpointError: It cannot be continued, or was trained from another model, tokenizer or chat template.
        DataError: It was taken in other data.
    """
    newest = checkpoints.newest()
    if newest is None:
        return None, min(max_num_steps, loader.num_batches_left)
    check_identity(newest.folder, newest.identity, checkpoints.identity)
    loader.load_state_dict(newest.loader)
    mine = loader.state_dict()
    if newest.loader.get("parts", mine.get("parts")) != mine.get("parts"):
        logger.warning(
            "the weights of data.train are not those of %s: rows of a data set that weighs less now are repeated, and "
            "rows of one that weighs more are left out, in the pass over it that the run is in",
            newest.folder,
        )
    if newest.loader.get("digest", mine.get("digest")) != mine.get("digest"):
        logger.warning(
            "the rows of data.train are as many as those of %s, but other ones: the run goes on at their number, and "
            "may train on rows that were kept aside for validation there",
            newest.folder,
        )
    key = "max_num_steps" if newest.step >= max_num_steps else "max_num_epochs"
    last_step = min(max_num_steps, newest.step + loader.num_batches_left)
    if newest.step >= last_step:
        raise ConfigError(
            f"{newest.folder} is as far as this run of {last_step} steps goes; raise {section}.{key} to go on, or "
            "change checkpointing.checkpoint_dir to start anew"
        )
    return newest, last_step
