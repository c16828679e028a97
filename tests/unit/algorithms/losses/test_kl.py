import math

import pytest
import torch

from nemo_offload_rl.algorithms.losses.kl import estimate_kl

POLICY = torch.tensor([math.log(0.5), math.log(0.2)])
REFERENCE = torch.tensor([math.log(0.25), math.log(0.4)])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [math.log(2), -math.log(2)]),
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2]),
        ("k3", [0.5 - 1 + math.log(2), 2 - 1 - math.log(2)]),
    ],
)
def test_estimators_give_the_values_computed_by_hand(estimator, expected):
    kl = estimate_kl(POLICY, REFERENCE, estimator=estimator, input_clamp=None, output_clamp=None)
    torch.testing.assert_close(kl, torch.tensor(expected))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_exact_divergence(estimator):
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    reference = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    per_token = estimate_kl(policy, reference, estimator=estimator, input_clamp=None, output_clamp=None)
    expected = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="sum")
    torch.testing.assert_close((policy.exp() * per_token).sum(), expected)


def test_the_input_clamp_bounds_the_difference_and_the_output_clamp_the_estimate():
    far = torch.tensor([-50.0])
    clamped = estimate_kl(far, torch.zeros(1), estimator="k1", input_clamp=20.0, output_clamp=None)
    assert clamped.item() == -20.0
    bounded = estimate_kl(far, torch.zeros(1), estimator="k3", input_clamp=20.0, output_clamp=10.0)
    assert bounded.item() == 10.0


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k1, k2 and k3"):
        estimate_kl(POLICY, REFERENCE, estimator="k4", input_clamp=None, output_clamp=None)
