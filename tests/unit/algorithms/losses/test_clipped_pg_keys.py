"""Every combination of the loss's keys against the loss in plain numbers, and what must hold for all of them."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from pg_cases import PLAIN, by_hand, random_batch

from nemo_offload_rl.algorithms.losses import ClippedPGLoss
from nemo_offload_rl.data.batch import LossNorm, PolicyGradientBatch

KEYS = {
    "reference_policy_kl_type": ["k1", "k2", "k3", "k1+", "k3+"],
    "sequence_level_importance_ratios": [False, True],
    "reference_policy_kl_penalty": [0.0, 0.3],
    "use_on_policy_kl_approximation": [False, True],
    "use_importance_sampling_correction": [False, True],
    "truncated_importance_sampling_ratio": [None, 1.2],
    "ratio_clip_c": [None, 1.1],
    "token_level_loss": [False, True],
    "force_on_policy_ratio": [False, True],
    "ratio_clip_max": [0.05, 0.28],
    "kl_output_clamp_value": [None, 0.5],
    "use_kl_in_reward": [False, True],
    "truncated_importance_sampling_type": [None, "tis", "icepop", "seq-mask-tis"],
    "truncated_importance_sampling_ratio_min": [None, 0.9],
    "constant_length_divisor": [None, 11],
    "use_cispo": [False, True, False],
    "disable_ppo_ratio": [False, False, True],
}
WHOLE_PRODUCT = 7  # of the keys after the first two; the others take turns
MATRIX = list(itertools.product(KEYS["reference_policy_kl_type"], KEYS["sequence_level_importance_ratios"]))
VARIANTS = st.builds(replace, st.just(PLAIN), **{key: st.sampled_from(values) for key, values in KEYS.items()})


@pytest.mark.parametrize(("kl_type", "sequence_level"), MATRIX)
def test_loss_gradient_and_every_metric_equal_those_in_plain_numbers_for_all_combinations_of_keys(
    kl_type, sequence_level
):
    now, batch, norm = random_batch(MATRIX.index((kl_type, sequence_level)))
    others = dict(itertools.islice(KEYS.items(), 2, 2 + WHOLE_PRODUCT))
    taking_turns = dict(itertools.islice(KEYS.items(), 2 + WHOLE_PRODUCT, None))
    draws = random.Random(MATRIX.index((kl_type, sequence_level)))
    for values in itertools.product(*others.values()):
        settings = replace(
            PLAIN,
            reference_policy_kl_type=kl_type,
            sequence_level_importance_ratios=sequence_level,
            **dict(zip(others, values, strict=True)),
            **{key: draws.choice(known) for key, known in taking_turns.items()},
        )
        loss, metrics = ClippedPGLoss(settings)(now, batch, norm)
        expected = by_hand(settings, now, batch)
        assert {name: value.item() for name, value in metrics.items()} == pytest.approx(expected.metrics), settings
        assert loss.item() == pytest.approx(expected.metrics["loss"]), settings
        (gradient,) = torch.autograd.grad(loss, now)
        slopes = torch.zeros_like(gradient)
        for place, slope in expected.gradient.items():
            slopes[place] = slope
        torch.testing.assert_close(gradient, slopes, msg=str(settings))


@hypothesis_settings(max_examples=40)
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


# -- finite for whatever is finite

LOGPROBS = st.floats(-(2.0**100), 0.0, width=32) | st.floats(-100.0, 0.0, width=32) | st.just(-200.0)
ADVANTAGES = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1.0, -1.0])
ROWS, WIDTH = 2, 4


def table(elements: st.SearchStrategy[float]) -> st.SearchStrategy[torch.Tensor]:
    row = st.lists(elements, min_size=WIDTH, max_size=WIDTH)
    return st.lists(row, min_size=ROWS, max_size=ROWS).map(lambda rows: torch.tensor(rows, dtype=torch.float32))


@st.composite
def extreme_batches(draw) -> tuple[torch.Tensor, PolicyGradientBatch, LossNorm]:
    mask = draw(table(st.sampled_from([0.0, 1.0])))
    mask[:, 0] = 0
    sample_mask = torch.tensor(draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=ROWS, max_size=ROWS)))
    advantages = torch.tensor(draw(st.lists(ADVANTAGES, min_size=ROWS, max_size=ROWS)), dtype=torch.float32)
    batch = PolicyGradientBatch(
        input_ids=torch.zeros((ROWS, WIDTH), dtype=torch.int64),
        input_lengths=torch.full((ROWS,), WIDTH),
        token_mask=mask,
        sample_mask=sample_mask,
        rewards=torch.ones(ROWS),
        advantages=advantages[:, None].expand(ROWS, WIDTH),
        prev_logprobs=draw(table(LOGPROBS)),
        generation_logprobs=draw(table(LOGPROBS)),
        reference_logprobs=draw(table(LOGPROBS)),
    )
    norm = LossNorm(num_valid_seqs=sample_mask.sum().item(), num_valid_tokens=batch.loss_mask.sum().item())
    return draw(table(LOGPROBS)), batch, norm


@hypothesis_settings(max_examples=100)
@given(settings=VARIANTS, given_batch=extreme_batches())
def test_finite_logprobs_give_a_finite_loss_and_gradient_whatever_the_masks_and_ratios(settings, given_batch):
    now, batch, norm = given_batch
    now.requires_grad_()
    loss, _ = ClippedPGLoss(settings)(now, batch, norm)
    # Without a ratio of its own the loss is a multiple of the logprobs, which may be as large as a number can be.
    assert math.isfinite(loss.item()) or settings.use_cispo or settings.disable_ppo_ratio
    (gradient,) = torch.autograd.grad(loss, now)
    assert torch.isfinite(gradient).all()
    assert not gradient[batch.loss_mask == 0].any()


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_an_overflowing_ratio_is_bounded_where_a_product_with_zero_would_be_nan(advantage):
    now, batch, norm = random_batch(0)
    now = now.detach().float().requires_grad_()
    far = replace(
        batch, prev_logprobs=now.detach() - 300, generation_logprobs=now.detach() - 900,
        advantages=torch.full_like(now.detach(), advantage),
    )  # fmt: skip
    for sequence_level in (False, True):
        settings = replace(
            PLAIN, use_importance_sampling_correction=True, sequence_level_importance_ratios=sequence_level
        )
        loss, metrics = ClippedPGLoss(settings)(now, far, norm)
        (gradient,) = torch.autograd.grad(loss, now)
        assert math.isfinite(loss.item())
        assert torch.isfinite(gradient).all()
        assert metrics["probs_ratio"].item() == pytest.approx(math.exp(20), rel=1e-5)
        assert metrics["sampling_importance_ratio"].item() == pytest.approx(math.exp(20), rel=1e-5)


# -- tokens outside the policy's nucleus

OUTSIDE = {"now": [(0, 1), (4, 2)], "before": [(1, 1), (4, 1)]}


def with_outside(now, batch):
    """Some counted tokens that the policy's nucleus leaves out now, or left out before the step."""
    now, prev = now.detach().clone(), batch.prev_logprobs.clone()
    for place in OUTSIDE["now"]:
        now[place] = -math.inf
    for place in OUTSIDE["before"]:
        prev[place] = -math.inf
    return now.requires_grad_(), replace(batch, prev_logprobs=prev)


@hypothesis_settings(max_examples=60)
@given(settings=VARIANTS, seed=st.integers(0, 1000))
def test_tokens_outside_the_nucleus_change_no_actor_term_ratio_weight_mask_or_comparison(settings, seed):
    settings = replace(settings, reference_policy_kl_penalty=0.0)
    now, batch, norm = random_batch(seed)
    prev_counts = not settings.force_on_policy_ratio
    places = OUTSIDE["now"] + (OUTSIDE["before"] if prev_counts else [])
    rest = batch.token_mask.clone()
    for place in places:
        rest[place] = 0
    num_outside = batch.loss_mask.sum().item() - (rest * batch.sample_mask[:, None]).sum().item()
    expected_loss, expected = ClippedPGLoss(settings)(now, replace(batch, token_mask=rest), norm)
    (expected_gradient,) = torch.autograd.grad(expected_loss, now)

    outside_now, outside_batch = with_outside(now, batch)
    loss, metrics = ClippedPGLoss(settings)(outside_now, outside_batch, norm)
    (gradient,) = torch.autograd.grad(loss, outside_now)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradient, expected_gradient)
    share = num_outside / norm.num_valid_tokens
    assert metrics["outside_nucleus_rate"].item() == pytest.approx(share)
    ones = {"probs_ratio", "sampling_importance_ratio", "token_mult_prob_error"}  # where each of them counts as 1
    if settings.sequence_level_importance_ratios:
        ones = {"token_mult_prob_error"}
    if settings.truncated_importance_sampling_type == "seq-mask-tis":
        ones -= {"sampling_importance_ratio"}  # a response that is masked counts as 0, all of its tokens
    for name in expected.keys() - {"outside_nucleus_rate", "probs_ratio", "sampling_importance_ratio"} | ones:
        wanted = expected[name] + (share if name in ones else 0.0)
        torch.testing.assert_close(metrics[name], wanted, msg=name)


@pytest.mark.parametrize("approximates", [False, True])
def test_the_kl_with_the_reference_keeps_tokens_outside_the_nucleus(approximates):
    settings = replace(PLAIN, reference_policy_kl_penalty=0.3, use_on_policy_kl_approximation=approximates)
    now, batch, norm = random_batch(3)
    whole = (now.detach() - 0.1).requires_grad_()
    outside_now, outside_batch = with_outside(now, batch)
    _, plain = ClippedPGLoss(settings)(now, batch, norm, whole)
    _, found = ClippedPGLoss(settings)(outside_now, outside_batch, norm, whole)
    assert found["outside_nucleus_rate"] > 0
    torch.testing.assert_close(found["kl"], plain["kl"])
    gradients = [
        torch.autograd.grad(ClippedPGLoss(settings)(given, made, norm, whole)[0], whole)[0]
        for given, made in ((now, batch), (outside_now, outside_batch))
    ]
    torch.testing.assert_close(gradients[1], gradients[0])
    counted = [place for places in OUTSIDE.values() for place in places if batch.loss_mask[place]]
    assert len(counted) > 2 and all(gradients[1][place] != 0 for place in counted)
