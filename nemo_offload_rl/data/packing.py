"""Sequence packing: micro-batches whose rows are put end to end, as many as fit a budget of real tokens."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_offload_rl.errors import ConfigError


def pack_rows(lengths: Sequence[int], max_tokens: int, round_to: int) -> list[list[int]]:
    """Bins by first-fit decreasing: each row, the longest first, goes into the first bin that still holds it.

    At most 11/9 of the fewest possible bins, and 6/9 of one (Dosa, 2007).

    Args:
        lengths: Tokens of each row.
        max_tokens: Budget of a bin.
        round_to: A row counts as its length rounded up to a multiple of this.

    Returns:
        Row indices by bin; every row once.

    Raises:
        ConfigError: One row alone exceeds the budget.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        size = -(-lengths[row] // round_to) * round_to
        if size > max_tokens:
            raise ConfigError(
                f"A row of {lengths[row]} tokens ({size} rounded up to sequence_length_round={round_to}) does not fit "
                f"a micro-batch of {max_tokens} tokens; raise policy.sequence_packing.*_mb_tokens."
            )
        fitting = next((index for index, left in enumerate(room) if left >= size), None)
        if fitting is None:
            bins.append([row])
            room.append(max_tokens - size)
        else:
            bins[fitting].append(row)
            room[fitting] -= size
    return bins
