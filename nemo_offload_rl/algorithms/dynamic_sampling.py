"""Dynamic sampling: fill a step with groups whose rewards differ (DAPO, arXiv 2503.14476, section 3.2).

NeMo-RL's variant judges each response by the rewards of the others in its group, and keeps parts of groups.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from nemo_offload_rl.errors import DataError
from nemo_offload_rl.experience.types import RolloutBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SampledGroups:
    """The groups of one step.

    Attributes:
        trained: Rollouts for training: whole groups, or with `places` single rollouts, each a group of one.
        sampled: All sampled groups, trained ones included; metrics of rollouts use them.
        num_batches: Number of generation batches drawn.
        age: Mean number of steps between the weights that the rollouts began with and those being trained.
        seconds: Seconds of drawing during training, by phase; empty if the step waited for the rollouts.
        places: [B] int64, index in `sampled` of each trained rollout; None if whole groups are trained on.
    """

    trained: RolloutBatch
    sampled: RolloutBatch
    num_batches: int = 1
    age: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    places: Tensor | None = None

    @staticmethod
    def all_of(batch: RolloutBatch) -> SampledGroups:
        """Return groups that are all trained on."""
        return SampledGroups(trained=batch, sampled=batch)

    def in_groups(self, values_B: Tensor) -> Tensor:
        """Arrange values of the trained rollouts by group, [P, G]; 0 for rollouts of a group that are left out."""
        if self.places is None:
            return values_B.reshape(self.trained.num_prompts, self.trained.group_size)
        values_PG = values_B.new_zeros(self.sampled.num_prompts, self.sampled.group_size)
        values_PG.view(-1)[self.places] = values_B
        return values_PG

    def row_places(self) -> Tensor:
        """Return [R] int64, the place of each row of `trained.collate` in the flattened values of `in_groups`."""
        owners = self.trained.row_owners()
        return owners if self.places is None else self.places[owners]


def sample_until_full(
    batches: Iterator[RolloutBatch],
    *,
    num_prompts: int,
    max_batches: int,
    drops: Literal["groups", "responses"] = "groups",
) -> SampledGroups | None:
    """Draw batches until the step is full of rollouts to learn from; the surplus is not trained on.

    Args:
        batches: Each item generates and scores fresh prompts; ends with the data.
        num_prompts: Groups that the step needs. If `drops` is "responses", it needs as many responses as these have.
        max_batches: Most batches to draw.
        drops: The key `grpo.dynamic_sampling_drops`.

    Returns:
        The groups; None if the data ended before the step was full.

    Raises:
        DataError: `max_batches` batches did not give enough groups.
    """
    sampled: list[RolloutBatch] = []
    kept: list[Tensor] = []
    num_kept = num_wanted = 0
    for batch in islice(batches, max_batches):
        sampled.append(batch)
        useful_PG = in_varied_groups(batch) if drops == "groups" else among_varied_others(batch)
        kept.append(useful_PG.reshape(-1))
        size = batch.group_size if drops == "groups" else 1
        num_kept, num_wanted = num_kept + int(kept[-1].sum()) // size, num_prompts * batch.group_size // size
        if num_kept >= num_wanted:
            whole, places = RolloutBatch.concatenate(sampled), torch.cat(kept).nonzero()[: num_wanted * size, 0]
            return SampledGroups(
                trained=RolloutBatch(rollouts=tuple(whole.rollouts[place] for place in places), group_size=size),
                sampled=whole,
                num_batches=len(sampled),
                places=places if drops == "responses" else None,
            )
        logger.info("dynamic sampling: %d of %d %s after %d batches", num_kept, num_wanted, drops, len(sampled))
    if len(sampled) < max_batches:
        return None
    raise DataError(
        f"dynamic sampling found {num_kept} of {num_wanted} {drops} to learn from in {max_batches} batches: rewards "
        "hardly differ within a group, since the prompts are too easy or too hard; change the data, or raise "
        "grpo.dynamic_sampling_max_gen_batches"
    )


def in_varied_groups(batch: RolloutBatch) -> Tensor:
    """Mark [P, G] the rollouts of groups whose rewards differ and whose prompt is not too long."""
    is_trained_PG = (batch.loss_multipliers() != 0).reshape(batch.num_prompts, batch.group_size)
    useful_P1 = (is_trained_PG.all(dim=1) & ~batch.constant_groups())[:, None]
    return useful_P1.expand_as(is_trained_PG)


def among_varied_others(batch: RolloutBatch) -> Tensor:
    """Mark [P, G] those rollouts of `in_varied_groups` that are scored and whose group's other rewards differ too.

    NeMo-RL drops all other rollouts, whose leave-one-out deviation is 0, such as a group's only right response.
    """
    size = batch.group_size
    others = torch.tensor([[other for other in range(size) if other != one] for one in range(size)], dtype=torch.int64)
    rewards_PGO = batch.rewards_PG()[:, others]
    highest_PG = rewards_PGO.nan_to_num(nan=float("-inf")).amax(dim=2)
    differ_PG = highest_PG > rewards_PGO.nan_to_num(nan=float("inf")).amin(dim=2)
    return differ_PG & batch.scored_PG() & in_varied_groups(batch)
