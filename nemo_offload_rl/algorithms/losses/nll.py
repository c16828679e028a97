"""Negative log-likelihood: the loss of SFT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from nemo_offload_rl.algorithms.losses.reduce import token_mean_share
from nemo_offload_rl.data.batch import LossNorm, TrainBatch
from nemo_offload_rl.policy.interfaces import TokenStat


@dataclass(frozen=True)
class NLLLoss:
    """Mean of minus the logprob over the counted tokens of the global batch."""

    @property
    def token_stat(self) -> TokenStat:
        """See `LossFn`."""
        return TokenStat.ACCURACY

    def __call__(self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Loss and metrics of one micro-batch; see `LossFn`."""
        loss = token_mean_share(-logprobs_BS, batch.loss_mask, norm)
        return loss, {"loss": loss.detach()}
