"""GRPO and its loss."""

from __future__ import annotations

from nemo_offload_rl.config.schema import GrpoMasterConfig
from nemo_offload_rl.policy.rules import Rule


def leave_one_out_needs_two_responses(cfg: GrpoMasterConfig) -> str | None:
    """The leave-one-out baseline needs at least two responses for each prompt."""
    group = cfg.grpo.num_generations_per_prompt
    if cfg.grpo.use_leave_one_out_baseline and group < 2:
        return (
            f"grpo.num_generations_per_prompt is {group}, but use_leave_one_out_baseline compares each response with "
            "the others of its group; set it to 2 or more, or turn the baseline off"
        )
    return None


def dynamic_sampling_needs_groups(cfg: GrpoMasterConfig) -> str | None:
    """Dynamic sampling needs at least two responses for each prompt."""
    grpo = cfg.grpo
    if grpo.use_dynamic_sampling and grpo.num_generations_per_prompt < 2:
        return (
            "grpo.use_dynamic_sampling drops groups whose rewards are all equal, which with "
            "num_generations_per_prompt 1 is every group; raise it or turn dynamic sampling off"
        )
    return None


def on_policy_ratio_needs_one_update_per_step(cfg: GrpoMasterConfig) -> str | None:
    """A forced on-policy ratio needs exactly one update for each step."""
    rollouts = cfg.grpo.num_prompts_per_step * cfg.grpo.num_generations_per_prompt
    batch = cfg.policy.train_global_batch_size
    if cfg.loss_fn.force_on_policy_ratio and batch != rollouts:
        return (
            f"loss_fn.force_on_policy_ratio is true, but policy.train_global_batch_size {batch} is not the {rollouts} "
            "responses of a step, so later updates are off-policy; make them equal or turn it off"
        )
    return None


def truncation_needs_importance_sampling(cfg: GrpoMasterConfig) -> str | None:
    """Truncation needs the importance-sampling correction."""
    loss = cfg.loss_fn
    if loss.truncated_importance_sampling_ratio is not None and not loss.use_importance_sampling_correction:
        return (
            "loss_fn.truncated_importance_sampling_ratio is set, but it bounds the weights of "
            "use_importance_sampling_correction, which is false; set that to true or the ratio to null"
        )
    return None


def sequence_ratios_need_the_sequence_loss(cfg: GrpoMasterConfig) -> str | None:
    """Sequence-level ratios go with the sequence-level loss."""
    loss = cfg.loss_fn
    if loss.sequence_level_importance_ratios and loss.token_level_loss:
        return (
            "loss_fn.sequence_level_importance_ratios and token_level_loss are both true, but one ratio for each "
            "response goes with a mean over responses; set token_level_loss to false"
        )
    return None


def overlong_buffer_is_within_the_response(cfg: GrpoMasterConfig) -> str | None:
    """The overlong buffer is shorter than the response limit."""
    shaping = cfg.grpo.reward_shaping
    if shaping.enabled and shaping.overlong_buffer_length >= shaping.max_response_length:
        return (
            f"grpo.reward_shaping.overlong_buffer_length {shaping.overlong_buffer_length} is not below "
            f"max_response_length {shaping.max_response_length}, so every response would be punished; lower it"
        )
    return None


def reward_ranges_are_ascending(cfg: GrpoMasterConfig) -> str | None:
    """The ranges of reward scaling are ascending."""
    scaling = cfg.grpo.reward_scaling
    for side in ("source", "target"):
        low = scaling.source_min if side == "source" else scaling.target_min
        high = scaling.source_max if side == "source" else scaling.target_max
        if scaling.enabled and low >= high:
            return f"grpo.reward_scaling.{side}_min {low:g} is not below {side}_max {high:g}; swap or change them"
    return None


RULES: tuple[Rule[GrpoMasterConfig], ...] = (
    leave_one_out_needs_two_responses,
    dynamic_sampling_needs_groups,
    on_policy_ratio_needs_one_update_per_step,
    truncation_needs_importance_sampling,
    sequence_ratios_need_the_sequence_loss,
    overlong_buffer_is_within_the_response,
    reward_ranges_are_ascending,
)
