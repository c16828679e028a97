"""Turns a user's values into scores, and retries, raises or skips failures of scoring (`env.NAME.on_error`).

A response or rollout that could not be scored becomes `Unscored`, not a reward of 0: a failed judge says nothing about
the response, so such rollouts are left out of loss, baselines and accuracy.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from nemo_offload_rl.environments.grading_pool import Failed, Refused, TimedOut
from nemo_offload_rl.environments.interfaces import Observation, Score, Unscored
from nemo_offload_rl.errors import UserCodeError

logger = logging.getLogger(__name__)

type OnError = Literal["raise", "skip", "retry"] | None
"""The key `env.NAME.on_error`. None raises exceptions of a user's code, and skips time-outs and dead processes."""

type Outcome = Score | Observation | Unscored | TimedOut | Failed | Refused

FAILURES = (TimedOut, Failed, Refused)
NUM_RETRIES = 2
NO_REWARD = Unscored("no_reward")


def plain_score(value: Any) -> Score | Unscored:
    """Turn a user's reward into a `Score` of plain Python types, which can be pickled, compared and written as JSON.

    A number or a scalar of NumPy or torch becomes a score, which counts as correct if it is at least 1. None means that
    the reward does not apply to the response.

    Raises:
        ValueError: The value is of another kind or not finite; the message says what to return.
    """
    if value is None:
        return NO_REWARD
    if isinstance(value, Unscored):
        return value
    if not isinstance(value, Score):
        reward = finite_number(value)
        return Score(reward=reward, correct=reward >= 1)
    if value.reward is None:
        return NO_REWARD
    return replace(
        value,
        reward=finite_number(value.reward),
        correct=_boolean(value.correct),
        parts={str(name): finite_number(part) for name, part in value.parts.items()},
        answer=_answer(value.answer),
        extra={str(name): loggable(one) for name, one in value.extra.items()},
    )


def settled[Item](
    items: Sequence[Item],
    attempt: Callable[[Sequence[Item]], Sequence[Outcome]],
    *,
    on_error: OnError,
    name: str,
    what: str,
    timeout_s: float,
) -> list[Score | Observation | Unscored]:
    """Score items with `attempt`, and failed ones again if `on_error` is "retry".

    Args:
        items: Responses or rollouts.
        attempt: Scores items, one outcome for each.
        on_error: See `OnError`.
        name: For messages: `env.NAME`.
        what: The plural noun for the items in messages.
        timeout_s: The time limit, for messages.

    Raises:
        UserCodeError: Scoring failed, and `on_error` does not skip that.
    """
    outcomes = list(attempt(items))
    for _ in range(NUM_RETRIES if on_error == "retry" else 0):
        failed = [row for row, outcome in enumerate(outcomes) if isinstance(outcome, FAILURES)]
        if failed:
            for row, outcome in zip(failed, attempt([items[row] for row in failed]), strict=True):
                outcomes[row] = outcome
    return without_failures(outcomes, on_error=on_error, name=name, what=what, timeout_s=timeout_s)


def without_failures(
    outcomes: Sequence[Outcome], *, on_error: OnError, name: str, what: str, timeout_s: float
) -> list[Score | Observation | Unscored]:
    """Raise failures as `on_error` says; warn of all others and make them `Unscored`. Arguments as in `settled`."""
    late = [outcome for outcome in outcomes if isinstance(outcome, TimedOut)]
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed | Refused)]
    raised = failed if on_error == "raise" else [f for f in failed if isinstance(f, Refused) and on_error is None]
    remedy = f"to go on without such {what}, set {name}.on_error to skip or retry"
    if raised:
        raise UserCodeError(f"{raised[0].reason}; {remedy}")
    told_late = f"{name}: {len(late)} of {len(outcomes)} {what} took longer than {timeout_s:g} s"
    if late and on_error == "raise":
        raise UserCodeError(f"{told_late}; raise {name}.timeout_s, or {remedy}")
    if late:
        logger.warning("%s and are left out; raise %s.timeout_s if they may", told_late, name)
    if failed:
        logger.warning(
            "%s: %d of %d %s failed and are left out, first: %s",
            name, len(failed), len(outcomes), what, failed[0].reason,
        )  # fmt: skip
    return [_without_failure(outcome) for outcome in outcomes]


def _without_failure(outcome: Outcome) -> Score | Observation | Unscored:
    match outcome:
        case TimedOut():
            return Unscored("timed_out")
        case Failed(reason) | Refused(reason):
            return Unscored("failed", reason)
    return outcome


def finite_number(value: Any) -> float:
    """Convert a number or a scalar of NumPy or torch.

    Raises:
        ValueError: It is no number, or not finite.
    """
    if not isinstance(value, str | bytes) and hasattr(value, "__float__"):
        # A tensor of several values raises one of the first three, an int that is too large the last.
        with suppress(TypeError, ValueError, RuntimeError, OverflowError):
            if math.isfinite(number := float(value)):
                return number
    raise ValueError("return a finite number")


def _boolean(value: Any) -> bool:
    plain = _plain(value)
    if isinstance(plain, bool | int | float) and plain in (0, 1):
        return bool(plain)
    raise ValueError("give its `correct` True or False")


def _answer(value: Any) -> str | None:
    plain = _plain(value)
    if plain is None or isinstance(plain, str | bool | int | float):
        return None if plain is None else str(plain)
    raise ValueError("give its `answer` a text, or None")


def loggable(value: Any) -> Any:
    """Return a value of JSON: a number, text, a boolean or None as it is, anything else as its `repr`."""
    plain = _plain(value)
    is_json = plain is None or isinstance(plain, str | int) or (isinstance(plain, float) and math.isfinite(plain))
    return plain if is_json else repr(plain)


def _plain(value: Any) -> Any:
    """Convert a scalar of NumPy or torch to Python's type; return anything else unchanged."""
    if hasattr(value, "item"):
        with suppress(TypeError, ValueError, RuntimeError):
            return value.item()
    return value
