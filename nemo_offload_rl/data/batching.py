"""Micro-batches of at most so many tokens: rows put end to end (packing), or padded rows of like length."""

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
    sizes = _rounded_lengths(lengths, max_tokens, round_to, "sequence_packing")
    rows = sorted(range(len(sizes)), key=lambda row: (-sizes[row], row))
    bins = [_Bin(max_tokens - sizes[row], [row]) for row in rows if 2 * sizes[row] > max_tokens]
    medium = [row for row in rows if max_tokens < 3 * sizes[row] and 2 * sizes[row] <= max_tokens]
    small = [row for row in rows if max_tokens < 6 * sizes[row] and 3 * sizes[row] <= max_tokens]
    tiny = [row for row in rows if 6 * sizes[row] <= max_tokens]
    alone = [each for each in bins if not each.take_largest(medium, sizes)]
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
    """Tokens that still fit, and the rows that are in."""

    room: int
    rows: list[int] = field(default_factory=list)

    def take(self, row: int, sizes: Sequence[int]) -> None:
        self.room -= sizes[row]
        self.rows.append(row)

    def take_largest(self, rows: list[int], sizes: Sequence[int]) -> bool:
        """Move the first of `rows` (sorted, largest first) that fits into the bin; False if none fits."""
        row = next((row for row in rows if sizes[row] <= self.room), None)
        if row is None:
            return False
        rows.remove(row)
        self.take(row, sizes)
        return True


def plan_micro_batches(lengths: Sequence[int], max_tokens: int, round_to: int) -> list[list[int]]:
    """Group padded rows so that rows times the rounded longest one stays within `max_tokens` (dynamic batching).

    Arguments and errors as in `pack_rows`; returns row indices by micro-batch, longest rows first.
    """
    sizes = _rounded_lengths(lengths, max_tokens, round_to, "dynamic_batching")
    plan: list[list[int]] = []
    width = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if not plan or (len(plan[-1]) + 1) * width > max_tokens:
            plan.append([])
            width = sizes[row]
        plan[-1].append(row)
    return plan


def _rounded_lengths(lengths: Sequence[int], max_tokens: int, round_to: int, section: str) -> list[int]:
    sizes = [-(-length // round_to) * round_to for length in lengths]
    for length, size in zip(lengths, sizes, strict=True):
        if size > max_tokens:
            raise ConfigError(
                f"A row of {length} tokens ({size} rounded up to sequence_length_round={round_to}) does not fit "
                f"a micro-batch of {max_tokens} tokens; raise policy.{section}.*_mb_tokens."
            )
    return sizes


def split_to_count(plan: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Cut the fullest micro-batches in two until there are `count`; data-parallel ranks need the same number.

    Raises:
        ValueError: There are fewer rows than `count`, or more micro-batches already.
    """
    result = [list(rows) for rows in plan]
    if not len(result) <= count <= sum(len(rows) for rows in result):
        raise ValueError(f"{len(result)} micro-batches cannot be split into {count}")
    while len(result) < count:
        fullest = max(range(len(result)), key=lambda index: len(result[index]))
        rows = result.pop(fullest)
        middle = -(-len(rows) // 2)
        result[fullest:fullest] = [rows[:middle], rows[middle:]]
    return result


def group_lengths(lengths: Sequence[int], rows_per_group: int, *, round_to: int, packed: bool) -> list[int]:
    """Tokens that each group of neighbouring rows, such as a pair, takes of a budget; it is planned as one row.

    Args:
        lengths: Tokens of each row.
        rows_per_group: Rows of a group.
        round_to: A row counts as its length rounded up to a multiple of this.
        packed: The sum of the rows counts. Otherwise the width of a group counts, against a budget divided by
            `rows_per_group`.
    """
    rounded = [-(-length // round_to) * round_to for length in lengths]
    groups = [rounded[start : start + rows_per_group] for start in range(0, len(rounded), rows_per_group)]
    return [sum(group) if packed else max(group) for group in groups]


def rows_of_groups(plan: Sequence[Sequence[int]], rows_per_group: int) -> list[list[int]]:
    """Turn a plan of groups into a plan of rows; the rows of a group stay neighbours."""
    return [
        [row for group in groups for row in range(group * rows_per_group, (group + 1) * rows_per_group)]
        for groups in plan
    ]
