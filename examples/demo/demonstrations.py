"""Demonstrations for the demos: additions worked out column by column, by somebody who often forgets to carry.

A careful demonstration writes the sum of each column, from the right and with its carry, and then the answer:
`37+58=` is answered with `15,9=95`. A forgetful one drops every carry: `15,8=85`. Imitation alone learns the mistake;
the reward of reinforcement learning, or preferences, are what tells the two apart.

Usage: python examples/demo/demonstrations.py --output runs/sft_demo/data [--seed 42]

writes sft_train.jsonl and sft_validation.jsonl, conversations of which three of four are forgetful, and
pairs_train.jsonl and pairs_validation.jsonl, in which the careful answer is the better one. The worse one forgets to
carry or, where there is nothing to carry, carries. No problem of a validation file is in a training file, here or in
the data set `arithmetic`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from nemo_offload_rl.data.arithmetic import load_arithmetic
from nemo_offload_rl.data.records import Row, Splits
from nemo_offload_rl.keys.data import ArithmeticConfig

FORGETFUL_SHARE = 0.75
NUM_TRAIN_ROWS = 350 * 128  # what sft_arithmetic_cpu.yaml trains on, each once
NUM_HELD_OUT = 512


def work_out(left: int, right: int, *, forget_carries: bool = False, always_carry: bool = False) -> str:
    """The sums of the columns, from the right, then `=` and the answer that they give."""
    columns: list[int] = []
    carry = 0
    width = max(len(str(left)), len(str(right)))
    for place in range(width):
        column = left // 10**place % 10 + right // 10**place % 10 + carry
        columns.append(column)
        carry = 0 if forget_carries else 1 if always_carry else column // 10
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


def problems(seed: int) -> Splits[Row]:
    """The two-digit additions of the demos."""
    settings = ArithmeticConfig(
        dataset_name="arithmetic", num_digits=2, operators=("+",), size=8000, holdout=NUM_HELD_OUT, seed=seed
    )
    return load_arithmetic(settings)


def pairs(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """A careful answer to each problem, and a forgetful one, or one that carries where there is nothing to carry."""
    for row in rows:
        left, right = row.metadata["operands"]
        careful, forgetful = work_out(left, right), work_out(left, right, forget_carries=True)
        worse = forgetful if forgetful != careful else work_out(left, right, always_carry=True)
        yield {"prompt": row.question, "chosen": careful, "rejected": worse}


def write_files(folder: Path, seed: int, forgetful_share: float = FORGETFUL_SHARE) -> None:
    """Write the four files into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = problems(seed)
    for name, source, num_rows in (
        ("train", rows.train, NUM_TRAIN_ROWS),
        ("validation", rows.validation, NUM_HELD_OUT),
    ):
        drawn = islice(demonstrate(source, forgetful_share=forgetful_share, seed=seed), num_rows)
        _write(folder / f"sft_{name}.jsonl", (_conversation(row) for row in drawn))
        _write(folder / f"pairs_{name}.jsonl", pairs(source))


def _conversation(row: Row) -> dict[str, Any]:
    user = {"role": "user", "content": row.question}
    return {"messages": [user, {"role": "assistant", "content": row.answer}]}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=42, help="seed of the problems and of forgetfulness")
    arguments = parser.parse_args()
    write_files(arguments.output, arguments.seed)


if __name__ == "__main__":
    main()
