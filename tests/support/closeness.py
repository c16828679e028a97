"""How close two float32 results must be that were computed in another order.

Kernels differ between processors (vector widths, fused multiply-add, blocking), so each adds up in another order. The
bound is the probabilistic one of Higham and Mary ("A new approach to probabilistic rounding error analysis", SIAM J.
Sci. Comput. 41, 2019): a sum of n terms has a relative error of at most `8 sqrt(n) u`, u = 2**-24, but for a
probability below 1e-13, and each of the two sides may have it. It is relative to the norm of the whole tensor: an
element that is nearly 0 because large terms cancel has the rounding errors of those terms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

UNIT_ROUNDOFF = 2.0**-24
# The tiny models of these tests: two layers of sums over 32 to 128 channels, 384 tokens of vocabulary, up to 350 tokens
# of a batch, there and back again.
NUM_TERMS = 4096


def relative_bound(num_terms: int = NUM_TERMS) -> float:
    """The largest relative difference of two float32 results that add up `num_terms` terms in any order."""
    return 2 * 8 * math.sqrt(num_terms) * UNIT_ROUNDOFF


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference by that of `expected`; 0 if both are all zeros."""
    difference, size = (found.double() - expected.double()).norm().item(), expected.double().norm().item()
    if difference == 0:
        return 0.0
    return difference / size if size else math.inf


def assert_close(found: Any, expected: Any, *, num_terms: int = NUM_TERMS, name: str = "") -> None:
    """Tensors, numbers, or sequences and mappings of them, differ by no more than roundings; NaN never passes."""
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), name
        for key in expected:
            assert_close(found[key], expected[key], num_terms=num_terms, name=f"{name}{key} ")
    elif isinstance(expected, Sequence):
        assert len(found) == len(expected), name
        for place, value in enumerate(expected):
            assert_close(found[place], value, num_terms=num_terms, name=f"{name}[{place}] ")
    else:
        found, expected = torch.as_tensor(found).detach(), torch.as_tensor(expected).detach()
        assert found.shape == expected.shape, f"{name}{tuple(found.shape)} instead of {tuple(expected.shape)}"
        differs, bound = relative_difference(found, expected), relative_bound(num_terms)
        assert differs <= bound, f"{name}differs by {differs:.2e} of its norm, more than {bound:.2e}"
