"""Numbers about a batch of rollouts."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_offload_rl.experience.pass_at_k import pass_at_k, powers_of_two
from nemo_offload_rl.experience.types import RolloutBatch


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """What a step reports of its rollouts, under the names of docs/reference/metrics.md.

    Rewards are those of `batch`; a rollout's response is all that the policy sampled in all of its turns.
    """
    lengths = batch.response_lengths().float()
    prompt_lengths = batch.prompt_lengths().float()
    num_correct_P = batch.correct().reshape(batch.num_prompts, batch.group_size).sum(dim=1)
    return {
        **spread("reward", batch.rewards()),
        "accuracy": batch.correct().float().mean().item(),
        "pass_rate": (num_correct_P > 0).float().mean().item(),
        **{
            f"pass_at_{k}": pass_at_k(num_correct_P.tolist(), batch.group_size, k)
            for k in powers_of_two(batch.group_size)
        },
        "constant_group_rate": batch.constant_groups().float().mean().item(),
        "overlong_prompt_rate": 1.0 - batch.loss_multipliers().mean().item(),
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
