"""The loss against numbers computed by hand."""

import math
import pickle
from dataclasses import replace

import pytest
import torch
from pg_cases import PLAIN, one_row, random_batch

from nemo_offload_rl.algorithms.losses import ClippedPGLoss
from nemo_offload_rl.data.batch import LossNorm


def loss_of(settings, *row):
    loss, metrics = ClippedPGLoss(settings)(*row)
    return loss.item(), {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected", "is_clipped"),
    [
        (2.0, 1.0, -2.0, False),
        (2.0, 1.5, -2.4, True),  # clipped at 1.2: nothing is gained by going further
        (2.0, 0.5, -1.0, False),  # below the range the plain term is the pessimistic one
        (-2.0, 1.5, 3.0, False),
        (-2.0, 0.5, 1.6, True),  # clipped at 0.8
        (0.0, 1.5, 0.0, False),
    ],
)
def test_a_single_token_gives_the_clipped_term_computed_by_hand(advantage, ratio, expected, is_clipped):
    loss, metrics = loss_of(PLAIN, *one_row(advantage, [ratio]))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert metrics["probs_ratio"] == pytest.approx(ratio, rel=1e-5)
    assert metrics["clip_fraction"] == float(is_clipped)
    assert metrics["dual_clip_fraction"] == 0.0


def test_lower_and_upper_clip_are_separate():
    settings = replace(PLAIN, ratio_clip_min=0.1, ratio_clip_max=0.4)
    assert loss_of(settings, *one_row(1.0, [3.0]))[0] == pytest.approx(-1.4, rel=1e-5)
    assert loss_of(settings, *one_row(-1.0, [0.2]))[0] == pytest.approx(0.9, rel=1e-5)


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    settings = replace(PLAIN, ratio_clip_c=3.0)
    loss, metrics = loss_of(settings, *one_row(-1.0, [7.0, 2.0]))
    assert loss == pytest.approx((3.0 + 2.0) / 2, rel=1e-5)
    assert (metrics["clip_fraction"], metrics["dual_clip_fraction"]) == (0.0, 0.5)
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
    # Each token's logprob weighted by how much likelier the policy is to sample it than the engine was.
    assert metrics["approx_entropy"] == pytest.approx(-math.log(0.1) * (0.5 + 1.25) / 2, rel=1e-5)


def test_sampling_importance_ratio_is_the_mean_of_the_weights_as_they_are_applied():
    row = one_row(1.0, [1.0, 1.0], sampler_ratios=[0.5, 8.0])
    truncated = replace(PLAIN, use_importance_sampling_correction=True, truncated_importance_sampling_ratio=2.0)
    _, metrics = loss_of(truncated, *row)
    assert metrics["sampling_importance_ratio"] == pytest.approx((0.5 + 2.0) / 2, rel=1e-5)
    assert metrics["is_oob_ratio"] == 0.5
    per_response = replace(truncated, sequence_level_importance_ratios=True, token_level_loss=False)
    _, metrics = loss_of(replace(per_response, truncated_importance_sampling_ratio=None), *row)
    assert metrics["sampling_importance_ratio"] == pytest.approx(0.5 * 8.0, rel=1e-5)
    assert "is_oob_ratio" not in metrics


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
