"""What happens to rewards between the environment and the advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_offload_rl.algorithms.settings import RewardScalingSettings, RewardShapingSettings


def scale_rewards(rewards: Tensor, settings: RewardScalingSettings) -> Tensor:
    """Map rewards linearly from the source range to the target range, clipping what lies outside the source range."""
    if not settings.enabled:
        return rewards
    share = (rewards - settings.source_min) / (settings.source_max - settings.source_min)
    return settings.target_min + share.clamp(0.0, 1.0) * (settings.target_max - settings.target_min)


def shape_rewards(rewards: Tensor, response_lengths: Tensor, settings: RewardShapingSettings) -> Tensor:
    """Subtract DAPO's soft length penalty (arXiv 2503.14476, equation 13).

    The penalty is 0 up to `max_response_length - overlong_buffer_length` tokens and grows linearly from there to
    `overlong_buffer_penalty` at `max_response_length`.

    Args:
        rewards: [B].
        response_lengths: [B] tokens.
        settings: The keys `grpo.reward_shaping.*`.
    """
    if not settings.enabled:
        return rewards
    free_tokens = settings.max_response_length - settings.overlong_buffer_length
    share = (response_lengths.to(torch.float32) - free_tokens) / settings.overlong_buffer_length
    return rewards - settings.overlong_buffer_penalty * share.clamp(0.0, 1.0)


def overlong_sample_mask(truncated: Tensor, *, filtering: bool) -> Tensor:
    """[B] float32: 0 for responses that were cut at the token limit when `filtering`, else 1 (DAPO, section 3.4)."""
    if not filtering:
        return torch.ones(truncated.shape[0], dtype=torch.float32)
    return 1.0 - truncated.to(torch.float32)
