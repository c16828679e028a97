"""Keys of the algorithm and the tokenizer that mean another thing here, or depend on others: one function each."""

from __future__ import annotations

from nemo_offload_rl.migrate.conversion import Conversion
from nemo_offload_rl.migrate.draft import Draft

PASS_THROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_METRICS = {
    "val:val_loss": "val:loss",
    "val:validation-default_loss": "val:loss",
    "val:total_reward/mean": "val:reward",
    "train:reward": "train:reward_mean",
}


def _kl(draft: Draft) -> None:
    key = "loss_fn.reference_policy_kl_type"
    kind = draft.get(key, "k3")
    if draft.get("loss_fn.use_kl_in_reward", False):
        draft.keep(key, key, kind)  # its value alone counts
    elif kind in ("k1", "k2", "k3"):
        draft.convert(
            key, key, f"{kind}w", "the name of the estimate with the gradient of its weight, as it has it there"
        )
    else:
        draft.keep(key, key, kind)


def _kl_in_reward(draft: Draft) -> None:
    key, clamps = "loss_fn.use_kl_in_reward", ("kl_input_clamp_value", "kl_output_clamp_value")
    given = tuple(draft.get(f"loss_fn.{name}", there) for name, there in zip(clamps, (20.0, 10.0), strict=True))
    if not draft.get(key, False):
        draft.keep(key, key, False)
    elif draft.get("grpo.adv_estimator.name", "grpo") != "reinforce_plus_plus":
        draft.missing(key, "a KL without effect (use_kl_in_reward without reinforce_plus_plus)")
    elif given != (20.0, 10.0):
        draft.missing(key, "clamps of the KL that do not act on the KL in the reward")
    else:
        draft.keep(key, key, True)


def _baseline(draft: Draft) -> None:
    estimator, known = "grpo.adv_estimator.name", ("grpo", "reinforce_plus_plus")
    name = draft.get(estimator, "grpo")
    if name in known:
        draft.keep(estimator, estimator, name)
    else:
        draft.missing(estimator, f"advantage estimator {name}")
    for name in ("normalize_rewards", "use_leave_one_out_baseline"):
        inner, outer = f"grpo.adv_estimator.{name}", f"grpo.{name}"
        if draft.has(inner):
            draft.rename(inner, outer, draft.get(inner), "the estimator's value")
            if draft.has(outer):
                draft.ignore(outer, "the estimator's value is what advantages are computed with")
        else:
            draft.keep(outer, outer, draft.get(outer, True))
    if draft.get("grpo.use_dynamic_sampling") and draft.get("grpo.use_leave_one_out_baseline", True):
        draft.missing(
            "grpo.use_leave_one_out_baseline",
            "dynamic sampling that drops single responses, whose leave-one-out deviation is 0",
        )


def _dynamic_sampling(draft: Draft) -> None:
    key = "grpo.dynamic_sampling_max_gen_batches"
    if draft.get("grpo.use_dynamic_sampling") and draft.number(key) is not None:
        draft.convert(key, key, draft.number(key) + 1, "there the error comes after one batch more")


def _truncation(draft: Draft) -> None:
    weighted = draft.get("loss_fn.use_importance_sampling_correction", False)
    bounded = weighted and draft.get("loss_fn.truncated_importance_sampling_ratio") is not None
    for name in ("ratio", "type", "ratio_min"):
        key = f"loss_fn.truncated_importance_sampling_{name}"
        if draft.get(key) is not None and not bounded:
            draft.convert(key, key, None, "there are no weights to truncate")
        else:
            draft.keep(key, key, draft.get(key))


def _validation(draft: Draft) -> None:
    section = draft.algorithm
    period = f"{section}.val_period"
    if (given := draft.number(period)) is not None:
        if given < 0:
            draft.convert(period, period, 0, "0 is never")
        else:
            draft.keep(period, period, given)
    key = f"{section}.max_val_samples"
    if not draft.samples or not draft.has(key):
        return
    samples, size = draft.number(key), draft.number(f"{section}.val_batch_size")
    if samples is None or size is None:
        draft.missing(key, "validation on all prompts (max_val_samples null)")
    elif samples % size and samples > size:
        draft.convert(key, key, samples // size * size, "whole batches of val_batch_size")
    else:
        draft.keep(key, key, samples)


def _val_batches(draft: Draft) -> None:
    key = f"{draft.algorithm}.val_batches"
    if draft.has(key):
        given = draft.number(key, 0)
        if given < 0:
            draft.convert(key, key, 0, "0 is all")
        else:
            draft.keep(key, key, given)


def _metric(draft: Draft) -> None:
    key = "checkpointing.metric_name"
    if not draft.has(key):
        return
    name = draft.get(key)
    period = draft.number(f"{draft.algorithm}.val_period", 0)
    never = period <= 0 and not draft.get(f"{draft.algorithm}.val_at_end", False)
    if isinstance(name, str) and name.startswith("val:") and never:
        draft.convert(key, key, None, "nothing is validated, so the newest are kept")
    elif isinstance(name, str) and name in _METRICS:
        draft.convert(key, key, _METRICS[name], "the metric's name here")
    else:
        draft.keep(key, key, name)


def _chat_template(draft: Draft) -> None:
    key = "policy.tokenizer.chat_template"
    if not draft.has(key):
        draft.fill(key, None, "the tokenizer's own template, which is NeMo-RL's default too")
    elif draft.get(key) is None:
        draft.convert(key, key, PASS_THROUGH, "null is messages put one after the other there")
    else:
        draft.keep(key, key, draft.get(key))


def _loss_span(draft: Draft) -> None:
    """A message there is what its rendering adds; add_generation_prompt gives what stands before it to the prompt."""
    key = "data.add_generation_prompt"
    if draft.algorithm == "sft" and draft.get(key, False):
        draft.rename(key, "data.loss_span", "response_and_end", "the prompt ends where the response begins")
        return
    note = "what the template writes before a response counts too"
    if draft.has(key):
        draft.rename(key, "data.loss_span", "message", note)
    else:
        draft.fill("data.loss_span", "message", note)


_GRPO = ("grpo",)
ALGORITHM: tuple[Conversion, ...] = (
    Conversion(
        (),
        "a batch more than `dynamic_sampling_max_gen_batches` is tried",
        "that number of batches",
        _dynamic_sampling,
        _GRPO,
        ("grpo.dynamic_sampling_max_gen_batches",),
    ),
    Conversion(
        (
            "grpo.adv_estimator.name",
            "grpo.normalize_rewards",
            "grpo.use_leave_one_out_baseline",
            "grpo.adv_estimator.normalize_rewards",
            "grpo.adv_estimator.use_leave_one_out_baseline",
        ),
        "the estimator's values count for advantages, those of `grpo` for dynamic sampling",
        "one pair, the estimator's; dynamic sampling drops whole groups only",
        _baseline,
        _GRPO,
    ),
    Conversion(
        ("loss_fn.reference_policy_kl_type",),
        "estimates have a weight, whose gradient counts",
        "`k1`, `k2` and `k3` have none; those with it are `k1w`, `k2w` and `k3w`",
        _kl,
        _GRPO,
    ),
    Conversion(
        ("loss_fn.use_kl_in_reward",),
        "`reinforce_plus_plus` reads it, with clamps of its own; other estimators then have no KL at all",
        "the same for `reinforce_plus_plus`, with the clamps of the keys; refused elsewhere",
        _kl_in_reward,
        _GRPO,
    ),
    Conversion(
        (
            "loss_fn.truncated_importance_sampling_ratio",
            "loss_fn.truncated_importance_sampling_type",
            "loss_fn.truncated_importance_sampling_ratio_min",
        ),
        "are read with `use_importance_sampling_correction` only",
        "the same; null where it would not be read",
        _truncation,
        _GRPO,
    ),
    Conversion(
        (
            "grpo.val_period",
            "sft.val_period",
            "dpo.val_period",
            "distillation.val_period",
            "grpo.max_val_samples",
            "distillation.max_val_samples",
        ),
        "a period of 0 or less never validates; of `max_val_samples`, whole batches of `val_batch_size`",
        "0 never validates; `max_val_samples` is exact",
        _validation,
    ),
    Conversion(("sft.val_batches", "dpo.val_batches"), "0 or less is all", "0 is all", _val_batches, ("sft", "dpo")),
    Conversion(
        ("checkpointing.metric_name",),
        "`val:val_loss`, `val:validation-default_loss`, `val:total_reward/mean`",
        "`val:loss`, `val:loss`, `val:reward`; null where nothing is validated",
        _metric,
    ),
    Conversion(
        ("policy.tokenizer.chat_template",),
        "null: messages put one after the other; left out: the tokenizer's own",
        "null: the tokenizer's own; messages put one after the other are a template",
        _chat_template,
    ),
    Conversion(
        ("data.add_generation_prompt",),
        "false, and always in DPO: what the template writes before a response counts in the loss",
        "`data.loss_span`: `response_and_end` for true, `message` for false",
        _loss_span,
        ("sft", "dpo"),
    ),
)
