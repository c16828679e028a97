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
    bounded,
    sequence_mean,
    sequence_mean_share,
    token_mean_share,
    zero_where_masked,
)
from nemo_offload_rl.algorithms.settings import ClippedPGLossSettings
from nemo_offload_rl.data.batch import LossNorm, PolicyGradientBatch, TrainBatch
from nemo_offload_rl.policy.interfaces import TokenStat


@dataclass(frozen=True)
class ClippedPGLoss:
    """Policy gradient on sampled tokens, kept near the policy that sampled them and near the reference."""

    settings: ClippedPGLossSettings

    @property
    def reads_prev_logprobs(self) -> bool:
        """Whether `prev_logprobs` of a batch count; where they do not, no pass has to compute them."""
        return not self.settings.force_on_policy_ratio

    @property
    def token_stat(self) -> TokenStat:
        """See `LossFn`."""
        return TokenStat.ENTROPY

    def __call__(self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Loss and metrics of one micro-batch; see `LossFn`. `batch` has to be a `PolicyGradientBatch`."""
        assert isinstance(batch, PolicyGradientBatch), type(batch)
        mask_BS = batch.loss_mask
        terms = _Terms.of(logprobs_BS, batch, mask_BS, reads_prev=self.reads_prev_logprobs)
        ratio_BS = self._ratio(terms, mask_BS)
        clipped = self._clip(ratio_BS, batch.advantages)
        weight_BS = self._sampler_weight(terms)
        corrected_BS = clipped.loss
        if self.settings.use_importance_sampling_correction:
            corrected_BS = corrected_BS * self._truncated(weight_BS)
        actor_loss = self._mean_share(corrected_BS, mask_BS, norm)
        kl = self._mean_share(self._kl(terms), mask_BS, norm)
        loss = actor_loss + self.settings.reference_policy_kl_penalty * kl
        metrics = {
            "loss": loss,
            "actor_loss": actor_loss,
            "kl": kl,
            "probs_ratio": token_mean_share(ratio_BS, mask_BS, norm),
            **_extremes("probs_ratio", ratio_BS, mask_BS),
            "clip_fraction": token_mean_share(clipped.is_clipped.float(), mask_BS, norm),
            "dual_clip_fraction": token_mean_share(clipped.is_dual_clipped.float(), mask_BS, norm),
            **self._sampler_metrics(terms, weight_BS, mask_BS, norm),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _ratio(self, terms: _Terms, mask_BS: Tensor) -> Tensor:
        """[B, S]: probability now over probability before the step, for each token or for its whole sequence."""
        log_ratio_BS = terms.logprobs - terms.prev_logprobs
        if self.settings.sequence_level_importance_ratios:
            # The same value on every token: averaged over the sequence's tokens it gives that sequence's loss once.
            log_ratio_BS = sequence_mean(log_ratio_BS, mask_BS)[:, None].expand_as(log_ratio_BS)
        return bounded(log_ratio_BS).exp()

    def _clip(self, ratio_BS: Tensor, advantages_BS: Tensor) -> _Clipped:
        """The larger of clipped and unclipped loss, with the dual clip's bound where advantages are below 0."""
        clipped_ratio_BS = ratio_BS.clamp(1 - self.settings.ratio_clip_min, 1 + self.settings.ratio_clip_max)
        plain_BS, clipped_BS = -advantages_BS * ratio_BS, -advantages_BS * clipped_ratio_BS
        loss_BS, is_clipped_BS = torch.maximum(plain_BS, clipped_BS), clipped_BS > plain_BS
        if self.settings.ratio_clip_c is None:
            return _Clipped(loss_BS, is_clipped_BS, torch.zeros_like(is_clipped_BS))
        bound_BS = -advantages_BS * self.settings.ratio_clip_c
        is_bounded_BS = (advantages_BS < 0) & (loss_BS > bound_BS)
        return _Clipped(torch.where(is_bounded_BS, bound_BS, loss_BS), is_clipped_BS, is_bounded_BS)

    def _sampler_weight(self, terms: _Terms) -> Tensor:
        """[B, S] without gradient: the policy's over the sampler's probability, of each token or its whole sequence."""
        log_weight_BS = terms.prev_logprobs - terms.sampler_logprobs
        if self.settings.sequence_level_importance_ratios:
            log_weight_BS = log_weight_BS.sum(dim=1, keepdim=True).expand_as(log_weight_BS)
        return bounded(log_weight_BS).exp()

    def _truncated(self, weight_BS: Tensor) -> Tensor:
        bound = self.settings.truncated_importance_sampling_ratio
        return weight_BS if bound is None else weight_BS.clamp(max=bound)

    def _sampler_metrics(self, terms: _Terms, weight_BS: Tensor, mask_BS: Tensor, norm: LossNorm) -> dict[str, Tensor]:
        """What compares policy and sampler; formulas and names are NeMo-RL's. `weight_BS` is not yet truncated."""
        settings, now, prev, sampler = (
            self.settings,
            terms.logprobs.detach(),
            terms.prev_logprobs,
            terms.sampler_logprobs,
        )
        applied_mean_share = sequence_mean_share if settings.sequence_level_importance_ratios else token_mean_share
        values_BS = {
            "approx_entropy": -bounded(now - sampler).exp() * now,
            "token_mult_prob_error": bounded((prev - sampler).abs()).exp(),
            "gen_kl_error": estimate_kl(sampler, prev, estimator="k3", input_clamp=None, output_clamp=None),
        }
        if settings.truncated_importance_sampling_ratio is not None:
            values_BS["is_oob_ratio"] = (weight_BS > settings.truncated_importance_sampling_ratio).float()
        return {
            "sampling_importance_ratio": applied_mean_share(self._truncated(weight_BS), mask_BS, norm),
            **{name: token_mean_share(value_BS, mask_BS, norm) for name, value_BS in values_BS.items()},
        }

    def _kl(self, terms: _Terms) -> Tensor:
        """[B, S]: estimate of KL(policy || reference); zeros, without reading the reference, when it has no weight."""
        settings = self.settings
        if settings.reference_policy_kl_penalty == 0:
            return torch.zeros_like(terms.logprobs)
        return estimate_kl(
            terms.logprobs,
            terms.reference_logprobs,
            estimator=settings.reference_policy_kl_type,
            input_clamp=settings.kl_input_clamp_value,
            output_clamp=settings.kl_output_clamp_value,
            sampler_logprobs=terms.sampler_logprobs if settings.use_on_policy_kl_approximation else None,
        )

    def _mean_share(self, values_BS: Tensor, mask_BS: Tensor, norm: LossNorm) -> Tensor:
        if self.settings.token_level_loss:
            return token_mean_share(values_BS, mask_BS, norm)
        return sequence_mean_share(values_BS, mask_BS, norm)


@dataclass(frozen=True)
class _Clipped:
    """The policy-gradient loss of each token, [B, S], and which tokens got it from which bound."""

    loss: Tensor
    is_clipped: Tensor
    is_dual_clipped: Tensor


@dataclass(frozen=True)
class _Terms:
    """Logprobs, [B, S], 0 wherever the loss does not look.

    Without `reads_prev` the present logprobs, without gradient, stand for those before the step.
    """

    logprobs: Tensor
    prev_logprobs: Tensor
    sampler_logprobs: Tensor
    reference_logprobs: Tensor

    @staticmethod
    def of(logprobs_BS: Tensor, batch: PolicyGradientBatch, mask_BS: Tensor, *, reads_prev: bool) -> _Terms:
        now = zero_where_masked(logprobs_BS, mask_BS)
        return _Terms(
            logprobs=now,
            prev_logprobs=zero_where_masked(batch.prev_logprobs, mask_BS) if reads_prev else now.detach(),
            sampler_logprobs=zero_where_masked(batch.generation_logprobs, mask_BS),
            reference_logprobs=zero_where_masked(batch.reference_logprobs, mask_BS),
        )


def _extremes(name: str, values_BS: Tensor, mask_BS: Tensor) -> dict[str, Tensor]:
    """Least and greatest counted value; infinities, which any other micro-batch beats, when nothing is counted."""
    hidden = mask_BS == 0
    return {
        f"{name}_min": values_BS.masked_fill(hidden, float("inf")).amin(),
        f"{name}_max": values_BS.masked_fill(hidden, float("-inf")).amax(),
    }
