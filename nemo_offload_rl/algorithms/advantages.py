"""Advantages from the rewards of groups of responses to the same prompt. Shape suffixes: P prompts, G group size."""

from __future__ import annotations

import torch
from torch import Tensor

_STD_EPS = 1e-6


def group_advantages(rewards_PG: Tensor, *, leave_one_out: bool, normalize: bool) -> Tensor:
    """Reward minus the group's baseline, optionally divided by a standard deviation.

    With `leave_one_out` the baseline of a response is the mean reward of the others in its group (RLOO, arXiv
    2402.14740); without, the mean of the whole group (GRPO, arXiv 2402.03300). The deviation is the whole group's in
    both cases, with divisor G - 1. A group of equal rewards gives 0.

    Args:
        rewards_PG: [P, G] float rewards.
        leave_one_out: Which baseline.
        normalize: Divide by the standard deviation.

    Returns:
        [P, G] float32.
    """
    rewards_PG = rewards_PG.to(torch.float32)
    baseline_PG = leave_one_out_baseline(rewards_PG) if leave_one_out else group_mean_baseline(rewards_PG)
    # Equal rewards can differ from their own mean by a rounding error, which the division would blow up to order 1.
    constant_P1 = rewards_PG.amax(dim=1, keepdim=True) == rewards_PG.amin(dim=1, keepdim=True)
    advantages_PG = (rewards_PG - baseline_PG).masked_fill(constant_P1, 0.0)
    if not normalize:
        return advantages_PG
    return advantages_PG / (group_std(rewards_PG)[:, None] + _STD_EPS)


def group_mean_baseline(rewards_PG: Tensor) -> Tensor:
    """[P, G]: the mean of the group, the same for all of it."""
    return rewards_PG.mean(dim=1, keepdim=True).expand_as(rewards_PG)


def leave_one_out_baseline(rewards_PG: Tensor) -> Tensor:
    """[P, G]: the mean of the others in the group; a group of one has its own reward as baseline."""
    group_size = rewards_PG.shape[1]
    if group_size == 1:
        return rewards_PG.clone()
    return (rewards_PG.sum(dim=1, keepdim=True) - rewards_PG) / (group_size - 1)


def group_std(rewards_PG: Tensor) -> Tensor:
    """[P]: the sample standard deviation of each group; 0 for a group of one."""
    if rewards_PG.shape[1] == 1:
        return torch.zeros(rewards_PG.shape[0], dtype=torch.float32)
    return rewards_PG.to(torch.float32).std(dim=1)
