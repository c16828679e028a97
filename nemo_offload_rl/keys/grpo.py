"""The YAML keys `grpo.*`, `distillation.*` and `loss_fn.*`; those of `sft` and `dpo` are in `supervised.py`."""

from typing import Annotated, Any, Literal, Protocol

from nemo_offload_rl.keys.section import doc, section, value_of


@section
class RewardShapingConfig:
    """`grpo.reward_shaping`: a penalty for long (DAPO, arXiv 2503.14476, equation 13) or truncated responses."""

    enabled: Annotated[
        bool, doc("Lower the reward of responses that come close to the length limit, or were truncated.")
    ] = False
    overlong_buffer_length: Annotated[
        int, doc("The penalty grows from 0 to its full value over this many tokens before the limit.", ge=1)
    ] = 128
    overlong_buffer_penalty: Annotated[float, doc("Penalty of a response as long as `max_response_length`.", ge=0)] = 1
    max_response_length: Annotated[int, doc("Length limit for the penalty, in tokens.", ge=1)] = value_of(
        "${policy.generation.max_new_tokens}"
    )
    stop_properly_penalty_coef: Annotated[
        float | None,
        doc(
            "If set, multiply the reward of truncated responses by this instead (ProRLv2), and ignore the other keys: "
            "0 removes the reward, 1 keeps it. Negative rewards stay as they are, since a factor below 1 would raise "
            "them (NeMo-RL multiplies them too). null: the penalty for length.",
            ge=0,
            le=1,
        ),
    ] = None


@section
class RewardScalingConfig:
    """`grpo.reward_scaling`: a linear map of rewards, clipped at both ends."""

    enabled: Annotated[bool, doc("Map rewards from the source range to the target range.")] = False
    source_min: Annotated[float, doc("Reward mapped to `target_min`; lower rewards are clipped.")] = 0.0
    source_max: Annotated[float, doc("Reward mapped to `target_max`; higher rewards are clipped.")] = 1.0
    target_min: Annotated[float, doc("Lower end of the mapped reward.")] = 0.0
    target_max: Annotated[float, doc("Upper end of the mapped reward.")] = 1.0


@section
class AdvEstimatorConfig:
    """`grpo.adv_estimator`: how rewards become advantages."""

    name: Annotated[
        Literal["grpo", "gdpo", "reinforce_plus_plus"],
        doc(
            "`grpo` compares rewards within each group, as `grpo.normalize_rewards` and `use_leave_one_out_baseline` "
            "say. `gdpo` (arXiv 2601.05242) does so for each part of a reward by itself, such as each of several "
            "reward functions, and normalizes the weighted sum over the step. `reinforce_plus_plus` (arXiv 2501.03262) "
            "normalizes over all tokens of the step and ignores both keys."
        ),
    ] = "grpo"
    minus_baseline: Annotated[
        bool,
        doc("For `reinforce_plus_plus`: subtract the group's mean reward first; ignored by the others."),
    ] = True
    reward_weights: Annotated[
        tuple[float, ...] | None,
        doc(
            "For `gdpo`: weights of the parts' advantages, in alphabetical order of the parts' names, as in NeMo-RL; "
            "null: 1 each. The reported reward uses `env.NAME.weights`."
        ),
    ] = None
    target: Annotated[
        str | None,
        doc(
            "Your own function instead of `name` (docs/guides/your-own-reward.md), as `package.module.name` or "
            "`path/to/file.py:name`; null: none."
        ),
    ] = None
    kwargs: Annotated[dict[str, Any] | None, doc("Its further arguments; null for none.")] = None


@section
class RolloutFilterConfig:
    """`grpo.rollout_filter`: a function of your own that leaves rollouts out of the loss."""

    target: Annotated[
        str | None,
        doc(
            "Function, as `package.module.name` or `path/to/file.py:name`, that takes the rollouts of a group and "
            "returns for each whether to train on it. Rewards of all rollouts count in advantages and metrics. null "
            "trains on all."
        ),
    ] = None
    kwargs: Annotated[dict[str, Any] | None, doc("Its further arguments; null for none.")] = None


@section
class RolloutStopConfig:
    """`grpo.rollout_stop`: a function of your own that ends rollouts of several turns early."""

    target: Annotated[
        str | None,
        doc(
            "Function, as `package.module.name` or `path/to/file.py:name`, that takes a `Response` and the "
            "environment's `Observation`. True ends the rollout with `Observation.otherwise`, a `Score` ends it with "
            "that score, False continues. It is called after each turn that another one could follow, also in "
            "validation, but not for agents, which end their own rollouts. null ends none."
        ),
    ] = None
    kwargs: Annotated[dict[str, Any] | None, doc("Its further arguments; null for none.")] = None


@section
class OwnLossConfig:
    """`loss_fn` of SFT and DPO: a function of your own."""

    target: Annotated[
        str | None,
        doc(
            "Function `(logprobs, batch, norm)` that replaces the algorithm's loss "
            "(docs/guides/your-own-reward.md), as `package.module.name` or `path/to/file.py:name`; null: none."
        ),
    ] = None
    kwargs: Annotated[dict[str, Any] | None, doc("Its further arguments; null for none.")] = None


class OwnCodeConfig(Protocol):
    """A section that names the user's code."""

    @property
    def target(self) -> str | None:
        """The name; None for none."""
        ...

    @property
    def kwargs(self) -> dict[str, Any] | None:
        """Further arguments."""
        ...


@section
class AsyncGrpoConfig:
    """`grpo.async_grpo`: generating rollouts while the policy trains."""

    enabled: Annotated[
        bool,
        doc(
            "Generate the rollouts of later steps while the current step trains (docs/guides/async-grpo.md); with "
            "engines on the policy's devices, before and after that. Requires `vllm_cfg.async_engine` and "
            "`loss_fn.use_importance_sampling_correction`."
        ),
    ] = False
    max_trajectory_age_steps: Annotated[
        int,
        doc(
            "Maximum number of steps between the weights with which a rollout begins and the step that trains on it; "
            "at most this many steps are collected ahead. With 0, generation and training take turns.",
            ge=0,
        ),
    ] = 1
    order: Annotated[
        Literal["data", "finished"],
        doc(
            "Which rollouts a step trains on: data: those of the next prompts in the order of the data. finished: the "
            "oldest groups that have finished, and those that would be too old for later steps, which are waited for. "
            "finished keeps engines busy while long responses are in progress. It requires "
            "`in_flight_weight_updates`, and engines on the policy's devices require it."
        ),
    ] = "data"
    in_flight_weight_updates: Annotated[
        bool,
        doc(
            "Update the engines' weights in the middle of responses, which continue with the new weights. With false, "
            "each update waits until no rollout is in progress."
        ),
    ] = False
    recompute_kv_cache_after_weight_updates: Annotated[
        bool,
        doc(
            "Recompute the KV cache of responses that continue with new weights; with false they keep the cache of the "
            "old weights. No effect without `in_flight_weight_updates`."
        ),
    ] = False
    paused_kv: Annotated[
        Literal["recompute", "host", "auto"],
        doc(
            "KV cache of unfinished responses while their engines sleep and the policy trains on the same devices: "
            "recompute: dropped, and computed again with the new weights. host: copied to the host and back, so that "
            "they continue with the cache of the old weights. auto: host if the estimator expects the copies to take "
            "less time than recomputing, else recompute. All but recompute require engines that sleep."
        ),
    ] = "recompute"
    paused_kv_host_gib: Annotated[
        float,
        doc(
            "Most page-locked GiB of host memory per GPU for `paused_kv`; what is beyond it is recomputed, the newest "
            "responses first.",
            gt=0,
        ),
    ] = 8.0


@section
class RolloutSectionConfig:
    """Keys of all algorithms with rollouts: prompts, responses, steps and validation."""

    num_prompts_per_step: Annotated[int, doc("Prompts per step.", ge=1)]
    num_generations_per_prompt: Annotated[int, doc("Responses sampled per prompt: the group size.", ge=1)]
    max_rollout_turns: Annotated[
        int, doc("Maximum number of policy turns in a rollout; the environment may reply between them.", ge=1)
    ] = 1
    max_num_epochs: Annotated[
        int,
        doc(
            "Maximum number of passes over the training prompts. Prompts that dynamic sampling draws count too.",
            ge=1,
        ),
    ]
    max_num_steps: Annotated[int, doc("Maximum number of steps; the epochs may end the run earlier.", ge=1)]
    val_period: Annotated[int, doc("Steps between validations; 0: only `val_at_start` and `val_at_end` count.", ge=0)]
    val_at_start: Annotated[bool, doc("Validate before the first step.")] = False
    val_at_end: Annotated[bool, doc("Validate after the last step.")] = False
    max_val_samples: Annotated[int, doc("Maximum number of prompts per validation.", ge=1)]
    val_batch_size: Annotated[int, doc("Validation prompts sent to the engine at once.", ge=1)]
    val_num_generations_per_prompt: Annotated[
        int, doc("Responses per validation prompt; accuracy is their mean.", ge=1)
    ] = 1
    max_token_mult_prob_error: Annotated[
        float | None,
        doc(
            "A step in which `train/token_mult_prob_error` is above this ends the run, since engine and policy give "
            "sampled tokens different probabilities (1 is agreement). null for no limit.",
            gt=1,
        ),
    ] = 1.5
    log_rollouts: Annotated[
        bool,
        doc(
            "Write every training rollout, with tokens and logprobs, to `logger.log_dir`/rollouts, one file per "
            "step: about 60 bytes per token."
        ),
    ] = False
    seed: Annotated[int, doc("Seed for data order, sampling and initialization.", ge=0)] = 42

    @property
    def kept_kv_gib(self) -> float:
        """Most GiB per GPU of unfinished responses' KV blocks that the host keeps; 0 for none."""
        return 0.0

    @property
    def validates(self) -> bool:
        """Whether the run validates at all."""
        return self.val_at_start or self.val_at_end or self.val_period > 0

    @property
    def prompts_per_generation_batch(self) -> int:
        """Number of prompts that are drawn and answered at once."""
        return self.num_prompts_per_step


@section
class GrpoSectionConfig(RolloutSectionConfig):
    """`grpo`: the loop of group relative policy optimization (arXiv 2402.03300)."""

    normalize_rewards: Annotated[
        bool, doc("Divide advantages by the standard deviation of the rewards whose mean is the baseline.")
    ] = True
    use_leave_one_out_baseline: Annotated[
        bool,
        doc(
            "The baseline of a response is the mean reward of the other responses of its group; with false, the mean "
            "of the whole group."
        ),
    ] = True
    overlong_filtering: Annotated[
        bool, doc("Exclude responses truncated at the token limit from the loss (DAPO); their rewards still count.")
    ] = False
    use_dynamic_sampling: Annotated[
        bool, doc("Drop groups whose rewards are all equal, and sample more prompts until the step is full (DAPO).")
    ] = False
    dynamic_sampling_drops: Annotated[
        Literal["groups", "responses"],
        doc(
            "`groups`: dynamic sampling drops whole groups only. `responses`: it also drops a response if the rewards "
            "of the others of its group are all equal, such as the only right one. The step is then filled with "
            "responses to further prompts, and baselines are those of the kept part of a group. NeMo-RL does so with "
            "`use_leave_one_out_baseline`."
        ),
    ] = "groups"
    dynamic_sampling_max_gen_batches: Annotated[
        int,
        doc(
            "Maximum number of generation batches that dynamic sampling may use for one step. A step that is not full "
            "then ends the run.",
            ge=1,
        ),
    ] = 10
    batch_multiplier: Annotated[
        float,
        doc(
            "Size of dynamic sampling's generation batches, as a multiple of `num_prompts_per_step`, rounded down. "
            "More than 1 makes up for groups that will be dropped. Must be 1 without dynamic sampling.",
            ge=1,
        ),
    ] = 1
    reward_shaping: Annotated[RewardShapingConfig, doc("Penalty for long or truncated responses.")]
    reward_scaling: Annotated[RewardScalingConfig, doc("Linear map of rewards, before shaping.")]
    adv_estimator: Annotated[AdvEstimatorConfig, doc("How advantages are computed from rewards.")]
    rollout_filter: Annotated[RolloutFilterConfig, doc("Which rollouts to train on; if omitted, all.")] | None = None
    async_grpo: Annotated[AsyncGrpoConfig, doc("Generate rollouts during training; if omitted, off.")] | None = None
    rollout_stop: Annotated[RolloutStopConfig, doc("When to end rollouts early; if omitted, never.")] | None = None
    advantage_clip_low: Annotated[float | None, doc("Lower bound that advantages are clipped to; null for none.")] = (
        None
    )
    advantage_clip_high: Annotated[float | None, doc("Upper bound that advantages are clipped to; null for none.")] = (
        None
    )
    seq_logprob_error_threshold: Annotated[
        float | None,
        doc(
            "Exclude responses from the loss whose mean `token_mult_prob_error` is above this, since engine and policy "
            "give them different probabilities (1 is agreement). null keeps all.",
            gt=1,
        ),
    ] = None

    @property
    def is_async(self) -> bool:
        """Whether rollouts are generated during training."""
        return self.async_grpo is not None and self.async_grpo.enabled

    @property
    def kept_kv_gib(self) -> float:
        """See the base class."""
        ahead = self.async_grpo
        if ahead is None or not ahead.enabled or ahead.paused_kv == "recompute":
            return 0.0
        return ahead.paused_kv_host_gib

    @property
    def prompts_per_generation_batch(self) -> int:
        """Number of prompts that are drawn and answered at once."""
        return int(self.num_prompts_per_step * self.batch_multiplier)


@section
class ClippedPGLossConfig:
    """`loss_fn`: the clipped policy-gradient loss with a KL term (PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300)."""

    reference_policy_kl_penalty: Annotated[
        float, doc("Weight of the KL term to the reference policy; 0 skips the reference logprobs.", ge=0)
    ] = 0.01
    reference_policy_kl_type: Annotated[
        Literal["k1", "k2", "k3", "k1+", "k3+", "k1w", "k2w", "k3w"],
        doc(
            "Estimator of the KL. k1+, k2 and k3+ have the gradient of the KL; k1+ and k3+ have the values of k1 and "
            "k3. The gradient of k1 is 0 in expectation, and that of k3 is not the KL's. k1w, k2w and k3w are "
            "NeMo-RL's k1, k2 and k3 (docs/reference/metrics.md, estimators of the KL)."
        ),
    ] = "k3+"
    kl_input_clamp_value: Annotated[
        float | None,
        doc(
            "Clamp the logprob difference to plus and minus this before estimating; null for 20, the limit of every "
            "log-ratio.",
            gt=0,
            le=20,
        ),
    ] = 20.0
    kl_output_clamp_value: Annotated[
        float | None,
        doc("Clamp the estimate of each token to this; null for no limit. k1+ and k3+ keep their gradient.", gt=0),
    ] = 10.0
    use_kl_in_reward: Annotated[
        bool,
        doc(
            "Subtract each token's weighted KL from its reward, without a gradient, instead of adding it to the "
            "loss. Requires `grpo.adv_estimator.name` reinforce_plus_plus."
        ),
    ] = False
    ratio_clip_min: Annotated[float, doc("Clip the probability ratio from below at 1 minus this.", ge=0, le=1)] = 0.2
    ratio_clip_max: Annotated[float, doc("Clip the probability ratio from above at 1 plus this.", ge=0)] = 0.2
    ratio_clip_c: Annotated[
        float | None, doc("Dual-clip bound for negative advantages (arXiv 1912.09729), above 1; null for none.", gt=1)
    ] = None
    use_on_policy_kl_approximation: Annotated[
        bool,
        doc(
            "Weight the KL estimate by the ratio of the current to the sampling probability, which makes it on-policy; "
            "k1 and k3 then also have the gradient of the KL."
        ),
    ] = False
    use_importance_sampling_correction: Annotated[
        bool,
        doc(
            "Weight tokens by the ratio of the policy's to the engine's probability, since the two do not compute "
            "exactly the same numbers."
        ),
    ] = False
    truncated_importance_sampling_type: Annotated[
        Literal["tis", "icepop", "seq-mask-tis"] | None,
        doc(
            "How to treat those weights out of bounds: tis (also null) clamps them to the bounds; icepop sets them to "
            "0; seq-mask-tis excludes responses whose geometric mean weight is out of bounds, and leaves all other "
            "weights unchanged."
        ),
    ] = None
    truncated_importance_sampling_ratio: Annotated[
        float | None, doc("Upper bound of those weights; null for none.", gt=0)
    ] = None
    truncated_importance_sampling_ratio_min: Annotated[
        float | None, doc("Lower bound of those weights; null for none. icepop and seq-mask-tis need one.", ge=0)
    ] = None
    sequence_level_importance_ratios: Annotated[
        bool, doc("Use one ratio per response, from the mean logprob difference (GSPO, arXiv 2507.18071).")
    ] = False
    token_level_loss: Annotated[
        bool, doc("Average over all tokens of the global batch; false averages within each response first.")
    ] = True
    constant_length_divisor: Annotated[
        int | None,
        doc(
            "Divide the sum over a response's tokens by this constant instead of by the response's length, before "
            "averaging over responses (Dr. GRPO, arXiv 2503.20783); null divides by lengths. Requires "
            "`token_level_loss` false.",
            ge=1,
        ),
    ] = None
    use_cispo: Annotated[
        bool,
        doc(
            "Weight the logprob of each token by the clipped ratio, without a gradient through the ratio (CISPO, arXiv "
            "2506.13585). Clipped tokens then have a gradient too."
        ),
    ] = False
    positive_example_nll_weight: Annotated[
        float,
        doc(
            "Weight of a further loss term (VAPO, arXiv 2504.05118): the negative logprob of tokens in responses whose "
            "reward, scaled and shaped, is above 0, averaged over those tokens of the global batch. NeMo-RL reads this "
            "key in PPO only.",
            ge=0,
        ),
    ] = 0.0
    disable_ppo_ratio: Annotated[
        bool, doc("Use no ratio and no clipping: the loss is minus advantage times logprob (REINFORCE, RLOO).")
    ] = False
    force_on_policy_ratio: Annotated[
        bool,
        doc(
            "Make the ratio exactly 1: logprobs of the training pass stand in for those before the step, which then "
            "need no pass of their own. Requires one update per step."
        ),
    ] = False
    target: Annotated[
        str | None,
        doc(
            "Your own function instead of this loss (docs/guides/your-own-reward.md), as `package.module.name` or "
            "`path/to/file.py:name`; null: none. Two other keys still decide which logprobs it receives: the "
            "reference's with a `reference_policy_kl_penalty` above 0, those before the step without "
            "`force_on_policy_ratio`."
        ),
    ] = None
    kwargs: Annotated[dict[str, Any] | None, doc("Its further arguments; null for none.")] = None


def needs_prev_logprobs(grpo: GrpoSectionConfig, loss: ClippedPGLossConfig) -> bool:
    """Tell whether a step computes the policy's logprobs before its updates."""
    kl_in_reward = loss.use_kl_in_reward and loss.reference_policy_kl_penalty != 0
    return not loss.force_on_policy_ratio or kl_in_reward or grpo.seq_logprob_error_threshold is not None


@section
class DistillationSectionConfig(RolloutSectionConfig):
    """`distillation`: the loop of on-policy distillation (arXiv 2306.13649)."""

    topk_logits_k: Annotated[
        int | None,
        doc(
            "Compare student and teacher on this many of the teacher's most likely tokens, which take 8 bytes each "
            "for every sampled token. null compares whole distributions: the teacher's last hidden states are kept "
            "instead, and its output layer is on the device in training.",
            ge=1,
        ),
    ] = 64


@section
class DistillationLossConfig:
    """`loss_fn`: the divergence between student and teacher, a mean over the sampled tokens."""

    kl_type: Annotated[
        Literal["forward", "reverse", "mixed"],
        doc("forward is KL(teacher || student), reverse is KL(student || teacher), mixed is a weighted sum of both."),
    ] = "mixed"
    mixed_kl_weight: Annotated[
        float, doc("Weight of the forward KL in `mixed`; the reverse has the rest.", ge=0, le=1)
    ] = 0.5
    zero_outside_topk: Annotated[
        bool,
        doc(
            "Take the teacher's probability outside its top-k as 0 (logprob -100), and normalize the student's over "
            "the whole vocabulary. false normalizes both over the top-k."
        ),
    ] = False
