"""From values per token to one micro-batch's share of a global mean, and the bound of log-ratios.

Shape suffixes: B samples, S positions.
"""

from __future__ import annotations

from torch import Tensor

from nemo_offload_rl.data.batch import LossNorm

# As in verl. A ratio of exp(20) was clipped or truncated long before; its products and squares are finite in float32.
MAX_LOG_RATIO = 20.0


def bounded(log_ratio: Tensor, bound: float = MAX_LOG_RATIO) -> Tensor:
    """The logarithm of a ratio of probabilities within +-`bound`, constant beyond: ratio and gradient are finite."""
    return log_ratio.clamp(-bound, bound)


def zero_where_masked(values_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """Values where the mask is not 0, else 0, so that infinities at padding reach neither loss nor gradient."""
    return values_BS.masked_fill(mask_BS == 0, 0.0)


def token_mean_share(values_BS: Tensor, mask_BS: Tensor, norm: LossNorm) -> Tensor:
    """Sum over counted tokens divided by the global number of them; 0 when there are none at all."""
    return zero_where_masked(values_BS, mask_BS).mul(mask_BS).sum() / max(norm.num_valid_tokens, 1.0)


def sequence_mean(values_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """[B]: the mean over each sequence's counted tokens; 0 for a sequence without any."""
    return zero_where_masked(values_BS, mask_BS).mul(mask_BS).sum(dim=1) / mask_BS.sum(dim=1).clamp(min=1.0)


def sequence_mean_share(values_BS: Tensor, mask_BS: Tensor, norm: LossNorm) -> Tensor:
    """Mean within each sequence, then sum over sequences divided by the global number of them."""
    return sequence_mean(values_BS, mask_BS).sum() / max(norm.num_valid_seqs, 1.0)
