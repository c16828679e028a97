"""The loss against numbers computed by hand and against a formula written naively, token by token."""

import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nemo_offload_rl.algorithms.losses.clipped_pg import ClippedPGLoss
from nemo_offload_rl.algorithms.settings import ClippedPGLossSettings
from nemo_offload_rl.data.batch import LossNorm, PolicyGradientBatch

PLAIN = ClippedPGLossSettings(
    reference_policy_kl_penalty=0.0,
    reference_policy_kl_type="k3",
    kl_input_clamp_value=20.0,
    kl_output_clamp_value=10.0,
    ratio_clip_min=0.2,
    ratio_clip_max=0.2,
    ratio_clip_c=None,
    use_on_policy_kl_approximation=False,
    use_importance_sampling_correction=False,
    truncated_importance_sampling_ratio=None,
    sequence_level_importance_ratios=False,
    token_level_loss=True,
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
        advantages=torch.full((1, width), float(advantage)),
        prev_logprobs=prev,
        generation_logprobs=sampler,
        reference_logprobs=reference,
    )
    return now.requires_grad_(), batch, LossNorm(num_valid_seqs=1.0, num_valid_tokens=float(len(ratios)))


def loss_of(settings, *row):
    loss, metrics = ClippedPGLoss(settings)(*row)
    return loss.item(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [
        (2.0, 1.0, -2.0),
        (2.0, 1.5, -2.4),  # clipped at 1.2: nothing is gained by going further
        (2.0, 0.5, -1.0),  # below the range the plain term is the pessimistic one
        (-2.0, 1.5, 3.0),
        (-2.0, 0.5, 1.6),  # clipped at 0.8
    ],
)
def test_a_single_token_gives_the_clipped_term_computed_by_hand(advantage, ratio, expected):
    loss, metrics = loss_of(PLAIN, *one_row(advantage, [ratio]))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert metrics["probs_ratio"] == pytest.approx(ratio, rel=1e-5)
    assert metrics["clip_fraction"] == float(ratio != 1.0)


def test_lower_and_upper_clip_are_separate():
    settings = replace(PLAIN, ratio_clip_min=0.1, ratio_clip_max=0.4)
    assert loss_of(settings, *one_row(1.0, [3.0]))[0] == pytest.approx(-1.4, rel=1e-5)
    assert loss_of(settings, *one_row(-1.0, [0.2]))[0] == pytest.approx(0.9, rel=1e-5)


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    settings = replace(PLAIN, ratio_clip_c=3.0)
    assert loss_of(settings, *one_row(-1.0, [7.0]))[0] == pytest.approx(3.0, rel=1e-5)
    assert loss_of(settings, *one_row(-1.0, [2.0]))[0] == pytest.approx(2.0, rel=1e-5)
    assert loss_of(settings, *one_row(1.0, [7.0]))[0] == pytest.approx(-1.2, rel=1e-5)


def test_clipped_tokens_have_no_gradient_and_others_have_minus_ratio_times_advantage():
    now, batch, norm = one_row(2.0, [1.5, 1.1])
    loss, _ = ClippedPGLoss(PLAIN)(now, batch, norm)
    loss.backward()
    torch.testing.assert_close(now.grad, torch.tensor([[0.0, 0.0, -2.0 * 1.1 / 2]]))


def test_one_ratio_per_sequence_is_the_geometric_mean_of_the_tokens_ratios():
    settings = replace(PLAIN, sequence_level_importance_ratios=True, token_level_loss=False)
    row = one_row(1.0, [1.21, 1.0])
    loss, metrics = loss_of(settings, *row)
    assert metrics["probs_ratio_max"] == pytest.approx(1.1, rel=1e-5)
    assert metrics["probs_ratio_min"] == pytest.approx(1.1, rel=1e-5)
    assert loss == pytest.approx(-1.1, rel=1e-5)


def test_importance_sampling_correction_weights_tokens_by_policy_over_sampler_and_is_truncated():
    row = one_row(1.0, [1.0, 1.0], sampler_ratios=[0.5, 4.0])
    corrected = replace(PLAIN, use_importance_sampling_correction=True)
    assert loss_of(corrected, *row)[0] == pytest.approx(-(0.5 + 4.0) / 2, rel=1e-5)
    truncated = replace(corrected, truncated_importance_sampling_ratio=2.0)
    assert loss_of(truncated, *row)[0] == pytest.approx(-(0.5 + 2.0) / 2, rel=1e-5)
    sequence_level = replace(corrected, sequence_level_importance_ratios=True, token_level_loss=False)
    assert loss_of(sequence_level, *row)[0] == pytest.approx(-(0.5 * 4.0), rel=1e-5)


def test_the_kl_term_is_added_with_its_weight_and_reported_without_it():
    row = one_row(0.0, [1.0, 1.0], reference_ratios=[0.5, 2.0])
    settings = replace(PLAIN, reference_policy_kl_penalty=0.1)
    expected = ((0.5 - 1 - math.log(0.5)) + (2 - 1 - math.log(2))) / 2
    loss, metrics = loss_of(settings, *row)
    assert metrics["kl"] == pytest.approx(expected, rel=1e-5)
    assert loss == pytest.approx(0.1 * expected, rel=1e-5)


def test_the_on_policy_approximation_weights_the_kl_by_policy_now_over_sampler():
    row = one_row(0.0, [3.0], sampler_ratios=[2.0], reference_ratios=[0.5])
    settings = replace(PLAIN, reference_policy_kl_penalty=1.0, use_on_policy_kl_approximation=True)
    assert loss_of(settings, *row)[0] == pytest.approx(6.0 * (0.5 - 1 - math.log(0.5)), rel=1e-5)


def test_without_a_kl_penalty_the_reference_is_not_read():
    now, batch, norm = one_row(1.0, [1.0])
    unused = replace(batch, reference_logprobs=torch.full_like(batch.reference_logprobs, float("nan")))
    assert loss_of(PLAIN, now, unused, norm) == loss_of(PLAIN, now, batch, norm)


def test_a_forced_on_policy_ratio_is_one_in_value_and_has_the_gradient_of_reinforce():
    now, batch, norm = one_row(2.0, [5.0])
    unknown = replace(batch, prev_logprobs=torch.zeros_like(batch.prev_logprobs))
    loss, metrics = ClippedPGLoss(replace(PLAIN, force_on_policy_ratio=True))(now, unknown, norm)
    loss.backward()
    assert metrics["probs_ratio"].item() == 1.0
    assert now.grad.tolist() == [[0.0, -2.0]]


def test_sequence_level_loss_gives_every_sequence_the_same_weight():
    rows = [one_row(1.0, [1.0]), one_row(-3.0, [1.0, 1.0, 1.0])]
    settings = replace(PLAIN, token_level_loss=False)
    norm = LossNorm(num_valid_seqs=2.0, num_valid_tokens=4.0)
    shares = [loss_of(settings, now, batch, norm)[0] for now, batch, _ in rows]
    assert sum(shares) == pytest.approx((-1.0 + 3.0) / 2)
    token_level = [loss_of(PLAIN, now, batch, norm)[0] for now, batch, _ in rows]
    assert sum(token_level) == pytest.approx((-1.0 + 3 * 3.0) / 4)


def test_token_mult_prob_error_is_the_mean_of_exp_of_the_absolute_logprob_difference():
    _, metrics = loss_of(PLAIN, *one_row(1.0, [1.0, 1.0], sampler_ratios=[0.5, 1.25]))
    assert metrics["token_mult_prob_error"] == pytest.approx((2.0 + 1.25) / 2, rel=1e-5)
    assert metrics["sampling_importance_ratio"] == pytest.approx((0.5 + 1.25) / 2, rel=1e-5)
    assert metrics["approx_entropy"] == pytest.approx(-math.log(0.1), rel=1e-5)


def random_batch(seed: int, rows: int = 6, width: int = 7) -> tuple[torch.Tensor, PolicyGradientBatch, LossNorm]:
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
        advantages=noise(1.0)[:, :1].expand(rows, width),
        prev_logprobs=now + noise(0.2),
        generation_logprobs=now + noise(0.3),
        reference_logprobs=now + noise(0.5),
    )
    kept = mask * sample_mask[:, None]
    norm = LossNorm(num_valid_seqs=sample_mask.sum().item(), num_valid_tokens=kept.sum().item())
    return now.requires_grad_(), batch, norm


def naive_loss(settings: ClippedPGLossSettings, now: torch.Tensor, batch: PolicyGradientBatch) -> torch.Tensor:
    """The same loss, one token after the other, over the whole batch."""
    per_sequence = []
    for row in range(len(batch)):
        if batch.sample_mask[row] == 0:
            continue
        tokens = [t for t in range(1, now.shape[1]) if batch.token_mask[row, t] == 1]
        log_ratios = [now[row, t] - batch.prev_logprobs[row, t] for t in tokens]
        log_weights = [batch.prev_logprobs[row, t] - batch.generation_logprobs[row, t] for t in tokens]
        if settings.sequence_level_importance_ratios:
            log_ratios = [sum(log_ratios) / len(tokens)] * len(tokens)
            log_weights = [sum(log_weights)] * len(tokens)
        terms = []
        for token, log_ratio, log_weight in zip(tokens, log_ratios, log_weights, strict=True):
            ratio, advantage = log_ratio.exp(), batch.advantages[row, token]
            low, high = 1 - settings.ratio_clip_min, 1 + settings.ratio_clip_max
            term = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
            if settings.ratio_clip_c is not None and advantage < 0:
                term = min(term, -settings.ratio_clip_c * advantage)
            if settings.use_importance_sampling_correction:
                term = term * min(log_weight.exp(), settings.truncated_importance_sampling_ratio)
            log_r = batch.reference_logprobs[row, token] - now[row, token]
            kl = {"k1": -log_r, "k2": log_r**2 / 2, "k3": log_r.exp() - 1 - log_r}[settings.reference_policy_kl_type]
            if settings.use_on_policy_kl_approximation:
                kl = kl * (now[row, token] - batch.generation_logprobs[row, token]).exp().detach()
            terms.append(term + settings.reference_policy_kl_penalty * kl)
        per_sequence.append(terms)
    if settings.token_level_loss:
        return sum(sum(terms) for terms in per_sequence) / sum(len(terms) for terms in per_sequence)
    return sum(sum(terms) / len(terms) for terms in per_sequence) / len(per_sequence)


VARIANTS = st.builds(
    replace,
    st.just(PLAIN),
    reference_policy_kl_penalty=st.sampled_from([0.0, 0.3]),
    reference_policy_kl_type=st.sampled_from(["k1", "k2", "k3"]),
    ratio_clip_max=st.sampled_from([0.05, 0.28]),
    ratio_clip_c=st.sampled_from([None, 1.1]),
    use_on_policy_kl_approximation=st.booleans(),
    use_importance_sampling_correction=st.booleans(),
    truncated_importance_sampling_ratio=st.just(1.2),
    sequence_level_importance_ratios=st.booleans(),
    token_level_loss=st.booleans(),
)


@hypothesis_settings(max_examples=60, deadline=None)
@given(settings=VARIANTS, seed=st.integers(0, 1000))
def test_loss_and_gradient_equal_those_of_the_naive_formula(settings, seed):
    now, batch, norm = random_batch(seed)
    loss, _ = ClippedPGLoss(settings)(now, batch, norm)
    expected = naive_loss(settings, now, batch)
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, now)
    (expected_gradient,) = torch.autograd.grad(expected, now)
    torch.testing.assert_close(gradient, expected_gradient)


@hypothesis_settings(max_examples=40, deadline=None)
@given(settings=VARIANTS, seed=st.integers(0, 1000), cut=st.integers(1, 5))
def test_splitting_into_micro_batches_changes_neither_loss_nor_metrics_nor_gradient(settings, seed, cut):
    now, batch, norm = random_batch(seed)
    loss, metrics = ClippedPGLoss(settings)(now, batch, norm)
    (gradient,) = torch.autograd.grad(loss, now)
    parts = [
        ClippedPGLoss(settings)(now[rows], batch.select(rows), norm) for rows in (range(cut), range(cut, len(batch)))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], loss)
    (summed_gradient,) = torch.autograd.grad(parts[0][0] + parts[1][0], now)
    torch.testing.assert_close(summed_gradient, gradient)
    for name, whole in metrics.items():
        shares = torch.stack([part[1][name] for part in parts])
        reduced = shares.amin() if name.endswith("_min") else shares.amax() if name.endswith("_max") else shares.sum()
        torch.testing.assert_close(reduced, whole, msg=name)


def test_infinities_where_nothing_is_counted_reach_neither_loss_nor_gradient():
    now, batch, norm = random_batch(3)
    loss, _ = ClippedPGLoss(replace(PLAIN, reference_policy_kl_penalty=0.1))(now, batch, norm)
    hidden = (batch.token_mask * batch.sample_mask[:, None]) == 0
    spoiled = now.detach().masked_fill(hidden, float("-inf")).requires_grad_()
    same, _ = ClippedPGLoss(replace(PLAIN, reference_policy_kl_penalty=0.1))(spoiled, batch, norm)
    assert same.item() == loss.item()
    (gradient,) = torch.autograd.grad(same, spoiled)
    assert torch.isfinite(gradient).all()
    assert (gradient[hidden] == 0).all()


def test_the_loss_survives_pickling():
    assert pickle.loads(pickle.dumps(ClippedPGLoss(PLAIN))) == ClippedPGLoss(PLAIN)
