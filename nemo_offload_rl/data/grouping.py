"""Rows that belong together, such as the two responses of a pair, stay in one micro-batch made by tokens."""

from __future__ import annotations

from collections.abc import Sequence


def group_lengths(lengths: Sequence[int], rows_per_group: int, *, round_to: int, packed: bool) -> list[int]:
    """Tokens that each group takes of a micro-batch's budget, to be planned as if it were one row.

    Args:
        lengths: Tokens of each row; neighbours form a group.
        rows_per_group: Rows of a group.
        round_to: A row counts as its length rounded up to a multiple of this.
        packed: Rows are put end to end: the sum counts. Otherwise all rows are as wide as the longest one, and the
            width of a group counts, against a budget divided by `rows_per_group`.
    """
    rounded = [-(-length // round_to) * round_to for length in lengths]
    groups = [rounded[start : start + rows_per_group] for start in range(0, len(rounded), rows_per_group)]
    return [sum(group) if packed else max(group) for group in groups]


def rows_of_groups(plan: Sequence[Sequence[int]], rows_per_group: int) -> list[list[int]]:
    """A plan of groups as a plan of rows, the rows of a group beside each other."""
    return [
        [row for group in groups for row in range(group * rows_per_group, (group + 1) * rows_per_group)]
        for groups in plan
    ]
