"""The loss of distillation: the mean divergence between student and teacher over the tokens that the student sampled.

Sources: on-policy distillation (GKD, arXiv 2306.13649; MiniLLM's reverse KL, arXiv 2306.08543). Keys and values are
those of NeMo-RL's `DistillationLossFn`; `backends/scoring/divergence.py` has the formulas. Shape suffixes: B samples, S
positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from nemo_offload_rl.algorithms.losses import bounded, is_inside, token_mean_share, zero_where_masked
from nemo_offload_rl.data.batch import DistillationBatch, LossNorm, TrainBatch
from nemo_offload_rl.keys.grpo import DistillationLossConfig
from nemo_offload_rl.protocols.loss import Divergence, DivergenceLoss, DivergenceScores


@dataclass(frozen=True)
class DistillationLoss(DivergenceLoss):
    """Mean divergence over the counted tokens of the global batch."""

    settings: DistillationLossConfig

    @property
    def divergence(self) -> Divergence:
        """See `DivergenceLoss`."""
        settings = self.settings
        weights = {"forward": 1.0, "reverse": 0.0, "mixed": settings.mixed_kl_weight}
        return Divergence(weights[settings.kl_type], settings.zero_outside_topk)

    def __call__(self, divergence_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `DivergenceLoss`."""
        loss = token_mean_share(divergence_BS, batch.loss_mask, norm)
        return loss, {"loss": loss.detach()}

    def measure(self, scores_BS: DivergenceScores, batch: TrainBatch, norm: LossNorm) -> Mapping[str, Tensor]:
        """Share of the teacher that is known; agreement of engine and student on tokens in the student's nucleus."""
        assert isinstance(batch, DistillationBatch), type(batch)
        mask_BS = batch.loss_mask
        is_inside_BS = is_inside(scores_BS.logprobs)
        gap_BS = zero_where_masked(scores_BS.logprobs - batch.generation_logprobs, mask_BS * is_inside_BS).abs()
        values_BS = {
            "teacher_topk_mass": scores_BS.teacher_mass,
            "token_mult_prob_error": bounded(gap_BS).exp(),
            "sampled_nll": -zero_where_masked(scores_BS.logprobs, is_inside_BS),
            "outside_nucleus_rate": (~is_inside_BS).float(),
        }
        return {name: token_mean_share(value_BS, mask_BS, norm) for name, value_BS in values_BS.items()}
