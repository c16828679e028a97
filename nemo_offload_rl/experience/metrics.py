"""Numbers about a batch of rollouts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_offload_rl.experience.types import RolloutBatch


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """What a step reports of its rollouts, under the names of docs/metrics.md.

    Rewards are those of `batch`; a rollout's response is all that the policy sampled in all of its turns.
    """
    lengths = batch.response_lengths().float()
    prompt_lengths = batch.prompt_lengths().float()
    num_correct_P = batch.correct().reshape(batch.num_prompts, batch.group_size).sum(dim=1)
    return {
        **spread("reward", batch.rewards()),
        "accuracy": batch.correct().float().mean().item(),
        "pass_rate": (num_correct_P > 0).float().mean().item(),
        **pass_at_powers_of_two(num_correct_P, batch.group_size),
        "constant_group_rate": batch.constant_groups().float().mean().item(),
        "mean_prompt_tokens": prompt_lengths.mean().item(),
        "max_prompt_tokens": prompt_lengths.max().item(),
        "mean_response_tokens": lengths.mean().item(),
        "max_response_tokens": lengths.max().item(),
        "mean_turns": batch.num_turns().float().mean().item(),
        "truncation_rate": batch.truncated().float().mean().item(),
        **by_data_set(batch),
    }


def spread(name: str, values: Tensor) -> dict[str, float]:
    """Mean, standard deviation (divisor n - 1; 0 for one value), least and greatest of `values` [B]."""
    return {
        f"{name}_mean": values.mean().item(),
        f"{name}_std": values.std().item() if values.numel() > 1 else 0.0,
        f"{name}_min": values.min().item(),
        f"{name}_max": values.max().item(),
    }


def powers_of_two(group_size: int) -> list[int]:
    """2, 4, 8 and so on, as far as a group goes."""
    return [1 << power for power in range(1, group_size.bit_length())]


def pass_at_powers_of_two(num_correct_P: Tensor, group_size: int) -> dict[str, float]:
    """Chance that at least one of k responses to a prompt is correct, k = 2, 4, 8, ..., averaged over prompts.

    The unbiased estimate of M. Chen et al. (arXiv 2107.03374, section 2.1) from `group_size` responses.

    Args:
        num_correct_P: [P] correct responses to each prompt.
        group_size: Responses to each.
    """

    def estimate(num_correct: int, k: int) -> float:
        return 1.0 - math.comb(group_size - num_correct, k) / math.comb(group_size, k)

    counts = num_correct_P.tolist()
    return {
        f"pass_at_{k}": sum(estimate(count, k) for count in counts) / len(counts) for k in powers_of_two(group_size)
    }


def by_data_set(batch: RolloutBatch) -> dict[str, float]:
    """Mean reward and accuracy of each data set; nothing where the data have one only."""
    names = [rollout.prompt.data_set for rollout in batch.rollouts]
    found: dict[str, float] = {}
    if len(set(names)) > 1:
        for name in sorted(set(names)):
            rows = torch.tensor([row for row, other in enumerate(names) if other == name])
            found[f"reward_mean/{name}"] = batch.rewards()[rows].mean().item()
            found[f"accuracy/{name}"] = batch.correct()[rows].float().mean().item()
    return found
