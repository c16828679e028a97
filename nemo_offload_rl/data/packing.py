"""Sequence packing: micro-batches whose rows are put end to end, as many as fit a budget of real tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nemo_offload_rl.errors import ConfigError


def pack_rows(lengths: Sequence[int], max_tokens: int, round_to: int) -> list[list[int]]:
    """Bins by modified first-fit decreasing: at most 71/60 of the fewest possible, and one.

    First-fit decreasing puts the largest row into the first bin that still holds it. Modified, rows of more than half a
    bin are paired first with those that fill their bins best: one of more than a third, else two of more than a sixth
    (Johnson and Garey, "A 71/60 theorem for bin packing", Journal of Complexity 1, 1985).

    Args:
        lengths: Tokens of each row.
        max_tokens: Budget of a bin.
        round_to: A row counts as its length rounded up to a multiple of this.

    Returns:
        Row indices by bin; every row once.

    Raises:
        ConfigError: One row alone exceeds the budget.
    """
    sizes = [-(-length // round_to) * round_to for length in lengths]
    for length, size in zip(lengths, sizes, strict=True):
        if size > max_tokens:
            raise ConfigError(
                f"A row of {length} tokens ({size} rounded up to sequence_length_round={round_to}) does not fit "
                f"a micro-batch of {max_tokens} tokens; raise policy.sequence_packing.*_mb_tokens."
            )
    rows = sorted(range(len(sizes)), key=lambda row: (-sizes[row], row))
    bins = [_Bin(max_tokens - sizes[row], [row]) for row in rows if 2 * sizes[row] > max_tokens]
    medium = [row for row in rows if max_tokens < 3 * sizes[row] and 2 * sizes[row] <= max_tokens]
    small = [row for row in rows if max_tokens < 6 * sizes[row] and 3 * sizes[row] <= max_tokens]
    tiny = [row for row in rows if 6 * sizes[row] <= max_tokens]
    alone = []
    for each in bins:
        if not each.take_largest(medium, sizes):
            alone.append(each)
    for each in reversed(alone):
        if len(small) >= 2 and sizes[small[-1]] + sizes[small[-2]] <= each.room:
            each.take(small.pop(), sizes)
            each.take_largest(small, sizes)
    rest = [*medium, *small, *tiny]
    for each in bins:
        while each.take_largest(rest, sizes):
            pass
    for row in rest:
        fitting = next((each for each in bins if each.room >= sizes[row]), None)
        if fitting is None:
            fitting = _Bin(max_tokens)
            bins.append(fitting)
        fitting.take(row, sizes)
    return [each.rows for each in bins]


@dataclass
class _Bin:
    """Tokens that are left, and the rows that are in."""

    room: int
    rows: list[int] = field(default_factory=list)

    def take(self, row: int, sizes: Sequence[int]) -> None:
        self.room -= sizes[row]
        self.rows.append(row)

    def take_largest(self, rows: list[int], sizes: Sequence[int]) -> bool:
        """Take the first of `rows`, the largest first, that fits out of them; whether there was one."""
        row = next((row for row in rows if sizes[row] <= self.room), None)
        if row is None:
            return False
        rows.remove(row)
        self.take(row, sizes)
        return True
