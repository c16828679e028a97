"""Micro-batches of at most so many tokens: rows put end to end (packing), or padded rows of like length."""

from collections.abc import Sequence

from nemo_offload_rl.errors import ConfigError


def pack_rows(lengths: Sequence[int], max_tokens: int, round_to: int) -> list[list[int]]:
    """Bins by first-fit decreasing: rows go, the longest first, into the first bin that still holds them.

    It needs at most 11/9 of the fewest possible bins, and one. Refinements that pair rows of more than half a bin first
    (modified first-fit decreasing) made as many bins of batches with log-normal lengths.

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
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)):
        fitting = next((index for index, left in enumerate(room) if left >= sizes[row]), len(bins))
        if fitting == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[fitting].append(row)
        room[fitting] -= sizes[row]
    return bins


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
