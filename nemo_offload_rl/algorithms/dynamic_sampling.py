"""Dynamic sampling: fill a step with groups whose rewards differ (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from nemo_offload_rl.errors import DataError
from nemo_offload_rl.experience.types import RolloutBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingStats:
    """What one step's sampling cost: batches drawn, groups seen in them, and groups kept out for equal rewards."""

    num_batches: int
    num_groups: int
    num_constant_groups: int


def sample_until_full(
    draw: Callable[[], RolloutBatch], *, num_prompts: int, max_batches: int
) -> tuple[RolloutBatch, DynamicSamplingStats]:
    """Draw batches until `num_prompts` groups with differing rewards are there; later ones are left over and dropped.

    Args:
        draw: Generates and scores one batch of fresh prompts.
        num_prompts: Groups that the step needs.
        max_batches: Batches to try.

    Raises:
        DataError: `max_batches` batches did not give enough groups.
    """
    kept: list[RolloutBatch] = []
    num_kept = num_groups = num_constant = 0
    for num_batches in range(1, max_batches + 1):
        batch = draw()
        useful = drop_constant_groups(batch)
        num_groups += batch.num_prompts
        num_constant += batch.num_prompts - useful.num_prompts
        num_kept += useful.num_prompts
        kept.append(useful)
        if num_kept >= num_prompts:
            stats = DynamicSamplingStats(
                num_batches=num_batches, num_groups=num_groups, num_constant_groups=num_constant
            )
            return RolloutBatch.concatenate(kept).select_groups(range(num_prompts)), stats
        logger.info("dynamic sampling: %d of %d groups after %d batches", num_kept, num_prompts, num_batches)
    raise DataError(
        f"dynamic sampling found {num_kept} of {num_prompts} groups with differing rewards in {max_batches} batches: "
        f"the prompts are too easy or too hard; change the data, or raise grpo.dynamic_sampling_max_gen_batches"
    )


def drop_constant_groups(batch: RolloutBatch) -> RolloutBatch:
    """The groups whose rewards are not all equal, in their order."""
    constant_P = batch.constant_groups()
    return batch.select_groups([index for index, constant in enumerate(constant_P.tolist()) if not constant])
