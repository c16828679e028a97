"""pass@k: the chance that at least one of k responses to a prompt is correct (arXiv 2107.03374, section 2.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence


def powers_of_two(group_size: int) -> list[int]:
    """2, 4, 8 and so on, as far as a group goes: the k that are reported."""
    return [1 << power for power in range(1, group_size.bit_length())]


def pass_at_k(num_correct: Sequence[int], group_size: int, k: int) -> float:
    """The unbiased estimate, averaged over prompts.

    Args:
        num_correct: Correct responses to each prompt.
        group_size: Responses to each, k or more.
        k: Responses of which one has to be correct.
    """
    none_correct = (math.comb(group_size - count, k) for count in num_correct)
    return 1.0 - sum(none_correct) / (math.comb(group_size, k) * len(num_correct))
