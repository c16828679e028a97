"""Dynamic batching: micro-batches of rows of like length, as many as fit a budget of tokens (padding included)."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_offload_rl.errors import ConfigError


def plan_micro_batches(lengths: Sequence[int], max_tokens: int, round_to: int) -> list[list[int]]:
    """Group rows so that rows times the rounded longest one stays within `max_tokens`.

    Args:
        lengths: Tokens of each row.
        max_tokens: Budget of a micro-batch.
        round_to: Widths are rounded up to a multiple of this.

    Returns:
        Row indices by micro-batch, longest rows first; every row once.

    Raises:
        ConfigError: One row alone exceeds the budget.
    """
    plan: list[list[int]] = []
    width = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        rounded = -(-lengths[row] // round_to) * round_to
        if rounded > max_tokens:
            raise ConfigError(
                f"A row of {lengths[row]} tokens ({rounded} rounded up to sequence_length_round={round_to}) does not "
                f"fit a micro-batch of {max_tokens} tokens; raise policy.dynamic_batching.*_mb_tokens."
            )
        if not plan or (len(plan[-1]) + 1) * width > max_tokens:
            plan.append([])
            width = rounded
        plan[-1].append(row)
    return plan


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
