"""Batches for the clipped policy-gradient loss, and that loss in plain numbers, token after token, with its gradient.

The gradient is written down by hand: it shares with the loss neither tensors nor automatic differentiation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from nemo_offload_rl.data.batch import LossNorm, PolicyGradientBatch
from nemo_offload_rl.keys.grpo import ClippedPGLossConfig

PLAIN = ClippedPGLossConfig(
    reference_policy_kl_penalty=0.0,
    reference_policy_kl_type="k3",
    kl_input_clamp_value=20.0,
    kl_output_clamp_value=10.0,
    use_kl_in_reward=False,
    ratio_clip_min=0.2,
    ratio_clip_max=0.2,
    ratio_clip_c=None,
    use_on_policy_kl_approximation=False,
    use_importance_sampling_correction=False,
    truncated_importance_sampling_type=None,
    truncated_importance_sampling_ratio=None,
    truncated_importance_sampling_ratio_min=None,
    sequence_level_importance_ratios=False,
    token_level_loss=True,
    constant_length_divisor=None,
    use_cispo=False,
    disable_ppo_ratio=False,
    force_on_policy_ratio=False,
)


def one_row(advantage, ratios, *, sampler_ratios=None, reference_ratios=None):
    """One sequence: a prompt token, then one token for each ratio of probability now to probability before."""
    width = len(ratios) + 1
    prev = torch.full((1, width), math.log(0.1))
    now = prev + torch.tensor([[0.0, *map(math.log, ratios)]])
    sampler = prev - torch.tensor([[0.0, *map(math.log, sampler_ratios or [1.0] * len(ratios))]])
    reference = now + torch.tensor([[0.0, *map(math.log, reference_ratios or [1.0] * len(ratios))]])
    batch = PolicyGradientBatch(
        input_ids=torch.zeros((1, width), dtype=torch.int64),
        input_lengths=torch.tensor([width]),
        token_mask=torch.tensor([[0.0] + [1.0] * len(ratios)]),
        sample_mask=torch.ones(1),
        rewards=torch.ones(1),
        advantages=torch.full((1, width), float(advantage)),
        prev_logprobs=prev,
        generation_logprobs=sampler,
        reference_logprobs=reference,
    )
    return now.requires_grad_(), batch, LossNorm(num_valid_seqs=1.0, num_valid_tokens=float(len(ratios)))


def random_batch(seed: int, rows: int = 6, width: int = 7) -> tuple[torch.Tensor, PolicyGradientBatch, LossNorm]:
    """Float64 logprobs with gradient, a batch whose third sample is left out, and its counts."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn((rows, width), generator=generator, dtype=torch.float64)

    lengths = torch.randint(2, width + 1, (rows,), generator=generator)
    positions = torch.arange(width)
    mask = ((positions >= 1) & (positions < lengths[:, None])).double()
    now = -noise(1.0).abs() - 0.1
    sample_mask = torch.ones(rows, dtype=torch.float64)
    sample_mask[2] = 0.0
    batch = PolicyGradientBatch(
        input_ids=torch.zeros((rows, width), dtype=torch.int64),
        input_lengths=lengths,
        token_mask=mask,
        sample_mask=sample_mask,
        rewards=torch.arange(rows, dtype=torch.float64) % 2,
        advantages=noise(1.0)[:, :1].expand(rows, width),
        prev_logprobs=now + noise(0.2),
        generation_logprobs=now + noise(0.3),
        reference_logprobs=now + noise(1.0),
    )
    kept = mask * sample_mask[:, None]
    norm = LossNorm(sample_mask.sum().item(), kept.sum().item(), batch.num_positive_tokens())
    return now.requires_grad_(), batch, norm


@dataclass
class ByHand:
    """What the loss must give: metrics, `loss` among them, and the gradient by (row, position)."""

    metrics: dict[str, float] = field(default_factory=dict)
    gradient: dict[tuple[int, int], float] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.metrics[name] = self.metrics.get(name, 0.0) + value

    def slope(self, place: tuple[int, int], value: float) -> None:
        self.gradient[place] = self.gradient.get(place, 0.0) + value


def kl_by_hand(settings: ClippedPGLossConfig, now: float, reference: float, sampler: float) -> tuple[float, float]:
    """The estimate of one token and its derivative by `now`; the clamp of log r does not act."""
    log_r, kind = reference - now, settings.reference_policy_kl_type
    weighted = settings.use_on_policy_kl_approximation
    weight = math.exp(now - sampler) if weighted else 1.0
    value, slope = {
        "k1": (-log_r, 1.0),
        "k2": (log_r**2 / 2, -log_r),
        "k3": (math.exp(log_r) - 1 - log_r, 1.0 - math.exp(log_r)),
    }[kind.removesuffix("+")]
    if weighted and kind in ("k1", "k3"):
        slope += value  # of the weight, whose derivative is the weight itself
    value, slope, bound = weight * value, weight * slope, settings.kl_output_clamp_value
    if bound is not None and abs(value) > bound:
        value, slope = math.copysign(bound, value), 0.0
    return value, -weight * log_r if kind.endswith("+") else slope


def by_hand(settings: ClippedPGLossConfig, now: torch.Tensor, batch: PolicyGradientBatch) -> ByHand:
    """Over the whole batch, which is a global batch of its own."""
    result, beta = ByHand(), settings.reference_policy_kl_penalty
    kept = [row for row in range(len(batch)) if batch.sample_mask[row]]
    tokens = {row: [t for t in range(now.shape[1]) if batch.token_mask[row, t]] for row in kept}
    num_tokens = sum(map(len, tokens.values()))
    ratios = []
    for row in kept:
        length = len(tokens[row])
        divisor = settings.constant_length_divisor or length
        share = 1 / num_tokens if settings.token_level_loss else 1 / divisor / len(kept)
        p = {t: now[row, t].item() for t in tokens[row]}
        old = p if settings.force_on_policy_ratio else {t: batch.prev_logprobs[row, t].item() for t in p}
        sampler = {t: batch.generation_logprobs[row, t].item() for t in p}
        for t in p:
            near = tokens[row] if settings.sequence_level_importance_ratios else [t]
            ratio = math.exp(sum(p[s] - old[s] for s in near) / len(near))
            raw_weight = math.exp(sum(old[s] - sampler[s] for s in near))
            mean_weight = math.exp(sum(old[s] - sampler[s] for s in tokens[row]) / length)
            weight, is_out = weight_by_hand(settings, raw_weight, mean_weight)
            advantage = batch.advantages[row, t].item()
            term, slope, own_slope, bounded_by = policy_gradient_by_hand(settings, ratio, advantage, p[t])
            applied = weight if settings.use_importance_sampling_correction else 1.0
            for s in near:
                result.slope((row, s), share * applied * slope * ratio / len(near))
            result.slope((row, t), share * applied * own_slope)
            kl, kl_slope = kl_by_hand(settings, p[t], batch.reference_logprobs[row, t].item(), sampler[t])
            if beta == 0:
                kl, kl_slope = 0.0, 0.0
            in_loss = 0.0 if settings.use_kl_in_reward else beta
            result.slope((row, t), share * in_loss * kl_slope)
            result.add("actor_loss", share * applied * term)
            result.add("kl", share * kl)
            result.add("loss", share * (applied * term + in_loss * kl))
            per_sequence = settings.sequence_level_importance_ratios
            result.add("sampling_importance_ratio", weight / (length * len(kept) if per_sequence else num_tokens))
            result.add("probs_ratio", ratio / num_tokens)
            result.add("clip_fraction", (bounded_by == "clip") / num_tokens)
            result.add("dual_clip_fraction", (bounded_by == "dual clip") / num_tokens)
            result.add("outside_nucleus_rate", 0.0)
            result.add("approx_entropy", -math.exp(p[t] - sampler[t]) * p[t] / num_tokens)
            result.add("token_mult_prob_error", math.exp(abs(old[t] - sampler[t])) / num_tokens)
            log_r = old[t] - sampler[t]
            result.add("gen_kl_error", (math.exp(log_r) - 1 - log_r) / num_tokens)
            if settings.truncated_importance_sampling_ratio is not None:
                by_sequence = settings.truncated_importance_sampling_type == "seq-mask-tis"
                result.add("is_oob_ratio", is_out / (length * len(kept) if by_sequence else num_tokens))
            ratios.append(ratio)
    result.metrics |= {"probs_ratio_min": min(ratios), "probs_ratio_max": max(ratios)}
    return result


def weight_by_hand(settings: ClippedPGLossConfig, weight: float, mean_weight: float) -> tuple[float, bool]:
    """The importance weight of one token as it is applied, and whether its bounds act."""
    high, low = settings.truncated_importance_sampling_ratio, settings.truncated_importance_sampling_ratio_min or 0.0
    if high is None:
        return weight, False
    kind = settings.truncated_importance_sampling_type or "tis"
    of_sequence = kind == "seq-mask-tis" and not settings.sequence_level_importance_ratios
    is_out = not low <= (mean_weight if of_sequence else weight) <= high
    if kind == "tis":
        return min(max(weight, low), high), is_out
    return (0.0 if is_out else weight), is_out


def policy_gradient_by_hand(
    settings: ClippedPGLossConfig, ratio: float, advantage: float, logprob: float
) -> tuple[float, float, float, str]:
    """The term of one token, its derivatives by the ratio and by the logprob itself, and what bounds it."""
    low, high, dual = 1 - settings.ratio_clip_min, 1 + settings.ratio_clip_max, settings.ratio_clip_c
    if settings.disable_ppo_ratio:
        return -advantage * logprob, 0.0, -advantage, ""
    if settings.use_cispo:
        weight = min(max(ratio, low), high)
        return -advantage * weight * logprob, 0.0, -advantage * weight, "" if low <= ratio <= high else "clip"
    if advantage > 0 and ratio > high:
        return -advantage * high, 0.0, 0.0, "clip"
    if advantage < 0 and ratio < low:
        return -advantage * low, 0.0, 0.0, "clip"
    if advantage < 0 and dual is not None and ratio > dual:
        return -advantage * dual, 0.0, 0.0, "dual clip"
    return -advantage * ratio, -advantage, 0.0, ""
