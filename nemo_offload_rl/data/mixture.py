"""Several data sets in fixed proportions, in an order that depends on the seed and the epoch's number alone.

An epoch is as many rows as all data sets have together. Each data set gives its share of them, spread evenly, and goes
on where it stopped in the epoch before: a small one is gone through several times, newly shuffled each time, before a
large one was seen once.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from nemo_offload_rl.data.records import Part


def mixture_order(parts: Sequence[Part], *, epoch: int, shuffle: bool, seed: int) -> list[int]:
    """Indices of one epoch into the rows of all parts, one part after the other.

    Args:
        parts: Sizes and weights.
        epoch: From 0.
        shuffle: False goes through each part in its order.
        seed: Of the shuffling.
    """
    counts = share_out(sum(part.num_items for part in parts), [part.weight for part in parts])
    first = [sum(part.num_items for part in parts[:index]) for index in range(len(parts))]
    streams = [
        _stream(part.num_items, start=epoch * count, shuffle=shuffle, seed=f"{seed}:{index}")
        for index, (part, count) in enumerate(zip(parts, counts, strict=True))
    ]
    return [first[source] + next(streams[source]) for source in _interleave(counts)]


def share_out(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to `weights` that add up to `total`, by largest remainder."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(counts)), key=lambda index: (counts[index] - exact[index], index))
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


def _interleave(counts: Sequence[int]) -> Iterator[int]:
    """Which part comes next, so that each is never further than about one row from its share of what came so far."""
    total = sum(counts)
    taken = [0] * len(counts)
    for position in range(1, total + 1):
        source = max(range(len(counts)), key=lambda index: counts[index] * position - taken[index] * total)
        taken[source] += 1
        yield source


def _stream(size: int, *, start: int, shuffle: bool, seed: str) -> Iterator[int]:
    """Rows of one part from the `start`-th drawn on, pass after pass."""
    passes, position = divmod(start, size)
    while True:
        order = list(range(size))
        if shuffle:
            random.Random(f"{seed}:{passes}").shuffle(order)
        yield from order[position:]
        passes, position = passes + 1, 0
