"""Names of the metrics that can rank checkpoints, known before a run starts. Tests compare them with real runs.

`<data set>` stands for the name of any data set of a mixture, `<part>` for the name of any part of a reward.
"""

import difflib
import re
from collections.abc import Iterable, Mapping

from nemo_offload_rl.experience.pass_at_k import powers_of_two

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
_TRUNCATION = ("is_oob_ratio",)
_AGREEMENT = ("mean_seq_mult_prob_error", "max_seq_mult_prob_error")
_DYNAMIC_SAMPLING = (
    "dynamic_sampling_batches", "dynamic_sampling_constant_groups", "filtered_reward_mean", "filtered_accuracy",
)  # fmt: skip
_SIZES = ("num_tokens", "total_tokens", "training_tokens_per_s")
_ROUTING = ("routed_token_rate", "routed_experts_mib")
_PREFERENCES = (
    "preference_loss", "sft_loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean", "rewards_margin_mean",
    "logps_chosen_mean", "logps_rejected_mean",
)  # fmt: skip

type Names = Mapping[str, tuple[str, ...]]
"""Names under `train` and under `val`."""


def grpo_names(
    *,
    group_size: int,
    val_group_size: int,
    dynamic_sampling: bool,
    scores_before_training: bool,
    truncates: bool,
    masks_by_error: bool,
    filters: bool = False,
    collects_ahead: bool = False,
    takes_finished: bool = False,
    positive_examples: bool = False,
    stops: bool = False,
    agents: bool = False,
    replays: bool = False,
) -> Names:
    """List the metrics of a GRPO run.

    Args:
        group_size: Responses to each prompt.
        val_group_size: Responses to each validation prompt.
        dynamic_sampling: The key `grpo.use_dynamic_sampling`.
        scores_before_training: There is a logprob pass.
        truncates: `loss_fn.truncated_importance_sampling_ratio` is set.
        masks_by_error: `grpo.seq_logprob_error_threshold` is set.
        filters: `grpo.rollout_filter.target` is set.
        collects_ahead: The key `grpo.async_grpo.enabled`.
        takes_finished: `grpo.async_grpo.order` is finished.
        agents: Engines serve agents.
        replays: The key `policy.router_replay.enabled`.
        stops: `grpo.rollout_stop.target` is set.
        positive_examples: `loss_fn.positive_example_nll_weight` is set.
    """
    spreads = tuple(f"{name}_{kind}" for name in ("reward", "shaped_reward", "advantage") for kind in _SPREAD)
    return {
        "train": (
            *spreads,
            *_ROLLOUTS,
            *_pass_at(group_size),
            *_UPDATE,
            *_POLICY_GRADIENT,
            *_SIZES,
            *(() if takes_finished else ("generation_tokens_per_s",)),
            *(("logprob_tokens_per_s", *_AGREEMENT) if scores_before_training else ()),
            *(("num_masked_seqs_by_logprob_error",) if masks_by_error else ()),
            *(("rollout_filter_rate",) if filters else ()),
            *(("mean_conversations",) if agents else ()),
            *(_ROUTING if replays else ()),
            *(("rollout_stop_rate",) if stops else ()),
            *(("positive_nll_loss",) if positive_examples else ()),
            *(_TRUNCATION if truncates else ()),
            *(_DYNAMIC_SAMPLING if dynamic_sampling else ()),
            *(("avg_trajectory_age", "avg_token_age", "max_token_age", "buffer_size") if collects_ahead else ()),
            *(("trained_length_mean", "sampled_length_mean") if takes_finished else ()),
            "reward_mean/<data set>",
            "accuracy/<data set>",
            "reward_part/<part>",
            "reward_extra/<name>",
        ),
        "val": _of_validation(val_group_size),
    }


def distillation_names(*, group_size: int, val_group_size: int, replays: bool = False) -> Names:
    """List the metrics of a distillation run; arguments as in `grpo_names`."""
    return {
        "train": (
            *(f"reward_{kind}" for kind in _SPREAD),
            *_ROLLOUTS,
            *_pass_at(group_size),
            *_UPDATE,
            "teacher_topk_mass", "token_mult_prob_error", "sampled_nll", "outside_nucleus_rate",
            *_SIZES,
            "generation_tokens_per_s",
            "teacher_tokens_per_s",
            *(_ROUTING if replays else ()),
            "reward_mean/<data set>",
            "accuracy/<data set>",
            "reward_part/<part>",
            "reward_extra/<name>",
        ),
        "val": _of_validation(val_group_size),
    }  # fmt: skip


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
