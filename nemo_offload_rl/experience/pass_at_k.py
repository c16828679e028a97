"""pass@k: the chance that at least one of k responses to a prompt is correct (arXiv 2107.03374, section 2.1).

cons@k: the chance that the answer most of k responses agree on is correct, as in NeMo-RL's evaluation.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations

_MOST_SUBSETS = 10_000


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


def cons_at_k(groups: Sequence[Sequence[tuple[str | None, bool]]], k: int) -> float:
    """The mean over prompts of the share of subsets of k responses whose most frequent answer is correct.

    Of equally frequent answers the first counts; no answer is one too. Of more than 10,000 subsets as many are drawn.

    Args:
        groups: Of each prompt answer and correctness of each response, k or more.
        k: Responses that vote.
    """
    shares = []
    for group in groups:
        votes = [_winner_is_correct([group[place] for place in places]) for places in _subsets(len(group), k)]
        shares.append(sum(votes) / len(votes))
    return sum(shares) / len(shares)


def _subsets(size: int, k: int) -> Iterable[Sequence[int]]:
    if math.comb(size, k) <= _MOST_SUBSETS:
        return combinations(range(size), k)
    draws = random.Random(0)
    return (sorted(draws.sample(range(size), k)) for _ in range(_MOST_SUBSETS))


def _winner_is_correct(votes: Sequence[tuple[str | None, bool]]) -> bool:
    ((winner, _),) = Counter(answer for answer, _ in votes).most_common(1)
    return next(is_correct for answer, is_correct in votes if answer == winner)
