"""Made-up arithmetic problems with exact answers.

A hash of the problem alone, not a seed, decides between training and validation. So runs with different seeds, or a
warm-up and the reinforcement learning after it, never see each other's held-out problems. Mirror images (3+5 and 5+3)
always fall on the same side.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator

from nemo_offload_rl.data.records import Row, Splits
from nemo_offload_rl.errors import DataError
from nemo_offload_rl.keys.data import ArithmeticConfig

_HELD_OUT_ONE_IN = 8
_ENUMERATE_UP_TO = 200_000

type Problem = tuple[int, str, int]


def load_arithmetic(settings: ArithmeticConfig) -> Splits[Row]:
    """Draw `size` training and `holdout` validation problems, all distinct, the same ones for the same seed.

    Raises:
        DataError: There are not that many problems of this shape.
    """
    drawn: dict[bool, list[Row]] = {False: [], True: []}
    wanted = {False: settings.size, True: settings.holdout}
    for problem in _shuffled_problems(settings):
        side = is_held_out(problem)
        if len(drawn[side]) < wanted[side]:
            drawn[side].append(_row(problem, len(drawn[side]), settings))
        elif all(len(drawn[s]) == wanted[s] for s in wanted):
            break
    for side, key in ((False, "size"), (True, "holdout")):
        if len(drawn[side]) < wanted[side]:
            raise DataError(
                f"arithmetic has {len(drawn[side])} problems for {key}={wanted[side]}: {settings.num_digits}-digit "
                f"operands with {' '.join(settings.operators)} give no more; lower {key} or raise num_digits"
            )
    return Splits(train=tuple(drawn[False]), validation=tuple(drawn[True]))


def is_held_out(problem: Problem) -> bool:
    """Whether a problem belongs to validation: one in eight, by a hash in which mirrored problems are equal."""
    left, operator, right = problem
    if operator in "+*" and left > right:
        left, right = right, left
    digest = hashlib.blake2b(f"{left}{operator}{right}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % _HELD_OUT_ONE_IN == 0


def solve(problem: Problem) -> int:
    """The exact answer."""
    left, operator, right = problem
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
    raise DataError(f"arithmetic operator {operator!r} is unknown; use '+', '-' or '*' in data.train.operators")


def _row(problem: Problem, index: int, settings: ArithmeticConfig) -> Row:
    left, operator, right = problem
    return Row(
        question=f"{left}{operator}{right}=",
        answer=str(solve(problem)),
        origin=f"arithmetic problem {index} (seed {settings.seed})",
        metadata={"operands": (left, right), "operator": operator},
    )


def _shuffled_problems(settings: ArithmeticConfig) -> Iterator[Problem]:
    """Distinct problems in an order given by the seed: all, or a tenth of them if there are too many to list."""
    rng = random.Random(settings.seed)
    bound = 10**settings.num_digits
    if bound * bound * len(settings.operators) <= _ENUMERATE_UP_TO:
        problems = list(itertools.product(range(bound), settings.operators, range(bound)))
        rng.shuffle(problems)
        yield from problems
        return
    seen: set[Problem] = set()
    while len(seen) * 10 < bound * bound * len(settings.operators):
        problem = (rng.randrange(bound), rng.choice(settings.operators), rng.randrange(bound))
        if problem not in seen:
            seen.add(problem)
            yield problem
