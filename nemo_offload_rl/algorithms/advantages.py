"""Turns rewards into advantages: scaling, shaping, masking, baselines, normalization, clipping.

Estimators take a mask of scored rollouts. Unscored rollouts are left out of baselines, deviations and means, as if
their group were smaller, and get an advantage of 0; their rewards may be NaN.

Shape suffixes: B samples, S positions, P prompts, G group size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.grpo import GrpoSectionConfig, RewardScalingConfig, RewardShapingConfig

_STD_EPS = 1e-6
_LEAST_VARIANCE = 1e-8


def scale_rewards(rewards: Tensor, settings: RewardScalingConfig) -> Tensor:
    """Clip rewards to the source range, and map it linearly to the target range."""
    if not settings.enabled:
        return rewards
    share = (rewards - settings.source_min) / (settings.source_max - settings.source_min)
    return settings.target_min + share.clamp(0.0, 1.0) * (settings.target_max - settings.target_min)


def shape_rewards(
    rewards: Tensor, response_lengths: Tensor, truncated: Tensor, settings: RewardShapingConfig
) -> Tensor:
    """Subtract a soft length penalty: DAPO's (arXiv 2503.14476, equation 13), continued beyond the limit as in NeMo-RL.

    With `stop_properly_penalty_coef`, the rewards of truncated responses are multiplied by it instead (ProRLv2);
    negative rewards, which that would raise, do not change.

    The penalty is 0 up to `max_response_length - overlong_buffer_length` tokens and grows linearly from there:
    `overlong_buffer_penalty` at `max_response_length`, more beyond it.

    Args:
        rewards: [B].
        response_lengths: [B] tokens.
        truncated: [B] bool.
        settings: The keys `grpo.reward_shaping.*`.
    """
    if not settings.enabled:
        return rewards
    if settings.stop_properly_penalty_coef is not None:
        return torch.where(truncated, torch.minimum(rewards, rewards * settings.stop_properly_penalty_coef), rewards)
    free_tokens = settings.max_response_length - settings.overlong_buffer_length
    share = (response_lengths.to(torch.float32) - free_tokens) / settings.overlong_buffer_length
    return rewards - settings.overlong_buffer_penalty * share.clamp(min=0.0)


def overlong_sample_mask(truncated: Tensor, *, filtering: bool) -> Tensor:
    """Return a mask [B] float32, 0 for truncated responses if `filtering`, else 1 (DAPO, section 3.4)."""
    if not filtering:
        return torch.ones(truncated.shape[0], dtype=torch.float32)
    return 1.0 - truncated.to(torch.float32)


def token_advantages(
    settings: GrpoSectionConfig,
    rewards_PG: Tensor,
    mask_BS: Tensor,
    kl_BS: Tensor | None = None,
    parts_PG: Mapping[str, Tensor] | None = None,
    owners: Tensor | None = None,
    scored_PG: Tensor | None = None,
) -> Tensor:
    """Compute the advantage of each token, [R, S] float32, by `grpo.adv_estimator`, and clip it.

    Args:
        settings: The keys `grpo.*`.
        rewards_PG: [P, G] after scaling and shaping, P * G = B.
        mask_BS: [R, S], 1 for tokens that the loss counts.
        kl_BS: [R, S] KL to subtract from each token's reward (`loss_fn.use_kl_in_reward`); None for nothing.
        parts_PG: [P, G] each, parts of rewards by name; only `gdpo` reads them.
        owners: [R] the rollout of each row; None if each rollout is one row (R = B).
        scored_PG: [P, G] bool, rollouts that have a score; `mask_BS` is 0 for the others. None for all.

    Raises:
        ConfigError: `gdpo` has less than two parts, or a different number of weights.
    """
    estimator = settings.adv_estimator
    leave_one_out, normalize = settings.use_leave_one_out_baseline, settings.normalize_rewards
    if estimator.name == "reinforce_plus_plus":
        advantages_BS = batch_advantages(
            rewards_PG,
            mask_BS,
            minus_baseline=estimator.minus_baseline,
            kl_BS=kl_BS,
            owners=owners,
            scored_PG=scored_PG,
        )
        return clip_advantages(advantages_BS, settings.advantage_clip_low, settings.advantage_clip_high)
    by_group: dict[str, Any] = {"leave_one_out": leave_one_out, "normalize": normalize, "scored_PG": scored_PG}
    if estimator.name == "gdpo":
        advantages_PG = decoupled_advantages(parts_PG or {}, estimator.reward_weights, **by_group)
    else:
        advantages_PG = group_advantages(rewards_PG, **by_group)
    advantages_BS = in_rows(advantages_PG, mask_BS, owners)
    return clip_advantages(advantages_BS, settings.advantage_clip_low, settings.advantage_clip_high)


def in_rows(values_PG: Tensor, mask_RS: Tensor, owners: Tensor | None) -> Tensor:
    """Expand the value of each rollout to every position of its rows, [R, S]."""
    values = values_PG.reshape(-1)
    return (values if owners is None else values[owners])[:, None].expand_as(mask_RS)


def response_means(values_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """Return the mean over each response's counted tokens, [B] float32; exact if all are equal."""
    total_B = (values_BS.double() * mask_BS).sum(dim=1)
    return (total_B / mask_BS.sum(dim=1).clamp(min=1.0)).to(torch.float32)


def clip_advantages(advantages: Tensor, low: float | None, high: float | None) -> Tensor:
    """Clamp advantages to the bounds that are set."""
    return advantages if low is None and high is None else advantages.clamp(low, high)


def batch_advantages(
    rewards_PG: Tensor,
    mask_BS: Tensor,
    *,
    minus_baseline: bool,
    kl_BS: Tensor | None = None,
    owners: Tensor | None = None,
    scored_PG: Tensor | None = None,
) -> Tensor:
    """Normalize to mean 0 and variance 1 over the step's counted tokens (REINFORCE++, arXiv 2501.03262; as in NeMo-RL).

    Args:
        rewards_PG: [P, G], P * G = B.
        mask_BS: [B, S], 1 for tokens that the loss counts.
        minus_baseline: Subtract the mean of the group first.
        kl_BS: [B, S] KL to subtract from each token's reward; None for nothing.
        owners: See `token_advantages`, which calls the rows R.
        scored_PG: See `token_advantages`.

    Returns:
        [B, S] float32; 0 if the rewards of all counted tokens are equal.
    """
    rewards_PG = rewards_PG.double()
    if scored_PG is None:
        scored_PG = torch.ones_like(rewards_PG, dtype=torch.bool)
    # Unscored rollouts have no counted token, and their NaN would spread through the mean.
    rewards_PG = rewards_PG.masked_fill(~scored_PG, 0.0)
    values_PG = rewards_PG
    if minus_baseline:
        num_scored_P1 = scored_PG.sum(dim=1, keepdim=True).clamp(min=1)
        values_PG = rewards_PG - rewards_PG.sum(dim=1, keepdim=True) / num_scored_P1
    values_BS = in_rows(values_PG, mask_BS, owners)
    if kl_BS is not None:
        values_BS = values_BS - kl_BS.masked_fill(mask_BS == 0, 0.0)
    num_counted = mask_BS.sum().clamp(min=1.0)
    mean = (values_BS * mask_BS).sum() / num_counted
    variance = ((values_BS - mean).square() * mask_BS).sum() / num_counted
    advantages_BS = (values_BS - mean) * variance.clamp(min=_LEAST_VARIANCE).rsqrt()
    return advantages_BS.masked_fill(~in_rows(scored_PG, mask_BS, owners), 0.0).to(torch.float32)


def group_advantages(
    rewards_PG: Tensor, *, leave_one_out: bool, normalize: bool, scored_PG: Tensor | None = None
) -> Tensor:
    """Subtract the group's baseline from each reward, and optionally divide by a standard deviation.

    With `leave_one_out` the baseline of a response is the mean reward of the others in its group (RLOO, arXiv
    2402.14740), otherwise the mean of the whole group (GRPO, arXiv 2402.03300). The deviation (divisor n - 1) is of the
    same rewards. As in NeMo-RL, a deviation of 0 does not divide, so the only right response of a group keeps its
    advantage. A group of equal rewards gives 0.

    Args:
        rewards_PG: [P, G] float rewards.
        leave_one_out: Leave each response out of its own baseline.
        normalize: Divide by the standard deviation.
        scored_PG: See `token_advantages`. A group with one score gives 0.

    Returns:
        [P, G] float32.
    """
    rewards_PG = rewards_PG.to(torch.float32)
    if scored_PG is not None and not scored_PG.all():
        advantages_PG = torch.zeros_like(rewards_PG)
        for group, scored_G in enumerate(scored_PG):
            if scored_G.any():
                smaller_1G = rewards_PG[None, group, scored_G]
                found_1G = group_advantages(smaller_1G, leave_one_out=leave_one_out, normalize=normalize)
                advantages_PG[group, scored_G] = found_1G[0]
        return advantages_PG
    baseline_PG = leave_one_out_baseline(rewards_PG) if leave_one_out else group_mean_baseline(rewards_PG)
    # Equal rewards can differ from their mean by a rounding error, which the division would scale up to about 1.
    constant_P1 = rewards_PG.amax(dim=1, keepdim=True) == rewards_PG.amin(dim=1, keepdim=True)
    advantages_PG = (rewards_PG - baseline_PG).masked_fill(constant_P1, 0.0)
    if not normalize:
        return advantages_PG
    std_PG = leave_one_out_std(rewards_PG) if leave_one_out else group_std(rewards_PG)[:, None].expand_as(rewards_PG)
    return torch.where(std_PG > 0, advantages_PG / (std_PG + _STD_EPS), advantages_PG)


def decoupled_advantages(
    parts_PG: Mapping[str, Tensor],
    weights: Sequence[float] | None,
    *,
    leave_one_out: bool,
    normalize: bool,
    scored_PG: Tensor | None = None,
) -> Tensor:
    """Normalize the weighted sum of each part's `group_advantages` over all rollouts (GDPO, arXiv 2601.05242).

    As in NeMo-RL, the sum is shifted to mean 0, and divided by its sample standard deviation unless that is 0.

    Args:
        parts_PG: [P, G] each, by name; NaN leaves a rollout out of a part.
        weights: Weights in the alphabetical order of the names; None for 1 each.
        leave_one_out: See `group_advantages`.
        normalize: See `group_advantages`.
        scored_PG: See `token_advantages`.

    Returns:
        [P, G] float32.

    Raises:
        ConfigError: There are less than two parts, or a different number of weights.
    """
    names = sorted(parts_PG)
    if len(names) < 2:
        raise ConfigError(
            f"grpo.adv_estimator.name is gdpo, which compares parts of rewards, but rewards have "
            f"{f'the part {names[0]} only' if names else 'no parts'}; give env.NAME.target a list of functions or "
            "return Scores with parts, or set name to grpo"
        )
    if weights is not None and len(weights) != len(names):
        raise ConfigError(
            f"grpo.adv_estimator.reward_weights has {len(weights)} numbers, but rewards have the parts "
            f"{', '.join(names)}; write one for each, in this order"
        )
    if scored_PG is None:
        scored_PG = torch.ones_like(parts_PG[names[0]], dtype=torch.bool)
    total_PG = torch.zeros(())
    for name, weight in zip(names, weights or [1.0] * len(names), strict=True):
        part_PG = parts_PG[name]
        total_PG = total_PG + weight * group_advantages(
            part_PG, leave_one_out=leave_one_out, normalize=normalize, scored_PG=scored_PG & ~part_PG.isnan()
        )
    counted = total_PG[scored_PG]
    centred_PG = (total_PG - counted.mean()).masked_fill(~scored_PG, 0.0)
    std = counted.std() if counted.numel() > 1 else torch.zeros(())
    return centred_PG / std if std > 0 else centred_PG


def group_mean_baseline(rewards_PG: Tensor) -> Tensor:
    """Return the mean of each group, [P, G]."""
    return rewards_PG.mean(dim=1, keepdim=True).expand_as(rewards_PG)


def leave_one_out_baseline(rewards_PG: Tensor) -> Tensor:
    """Return the mean of the others in the group, [P, G]; in a group of one, its own reward."""
    group_size = rewards_PG.shape[1]
    if group_size == 1:
        return rewards_PG.clone()
    return (rewards_PG.sum(dim=1, keepdim=True) - rewards_PG) / (group_size - 1)


def group_std(rewards_PG: Tensor) -> Tensor:
    """Return the sample standard deviation of each group, [P]; 0 for a group of one."""
    if rewards_PG.shape[1] == 1:
        return torch.zeros(rewards_PG.shape[0], dtype=torch.float32)
    return rewards_PG.to(torch.float32).std(dim=1)


def leave_one_out_std(rewards_PG: Tensor) -> Tensor:
    """Return the sample standard deviation of the others in the group, [P, G]; 0 if fewer than two, or all equal."""
    group_size = rewards_PG.shape[1]
    if group_size <= 2:
        return torch.zeros_like(rewards_PG, dtype=torch.float32)
    others = torch.tensor([[other for other in range(group_size) if other != one] for one in range(group_size)])
    others_PGO = rewards_PG.double()[:, others]
    # Equal rewards can differ from their mean by a rounding error.
    equal_PG = others_PGO.amax(dim=2) == others_PGO.amin(dim=2)
    return others_PGO.std(dim=2).masked_fill(equal_PG, 0.0).to(torch.float32)
