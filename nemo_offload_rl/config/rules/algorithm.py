"""Rules of GRPO and distillation, and of their losses."""

from nemo_offload_rl.backends.hf.model_folder import local_model_config
from nemo_offload_rl.errors import division_problem
from nemo_offload_rl.keys.master import DistillationMasterConfig, GrpoMasterConfig, rules_in
from nemo_offload_rl.models.families import state_mixer


def baselines_need_two_responses(cfg: GrpoMasterConfig) -> str | None:
    """A baseline that compares within a group needs at least two responses for each prompt."""
    grpo, group = cfg.grpo, cfg.grpo.num_generations_per_prompt
    estimator = grpo.adv_estimator
    compares = estimator.name != "reinforce_plus_plus" or estimator.minus_baseline
    if group < 2 and compares and estimator.target is None:
        return (
            f"grpo.num_generations_per_prompt is {group}, but advantages compare each response with its group, so all "
            "would be 0; set it to 2 or more, or grpo.adv_estimator.name=reinforce_plus_plus with minus_baseline=false"
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


def parts_of_groups_are_compared_by_the_package(cfg: GrpoMasterConfig) -> str | None:
    """`dynamic_sampling_drops: responses` needs three responses, dynamic sampling, and no code for whole groups."""
    grpo = cfg.grpo
    if grpo.dynamic_sampling_drops == "groups":
        return None
    told = "grpo.dynamic_sampling_drops is responses, but"
    if not grpo.use_dynamic_sampling:
        return f"{told} use_dynamic_sampling is false, so nothing is dropped; set that to true, or this key to groups"
    if grpo.num_generations_per_prompt < 3:
        return (
            f"{told} num_generations_per_prompt is {grpo.num_generations_per_prompt}, so that the others of a response "
            "never differ; set it to 3 or more, or this key to groups"
        )
    filters = grpo.rollout_filter is not None and grpo.rollout_filter.target is not None
    if filters or grpo.adv_estimator.target is not None:
        name = "rollout_filter" if filters else "adv_estimator"
        return f"{told} {name}.target is code that gets whole groups; set this key to groups, or {name}.target to null"
    return None


def only_dynamic_sampling_draws_larger_batches(cfg: GrpoMasterConfig) -> str | None:
    """Without dynamic sampling `batch_multiplier` is 1."""
    grpo = cfg.grpo
    if grpo.batch_multiplier != 1 and not grpo.use_dynamic_sampling:
        return (
            f"grpo.batch_multiplier is {grpo.batch_multiplier:g}, but without use_dynamic_sampling no group is dropped "
            "and a step needs only num_prompts_per_step prompts; set it to 1 or turn dynamic sampling on"
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
    """Truncation needs the importance-sampling correction and its upper bound."""
    loss = cfg.loss_fn
    names = {
        "truncated_importance_sampling_type": loss.truncated_importance_sampling_type,
        "truncated_importance_sampling_ratio": loss.truncated_importance_sampling_ratio,
        "truncated_importance_sampling_ratio_min": loss.truncated_importance_sampling_ratio_min,
    }
    given = [name for name, value in names.items() if value is not None]
    if given and not loss.use_importance_sampling_correction:
        return (
            f"loss_fn.{given[0]} is set, but it bounds the weights of use_importance_sampling_correction, which is "
            f"false; set that to true or {given[0]} to null"
        )
    if given and loss.truncated_importance_sampling_ratio is None:
        return (
            f"loss_fn.{given[0]} is set, but truncated_importance_sampling_ratio, the upper bound, is null; set it "
            f"too, or {given[0]} to null"
        )
    return None


def bounds_of_importance_weights_are_complete(cfg: GrpoMasterConfig) -> str | None:
    """The lower bound of importance weights is below the upper one; masks need both, and weights of tokens."""
    loss = cfg.loss_fn
    kind, low, high = (
        loss.truncated_importance_sampling_type,
        loss.truncated_importance_sampling_ratio_min,
        loss.truncated_importance_sampling_ratio,
    )
    if high is None:
        return None
    if low is not None and low > high:
        return (
            f"loss_fn.truncated_importance_sampling_ratio_min {low:g} is above truncated_importance_sampling_ratio "
            f"{high:g}; swap or change them"
        )
    if kind in ("icepop", "seq-mask-tis") and low is None:
        return (
            f"loss_fn.truncated_importance_sampling_type is {kind}, which masks on both sides, but "
            "truncated_importance_sampling_ratio_min is null; set it (0 masks on the upper side only)"
        )
    if kind == "seq-mask-tis" and loss.sequence_level_importance_ratios:
        return (
            "loss_fn.truncated_importance_sampling_type is seq-mask-tis, which keeps a weight for each token, but "
            "sequence_level_importance_ratios gives one to each response; set that to false or the type to icepop"
        )
    return None


def one_surrogate(cfg: GrpoMasterConfig) -> str | None:
    """CISPO, no ratio and a forced ratio exclude each other; CISPO also excludes the dual clip and sequence ratios."""
    loss = cfg.loss_fn
    chosen = [name for name in ("use_cispo", "disable_ppo_ratio", "force_on_policy_ratio") if getattr(loss, name)]
    if len(chosen) > 1:
        return f"loss_fn.{' and '.join(chosen)} are true, but each selects another loss; set all but one to false"
    if loss.ratio_clip_c is not None and (loss.use_cispo or loss.disable_ppo_ratio):
        return (
            f"loss_fn.ratio_clip_c is {loss.ratio_clip_c:g}, but with {chosen[0]} the loss has no clip that it could "
            "extend; set it to null"
        )
    if loss.use_cispo and loss.sequence_level_importance_ratios:
        return (
            "loss_fn.use_cispo weights single tokens, but sequence_level_importance_ratios is true; set one of them "
            "to false"
        )
    return None


def constant_divisor_goes_with_the_sequence_loss(cfg: GrpoMasterConfig) -> str | None:
    """`constant_length_divisor` needs a mean over responses."""
    loss = cfg.loss_fn
    if loss.constant_length_divisor is not None and loss.token_level_loss:
        return (
            f"loss_fn.constant_length_divisor is {loss.constant_length_divisor}, but token_level_loss divides by the "
            "number of all tokens; set token_level_loss to false or the divisor to null"
        )
    return None


def kl_in_reward_needs_rewards_of_tokens(cfg: GrpoMasterConfig) -> str | None:
    """`use_kl_in_reward` needs rewards of tokens, as reinforce_plus_plus has them."""
    name = cfg.grpo.adv_estimator.name
    if cfg.loss_fn.use_kl_in_reward and name != "reinforce_plus_plus":
        return (
            f"loss_fn.use_kl_in_reward lowers the reward of single tokens, but grpo.adv_estimator.name is {name}, "
            "which has one reward for each response; set it to reinforce_plus_plus, or use_kl_in_reward to false"
        )
    return None


def gdpo_compares_parts_of_rewards(cfg: GrpoMasterConfig) -> str | None:
    """GDPO needs rewards with parts, and excludes scaling and shaping; only GDPO has weights of parts."""
    grpo = cfg.grpo
    if grpo.adv_estimator.name != "gdpo":
        if grpo.adv_estimator.reward_weights is not None:
            return (
                f"grpo.adv_estimator.reward_weights is set, but grpo.adv_estimator.name is {grpo.adv_estimator.name}, "
                "which has one reward; set the weights to null, or name to gdpo"
            )
        return None
    for name, is_on in (("scaling", grpo.reward_scaling.enabled), ("shaping", grpo.reward_shaping.enabled)):
        if is_on:
            return (
                f"grpo.reward_{name}.enabled is true, but grpo.adv_estimator.name gdpo compares parts of rewards as "
                "environments give them; set the first to false, or name to grpo"
            )
    if all(section.target is None for section in cfg.env.values()):
        return (
            "grpo.adv_estimator.name is gdpo, which compares parts of rewards, but the environments of this package "
            "give one number; set env.NAME.target to a list of functions, or name to grpo"
        )
    return None


def kl_in_reward_needs_whole_distributions(cfg: GrpoMasterConfig) -> str | None:
    """A KL in the reward compares distributions over the whole vocabulary."""
    loss, generation = cfg.loss_fn, cfg.policy.generation
    if loss.use_kl_in_reward and loss.reference_policy_kl_penalty and (generation.top_k or generation.top_p < 1):
        return (
            "loss_fn.use_kl_in_reward compares the policy's logprobs, which are over the tokens that "
            f"top_p {generation.top_p:g} and top_k {generation.top_k} keep, with the reference's, which are over the "
            "whole vocabulary; set use_kl_in_reward to false, or top_p to 1.0 and top_k to null"
        )
    return None


def advantage_bounds_are_ascending(cfg: GrpoMasterConfig) -> str | None:
    """`advantage_clip_low` is below `advantage_clip_high`."""
    low, high = cfg.grpo.advantage_clip_low, cfg.grpo.advantage_clip_high
    if low is not None and high is not None and low >= high:
        return f"grpo.advantage_clip_low {low:g} is not below advantage_clip_high {high:g}; swap or change them"
    return None


def sequence_ratios_need_the_sequence_loss(cfg: GrpoMasterConfig) -> str | None:
    """Ratios of whole responses need a mean over responses."""
    loss = cfg.loss_fn
    if loss.sequence_level_importance_ratios and loss.token_level_loss:
        return (
            "loss_fn.sequence_level_importance_ratios and token_level_loss are both true, but one ratio for each "
            "response goes with a mean over responses; set token_level_loss to false"
        )
    return None


def overlong_buffer_is_within_the_response(cfg: GrpoMasterConfig) -> str | None:
    """`overlong_buffer_length` is below `max_response_length`."""
    shaping = cfg.grpo.reward_shaping
    reads_length = shaping.enabled and shaping.stop_properly_penalty_coef is None
    if reads_length and shaping.overlong_buffer_length >= shaping.max_response_length:
        return (
            f"grpo.reward_shaping.overlong_buffer_length {shaping.overlong_buffer_length} is not below "
            f"max_response_length {shaping.max_response_length}, so every response would be punished; lower it"
        )
    return None


def reward_ranges_are_ascending(cfg: GrpoMasterConfig) -> str | None:
    """The minima of reward scaling are below the maxima."""
    scaling = cfg.grpo.reward_scaling
    for side in ("source", "target"):
        low = scaling.source_min if side == "source" else scaling.target_min
        high = scaling.source_max if side == "source" else scaling.target_max
        if scaling.enabled and low >= high:
            return f"grpo.reward_scaling.{side}_min {low:g} is not below {side}_max {high:g}; swap or change them"
    return None


def rollouts_can_be_collected_during_training(cfg: GrpoMasterConfig) -> str | None:
    """Asynchronous GRPO needs `async_engine` and importance weights, and on the policy's devices order `finished`."""
    if not cfg.grpo.is_async:
        return None
    generation, told = cfg.policy.generation, "grpo.async_grpo.enabled is true, but"
    ahead = cfg.grpo.async_grpo
    if generation.colocated.enabled and ahead is not None and ahead.order == "data":
        return (
            f"{told} policy.generation.colocated.enabled is true too, and engines that share the trainer's devices "
            "cannot generate while it trains; set async_grpo.order to finished, so that responses stop meanwhile, or "
            "colocated.enabled to false, and resources.gpus_per_node and num_nodes"
        )
    if generation.colocated.enabled and generation.vllm_cfg.expose_http_server:
        return (
            f"{told} policy.generation.colocated.enabled is true too, and calls of agents cannot wait while the policy "
            "trains; set vllm_cfg.expose_http_server to false, or colocated.enabled to false"
        )
    if not generation.vllm_cfg.async_engine:
        return (
            f"{told} policy.generation.vllm_cfg.async_engine is false, and that engine answers only whole batches, one "
            "after the other; set it to true"
        )
    if ahead is not None and ahead.order == "finished" and not ahead.in_flight_weight_updates:
        return (
            "grpo.async_grpo.order is finished, but in_flight_weight_updates is false, so that every update of the "
            "engines waits for the longest response; set that to true, or order to data"
        )
    if cfg.grpo.use_dynamic_sampling:
        return (
            f"{told} use_dynamic_sampling draws as many prompts as a step turns out to need, which is not known in "
            "advance; turn one of them off"
        )
    if not cfg.loss_fn.use_importance_sampling_correction and cfg.loss_fn.target is None:
        return (
            f"{told} loss_fn.use_importance_sampling_correction is false, so rollouts of older weights would count as "
            "if they were of the current ones; set it to true"
        )
    return None


def paused_responses_keep_their_cache_only_where_they_pause(cfg: GrpoMasterConfig) -> str | None:
    """`paused_kv` other than `recompute` needs engines that sleep on the policy's devices, and no recomputed caches.

    `host` also needs a model whose layers are all attention.
    """
    ahead = cfg.grpo.async_grpo
    if ahead is None or not ahead.enabled or ahead.paused_kv == "recompute":
        return None
    told = f"grpo.async_grpo.paused_kv is {ahead.paused_kv}, but"
    generation = cfg.policy.generation
    if not generation.engines_sleep:
        key = "vllm_cfg.enable_sleep_mode" if generation.colocated.enabled else "colocated.enabled"
        return (
            f"{told} policy.generation.{key} is false, so responses do not stop while the policy trains; set paused_kv "
            "to recompute"
        )
    if ahead.recompute_kv_cache_after_weight_updates:
        return (
            f"{told} recompute_kv_cache_after_weight_updates is true, which asks for the opposite; set paused_kv to "
            "recompute, or the other to false"
        )
    if ahead.paused_kv == "host" and (model := local_model_config(cfg)) is not None and state_mixer(model) is not None:
        return (
            f"{told} layers of {cfg.policy.model_name} ({model['model_type']}) have states, which are kept in another "
            "way than KV blocks; set it to recompute or auto"
        )
    return None


def a_top_k_is_needed_for_what_is_outside_of_it(cfg: DistillationMasterConfig) -> str | None:
    """`zero_outside_topk` needs `topk_logits_k`."""
    if cfg.loss_fn.zero_outside_topk and cfg.distillation.topk_logits_k is None:
        return (
            "loss_fn.zero_outside_topk is true, but distillation.topk_logits_k is null, which compares whole "
            "distributions; set the first to false or the second to a number"
        )
    return None


def the_teachers_tensor_parallel_size_divides_the_workers(cfg: DistillationMasterConfig) -> str | None:
    """The tensor-parallel size of the teacher divides the workers, with the DTensor backend."""
    size, num_workers = cfg.teacher.dtensor_cfg.tensor_parallel_size, cfg.cluster.world_size
    if not cfg.policy.dtensor_cfg.enabled:
        return None
    what, fix = "policy workers, which the teacher is spread over", "change it or the number of devices"
    return division_problem({"teacher.dtensor_cfg.tensor_parallel_size": size}, num_workers, what, fix)


def a_megatron_teacher_is_spread_as_the_policy(cfg: DistillationMasterConfig) -> str | None:
    """With Megatron the teacher has no tensor-parallel size of its own."""
    size = cfg.teacher.dtensor_cfg.tensor_parallel_size
    if not cfg.policy.dtensor_cfg.enabled and size != 1:
        return (
            f"teacher.dtensor_cfg.tensor_parallel_size is {size}, but the Megatron backend is on and spreads the "
            "teacher as policy.megatron_cfg says; set it to 1"
        )
    return None


def a_megatron_teacher_has_no_streamed_layers(cfg: DistillationMasterConfig) -> str | None:
    """`teacher.stream_layers` needs the DTensor backend."""
    if cfg.teacher.stream_layers and not cfg.policy.dtensor_cfg.enabled:
        return (
            "teacher.stream_layers is true, but the Megatron backend is on and keeps a model in few large buffers; set "
            "it to false"
        )
    return None


RULES = rules_in(__name__, GrpoMasterConfig)

DISTILLATION_RULES = rules_in(__name__, DistillationMasterConfig)
