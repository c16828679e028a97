"""Whether engine and policy are the same model, and the message of a run that ends because they are not."""

from __future__ import annotations


def disagreement(step: int, error: float, limit: float | None) -> str | None:
    """One line on a step whose `token_mult_prob_error` is above the limit; None where it is not.

    A value that is no number is none of a disagreement: such an update is skipped and counted.

    Args:
        step: Number of the step.
        error: Mean over the step's tokens of exp |log p_engine - log p_policy|; 1 where both agree.
        limit: The key `grpo.max_token_mult_prob_error`; None for none.
    """
    if limit is None or not error > limit:
        return None
    causes = [
        "weights that were imported wrongly (policy.hf_config_overrides, rope scaling, a backend that does not support "
        "the model)",
        "weights that a refit left behind",
        "an engine of another precision (vllm_cfg.precision, kv_cache_dtype)",
    ]
    return (
        f"step {step}: engine and policy give the same tokens different probabilities (token_mult_prob_error is "
        f"{error:.4g} where 1 is agreement), above grpo.max_token_mult_prob_error={limit:g}, so training on them would "
        f"go astray; look at {', at '.join(causes)}; checkpoints of earlier steps are intact, null lifts the limit"
    )
