"""Losses of supervised training: negative log-likelihood (SFT) and direct preference optimization (DPO).

Sources: DPO (arXiv 2305.18290, equation 7); label smoothing as in conservative DPO (E. Mitchell,
https://ericmitchell.ai/cdpo.pdf); log-ratios averaged over tokens as in NeMo-RL's `preference_average_log_probs`.
Metric names are NeMo-RL's where it has the same metric. Shape suffixes: B rows, S positions, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from nemo_offload_rl.algorithms.losses import token_mean_share, zero_where_masked
from nemo_offload_rl.data.batch import LossNorm, PreferenceBatch, TrainBatch
from nemo_offload_rl.keys.supervised import DpoSectionConfig
from nemo_offload_rl.protocols.loss import TokenStat


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


@dataclass(frozen=True)
class DpoLoss:
    """Sigmoid preference loss, plus on demand the negative log-likelihood of the better response."""

    settings: DpoSectionConfig

    @property
    def token_stat(self) -> None:
        """See `LossFn`."""
        return None

    def __call__(self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Loss and metrics of one micro-batch of whole pairs; see `LossFn`. `batch` has to be a `PreferenceBatch`."""
        assert isinstance(batch, PreferenceBatch), type(batch)
        settings = self.settings
        sums_B, counts_B = counted_sums(logprobs_BS, batch), batch.loss_mask.sum(dim=1).clamp(min=1.0)
        ratio_B = sums_B - batch.reference_sums * batch.sample_mask
        if settings.preference_average_log_probs:
            ratio_B = ratio_B / counts_B
        chosen_P, rejected_P = (settings.reference_policy_kl_penalty * ratio_B).view(-1, 2).unbind(dim=1)
        margin_P = chosen_P - rejected_P
        preference_P = -(1 - settings.label_smoothing) * F.logsigmoid(margin_P)
        preference_P = preference_P - settings.label_smoothing * F.logsigmoid(-margin_P)
        sft_P = -(sums_B / counts_B if settings.sft_average_log_probs else sums_B).view(-1, 2)[:, 0]

        sums_P2, is_kept_P = sums_B.view(-1, 2), batch.sample_mask.view(-1, 2)[:, 0]

        def share(values_P: Tensor) -> Tensor:
            return (values_P * is_kept_P).sum() / max(norm.num_valid_seqs / 2, 1.0)

        preference_loss, sft_loss = share(preference_P), share(sft_P)
        loss = settings.preference_loss_weight * preference_loss
        if settings.sft_loss_weight > 0:
            loss = loss + settings.sft_loss_weight * sft_loss
        metrics = {
            "loss": loss,
            "preference_loss": preference_loss,
            "sft_loss": sft_loss,
            "accuracy": share((margin_P > 0).double()),
            "rewards_chosen_mean": share(chosen_P),
            "rewards_rejected_mean": share(rejected_P),
            "rewards_margin_mean": share(margin_P),
            "logps_chosen_mean": share(sums_P2[:, 0]),
            "logps_rejected_mean": share(sums_P2[:, 1]),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}


def counted_sums(logprobs_BS: Tensor, batch: TrainBatch) -> Tensor:
    """[B] float64: the sum of the counted logprobs.

    DPO subtracts two sums over thousands of tokens that differ in their last digits only, which needs float64.
    """
    return (zero_where_masked(logprobs_BS, batch.loss_mask) * batch.loss_mask).double().sum(dim=1)
