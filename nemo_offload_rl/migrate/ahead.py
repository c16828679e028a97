"""Keys that say how far rollouts may be ahead of training: asynchronous GRPO, and the single controller."""

from __future__ import annotations

from nemo_offload_rl.migrate.conversion import Conversion
from nemo_offload_rl.migrate.draft import Draft

_THEIRS, _SINGLE = "grpo.async_grpo", "async_rl"
_NAMES = ("max_trajectory_age_steps", "in_flight_weight_updates", "recompute_kv_cache_after_weight_updates")
_CORRECTION = "loss_fn.use_importance_sampling_correction"
_SCHEDULE_ONLY = (
    "min_groups_for_streaming_train",
    "max_inflight_prompts",
    "max_buffered_rollouts",
    "diagnostics",
    "stall_watchdog",
    "generation_fleet_health",
    "generation_router",
)


def _asynchronous(draft: Draft) -> None:
    section = draft.section(_THEIRS)
    if not section:
        if draft.has(_THEIRS):
            draft.convert(_THEIRS, f"{_THEIRS}.enabled", False, "null is off")
        return
    enabled = draft.get(f"{_THEIRS}.enabled", False)
    draft.keep(f"{_THEIRS}.enabled", f"{_THEIRS}.enabled", enabled)
    for name in _NAMES:
        key = f"{_THEIRS}.{name}"
        if draft.has(key):
            draft.keep(key, key, draft.get(key))
    failures = f"{_THEIRS}.max_generation_failures"
    if enabled and draft.get(failures, 0):
        draft.missing(failures, "rollouts that may fail (max_generation_failures)")
    elif draft.has(failures):
        draft.ignore(failures, "the first failure ends the run, there and here; vllm_cfg.max_restarts is for engines")


def _single_controller(draft: Draft) -> None:
    if not draft.has(_SINGLE):
        return
    key, sampler = f"{_SINGLE}.sampler", draft.section(f"{_SINGLE}.sampler")
    if sampler.get("name", "in_order") != "in_order":
        draft.missing(key, f"rollouts taken as they come (async_rl.sampler {sampler['name']})")
        return
    ahead = sampler.get("max_lookahead_versions", 1)
    if ahead == 0:
        draft.ignore(_SINGLE, "without lookahead a step trains on rollouts of its own weights, as every step does here")
        return
    failures = draft.section(f"{_SINGLE}.rollout_failure")
    if failures.get("max_skipped_prompts", 0) or failures.get("max_consecutive_dropped_prompts", 0):
        draft.missing(f"{_SINGLE}.rollout_failure", "steps without the prompts that failed (async_rl.rollout_failure)")
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
        "in_flight_weight_updates": True,
        "recompute_kv_cache_after_weight_updates": draft.get(f"{_SINGLE}.{_NAMES[2]}", False),
    }
    for name, value in ours.items():
        draft.fill(f"{_THEIRS}.{name}", value, "what async_rl does")
    for name in draft.section(_SINGLE):
        path = f"{_SINGLE}.{name}"
        if name == "sampler":
            draft.ignore(path, f"is {_THEIRS} with max_trajectory_age_steps={ahead}")
        elif name == _NAMES[2]:
            draft.ignore(path, f"is {_THEIRS}.{name}")
        elif name == "rollout_failure":
            draft.ignore(path, "how often and when a failed rollout is tried again; no prompt is left out")
        elif name in _SCHEDULE_ONLY:
            draft.ignore(path, "when rollouts begin and are watched, not what is trained")
        else:
            draft.missing(path, f"{path}")


_GRPO = ("grpo",)
AHEAD: tuple[Conversion, ...] = (
    Conversion(
        (_THEIRS, f"{_THEIRS}.*"),
        "vLLM's prefix cache outlives updates, unless `recompute_kv_cache_after_weight_updates`; what is collected is "
        "saved; an age of 0 never ends",
        "it is dropped with each update, but for responses that go on; what is collected is generated again after a "
        "resume; an age of 0 is one thing after the other",
        _asynchronous,
        _GRPO,
    ),
    Conversion(
        (_SINGLE, f"{_SINGLE}.*"),
        "the single controller; how far rollouts may be ahead",
        "`in_order` is `grpo.async_grpo` with in-flight updates, and without lookahead the synchronous run; other "
        "samplers are refused",
        _single_controller,
        _GRPO,
    ),
)
