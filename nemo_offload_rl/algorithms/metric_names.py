"""Names of the metrics that can rank checkpoints, known before a run starts. Tests compare them with real runs.

`<data set>` stands for the name of any data set of a mixture, `<part>` for the name of any part of a reward.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from nemo_offload_rl.experience.pass_at_k import powers_of_two
from nemo_offload_rl.keys.grpo import RolloutSectionConfig, needs_prev_logprobs
from nemo_offload_rl.keys.master import DistillationMasterConfig, DpoMasterConfig, GrpoMasterConfig, RunConfig

_UPDATE = ("loss", "grad_norm", "learning_rate", "skipped_updates", "oom_splits")
_SPREAD = ("mean", "std", "min", "max")
_POLICY_GRADIENT = (
    "actor_loss", "kl", "entropy", "approx_entropy", "probs_ratio", "probs_ratio_min", "probs_ratio_max",
    "clip_fraction", "dual_clip_fraction", "sampling_importance_ratio", "gen_kl_error", "token_mult_prob_error",
    "outside_nucleus_rate",
)  # fmt: skip
_ROLLOUTS = (
    "accuracy", "pass_rate", "constant_group_rate", "overlong_prompt_rate", "mean_prompt_tokens", "max_prompt_tokens",
    "mean_response_tokens",
    "max_response_tokens", "mean_turns", "truncation_rate", "failed_rate", "timed_out_rate", "no_reward_rate",
)  # fmt: skip
_SIZES = ("num_tokens", "total_tokens", "training_tokens_per_s")
_ROUTING = ("routed_token_rate", "routed_experts_mib")
_DISTILLATION = (
    "teacher_topk_mass", "token_mult_prob_error", "sampled_nll", "outside_nucleus_rate", "generation_tokens_per_s",
    "teacher_tokens_per_s",
)  # fmt: skip
_PREFERENCES = (
    "preference_loss", "sft_loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean", "rewards_margin_mean",
    "logps_chosen_mean", "logps_rejected_mean",
)  # fmt: skip

type Names = Mapping[str, tuple[str, ...]]
"""Names under `train` and under `val`."""


_OF_DATA = ("reward_mean/<data set>", "accuracy/<data set>", "reward_part/<part>", "reward_extra/<name>")


def _takes_finished(cfg: GrpoMasterConfig) -> bool:
    ahead = cfg.grpo.async_grpo
    return ahead is not None and cfg.grpo.is_async and ahead.order == "finished"


# Metrics that only some GRPO runs have, each with the keys that decide it.
GRPO_WITH: Sequence[tuple[tuple[str, ...], Callable[[GrpoMasterConfig], bool]]] = (
    (("generation_tokens_per_s",), lambda cfg: not _takes_finished(cfg)),
    (("trained_length_mean", "sampled_length_mean"), _takes_finished),
    (
        ("avg_trajectory_age", "avg_token_age", "max_token_age", "buffer_size"),
        lambda cfg: cfg.grpo.is_async,
    ),
    (
        ("logprob_tokens_per_s", "mean_seq_mult_prob_error", "max_seq_mult_prob_error"),
        lambda cfg: needs_prev_logprobs(cfg.grpo, cfg.loss_fn),
    ),
    (("num_masked_seqs_by_logprob_error",), lambda cfg: cfg.grpo.seq_logprob_error_threshold is not None),
    (
        ("rollout_filter_rate",),
        lambda cfg: cfg.grpo.rollout_filter is not None and cfg.grpo.rollout_filter.target is not None,
    ),
    (
        ("rollout_stop_rate",),
        lambda cfg: cfg.grpo.rollout_stop is not None and cfg.grpo.rollout_stop.target is not None,
    ),
    (("mean_conversations",), lambda cfg: cfg.policy.generation.vllm_cfg.expose_http_server),
    (_ROUTING, lambda cfg: cfg.policy.router_replay.enabled),
    (("positive_nll_loss",), lambda cfg: cfg.loss_fn.positive_example_nll_weight > 0),
    (("is_oob_ratio",), lambda cfg: cfg.loss_fn.truncated_importance_sampling_ratio is not None),
    (
        (
            "dynamic_sampling_batches", "dynamic_sampling_constant_groups", "filtered_reward_mean", "filtered_accuracy",
        ),
        lambda cfg: cfg.grpo.use_dynamic_sampling,
    ),
)  # fmt: skip


def names_of(cfg: RunConfig) -> Names:
    """List the metrics of a run."""
    if isinstance(cfg, GrpoMasterConfig):
        spreads = (f"{name}_{kind}" for name in ("reward", "shaped_reward", "advantage") for kind in _SPREAD)
        some = (name for names, has_them in GRPO_WITH if has_them(cfg) for name in names)
        return _of_rollouts(cfg.grpo, *spreads, *_POLICY_GRADIENT, *some)
    if isinstance(cfg, DistillationMasterConfig):
        spread = (f"reward_{kind}" for kind in _SPREAD)
        routing = _ROUTING if cfg.policy.router_replay.enabled else ()
        return _of_rollouts(cfg.distillation, *spread, *_DISTILLATION, *routing)
    return DPO_NAMES if isinstance(cfg, DpoMasterConfig) else SFT_NAMES


def _of_rollouts(section: RolloutSectionConfig, *more: str) -> Names:
    of_training = (*more, *_ROLLOUTS, *_pass_at(section.num_generations_per_prompt), *_UPDATE, *_SIZES, *_OF_DATA)
    return {"train": of_training, "val": _of_validation(section.val_num_generations_per_prompt)}


def _each_set(*names: str) -> tuple[str, ...]:
    return (*names, *(f"{name}/<data set>" for name in names))


SFT_NAMES: Names = {
    "train": (
        *_UPDATE, *_SIZES, "token_accuracy", "num_counted_tokens", "max_sequence_tokens", "overlong_row_rate",
    ),
    "val": _each_set("loss", "perplexity", "token_accuracy"),
}  # fmt: skip
DPO_NAMES: Names = {
    "train": (*_UPDATE, *_SIZES, *_PREFERENCES, "max_sequence_tokens", "training_pairs_per_s", "overlong_row_rate"),
    "val": _each_set("loss", *_PREFERENCES),
}  # fmt: skip


def metric_problem(metric_name: str, names: Names) -> str | None:
    """Return the reason why `checkpointing.metric_name` cannot rank checkpoints; None if it can."""
    prefix, _, name = metric_name.partition(":")
    if prefix not in names:
        return f"checkpointing.metric_name is {metric_name}, which is no metric; write train:NAME or val:NAME, or null"
    if any(_stands_for(known, name) for known in names[prefix]):
        return None
    near = _nearest(prefix, name, names)
    listed = ", ".join(sorted(names[prefix]))
    hint = f"did you mean {near}?" if near else f"choose one of {listed}, or null"
    return f"checkpointing.metric_name is {metric_name}, which this run does not measure; {hint}"


def data_set_problem(metric_name: str | None, data_sets: Mapping[str, Iterable[str]]) -> str | None:
    """Return the reason why a metric of one data set cannot rank checkpoints; None if it can, or covers all data sets.

    Args:
        metric_name: The key, which passed `metric_problem`.
        data_sets: Names of the data sets under `train` and `val`.
    """
    prefix, _, name = (metric_name or "").partition(":")
    metric, _, data_set = name.partition("/")
    if not data_set or metric in ("reward_part", "reward_extra"):
        return None
    known = sorted(set(data_sets[prefix]))
    if len(known) < 2:
        return (
            f"checkpointing.metric_name is {metric_name}, but there is one data set only; write {prefix}:{metric}, or "
            "null"
        )
    if data_set not in known:
        return (
            f"checkpointing.metric_name is {metric_name}, but no data set is called {data_set}; choose one of "
            f"{', '.join(known)}"
        )
    return None


def _nearest(prefix: str, name: str, names: Names) -> str | None:
    """Guess the metric that was meant: the same name under another prefix, or the most similar name."""
    for other, known in names.items():
        if name in known:
            return f"{other}:{name}"
    near = difflib.get_close_matches(name, names[prefix], n=1)
    return f"{prefix}:{near[0]}" if near else None


def _stands_for(known: str, name: str) -> bool:
    return re.fullmatch(re.sub("<.*>", ".+", re.escape(known)), name) is not None


def _of_validation(group_size: int) -> tuple[str, ...]:
    return (
        "accuracy", "reward", "mean_response_tokens", "truncation_rate", "failed_rate", "timed_out_rate",
        "no_reward_rate", *_pass_at(group_size),
        "accuracy/<data set>", "reward/<data set>", "reward_part/<part>", "reward_extra/<name>",
    )  # fmt: skip


def _pass_at(group_size: int) -> Iterable[str]:
    return (f"pass_at_{k}" for k in powers_of_two(group_size))
