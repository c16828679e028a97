"""pass@k: the chance that at least one of k responses to a prompt is correct (arXiv 2107.03374, section 2.1).

cons@k: the chance that the answer most of k responses agree on is correct, as in NeMo-RL's evaluation.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations

_MOST_SUBSETS = 10_000


def powers_of_two(group_size: int) -> list[int]:
    """The k that are reported: 2, 4, 8 and so on up to the group size."""
    return [1 << power for power in range(1, group_size.bit_length())]


def pass_at_k(num_correct: Sequence[int], num_scored: Sequence[int], k: int) -> float | None:
    """Average the unbiased estimate over prompts with at least k scored responses; None if there are none.

    Args:
        num_correct: Correct responses to each prompt.
        num_scored: Scored responses to each prompt.
        k: Number of responses, at least one of them correct.
    """
    pairs = [(correct, scored) for correct, scored in zip(num_correct, num_scored, strict=True) if scored >= k]
    if not pairs:
        return None
    none_correct = sum(math.comb(scored - correct, k) / math.comb(scored, k) for correct, scored in pairs)
    return 1.0 - none_correct / len(pairs)


def cons_at_k(groups: Sequence[Sequence[tuple[str | None, bool]]], k: int) -> float | None:
    """Average over prompts the share of subsets of k responses whose most frequent answer is correct.

    Among equally frequent answers the first counts; a missing answer counts as an answer. If there are more than 10,000
    subsets, 10,000 are drawn. Prompts with fewer than k scored responses are left out; None if all are.

    Args:
        groups: For each prompt, answer and correctness of each scored response.
        k: Number of responses that vote.
    """
    shares = []
    for group in [group for group in groups if len(group) >= k]:
        votes = [_winner_is_correct([group[place] for place in places]) for places in _subsets(len(group), k)]
        shares.append(sum(votes) / len(votes))
    return sum(shares) / len(shares) if shares else None


def _subsets(size: int, k: int) -> Iterable[Sequence[int]]:
    if math.comb(size, k) <= _MOST_SUBSETS:
        return combinations(range(size), k)
    draws = random.Random(0)
    return (sorted(draws.sample(range(size), k)) for _ in range(_MOST_SUBSETS))


def _winner_is_correct(votes: Sequence[tuple[str | None, bool]]) -> bool:
    ((winner, _),) = Counter(answer for answer, _ in votes).most_common(1)
    return next(is_correct for answer, is_correct in votes if answer == winner)
