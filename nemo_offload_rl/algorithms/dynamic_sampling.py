"""Dynamic sampling: fill a step with groups whose rewards differ (DAPO, arXiv 2503.14476, section 3.2)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from nemo_offload_rl.errors import DataError
from nemo_offload_rl.experience.types import RolloutBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SampledGroups:
    """The groups of one step.

    Attributes:
        trained: Groups that the policy is trained on.
        sampled: All sampled groups, trained ones included; metrics of rollouts use them.
        num_batches: Number of generation batches drawn.
        age: Mean number of steps between the weights that the rollouts began with and those being trained.
        seconds: Seconds of drawing during training, by phase; empty if the step waited for the rollouts.
    """

    trained: RolloutBatch
    sampled: RolloutBatch
    num_batches: int = 1
    age: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])

    @staticmethod
    def all_of(batch: RolloutBatch) -> SampledGroups:
        """Return groups that are all trained on."""
        return SampledGroups(trained=batch, sampled=batch)


def sample_until_full(batches: Iterator[RolloutBatch], *, num_prompts: int, max_batches: int) -> SampledGroups | None:
    """Draw batches until there are `num_prompts` groups with differing rewards; surplus groups are not trained on.

    Args:
        batches: Each item generates and scores fresh prompts; ends with the data.
        num_prompts: Groups that the step needs.
        max_batches: Most batches to draw.

    Returns:
        The groups; None if the data ended before the step was full.

    Raises:
        DataError: `max_batches` batches did not give enough groups.
    """
    sampled: list[RolloutBatch] = []
    kept: list[RolloutBatch] = []
    num_kept = 0
    for batch in islice(batches, max_batches):
        sampled.append(batch)
        kept.append(drop_constant_groups(batch))
        num_kept += kept[-1].num_prompts
        if num_kept >= num_prompts:
            return SampledGroups(
                trained=RolloutBatch.concatenate(kept).select_groups(range(num_prompts)),
                sampled=RolloutBatch.concatenate(sampled),
                num_batches=len(sampled),
            )
        logger.info("dynamic sampling: %d of %d groups after %d batches", num_kept, num_prompts, len(sampled))
    if len(sampled) < max_batches:
        return None
    raise DataError(
        f"dynamic sampling found {num_kept} of {num_prompts} groups with differing rewards in {max_batches} batches: "
        f"the prompts are too easy or too hard; change the data, or raise grpo.dynamic_sampling_max_gen_batches"
    )


def drop_constant_groups(batch: RolloutBatch) -> RolloutBatch:
    """Keep, in order, the groups whose rewards differ and whose prompt is not too long."""
    is_trained_P = (batch.loss_multipliers() != 0).reshape(batch.num_prompts, batch.group_size).all(dim=1)
    useful_P = is_trained_P & ~batch.constant_groups()
    return batch.select_groups([index for index in range(batch.num_prompts) if useful_P[index]])
