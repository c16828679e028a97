"""Frozen settings of the algorithms: what the YAML keys `grpo.*`, `loss_fn.*`, `sft.*` and `dpo.*` become.

Field names and meanings are those of the YAML keys, documented in `algorithms/config.py`. None has a default: YAML is
the only source.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RewardShapingSettings:
    """Soft punishment of responses that come near the length limit (DAPO, arXiv 2503.14476, equation 13)."""

    enabled: bool
    overlong_buffer_length: int  # tokens
    overlong_buffer_penalty: float
    max_response_length: int  # tokens


@dataclass(frozen=True, kw_only=True)
class RewardScalingSettings:
    """Linear map of rewards from the source range to the target range, clipped at both ends."""

    enabled: bool
    source_min: float
    source_max: float
    target_min: float
    target_max: float


@dataclass(frozen=True, kw_only=True)
class GrpoSettings:
    """The keys `grpo.*`."""

    num_prompts_per_step: int
    num_generations_per_prompt: int
    max_rollout_turns: int
    max_num_epochs: int
    max_num_steps: int
    normalize_rewards: bool
    use_leave_one_out_baseline: bool
    val_period: int
    val_at_start: bool
    val_at_end: bool
    max_val_samples: int
    val_batch_size: int
    val_num_generations_per_prompt: int
    overlong_filtering: bool
    use_dynamic_sampling: bool
    dynamic_sampling_max_gen_batches: int
    batch_multiplier: float
    reward_shaping: RewardShapingSettings
    reward_scaling: RewardScalingSettings
    max_token_mult_prob_error: float | None  # None: no limit
    log_rollouts: bool
    seed: int


@dataclass(frozen=True, kw_only=True)
class ClippedPGLossSettings:
    """The keys `loss_fn.*`."""

    reference_policy_kl_penalty: float
    reference_policy_kl_type: str  # "k1", "k2", "k3", "k1+" or "k3+"
    kl_input_clamp_value: float | None
    kl_output_clamp_value: float | None
    ratio_clip_min: float
    ratio_clip_max: float
    ratio_clip_c: float | None
    use_on_policy_kl_approximation: bool
    use_importance_sampling_correction: bool
    truncated_importance_sampling_ratio: float | None
    sequence_level_importance_ratios: bool
    token_level_loss: bool
    force_on_policy_ratio: bool


@dataclass(frozen=True, kw_only=True)
class SupervisedSettings:
    """What `sft.*` and `dpo.*` have in common."""

    max_num_epochs: int
    max_num_steps: int
    val_period: int  # steps; 0 never validates
    val_batches: int  # 0 for all
    val_global_batch_size: int  # sequences, or pairs
    val_micro_batch_size: int
    val_at_start: bool
    val_at_end: bool
    seed: int

    @property
    def validates(self) -> bool:
        """Whether there is any validation in a run."""
        return self.val_at_start or self.val_at_end or self.val_period > 0


@dataclass(frozen=True, kw_only=True)
class SftSettings(SupervisedSettings):
    """The keys `sft.*`."""

    only_unmask_final: bool


@dataclass(frozen=True, kw_only=True)
class DpoSettings(SupervisedSettings):
    """The keys `dpo.*`."""

    reference_policy_kl_penalty: float  # beta
    preference_loss_weight: float
    preference_average_log_probs: bool
    label_smoothing: float
    sft_loss_weight: float
    sft_average_log_probs: bool
    precompute_reference_logprobs: bool
