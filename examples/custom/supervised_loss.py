"""Losses of one's own for SFT and DPO: `loss_fn.target`."""

from __future__ import annotations

from torch import Tensor

from nemo_offload_rl import LossNorm, PreferenceBatch, TrainBatch, token_mean_share


def bounded_nll(logprobs: Tensor, batch: TrainBatch, norm: LossNorm, floor: float = -5.0) -> Tensor:
    """SFT that does not insist on tokens that the model finds absurd: below `floor` they have no gradient."""
    return token_mean_share(-logprobs.clamp(min=floor), batch.loss_mask, norm)


def ipo(logprobs: Tensor, batch: PreferenceBatch, norm: LossNorm, beta: float = 0.1) -> Tensor:
    """Identity preference optimization (arXiv 2310.12036, equation 17): the margin is to be 1 / (2 beta), not more."""
    sums = (logprobs * batch.loss_mask).sum(dim=1) - batch.reference_sums
    chosen, rejected = sums.view(-1, 2).unbind(dim=1)
    kept = batch.sample_mask.view(-1, 2)[:, 0]
    return ((chosen - rejected - 1 / (2 * beta)).square() * kept).sum() / max(norm.num_valid_seqs / 2, 1.0)
