"""Numbers about a batch of rollouts."""

from __future__ import annotations

from nemo_offload_rl.experience.types import RolloutBatch


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """What a step reports of its rollouts.

    Returns:
        `reward` (mean; before scaling and shaping if `batch` is), `accuracy` (share of correct responses),
        `mean_response_tokens` and `max_response_tokens` (of all turns of a rollout), `mean_turns`, `truncation_rate`
        (share of rollouts cut at a token limit), `constant_group_rate` (share of groups whose rewards are all equal,
        which teach nothing) and `pass_rate` (share of prompts with at least one correct response).
    """
    lengths = batch.response_lengths().float()
    solved = batch.correct().reshape(batch.num_prompts, batch.group_size).any(dim=1)
    return {
        "reward": batch.rewards().mean().item(),
        "accuracy": batch.correct().float().mean().item(),
        "mean_response_tokens": lengths.mean().item(),
        "max_response_tokens": lengths.max().item(),
        "mean_turns": batch.num_turns().float().mean().item(),
        "truncation_rate": batch.truncated().float().mean().item(),
        "constant_group_rate": batch.constant_groups().float().mean().item(),
        "pass_rate": solved.float().mean().item(),
    }
