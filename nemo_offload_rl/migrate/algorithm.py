"""Conversions of keys of the algorithm, the tokenizer, asynchronous GRPO and the teacher."""

from nemo_offload_rl.keys.run import validates_a_checkpoint
from nemo_offload_rl.migrate.draft import Draft, converts, leaves

PASS_THROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_METRICS = {
    "val:val_loss": "val:loss",
    "val:validation-default_loss": "val:loss",
    "val:total_reward/mean": "val:reward",
    "train:reward": "train:reward_mean",
}


@converts("loss_fn.reference_policy_kl_type", algorithms="grpo")
def _kl(draft: Draft) -> None:
    key = "loss_fn.reference_policy_kl_type"
    kind = draft.get(key, "k3")
    if draft.get("loss_fn.use_kl_in_reward", False):
        draft.keep(key, kind)  # only its value counts
    elif kind in ("k1", "k2", "k3"):
        draft.convert(key, f"{kind}w", "the name here of the variant that differentiates through the importance weight")
    else:
        draft.keep(key, kind)


@converts("loss_fn.use_kl_in_reward", algorithms="grpo")
def _kl_in_reward(draft: Draft) -> None:
    key, clamps = "loss_fn.use_kl_in_reward", ("kl_input_clamp_value", "kl_output_clamp_value")
    given = tuple(draft.get(f"loss_fn.{name}", there) for name, there in zip(clamps, (20.0, 10.0), strict=True))
    if not draft.get(key, False):
        draft.keep(key, False)
    elif draft.get("grpo.adv_estimator.name", "grpo") != "reinforce_plus_plus":
        draft.missing(key, "a KL without effect (use_kl_in_reward without reinforce_plus_plus)")
    elif given != (20.0, 10.0):
        draft.missing(key, "clamps of the KL that do not act on the KL in the reward")
    else:
        draft.keep(key, True)


@converts(
    "grpo.adv_estimator.name grpo.normalize_rewards grpo.use_leave_one_out_baseline "
    "grpo.adv_estimator.normalize_rewards grpo.adv_estimator.use_leave_one_out_baseline",
    algorithms="grpo",
)
def _baseline(draft: Draft) -> None:
    estimator, known = "grpo.adv_estimator.name", ("grpo", "reinforce_plus_plus")
    name = draft.get(estimator, "grpo")
    if name in known:
        draft.keep(estimator, name)
    else:
        draft.missing(estimator, f"advantage estimator {name}")
    for name in ("normalize_rewards", "use_leave_one_out_baseline"):
        inner, outer = f"grpo.adv_estimator.{name}", f"grpo.{name}"
        if draft.has(inner):
            draft.rename(inner, outer, draft.get(inner), "the estimator's value")
            if draft.has(outer):
                draft.ignore(outer, "the estimator's value is what advantages are computed with")
        else:
            draft.keep(outer, draft.get(outer, True))


@converts(algorithms="grpo", reads="grpo.dynamic_sampling_max_gen_batches")
def _dynamic_sampling(draft: Draft) -> None:
    key = "grpo.dynamic_sampling_max_gen_batches"
    # The outer key counts here, whatever the estimator's is.
    if draft.get("grpo.use_dynamic_sampling") and draft.get("grpo.use_leave_one_out_baseline", True):
        draft.fill("grpo.dynamic_sampling_drops", "responses", "those whose leave-one-out deviation is 0")
    if draft.get("grpo.use_dynamic_sampling") and draft.number(key) is not None:
        draft.convert(key, draft.number(key) + 1, "NeMo-RL tries one more batch before the error")


@converts(
    "loss_fn.truncated_importance_sampling_ratio loss_fn.truncated_importance_sampling_type "
    "loss_fn.truncated_importance_sampling_ratio_min",
    algorithms="grpo",
)
def _truncation(draft: Draft) -> None:
    weighted = draft.get("loss_fn.use_importance_sampling_correction", False)
    bounded = weighted and draft.get("loss_fn.truncated_importance_sampling_ratio") is not None
    for name in ("ratio", "type", "ratio_min"):
        key = f"loss_fn.truncated_importance_sampling_{name}"
        if draft.get(key) is not None and not bounded:
            draft.convert(key, None, "there are no weights to truncate")
        else:
            draft.keep(key)


@converts(
    "grpo.val_period sft.val_period dpo.val_period distillation.val_period grpo.max_val_samples "
    "distillation.max_val_samples"
)
def _validation(draft: Draft) -> None:
    section = draft.algorithm
    period = f"{section}.val_period"
    if (given := draft.number(period)) is not None:
        if given < 0:
            draft.convert(period, 0, "0 never validates")
        else:
            draft.keep(period, given)
    key = f"{section}.max_val_samples"
    if not draft.samples or not draft.has(key):
        return
    samples, size = draft.number(key), draft.number(f"{section}.val_batch_size")
    if samples is None or size is None:
        draft.missing(key, "validation on all prompts (max_val_samples null)")
    elif samples % size and samples > size:
        draft.convert(key, samples // size * size, "NeMo-RL validates only on whole batches of val_batch_size")
    else:
        draft.keep(key, samples)


@converts("sft.val_batches dpo.val_batches", algorithms="sft dpo")
def _val_batches(draft: Draft) -> None:
    key = f"{draft.algorithm}.val_batches"
    draft.keep_unless(draft.number(key, 0) < 0, key, 0, "0 takes all")


@converts("checkpointing.metric_name")
def _metric(draft: Draft) -> None:
    key = "checkpointing.metric_name"
    if not draft.has(key):
        return
    name, section = draft.get(key), draft.algorithm
    validates_last = draft.get(f"{section}.val_at_end", False)
    val_period, num_steps = (draft.number(f"{section}.{it}", 0) for it in ("val_period", "max_num_steps"))
    save_period = draft.number("checkpointing.save_period", 0)
    is_of_validation = isinstance(name, str) and name.startswith("val:") and not validates_last
    if is_of_validation and val_period <= 0:
        draft.convert(key, None, "nothing is validated, so the newest are kept")
    elif is_of_validation and save_period and not validates_a_checkpoint(save_period, val_period, num_steps):
        draft.convert(key, None, "no checkpoint's step is validated, so the newest are kept")
    elif isinstance(name, str) and name in _METRICS:
        draft.convert(key, _METRICS[name], "the metric's name here")
    else:
        draft.keep(key, name)


@converts("policy.tokenizer.chat_template")
def _chat_template(draft: Draft) -> None:
    key = "policy.tokenizer.chat_template"
    if not draft.has(key):
        draft.fill(key, None, "the tokenizer's own template, which is NeMo-RL's default too")
    draft.keep_unless(draft.get(key) is None, key, PASS_THROUGH, "null concatenates messages in NeMo-RL")


@converts("data.add_generation_prompt", algorithms="sft dpo")
def _loss_span(draft: Draft) -> None:
    """Convert `add_generation_prompt`, which moves the template's text before a response out of the loss."""
    key = "data.add_generation_prompt"
    if draft.algorithm == "sft" and draft.get(key, False):
        draft.rename(key, "data.loss_span", "response_and_end", "the prompt ends where the response begins")
        return
    note = "what the template writes before a response counts too"
    if draft.has(key):
        draft.rename(key, "data.loss_span", "message", note)
    else:
        draft.fill("data.loss_span", "message", note)


_TAKEN = ("model_name", "hf_config_overrides", "precision", "logprob_batch_size", "logprob_chunk_size")
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


@converts("teacher teacher.*", algorithms="distillation")
def _teacher(draft: Draft) -> None:
    for name in _TAKEN:
        key = f"teacher.{name}"
        draft.keep(key, draft.get(key, draft.get(f"policy.{name}", {} if name == "hf_config_overrides" else None)))
    temperature = draft.get("policy.generation.temperature")
    if draft.get("teacher.generation.temperature", temperature) != temperature:
        # The policy's temperature divides the teacher's logits here.
        draft.missing("teacher.generation.temperature", "a teacher with a temperature of its own")
    on_dtensor = bool(draft.get("teacher.dtensor_cfg.enabled", draft.get("policy.dtensor_cfg.enabled")))
    if on_dtensor != bool(draft.get("policy.dtensor_cfg.enabled")):
        draft.missing("teacher.dtensor_cfg.enabled", "a teacher on another backend than the policy's")
    size = "teacher.dtensor_cfg.tensor_parallel_size"
    if on_dtensor:
        draft.keep(size, draft.get(size, draft.get("policy.dtensor_cfg.tensor_parallel_size", 1)))
    else:
        draft.fill(size, 1, "the backend is Megatron")
    for path, _ in leaves(draft.section("teacher"), "teacher"):
        if path in draft.done:
            continue
        if path.removeprefix("teacher.megatron_cfg.") in _SIZES and not on_dtensor:
            draft.ignore(path, "the teacher is split over devices like the policy: the same numbers, with other memory")
        else:
            draft.ignore(path, "a teacher only computes logprobs, with the backend and the batches of the policy")


_THEIRS = "grpo.async_grpo"
_SINGLE = "async_rl"
_NAMES = ("max_trajectory_age_steps", "in_flight_weight_updates", "recompute_kv_cache_after_weight_updates")
_CORRECTION = "loss_fn.use_importance_sampling_correction"
# By name: the key of the bound, the order here, and what differs.
_SAMPLERS = {
    "in_order": ("max_lookahead_versions", "data", ""),
    "weight_fifo": ("max_staleness_versions", "data", "; batches of the first weights are not mixed"),
    "windowed": ("max_staleness_versions", "finished", "; groups at the bound are waited for, not dropped"),
    "ready_first": ("max_staleness_versions", "finished", "; groups at the bound are waited for, not trained on later"),
}
_SCHEDULE_ONLY = (
    "min_groups_for_streaming_train", "max_inflight_prompts", "max_buffered_rollouts", "diagnostics",
    "stall_watchdog", "generation_fleet_health", "generation_router",
)  # fmt: skip


@converts("grpo.async_grpo grpo.async_grpo.*", algorithms="grpo")
def _asynchronous(draft: Draft) -> None:
    section = draft.section(_THEIRS)
    if not section:
        if draft.has(_THEIRS):
            draft.convert(_THEIRS, False, "null turns it off", f"{_THEIRS}.enabled")
        return
    enabled = draft.get(f"{_THEIRS}.enabled", False)
    draft.keep(f"{_THEIRS}.enabled", enabled)
    for name in _NAMES:
        key = f"{_THEIRS}.{name}"
        if draft.has(key):
            draft.keep(key)
    failures = f"{_THEIRS}.max_generation_failures"
    if enabled and draft.get(failures, 0):
        draft.missing(failures, "rollouts that may fail")
    elif draft.has(failures):
        draft.ignore(failures, "the first failure ends the run, as in NeMo-RL; vllm_cfg.max_restarts restarts engines")


@converts("async_rl async_rl.*", algorithms="grpo")
def _single_controller(draft: Draft) -> None:
    if not draft.has(_SINGLE):
        return
    key, sampler = f"{_SINGLE}.sampler", draft.section(f"{_SINGLE}.sampler")
    kind = sampler.get("name", "in_order")
    if kind not in _SAMPLERS:
        draft.missing(key, f"a sampler of your own ({sampler.get('target', kind)})")
        return
    if sampler.get("sample_freshest_first", False):
        draft.missing(f"{key}.sample_freshest_first", "the newest rollouts first; here the oldest are")
        return
    bound, order, differs = _SAMPLERS[kind]
    ahead = sampler.get(bound, 1)
    if ahead == 0:
        draft.ignore(_SINGLE, "without lookahead a step trains on rollouts of its own weights, as every step does here")
        return
    failures = draft.section(f"{_SINGLE}.rollout_failure")
    if failures.get("max_skipped_prompts", 0) or failures.get("max_consecutive_dropped_prompts", 0):
        draft.missing(f"{_SINGLE}.rollout_failure", "steps without the prompts that failed")
        return
    streams = draft.number(f"{_SINGLE}.min_groups_for_streaming_train", 32)
    prompts, estimator = draft.number("grpo.num_prompts_per_step"), draft.get("grpo.adv_estimator.name", "grpo")
    if estimator != "grpo" and (prompts is None or streams < prompts):
        draft.missing(f"{_SINGLE}.min_groups_for_streaming_train", f"advantages of parts of a step ({estimator})")
        return
    if not draft.get(_CORRECTION, False):
        draft.missing(key, f"rollouts of older weights without {_CORRECTION}")
        return
    ours = {
        "enabled": True,
        "max_trajectory_age_steps": ahead,
        **({"order": order} if order == "finished" else {}),
        "in_flight_weight_updates": True,
        "recompute_kv_cache_after_weight_updates": draft.get(f"{_SINGLE}.{_NAMES[2]}", False),
    }
    for name, value in ours.items():
        draft.fill(f"{_THEIRS}.{name}", value, "what async_rl does")
    for name in draft.section(_SINGLE):
        path = f"{_SINGLE}.{name}"
        if name == "sampler":
            draft.ignore(path, f"becomes {_THEIRS} with max_trajectory_age_steps={ahead} and order={order}{differs}")
        elif name == _NAMES[2]:
            draft.ignore(path, f"becomes {_THEIRS}.{name}")
        elif name == "rollout_failure":
            draft.ignore(path, "says when to try a failed rollout again; no prompt is left out")
        elif name in _SCHEDULE_ONLY:
            draft.ignore(path, "schedules and watches rollouts; changes no result")
        else:
            draft.missing(path)
