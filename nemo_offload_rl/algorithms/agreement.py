"""Whether engine and policy are the same model: of a response, and the message of a run that ends because they are not.

Shape suffixes: B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from nemo_offload_rl.algorithms.losses import bounded, sequence_mean, zero_where_masked
from nemo_offload_rl.data.collate import SampledBatch


def without_disagreement(
    batch: SampledBatch, prev_logprobs_BS: Tensor, limit: float | None
) -> tuple[SampledBatch, Mapping[str, float]]:
    """Leave responses out of the loss about which engine and policy disagree; the batch, and the step's metrics.

    The error of a response is the mean over its counted tokens of exp |log p_engine - log p_policy|.

    Args:
        batch: Of the step.
        prev_logprobs_BS: [B, S] of the policy before the step's updates.
        limit: The key `grpo.seq_logprob_error_threshold`; None leaves out nothing.
    """
    mask_BS = batch.loss_mask
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
