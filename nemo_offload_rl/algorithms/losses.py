"""Losses and their reductions: GRPO's clipped policy gradient with a KL term to a reference policy, SFT's and DPO's.

GRPO: PPO's clipped ratio (arXiv 1707.06347), asymmetric clipping (DAPO, arXiv 2503.14476), the dual clip for negative
advantages (arXiv 1912.09729), GRPO's KL term (arXiv 2402.03300), one ratio per sequence (GSPO, arXiv 2507.18071),
clipped weights on logprobs (CISPO, arXiv 2506.13585), a constant divisor (Dr. GRPO, arXiv 2503.20783), truncated or
masked weights between sampler and policy (truncated importance sampling, IcePop, seq-mask-tis, as in NeMo-RL). KL
estimators: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html, for the values; "On a few
pitfalls in KL divergence gradient estimation for RL" (arXiv 2506.09477) for the gradients; docs/reference/metrics.md
lists which quantity each estimator's value and gradient estimate.
DPO: arXiv 2305.18290, equation 7; label smoothing as in conservative DPO (E. Mitchell,
https://ericmitchell.ai/cdpo.pdf); log-ratios averaged over tokens as in NeMo-RL's `preference_average_log_probs`.
Metrics that NeMo-RL has too carry its names. Shape suffixes: B rows, S positions, P pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_offload_rl.data.batch import LossNorm, PolicyGradientBatch, PreferenceBatch, TrainBatch
from nemo_offload_rl.keys.grpo import ClippedPGLossConfig
from nemo_offload_rl.keys.supervised import DpoSectionConfig
from nemo_offload_rl.protocols.loss import ReferenceLoss, TokenStat

# As in verl: clipping and truncation act far below exp(20), and its products and squares are finite in float32.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class ClippedPGLoss(ReferenceLoss):
    """Policy gradient on sampled tokens, kept near the policy that sampled them and near the reference.

    With `top_p` or `top_k`, the policy gradient uses the distribution that tokens are drawn from, and the KL term uses
    the whole vocabulary, as in NeMo-RL. Sampled tokens outside the policy's top-k and top-p count in the KL term only
    (NeMo-RL's `curr_logprobs_keep_mask`). Token-level means still divide by them: under importance sampling they
    contribute 0, since the policy gives them probability 0.
    """

    settings: ClippedPGLossConfig

    @property
    def token_stat(self) -> TokenStat:
        return TokenStat.ENTROPY

    @property
    def reads_whole(self) -> bool:
        return self.settings.reference_policy_kl_penalty != 0

    def __call__(
        self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm, whole_logprobs_BS: Tensor | None = None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute loss and metrics of one micro-batch; see `ReferenceLoss`. `batch` must be a `PolicyGradientBatch`."""
        assert isinstance(batch, PolicyGradientBatch), type(batch)
        mask_BS = batch.loss_mask
        reads_prev = not self.settings.force_on_policy_ratio
        terms = _Terms.of(logprobs_BS, whole_logprobs_BS, batch, mask_BS, reads_prev=reads_prev)
        inside_BS = terms.mask
        ratio_BS = self._ratio(terms, inside_BS)
        clipped = self._clip(terms, ratio_BS, batch.advantages)
        weight = self._sampler_weight(terms, inside_BS)
        corrected_BS = clipped.loss
        if self.settings.use_importance_sampling_correction:
            corrected_BS = corrected_BS * weight.applied
        actor_loss = self._mean_share(corrected_BS, inside_BS, norm)
        kl = self._mean_share(self._kl(terms), mask_BS, norm)
        loss = actor_loss
        if not self.settings.use_kl_in_reward:
            loss = loss + self.settings.reference_policy_kl_penalty * kl
        positive_nll = self._positive_nll(logprobs_BS, batch, norm)
        if self.settings.positive_example_nll_weight > 0:
            loss = loss + self.settings.positive_example_nll_weight * positive_nll
        metrics = {
            "loss": loss,
            "actor_loss": actor_loss,
            "kl": kl,
            **({"positive_nll_loss": positive_nll} if self.settings.positive_example_nll_weight > 0 else {}),
            "probs_ratio": token_mean_share(ratio_BS, mask_BS, norm),
            **_extremes("probs_ratio", ratio_BS, inside_BS),
            "clip_fraction": token_mean_share(clipped.is_clipped.float(), inside_BS, norm),
            "dual_clip_fraction": token_mean_share(clipped.is_dual_clipped.float(), inside_BS, norm),
            "outside_nucleus_rate": token_mean_share(1.0 - inside_BS, mask_BS, norm),
            **self._sampler_metrics(terms, weight, mask_BS, norm),
        }
        return loss, {name: value.detach() for name, value in metrics.items()}

    def kl_in_reward(self, prev_logprobs_BS: Tensor | None, reference_logprobs_BS: Tensor | None) -> Tensor | None:
        """Return the KL to subtract from each token's reward, [B, S] (`use_kl_in_reward`); None for nothing."""
        if not self.settings.use_kl_in_reward or prev_logprobs_BS is None or reference_logprobs_BS is None:
            return None
        return self.settings.reference_policy_kl_penalty * estimate_kl(
            prev_logprobs_BS,
            reference_logprobs_BS,
            estimator=self.settings.reference_policy_kl_type,
            input_clamp=self.settings.kl_input_clamp_value,
            output_clamp=self.settings.kl_output_clamp_value,
        )

    def _positive_nll(self, logprobs_BS: Tensor, batch: PolicyGradientBatch, norm: LossNorm) -> Tensor:
        mask_BS = batch.positive_mask * is_inside(logprobs_BS)
        return -zero_where_masked(logprobs_BS, mask_BS).mul(mask_BS).sum() / max(norm.num_positive_tokens, 1.0)

    def _ratio(self, terms: _Terms, mask_BS: Tensor) -> Tensor:
        """Return probability now over probability before the step, [B, S], of each token or of its whole sequence."""
        log_ratio_BS = terms.logprobs - terms.prev_logprobs
        if self.settings.sequence_level_importance_ratios:
            # The same value on every token, so that the mean over the sequence's tokens is the sequence's loss.
            log_ratio_BS = sequence_mean(log_ratio_BS, mask_BS)[:, None].expand_as(log_ratio_BS)
        return bounded(log_ratio_BS).exp()

    def _clip(self, terms: _Terms, ratio_BS: Tensor, advantages_BS: Tensor) -> _Clipped:
        """Take the larger of clipped and unclipped loss, with the dual clip's bound for negative advantages.

        CISPO weights logprobs by the clipped ratio instead; `disable_ppo_ratio` uses no weight.
        """
        settings, nowhere_BS = self.settings, torch.zeros_like(ratio_BS, dtype=torch.bool)
        if settings.disable_ppo_ratio:
            return _Clipped(-advantages_BS * terms.logprobs, nowhere_BS, nowhere_BS)
        clipped_ratio_BS = ratio_BS.clamp(1 - settings.ratio_clip_min, 1 + settings.ratio_clip_max)
        if settings.use_cispo:
            loss_BS = -advantages_BS * clipped_ratio_BS.detach() * terms.logprobs
            return _Clipped(loss_BS, clipped_ratio_BS != ratio_BS, nowhere_BS)
        plain_BS, clipped_BS = -advantages_BS * ratio_BS, -advantages_BS * clipped_ratio_BS
        loss_BS, is_clipped_BS = torch.maximum(plain_BS, clipped_BS), clipped_BS > plain_BS
        if settings.ratio_clip_c is None:
            return _Clipped(loss_BS, is_clipped_BS, nowhere_BS)
        bound_BS = -advantages_BS * settings.ratio_clip_c
        is_bounded_BS = (advantages_BS < 0) & (loss_BS > bound_BS)
        return _Clipped(torch.where(is_bounded_BS, bound_BS, loss_BS), is_clipped_BS, is_bounded_BS)

    def _sampler_weight(self, terms: _Terms, mask_BS: Tensor) -> _Weight:
        """Return the bounded ratio of policy to sampler probability, of each token or of its whole sequence."""
        settings, log_weight_BS = self.settings, terms.prev_logprobs - terms.sampler_logprobs
        judged_BS = log_weight_BS
        if settings.sequence_level_importance_ratios:
            log_weight_BS = judged_BS = log_weight_BS.sum(dim=1, keepdim=True).expand_as(log_weight_BS)
        elif settings.truncated_importance_sampling_type == "seq-mask-tis":
            judged_BS = sequence_mean(log_weight_BS, mask_BS)[:, None].expand_as(log_weight_BS)
        weight_BS, judged_BS = bounded(log_weight_BS).exp(), bounded(judged_BS).exp()
        low, high = settings.truncated_importance_sampling_ratio_min, settings.truncated_importance_sampling_ratio
        if high is None:
            return _Weight(weight_BS, None)
        is_out_BS = (judged_BS > high) | (judged_BS < (low or 0.0))
        if settings.truncated_importance_sampling_type in (None, "tis"):
            return _Weight(weight_BS.clamp(low, high), is_out_BS)
        return _Weight(weight_BS.masked_fill(is_out_BS, 0.0), is_out_BS)

    def _sampler_metrics(self, terms: _Terms, weight: _Weight, mask_BS: Tensor, norm: LossNorm) -> dict[str, Tensor]:
        """Compare policy and sampler, under NeMo-RL's names; tokens outside the nucleus count as agreeing."""
        settings, now = self.settings, terms.logprobs.detach()
        prev, sampler = terms.prev_logprobs, terms.sampler_logprobs
        applied_mean_share = sequence_mean_share if settings.sequence_level_importance_ratios else token_mean_share
        values_BS = {
            "approx_entropy": -bounded(now - sampler).exp() * now,
            "token_mult_prob_error": bounded((prev - sampler).abs()).exp(),
            "gen_kl_error": estimate_kl(sampler, prev, estimator="k3", input_clamp=None, output_clamp=None),
        }
        metrics = {
            "sampling_importance_ratio": applied_mean_share(weight.applied, mask_BS, norm),
            **{name: token_mean_share(value_BS, mask_BS, norm) for name, value_BS in values_BS.items()},
        }
        if weight.is_out is not None:
            by_sequence = settings.truncated_importance_sampling_type == "seq-mask-tis"
            out_mean_share = sequence_mean_share if by_sequence else token_mean_share
            metrics["is_oob_ratio"] = out_mean_share(weight.is_out.float(), terms.mask, norm)
        return metrics

    def _kl(self, terms: _Terms) -> Tensor:
        """Estimate KL(policy || reference), [B, S]; zeros if its weight is 0."""
        settings = self.settings
        if settings.reference_policy_kl_penalty == 0:
            return torch.zeros_like(terms.logprobs)
        return estimate_kl(
            terms.whole_logprobs,
            terms.reference_logprobs,
            estimator=settings.reference_policy_kl_type,
            input_clamp=settings.kl_input_clamp_value,
            output_clamp=settings.kl_output_clamp_value,
            sampler_logprobs=terms.kl_sampler_logprobs if settings.use_on_policy_kl_approximation else None,
        )

    def _mean_share(self, values_BS: Tensor, mask_BS: Tensor, norm: LossNorm) -> Tensor:
        if self.settings.token_level_loss:
            return token_mean_share(values_BS, mask_BS, norm)
        if self.settings.constant_length_divisor is not None:
            return constant_mean_share(values_BS, mask_BS, norm, self.settings.constant_length_divisor)
        return sequence_mean_share(values_BS, mask_BS, norm)


@dataclass(frozen=True)
class _Weight:
    """Applied importance weights, [B, S] without gradient, and a mask of those out of bounds, if there are bounds."""

    applied: Tensor
    is_out: Tensor | None


@dataclass(frozen=True)
class _Clipped:
    """The policy-gradient loss of each token, [B, S], and masks of tokens at either bound."""

    loss: Tensor
    is_clipped: Tensor
    is_dual_clipped: Tensor


@dataclass(frozen=True)
class _Terms:
    """Logprobs, [B, S], 0 at tokens that do not count.

    Attributes:
        mask: 1 for the tokens of the policy gradient: counted ones inside the policy's nucleus both now and before the
            step.
        logprobs: The policy's, now, with gradient, over the tokens that can be drawn; 0 outside `mask`.
        prev_logprobs: The policy's before the step; if the loss does not read those, `logprobs` without gradient.
        sampler_logprobs: The engine's.
        whole_logprobs: The policy's, now, with gradient, over the whole vocabulary, at every token of the KL term.
        reference_logprobs: The reference's, at every token of the KL term.
        kl_sampler_logprobs: The engine's, at every token of the KL term.
    """

    mask: Tensor
    logprobs: Tensor
    prev_logprobs: Tensor
    sampler_logprobs: Tensor
    whole_logprobs: Tensor
    reference_logprobs: Tensor
    kl_sampler_logprobs: Tensor

    @staticmethod
    def of(
        logprobs_BS: Tensor,
        whole_logprobs_BS: Tensor | None,
        batch: PolicyGradientBatch,
        mask_BS: Tensor,
        *,
        reads_prev: bool,
    ) -> _Terms:
        inside_BS = mask_BS * is_inside(logprobs_BS)
        if reads_prev:
            inside_BS = inside_BS * is_inside(batch.prev_logprobs)
        now = zero_where_masked(logprobs_BS, inside_BS)
        kl_mask_BS = inside_BS if whole_logprobs_BS is None else mask_BS
        return _Terms(
            mask=inside_BS,
            logprobs=now,
            prev_logprobs=zero_where_masked(batch.prev_logprobs, inside_BS) if reads_prev else now.detach(),
            sampler_logprobs=zero_where_masked(batch.generation_logprobs, inside_BS),
            whole_logprobs=now if whole_logprobs_BS is None else zero_where_masked(whole_logprobs_BS, mask_BS),
            reference_logprobs=zero_where_masked(batch.reference_logprobs, kl_mask_BS),
            kl_sampler_logprobs=zero_where_masked(batch.generation_logprobs, kl_mask_BS),
        )


def _extremes(name: str, values_BS: Tensor, mask_BS: Tensor) -> dict[str, Tensor]:
    """Return the least and greatest counted value; +inf and -inf if none is, so that other micro-batches decide."""
    hidden = mask_BS == 0
    return {
        f"{name}_min": values_BS.masked_fill(hidden, float("inf")).amin(),
        f"{name}_max": values_BS.masked_fill(hidden, float("-inf")).amax(),
    }


# -- KL ----------------------------------------------------------------------------------------------------------------


def estimate_kl(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    *,
    estimator: str,
    input_clamp: float | None,
    output_clamp: float | None,
    sampler_logprobs: Tensor | None = None,
) -> Tensor:
    """Estimate KL(policy || reference) per token, in the shape of the inputs, with gradient through `logprobs`.

    With r = p_reference / p_policy at a sampled token, the value is -log r (k1), (log r)^2 / 2 (k2) or r - 1 - log r
    (k3). A trailing "+" keeps the value and takes the gradient of k2, which is the gradient of the divergence. A
    trailing "w" is NeMo-RL's variant: the estimate times p_policy / stop_gradient(p_policy), a weight of 1 that is
    differentiated too. For k1 and k3 this gives the gradient of the divergence, for k2 it does not.

    Args:
        logprobs: The policy's.
        reference_logprobs: The reference's, for the same tokens.
        estimator: "k1", "k2", "k3", "k1+", "k3+", "k1w", "k2w" or "k3w".
        input_clamp: Bound on |log r|, without gradient beyond; None for `MAX_LOG_RATIO`.
        output_clamp: Bound on the absolute value; None for no bound. Without a "+" there is no gradient beyond it.
        sampler_logprobs: The sampler's, if it was not the policy: estimates are weighted by p_policy / p_sampler.
            The weights of k1, k3 and k2w are differentiated, the weight of k2 is not.

    Raises:
        ValueError: The estimator is unknown.
    """
    difference = reference_logprobs - logprobs
    log_r = bounded(difference, MAX_LOG_RATIO if input_clamp is None else input_clamp)
    if sampler_logprobs is None and not estimator.endswith("w"):
        weight = torch.ones_like(log_r)
    else:
        weight = bounded(logprobs - (logprobs.detach() if sampler_logprobs is None else sampler_logprobs)).exp()
    k2 = weight.detach() * log_r.square() / 2
    # Beyond the clamp nothing has a gradient, the weight included.
    weight = torch.where(log_r == difference, weight, weight.detach())
    match estimator:
        case "k1" | "k1+" | "k1w":
            kl = -weight * log_r
        case "k2":
            kl = k2
        case "k2w":
            kl = weight * log_r.square() / 2
        case "k3" | "k3+" | "k3w":
            kl = weight * (log_r.exp() - 1 - log_r)
        case _:
            raise ValueError(f"unknown KL estimator {estimator!r}: known are k1, k2, k3, k1+, k3+, k1w, k2w and k3w")
    if output_clamp is not None:
        kl = kl.clamp(-output_clamp, output_clamp)
    return kl.detach() + (k2 - k2.detach()) if estimator.endswith("+") else kl


# -- reductions: from values per token to one micro-batch's share of a global mean -------------------------------------


def bounded(log_ratio: Tensor, bound: float = MAX_LOG_RATIO) -> Tensor:
    """Clamp the logarithm of a ratio of probabilities to +-`bound`, so that ratio and gradient are finite."""
    return log_ratio.clamp(-bound, bound)


def is_inside(logprobs_BS: Tensor) -> Tensor:
    """Mark tokens inside the policy's nucleus, [B, S] bool; a logprob of -inf stands for a token outside."""
    return logprobs_BS.detach() != -torch.inf


def zero_where_masked(values_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """Set values to 0 where the mask is 0, so that infinities at padding reach neither loss nor gradient."""
    return values_BS.masked_fill(mask_BS == 0, 0.0)


def token_mean_share(values_BS: Tensor, mask_BS: Tensor, norm: LossNorm) -> Tensor:
    """Divide the sum over counted tokens by their global number; 0 if there are none."""
    return zero_where_masked(values_BS, mask_BS).mul(mask_BS).sum() / max(norm.num_valid_tokens, 1.0)


def sequence_mean(values_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """Return the mean over each sequence's counted tokens, [B]; 0 for a sequence without any."""
    return zero_where_masked(values_BS, mask_BS).mul(mask_BS).sum(dim=1) / mask_BS.sum(dim=1).clamp(min=1.0)


def sequence_mean_share(values_BS: Tensor, mask_BS: Tensor, norm: LossNorm) -> Tensor:
    """Divide the sum of the sequences' means by the global number of sequences."""
    return sequence_mean(values_BS, mask_BS).sum() / max(norm.num_valid_seqs, 1.0)


def constant_mean_share(values_BS: Tensor, mask_BS: Tensor, norm: LossNorm, length: float) -> Tensor:
    """Divide each sequence's sum over counted tokens by `length`, then average over all sequences (Dr. GRPO)."""
    total = zero_where_masked(values_BS, mask_BS).mul(mask_BS).sum()
    return total / (length * max(norm.num_valid_seqs, 1.0))


# -- SFT and DPO -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NLLLoss:
    """A `LossFn`: the mean negative logprob over the counted tokens of the global batch."""

    token_stat = TokenStat.ACCURACY

    def __call__(self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute loss and metrics of one micro-batch; see `LossFn`."""
        loss = token_mean_share(-logprobs_BS, batch.loss_mask, norm)
        return loss, {"loss": loss.detach()}


@dataclass(frozen=True)
class DpoLoss:
    """A `LossFn`: the sigmoid preference loss, plus optionally the better response's negative log-likelihood."""

    settings: DpoSectionConfig

    token_stat = None

    def __call__(self, logprobs_BS: Tensor, batch: TrainBatch, norm: LossNorm) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute loss and metrics of a micro-batch of whole pairs, a `PreferenceBatch`; see `LossFn`."""
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
    """Sum the counted logprobs of each row, [B] float64.

    DPO subtracts two sums over thousands of tokens that differ only in their last digits, which needs float64.
    """
    return (zero_where_masked(logprobs_BS, batch.loss_mask) * batch.loss_mask).double().sum(dim=1)
