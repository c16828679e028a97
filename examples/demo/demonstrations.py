"""Demonstrations for the demo's warm-up: additions worked out column by column, by somebody who often forgets to carry.

A careful demonstration writes the sum of each column, from the right and with its carry, and then the answer:
`37+58=` is answered with `15,9=95`. A forgetful one drops every carry: `15,8=85`. Imitation alone learns the mistake;
the reward of the reinforcement learning afterwards is what tells the two apart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from nemo_offload_rl.data.records import Row


def work_out(left: int, right: int, *, forget_carries: bool = False) -> str:
    """The sums of the columns, from the right, then `=` and the answer that they give."""
    columns: list[int] = []
    carry = 0
    width = max(len(str(left)), len(str(right)))
    for place in range(width):
        column = left // 10**place % 10 + right // 10**place % 10 + carry
        columns.append(column)
        carry = 0 if forget_carries else column // 10
    answer = sum(column % 10 * 10**place for place, column in enumerate(columns)) + carry * 10**width
    return f"{','.join(map(str, columns))}={answer}"


def demonstrate(rows: Sequence[Row], *, forgetful_share: float, seed: int) -> Iterator[Row]:
    """Endless demonstrations for problems drawn from `rows`; the share of forgetful ones is as given."""
    rng = random.Random(seed)
    while True:
        row = rng.choice(rows)
        left, right = row.metadata["operands"]
        answer = work_out(left, right, forget_carries=rng.random() < forgetful_share)
        yield Row(question=row.question, answer=answer, origin=row.origin, metadata=row.metadata)
