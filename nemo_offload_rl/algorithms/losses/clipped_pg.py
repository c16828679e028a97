"""The clipped policy-gradient loss with a KL term to a reference policy.

Sources: PPO's clipped ratio (arXiv 1707.06347), asymmetric clipping (DAPO, arXiv 2503.14476), the dual clip for
negative advantages (arXiv 1912.09729), GRPO's KL term (arXiv 2402.03300), one ratio per sequence (GSPO, arXiv
2507.18071).
Metric names are NeMo-RL's where it has the same metric. Shape suffixes: B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_offload_rl.algorithms.losses.kl import estimate_kl
from nemo_offload_rl.algorithms.losses.reduce import (
    sequence_mean,
    sequence_mean_share,
    token_mean_share,
    zero_where_masked,
)
from nemo_offload_rl.algorithms.settings import ClippedPGLossSettings
from nemo_offload_rl.data.batch import LossNorm, PolicyGradientBatch, TrainBatch


@dataclass(frozen=True)
class ClippedPGLoss:
    """Policy gradient on sampled tokens, kept near the policy that sampled them and near the reference."""

    settings: ClippedPGLossSettings

    @property
    def reads_prev_logprobs(self) -> bool:
        """Whether `prev_logprobs` of a batch count; where they do not, no pass has to compute them."""
        return not self.settings.force_on_policy_ratio

    def __call__(self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Loss and metrics of one micro-batch; see `LossFn`. `batch` has to be a `PolicyGradientBatch`."""
        assert isinstance(batch, PolicyGradientBatch), type(batch)
        mask_BS = batch.loss_mask
        terms = _Terms.of(logprobs_BS, batch, mask_BS, reads_prev=self.reads_prev_logprobs)
        ratio_BS = self._ratio(terms, mask_BS)
        clipped_BS = ratio_BS.clamp(1 - self.settings.ratio_clip_min, 1 + self.settings.ratio_clip_max)
        sampler_weight_BS = self._sampler_weight(terms, mask_BS)
        actor_BS = sampler_weight_BS * self._pessimistic(ratio_BS, clipped_BS, batch.advantages)
        kl_BS = self._kl(terms)

        actor_loss = self._mean_share(actor_BS, mask_BS, norm)
        kl = self._mean_share(kl_BS, mask_BS, norm)
        loss = actor_loss + self.settings.reference_policy_kl_penalty * kl
        metrics = {
            "loss": loss,
            "actor_loss": actor_loss,
            "kl": kl,
            "probs_ratio": token_mean_share(ratio_BS, mask_BS, norm),
            "clip_fraction": token_mean_share((ratio_BS != clipped_BS).float(), mask_BS, norm),
            "sampling_importance_ratio": token_mean_share(terms.prev_over_sampler.exp(), mask_BS, norm),
            "approx_entropy": token_mean_share(-terms.logprobs, mask_BS, norm),
            "token_mult_prob_error": token_mean_share(terms.prev_over_sampler.abs().exp(), mask_BS, norm),
            **_extremes("probs_ratio", ratio_BS, mask_BS),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _ratio(self, terms: _Terms, mask_BS: Tensor) -> Tensor:
        """[B, S]: probability now over probability before the step, for each token or for its whole sequence."""
        log_ratio_BS = terms.now_over_prev
        if self.settings.sequence_level_importance_ratios:
            # The same value on every token: averaged over the sequence's tokens it gives that sequence's loss once.
            log_ratio_BS = sequence_mean(log_ratio_BS, mask_BS)[:, None].expand_as(log_ratio_BS)
        return log_ratio_BS.exp()

    def _pessimistic(self, ratio_BS: Tensor, clipped_BS: Tensor, advantages_BS: Tensor) -> Tensor:
        """[B, S]: the larger of clipped and unclipped loss, with the dual clip's bound where advantages are < 0."""
        loss_BS = torch.maximum(-advantages_BS * ratio_BS, -advantages_BS * clipped_BS)
        if self.settings.ratio_clip_c is None:
            return loss_BS
        bounded_BS = torch.minimum(loss_BS, -advantages_BS * self.settings.ratio_clip_c)
        return torch.where(advantages_BS < 0, bounded_BS, loss_BS)

    def _sampler_weight(self, terms: _Terms, mask_BS: Tensor) -> Tensor:
        """[B, S] without gradient: the policy's over the sampler's probability, truncated; ones when switched off."""
        if not self.settings.use_importance_sampling_correction:
            return torch.ones_like(mask_BS)
        log_weight_BS = terms.prev_over_sampler
        if self.settings.sequence_level_importance_ratios:
            log_weight_BS = log_weight_BS.sum(dim=1, keepdim=True).expand_as(log_weight_BS)
        weight_BS = log_weight_BS.exp()
        bound = self.settings.truncated_importance_sampling_ratio
        return weight_BS if bound is None else weight_BS.clamp(max=bound)

    def _kl(self, terms: _Terms) -> Tensor:
        """[B, S]: estimate of KL(policy || reference); zeros, without reading the reference, when it has no weight."""
        if self.settings.reference_policy_kl_penalty == 0:
            return torch.zeros_like(terms.logprobs)
        kl_BS = estimate_kl(
            terms.logprobs,
            terms.reference_logprobs,
            estimator=self.settings.reference_policy_kl_type,
            input_clamp=self.settings.kl_input_clamp_value,
            output_clamp=self.settings.kl_output_clamp_value,
        )
        if self.settings.use_on_policy_kl_approximation:
            kl_BS = kl_BS * terms.now_over_sampler.detach().exp()
        return kl_BS

    def _mean_share(self, values_BS: Tensor, mask_BS: Tensor, norm: LossNorm) -> Tensor:
        if self.settings.token_level_loss:
            return token_mean_share(values_BS, mask_BS, norm)
        return sequence_mean_share(values_BS, mask_BS, norm)


@dataclass(frozen=True)
class _Terms:
    """Logprobs and their differences, [B, S], 0 wherever the loss does not look.

    Without `reads_prev` the present logprobs, without gradient, stand for those before the step.
    """

    logprobs: Tensor
    reference_logprobs: Tensor
    now_over_prev: Tensor
    now_over_sampler: Tensor
    prev_over_sampler: Tensor

    @staticmethod
    def of(logprobs_BS: Tensor, batch: PolicyGradientBatch, mask_BS: Tensor, *, reads_prev: bool) -> _Terms:
        now = zero_where_masked(logprobs_BS, mask_BS)
        prev = zero_where_masked(batch.prev_logprobs, mask_BS) if reads_prev else now.detach()
        sampler = zero_where_masked(batch.generation_logprobs, mask_BS)
        return _Terms(
            logprobs=now,
            reference_logprobs=zero_where_masked(batch.reference_logprobs, mask_BS),
            now_over_prev=now - prev,
            now_over_sampler=now - sampler,
            prev_over_sampler=prev - sampler,
        )


def _extremes(name: str, values_BS: Tensor, mask_BS: Tensor) -> dict[str, Tensor]:
    """Least and greatest counted value; infinities, which any other micro-batch beats, when nothing is counted."""
    hidden = mask_BS == 0
    return {
        f"{name}_min": values_BS.masked_fill(hidden, float("inf")).amin(),
        f"{name}_max": values_BS.masked_fill(hidden, float("-inf")).amax(),
    }
