"""Values computed by hand, and what value and gradient are in expectation, by enumerating a small vocabulary."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nemo_offload_rl.algorithms.losses import estimate_kl

POLICY = torch.tensor([math.log(0.5), math.log(0.2)])
REFERENCE = torch.tensor([math.log(0.25), math.log(0.4)])
ESTIMATORS = ["k1", "k2", "k3", "k1+", "k3+"]
NO_CLAMPS = {"input_clamp": None, "output_clamp": None}


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [math.log(2), -math.log(2)]),
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2]),
        ("k3", [0.5 - 1 + math.log(2), 2 - 1 - math.log(2)]),
        ("k1+", [math.log(2), -math.log(2)]),
        ("k3+", [0.5 - 1 + math.log(2), 2 - 1 - math.log(2)]),
    ],
)
def test_estimators_give_the_values_computed_by_hand(estimator, expected):
    kl = estimate_kl(POLICY, REFERENCE, estimator=estimator, **NO_CLAMPS)
    torch.testing.assert_close(kl, torch.tensor(expected))


# -- expectations over all tokens of a vocabulary


def distribution(seed: int, scale: float = 1.0) -> torch.Tensor:
    """Logits of seven tokens."""
    return scale * torch.randn(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum()


def gradient(value: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(value, logits)[0]


def exact(quantity: str, logits: torch.Tensor, reference: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A quantity and its gradient, of whole distributions."""
    policy = logits.log_softmax(0)
    value = {
        "nothing": 0 * policy.sum(),
        "KL(policy, reference)": divergence(policy, reference),
        "KL(reference, policy)": divergence(reference, policy),
        "half the mean square": (policy.exp() * (policy - reference).square()).sum() / 2,
    }[quantity]
    return value, gradient(value, logits)


def expectation(estimator: str, logits: torch.Tensor, reference: torch.Tensor, sampler: torch.Tensor | None, **clamps):
    """Mean value and mean gradient of the estimator, over all tokens and how often each is sampled."""
    policy = logits.log_softmax(0)
    how_often = (policy.detach() if sampler is None else sampler).exp()
    values = estimate_kl(policy, reference, estimator=estimator, sampler_logprobs=sampler, **clamps)
    value = (how_often * values).sum()
    return value, gradient(value, logits)


KL, REVERSED, SQUARE = "KL(policy, reference)", "KL(reference, policy)", "half the mean square"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("estimator", "weighted", "of_value", "of_gradient"),
    [
        ("k1", False, KL, "nothing"),
        ("k2", False, SQUARE, KL),
        ("k3", False, KL, REVERSED),
        ("k1+", False, KL, KL),
        ("k3+", False, KL, KL),
        ("k1", True, KL, KL),
        ("k2", True, SQUARE, KL),
        ("k3", True, KL, KL),
        ("k1+", True, KL, KL),
        ("k3+", True, KL, KL),
        ("k1w", False, KL, KL),
        ("k3w", False, KL, KL),
        ("k2w", False, SQUARE, SQUARE),
        ("k2w", True, SQUARE, SQUARE),
        ("k1w", True, KL, KL),
        ("k3w", True, KL, KL),
    ],
)
def test_mean_value_and_mean_gradient_are_those_that_the_documentation_says(
    estimator, weighted, of_value, of_gradient, seed
):
    logits, reference = distribution(seed).requires_grad_(), distribution(seed + 100).log_softmax(0)
    sampler = distribution(seed + 200).log_softmax(0) if weighted else None
    value, slope = expectation(estimator, logits, reference, sampler, **NO_CLAMPS)
    torch.testing.assert_close(value, exact(of_value, logits, reference)[0])
    torch.testing.assert_close(slope, exact(of_gradient, logits, reference)[1])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("estimator", ["k1+", "k3+"])
def test_the_output_clamp_bounds_the_value_and_leaves_a_straight_through_gradient_exact(estimator, weighted):
    logits, reference = distribution(0, 3.0).requires_grad_(), distribution(1, 3.0).log_softmax(0)
    sampler = distribution(2).log_softmax(0) if weighted else None
    policy = logits.log_softmax(0)
    values = estimate_kl(
        policy, reference, estimator=estimator, sampler_logprobs=sampler, input_clamp=20.0, output_clamp=0.5
    )
    assert (values.abs() == 0.5).any()
    assert values.abs().max() <= 0.5
    _, slope = expectation(estimator, logits, reference, sampler, input_clamp=20.0, output_clamp=0.5)
    torch.testing.assert_close(slope, exact(KL, logits, reference)[1])


def test_without_clamps_the_gradient_of_k3_plus_is_at_each_token_that_of_k3_weighted_by_the_policy_over_its_value():
    policy, reference = POLICY.clone().requires_grad_(), REFERENCE
    weighted = (policy - policy.detach()).exp() * estimate_kl(policy, reference, estimator="k3", **NO_CLAMPS)
    straight = estimate_kl(policy, reference, estimator="k3+", **NO_CLAMPS)
    torch.testing.assert_close(straight, weighted)
    torch.testing.assert_close(gradient(straight.sum(), policy), gradient(weighted.sum(), policy))


def nemo_rls(kind, logprobs, reference, sampler, input_clamp, output_clamp):
    """`calculate_kl` of NeMo-RL at 7ea279a with the weight that its loss gives it."""
    weight = (logprobs - (logprobs.detach() if sampler is None else sampler)).exp()
    log_r = reference - logprobs
    if input_clamp is not None:
        weight = torch.where(log_r.abs() <= input_clamp, weight, weight.detach())
        log_r = log_r.clamp(-input_clamp, input_clamp)
    kl = weight * {"k1": -log_r, "k2": log_r**2 / 2, "k3": log_r.exp() - 1 - log_r}[kind]
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)


@pytest.mark.parametrize("clamps", [(None, None), (1.5, None), (None, 0.4), (1.0, 0.3)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_w_is_nemo_rls_estimate_in_value_and_gradient_whatever_clamp_acts(kind, weighted, clamps):
    policy = distribution(0, 2.0).log_softmax(0).requires_grad_()
    reference, sampler = distribution(1).log_softmax(0), distribution(2).log_softmax(0) if weighted else None
    expected = nemo_rls(kind, policy, reference, sampler, *clamps)
    found = estimate_kl(
        policy,
        reference,
        estimator=f"{kind}w",
        input_clamp=clamps[0],
        output_clamp=clamps[1],
        sampler_logprobs=sampler,
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient(found.sum(), policy), gradient(expected.sum(), policy))


# -- clamps


def test_the_input_clamp_bounds_the_difference_and_the_output_clamp_the_estimate():
    far = torch.tensor([-50.0])
    clamped = estimate_kl(far, torch.zeros(1), estimator="k1", input_clamp=15.0, output_clamp=None)
    assert clamped.item() == -15.0
    unclamped = estimate_kl(far, torch.zeros(1), estimator="k1", **NO_CLAMPS)
    assert unclamped.item() == -20.0  # of every log-ratio
    bounded = estimate_kl(far, torch.zeros(1), estimator="k3", input_clamp=20.0, output_clamp=10.0)
    assert bounded.item() == 10.0


def test_the_output_clamp_comes_after_the_weight():
    policy, reference, sampler = torch.tensor([0.0]), torch.tensor([-4.0]), torch.tensor([-3.0])
    kl = estimate_kl(
        policy, reference, estimator="k1", input_clamp=None, output_clamp=10.0, sampler_logprobs=sampler
    )  # 4 times exp(3): above the bound, which 4 is not
    assert kl.item() == 10.0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_beyond_the_input_clamp_there_is_no_gradient_of_estimate_or_weight(estimator, weighted):
    policy = torch.tensor([-1.3, -7.0], requires_grad=True)
    sampler = torch.tensor([-1.5, -6.0]) if weighted else None
    kl = estimate_kl(
        policy, torch.zeros(2), estimator=estimator, input_clamp=5.0, output_clamp=None, sampler_logprobs=sampler
    )
    inside, beyond = gradient(kl.sum(), policy).tolist()
    assert inside != 0
    assert beyond == 0


FINITE = st.floats(-(2.0**100), 0.0, width=32) | st.floats(-60.0, 0.0, width=32)


@hypothesis_settings(max_examples=100)
@given(
    estimator=st.sampled_from(ESTIMATORS),
    logprobs=st.tuples(FINITE, FINITE, FINITE),
    weighted=st.booleans(),
    input_clamp=st.sampled_from([None, 20.0, 0.5]),
    output_clamp=st.sampled_from([None, 10.0]),
)
def test_finite_logprobs_give_a_finite_estimate_and_gradient(estimator, logprobs, weighted, input_clamp, output_clamp):
    policy, reference, sampler = (torch.tensor([value]) for value in logprobs)
    policy.requires_grad_()
    kl = estimate_kl(
        policy,
        reference,
        estimator=estimator,
        input_clamp=input_clamp,
        output_clamp=output_clamp,
        sampler_logprobs=sampler if weighted else None,
    )
    assert torch.isfinite(kl).all()
    assert torch.isfinite(gradient(kl.sum(), policy)).all()


@pytest.mark.parametrize("estimator", ["k4", "k2+", "+", ""])
def test_an_unknown_estimator_is_refused(estimator):
    with pytest.raises(ValueError, match=r"known are k1, k2, k3, k1\+, k3\+, k1w"):
        estimate_kl(POLICY, REFERENCE, estimator=estimator, **NO_CLAMPS)
