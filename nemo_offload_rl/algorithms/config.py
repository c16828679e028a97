"""The YAML keys `grpo.*`, `distillation.*` and `loss_fn.*`; those of `sft` and `dpo` are in `supervised_config.py`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

from nemo_offload_rl.algorithms.async_grpo_config import AsyncGrpoConfig
from nemo_offload_rl.schema import doc, section


@section
class RewardShapingConfig:
    """`grpo.reward_shaping`: a soft length penalty (DAPO, arXiv 2503.14476, equation 13), or one for cut responses."""

    enabled: Annotated[bool, doc("Lower the reward of responses that come near the length limit, or were cut.")]
    overlong_buffer_length: Annotated[
        int, doc("Tokens before `max_response_length` over which the penalty grows from 0 to its full value.", ge=1)
    ]
    overlong_buffer_penalty: Annotated[float, doc("Penalty of a response as long as `max_response_length`.", ge=0)]
    max_response_length: Annotated[int, doc("Length limit that the penalty refers to, in tokens.", ge=1)]
    stop_properly_penalty_coef: Annotated[
        float | None,
        doc(
            "Multiply the reward of responses that were cut at a token limit by this instead (ProRLv2): 0 takes it "
            "away, 1 leaves it; the other keys are not read then. null or absent: the soft length penalty.",
            ge=0,
            le=1,
        ),
    ] = None


@section
class RewardScalingConfig:
    """`grpo.reward_scaling`: a linear map of rewards, clipped at both ends."""

    enabled: Annotated[bool, doc("Map rewards from the source range to the target range.")]
    source_min: Annotated[float, doc("Reward that becomes `target_min`; lower ones are clipped.")]
    source_max: Annotated[float, doc("Reward that becomes `target_max`; higher ones are clipped.")]
    target_min: Annotated[float, doc("Lower end of the mapped reward.")]
    target_max: Annotated[float, doc("Upper end of the mapped reward.")]


@section
class AdvEstimatorConfig:
    """`grpo.adv_estimator`: how rewards become advantages."""

    name: Annotated[
        Literal["grpo", "gdpo", "reinforce_plus_plus"],
        doc(
            "`grpo` compares within each group, as `grpo.normalize_rewards` and `use_leave_one_out_baseline` say; "
            "`gdpo` (arXiv 2601.05242) does so for each part of a reward by itself, as for each of several functions, "
            "and normalizes their weighted sum over the step; `reinforce_plus_plus` (arXiv 2501.03262) normalizes over "
            "all tokens of the step and reads neither."
        ),
    ]
    minus_baseline: Annotated[
        bool,
        doc("For `reinforce_plus_plus`: subtract the mean reward of the group first; not read by others."),
    ]
    reward_weights: Annotated[
        tuple[float, ...] | None,
        doc(
            "For `gdpo`: factors of the parts' advantages, in the alphabetical order of the parts' names, as in "
            "NeMo-RL; null or absent: 1 each. The factors of `env.NAME.weights` make the reward that is reported."
        ),
    ] = None
    target: Annotated[
        str | None,
        doc(
            "A function of your own instead (docs/guides/your-own-reward.md): `package.module.name` or "
            "`path/to/file.py:name`; null or absent: `name` says how."
        ),
    ] = None
    kwargs: Annotated[dict[str, Any] | None, doc("Its further arguments; null or absent: none.")] = None


@section
class RolloutFilterConfig:
    """`grpo.rollout_filter`: a function of your own that leaves rollouts out of the loss."""

    target: Annotated[
        str | None,
        doc(
            "`package.module.name` or `path/to/file.py:name`: from the rollouts of a group to a list that says whether "
            "each is trained on; null trains on all. Their rewards count for advantages and metrics in any case."
        ),
    ]
    kwargs: Annotated[dict[str, Any] | None, doc("Its further arguments; null or absent: none.")] = None


@section
class RolloutStopConfig:
    """`grpo.rollout_stop`: a function of your own that ends rollouts of several turns early."""

    target: Annotated[
        str | None,
        doc(
            "`package.module.name` or `path/to/file.py:name`: from a `Response` and the environment's `Observation` to "
            "True, which ends the rollout with `Observation.otherwise`, a `Score`, which ends it with that, or False. "
            "null ends none. Asked after each turn that another could follow, in validations too; agents end their own."
        ),
    ]
    kwargs: Annotated[dict[str, Any] | None, doc("Its further arguments; null or absent: none.")] = None


@section
class OwnLossConfig:
    """`loss_fn` of SFT and DPO: a function of your own."""

    target: Annotated[
        str | None,
        doc(
            "A function `(logprobs, batch, norm)` in the place of the algorithm's loss "
            "(docs/guides/your-own-reward.md): `package.module.name` or `path/to/file.py:name`; null: none."
        ),
    ]
    kwargs: Annotated[dict[str, Any] | None, doc("Its further arguments; null or absent: none.")] = None


class OwnCodeConfig(Protocol):
    """A section that names code of a user's."""

    @property
    def target(self) -> str | None:
        """The name; None for none."""
        ...

    @property
    def kwargs(self) -> dict[str, Any] | None:
        """Further arguments."""
        ...


@section
class RolloutSectionConfig:
    """What algorithms with rollouts have in common: prompts, responses, steps and validation."""

    num_prompts_per_step: Annotated[int, doc("Prompts in one step.", ge=1)]
    num_generations_per_prompt: Annotated[int, doc("Responses sampled for each prompt: the group size.", ge=1)]
    max_rollout_turns: Annotated[
        int, doc("Maximum number of the policy's turns in a rollout; the environment may reply between them.", ge=1)
    ]
    max_num_epochs: Annotated[
        int,
        doc(
            "Stop after this number of passes over the training prompts, those that dynamic sampling draws included.",
            ge=1,
        ),
    ]
    max_num_steps: Annotated[int, doc("Stop after this number of steps, if the epochs do not end first.", ge=1)]
    val_period: Annotated[int, doc("Steps from one validation to the next; 0 disables validation.", ge=0)]
    val_at_start: Annotated[bool, doc("Validate before the first step.")]
    val_at_end: Annotated[bool, doc("Validate after the last step.")]
    max_val_samples: Annotated[int, doc("Maximum number of prompts in a validation.", ge=1)]
    val_batch_size: Annotated[int, doc("Validation prompts that the engine gets at once.", ge=1)]
    val_num_generations_per_prompt: Annotated[
        int, doc("Responses to each validation prompt; accuracy is their mean.", ge=1)
    ]
    max_token_mult_prob_error: Annotated[
        float | None,
        doc(
            "Limit of `train/token_mult_prob_error`, which measures how far engine and policy disagree about "
            "the probabilities of sampled tokens (1 is agreement): a step above it ends the run. null for no "
            "limit.",
            gt=1,
        ),
    ]
    log_rollouts: Annotated[
        bool,
        doc(
            "Write every training rollout, with tokens and logprobs, to `logger.log_dir`/rollouts, one file a "
            "step: about 60 bytes a token."
        ),
    ]
    seed: Annotated[int, doc("Seed of data order, sampling and initial state.", ge=0)]

    @property
    def prompts_per_generation_batch(self) -> int:
        """Prompts that are drawn and answered at once."""
        return self.num_prompts_per_step


@section
class GrpoSectionConfig(RolloutSectionConfig):
    """`grpo`: the loop of group relative policy optimization (arXiv 2402.03300)."""

    normalize_rewards: Annotated[
        bool, doc("Divide advantages by the standard deviation of the rewards that the baseline averages.")
    ]
    use_leave_one_out_baseline: Annotated[
        bool, doc("The baseline of a response is the mean reward of the others in its group, not of all.")
    ]
    overlong_filtering: Annotated[
        bool, doc("Leave responses that were cut at the token limit out of the loss (DAPO); their rewards still count.")
    ]
    use_dynamic_sampling: Annotated[
        bool, doc("Drop groups whose rewards are all equal and sample further prompts until the step is full (DAPO).")
    ]
    dynamic_sampling_max_gen_batches: Annotated[
        int, doc("Generation batches that dynamic sampling may spend on one step before it is an error.", ge=1)
    ]
    batch_multiplier: Annotated[
        float,
        doc(
            "Prompts of each generation batch of dynamic sampling, as a multiple of `num_prompts_per_step`, rounded "
            "down: more than one step needs, because some groups will be dropped. 1 without dynamic sampling.",
            ge=1,
        ),
    ]
    reward_shaping: Annotated[RewardShapingConfig, doc("Soft length penalty.")]
    reward_scaling: Annotated[RewardScalingConfig, doc("Linear map of rewards, before shaping.")]
    adv_estimator: Annotated[AdvEstimatorConfig, doc("From rewards to advantages.")]
    rollout_filter: Annotated[RolloutFilterConfig, doc("Which rollouts are trained on; absent: all.")] | None = None
    async_grpo: Annotated[AsyncGrpoConfig, doc("Rollouts beside training; absent: none.")] | None = None
    rollout_stop: Annotated[RolloutStopConfig, doc("When rollouts end early; absent: never.")] | None = None
    advantage_clip_low: Annotated[float | None, doc("Advantages below this become this; null for no bound.")]
    advantage_clip_high: Annotated[float | None, doc("Advantages above this become this; null for no bound.")]
    seq_logprob_error_threshold: Annotated[
        float | None,
        doc(
            "Responses whose mean `token_mult_prob_error` is above this are left out of the loss: engine and policy "
            "disagree about them (1 is agreement). null keeps all.",
            gt=1,
        ),
    ]

    @property
    def is_async(self) -> bool:
        """Whether rollouts are collected beside training."""
        return self.async_grpo is not None and self.async_grpo.enabled

    @property
    def prompts_per_generation_batch(self) -> int:
        """Prompts that are drawn and answered at once."""
        return int(self.num_prompts_per_step * self.batch_multiplier)


@section
class ClippedPGLossConfig:
    """`loss_fn`: the clipped policy-gradient loss with a KL term (PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300)."""

    reference_policy_kl_penalty: Annotated[
        float, doc("Weight of the KL term to the reference policy; 0 skips the reference logprobs.", ge=0)
    ]
    reference_policy_kl_type: Annotated[
        Literal["k1", "k2", "k3", "k1+", "k3+", "k1w", "k2w", "k3w"],
        doc(
            "Estimator of the KL. k1+ and k3+ have the value of k1 and k3 and the gradient of the KL, as k2 has; "
            "k1 has none in expectation, k3 another one; k1w, k2w and k3w are NeMo-RL's k1, k2 and k3 "
            "(docs/reference/metrics.md, estimators of the KL)."
        ),
    ]
    kl_input_clamp_value: Annotated[
        float | None,
        doc(
            "Clamp on the logprob difference before the estimator; null for 20, the bound of every log-ratio.",
            gt=0,
            le=20,
        ),
    ]
    kl_output_clamp_value: Annotated[
        float | None,
        doc("Clamp on the estimate per token; null for none. k1+ and k3+ keep their gradient beyond it.", gt=0),
    ]
    use_kl_in_reward: Annotated[
        bool,
        doc(
            "Subtract the weighted KL of each token from its reward, without a gradient of its own, instead of adding "
            "it to the loss. Requires `grpo.adv_estimator.name` reinforce_plus_plus."
        ),
    ]
    ratio_clip_min: Annotated[float, doc("The probability ratio is clipped from below at 1 minus this.", ge=0, le=1)]
    ratio_clip_max: Annotated[float, doc("The probability ratio is clipped from above at 1 plus this.", ge=0)]
    ratio_clip_c: Annotated[
        float | None, doc("Dual-clip bound for negative advantages (arXiv 1912.09729), above 1; null for none.", gt=1)
    ]
    use_on_policy_kl_approximation: Annotated[
        bool,
        doc(
            "Weight the KL estimate by the current over the sampling probability, so that it is on-policy; k1 and k3 "
            "then have the gradient of the KL too."
        ),
    ]
    use_importance_sampling_correction: Annotated[
        bool,
        doc(
            "Weight tokens by the policy's probability over the engine's, because the two compute slightly "
            "different numbers."
        ),
    ]
    truncated_importance_sampling_type: Annotated[
        Literal["tis", "icepop", "seq-mask-tis"] | None,
        doc(
            "What happens to weights out of bounds. tis, which null stands for too, clamps them to the bounds; icepop "
            "makes them 0; seq-mask-tis leaves out responses whose geometric mean weight is out of bounds, and "
            "applies all others as they are."
        ),
    ]
    truncated_importance_sampling_ratio: Annotated[
        float | None, doc("Upper bound of that weight; null for none.", gt=0)
    ]
    truncated_importance_sampling_ratio_min: Annotated[
        float | None, doc("Lower bound of that weight; null for none. icepop and seq-mask-tis need one.", ge=0)
    ]
    sequence_level_importance_ratios: Annotated[
        bool, doc("One ratio for each response, from the mean logprob difference (GSPO, arXiv 2507.18071).")
    ]
    token_level_loss: Annotated[
        bool, doc("Average over all tokens of the global batch; false averages within each response first.")
    ]
    constant_length_divisor: Annotated[
        int | None,
        doc(
            "Divide the sum over a response's tokens by this number, the same for all, instead of by its length, "
            "before the mean over responses (Dr. GRPO, arXiv 2503.20783); null divides by lengths. Requires "
            "`token_level_loss` false.",
            ge=1,
        ),
    ]
    use_cispo: Annotated[
        bool,
        doc(
            "The clipped ratio is a weight without a gradient, on the logprob of each token (CISPO, arXiv 2506.13585): "
            "clipped tokens have a gradient too."
        ),
    ]
    positive_example_nll_weight: Annotated[
        float,
        doc(
            "Weight of minus the logprob of tokens of responses whose reward, scaled and shaped, is above 0, a mean "
            "over those tokens of the global batch, added to the loss (VAPO, arXiv 2504.05118). Left out: "
            "0. NeMo-RL reads it in PPO only.",
            ge=0,
        ),
    ] = 0.0
    disable_ppo_ratio: Annotated[
        bool, doc("No ratio and no clip: the loss is minus advantage times logprob (REINFORCE, RLOO).")
    ]
    force_on_policy_ratio: Annotated[
        bool,
        doc(
            "The ratio is exactly 1 in value: the logprobs of the training pass replace those before the "
            "step, which need no pass then. Requires one update for each step."
        ),
    ]
    target: Annotated[
        str | None,
        doc(
            "A function of your own instead of this loss (docs/guides/your-own-reward.md): `package.module.name` or "
            "`path/to/file.py:name`; null or absent: none. Of the other keys those still say which logprobs it is "
            "given: `reference_policy_kl_penalty` (not 0) and `force_on_policy_ratio`."
        ),
    ] = None
    kwargs: Annotated[dict[str, Any] | None, doc("Its further arguments; null or absent: none.")] = None


def needs_prev_logprobs(grpo: GrpoSectionConfig, loss: ClippedPGLossConfig) -> bool:
    """Whether a step has a pass for the logprobs of the policy before its updates."""
    kl_in_reward = loss.use_kl_in_reward and loss.reference_policy_kl_penalty != 0
    return not loss.force_on_policy_ratio or kl_in_reward or grpo.seq_logprob_error_threshold is not None


@section
class DistillationSectionConfig(RolloutSectionConfig):
    """`distillation`: the loop of on-policy distillation (arXiv 2306.13649)."""

    topk_logits_k: Annotated[
        int | None,
        doc(
            "Tokens of the teacher's distribution that the student is compared with, the likeliest: 8 bytes each for "
            "every sampled token. null compares whole distributions: the teacher's last hidden states travel instead, "
            "and its output layer is on the device in training.",
            ge=1,
        ),
    ]


@section
class DistillationLossConfig:
    """`loss_fn`: the divergence between student and teacher, a mean over the sampled tokens."""

    kl_type: Annotated[
        Literal["forward", "reverse", "mixed"],
        doc("forward is KL(teacher || student), reverse KL(student || teacher), mixed a weighted sum of both."),
    ]
    mixed_kl_weight: Annotated[
        float, doc("Weight of the forward KL in `mixed`; the reverse KL has the rest.", ge=0, le=1)
    ]
    zero_outside_topk: Annotated[
        bool,
        doc(
            "The teacher's probability is taken to be 0 (its logprob -100) outside of its top-k, and the student keeps "
            "its own over the whole vocabulary; false renormalizes both over the top-k."
        ),
    ]
