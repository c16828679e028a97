"""Checks that engine and policy agree on the same tokens, for each response and for each step.

Shape suffixes: B samples, S positions.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from nemo_offload_rl.algorithms.losses import bounded, is_inside, sequence_mean, zero_where_masked
from nemo_offload_rl.data.batch import SampledBatch

# Rounding in bfloat16 moves less than 1 % of tokens across the edge of a nucleus; old weights move a few percent.
MAX_OUTSIDE_RATE = 0.5


def without_disagreement(
    batch: SampledBatch, prev_logprobs_BS: Tensor, limit: float | None
) -> tuple[SampledBatch, Mapping[str, float]]:
    """Mask responses on which engine and policy disagree; return the batch and the step's metrics.

    The error of a response is the mean of exp |log p_engine - log p_policy| over its counted tokens in the policy's
    nucleus.

    Args:
        batch: The step's batch.
        prev_logprobs_BS: [B, S] logprobs of the policy before the step's updates; -inf outside its nucleus.
        limit: The key `grpo.seq_logprob_error_threshold`; None leaves out nothing.
    """
    mask_BS = batch.loss_mask * is_inside(prev_logprobs_BS)
    difference_BS = zero_where_masked(prev_logprobs_BS - batch.generation_logprobs, mask_BS)
    error_B = sequence_mean(bounded(difference_BS.abs()).exp(), mask_BS)
    counted_B = mask_BS.any(dim=1)
    errors = error_B[counted_B] if counted_B.any() else torch.zeros(1)
    metrics = {
        "mean_seq_mult_prob_error": errors.mean().item(),
        "max_seq_mult_prob_error": errors.max().item(),
    }
    if limit is None:
        return batch, metrics
    is_left_out_B = counted_B & (error_B > limit)
    metrics["num_masked_seqs_by_logprob_error"] = float(is_left_out_B.sum())
    return replace(batch, sample_mask=batch.sample_mask.masked_fill(is_left_out_B, 0.0)), metrics


def disagreement(
    step: int, error: float, outside_rate: float, limit: float | None, section: str = "grpo"
) -> str | None:
    """Return an error line if engine and policy disagree in a step, else None.

    They disagree if the error of tokens in the policy's nucleus is above the limit, or if most tokens are outside the
    nucleus: two unrelated models have few tokens in common to compare.

    NaN is not reported here: an update with it is skipped and counted.

    Args:
        step: Number of the step.
        error: `token_mult_prob_error`: mean of exp |log p_engine - log p_policy| over the step's tokens; tokens
            outside the nucleus count as 1.
        outside_rate: `outside_nucleus_rate`: share of tokens outside the nucleus, 0..1.
        limit: The key `max_token_mult_prob_error` of the section; None for no limit.
        section: The algorithm's section of the configuration.
    """
    if limit is None:
        return None
    error_inside = 1 + (error - 1) / (1 - outside_rate) if outside_rate < 1 else 1.0
    if error_inside > limit:
        fact = (
            f"engine and policy give the same tokens different probabilities (token_mult_prob_error is "
            f"{error_inside:.4g} where 1 is agreement), above {section}.max_token_mult_prob_error={limit:g}"
        )
    elif outside_rate > MAX_OUTSIDE_RATE:
        fact = (
            f"{outside_rate:.0%} of the tokens that the engine sampled (outside_nucleus_rate) are outside the "
            f"top_k and top_p of the policy, above {MAX_OUTSIDE_RATE:.0%}"
        )
    else:
        return None
    causes = [
        "weights that were imported wrongly (policy.hf_config_overrides, rope scaling, a backend that does not support "
        "the model)",
        "weights that a refit left behind",
        "an engine of another precision (vllm_cfg.precision, kv_cache_dtype)",
    ]
    return (
        f"step {step}: {fact}, so training on them would go astray; look at {', at '.join(causes)}; checkpoints of "
        f"earlier steps are intact, {section}.max_token_mult_prob_error=null lifts the limit"
    )
