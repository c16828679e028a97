"""The bound of `closeness.py` takes every order of adding up, and nothing that is wrong."""

import math

import pytest
import torch
from closeness import assert_close, relative_bound, relative_difference
from hypothesis import given
from hypothesis import strategies as st


@given(seed=st.integers(0, 2**31), num_terms=st.integers(2, 4096), parts=st.integers(1, 64))
def test_a_sum_in_another_order_is_close(seed, num_terms, parts):
    generator = torch.Generator().manual_seed(seed)
    terms = torch.rand(num_terms, generator=generator)
    one_by_one = torch.zeros(())
    for chunk in terms[torch.randperm(num_terms, generator=generator)].chunk(parts):
        one_by_one = one_by_one + chunk.cumsum(0)[-1]
    assert relative_difference(one_by_one, terms.double().sum()) <= relative_bound(num_terms)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_what_is_not_rounding_is_refused_at_any_scale(scale):
    expected = scale * torch.randn(1024, generator=torch.Generator().manual_seed(0))
    assert_close({"weight": [expected + 1e-6 * expected.roll(1)]}, {"weight": [expected]})
    one_wrong = expected.clone()
    one_wrong[7] *= 1.1
    without = torch.where(torch.arange(1024) == 7, math.nan, expected)
    for wrong in (one_wrong, without, expected.bfloat16(), expected.roll(1), 1.001 * expected, expected[:-1]):
        with pytest.raises(AssertionError, match=r"weight \[0\]"):
            assert_close({"weight": [wrong]}, {"weight": [expected]})


def test_zeros_are_close_to_zeros_only():
    assert_close(torch.zeros(3), torch.zeros(3))
    with pytest.raises(AssertionError, match="inf"):
        assert_close(torch.tensor([0.0, 1e-30]), torch.zeros(2))
