"""Rewards and environments from outside of the package, in worker processes with a time limit.

A reward is a function `(prompt, response, answer, **row) -> float`, sync or async, or several of them with weights; an
environment is a class, or an object, with a method `step` (`Environment`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.environments.grading_pool import Failed, GradingPool, Refused, TimedOut
from nemo_offload_rl.environments.interfaces import Environment, Observation, Response, Score
from nemo_offload_rl.errors import UserCodeError
from nemo_offload_rl.targets import UserCode

logger = logging.getLogger(__name__)

_GIVEN = ("prompt", "response", "answer")
_ON_DEMAND = ("truncated", "rendered_prompt", "earlier")
_MOST_AT_ONCE = 64  # responses that one worker awaits together
_ASYNC_SLACK_S = 5.0  # that a worker has beyond the limit of what it awaits

type Outcome = Score | Observation | TimedOut | Failed | Refused


@dataclass(frozen=True)
class RewardFunctions:
    """The weighted sum of what functions return for a response. The first decides what counts as correct.

    Args:
        parts: The functions.
        weights: A factor for each.
        timeout_s: Seconds for one response, which bind where a function is awaited.
    """

    parts: tuple[UserCode, ...]
    weights: tuple[float, ...]
    timeout_s: float

    @property
    def names(self) -> tuple[str, ...]:
        """Of several functions those that metrics call them by: as they are defined, numbered where two are alike."""
        names = [part.name for part in self.parts]
        if len(names) == 1:
            return ()
        counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
        return tuple(name if count == 1 else f"{name}_{count}" for name, count in zip(names, counts, strict=True))

    @property
    def num_at_once(self) -> int:
        """Responses that belong in one call: what is awaited waits together."""
        return _MOST_AT_ONCE if all(part.is_async for part in self.parts) else 1

    def check(self, columns: Collection[str]) -> None:
        """Check that the functions ask for nothing that rows with these columns do not have.

        Raises:
            UserCodeError: One does.
        """
        for part in self.parts:
            part.check_named((*_GIVEN, *sorted({*columns} - {*_GIVEN})), optional=_ON_DEMAND)

    def __call__(self, responses: Sequence[Response]) -> list[Outcome]:
        """Score each."""
        if any(part.is_async for part in self.parts):
            # In a thread of its own: a notebook's has an event loop already.
            with ThreadPoolExecutor(max_workers=1) as pool:
                return pool.submit(asyncio.run, self._score_together(responses)).result()
        return [self._sum([_call(part, response) for part in self.parts], response) for response in responses]

    async def _score_together(self, responses: Sequence[Response]) -> list[Outcome]:
        return list(await asyncio.gather(*map(self._score_in_time, responses)))

    async def _score_in_time(self, response: Response) -> Outcome:
        try:
            async with asyncio.timeout(self.timeout_s):
                values = []
                for part in self.parts:
                    with part.telling():
                        value = _call(part, response)
                        values.append(await value if inspect.isawaitable(value) else value)
        except TimeoutError:
            return TimedOut()
        return self._sum(values, response)

    def _sum(self, values: Sequence[Any], response: Response) -> Score:
        scores = [_as_score(part, value, response) for part, value in zip(self.parts, values, strict=True)]
        total = sum(weight * score.reward for weight, score in zip(self.weights, scores, strict=True))
        parts = {name: score.reward for name, score in zip(self.names, scores, strict=False)}
        return Score(reward=total, correct=scores[0].correct, parts=parts)


@dataclass
class EnvironmentSteps:
    """What an environment's `step` returns; a class is made once in each process."""

    part: UserCode
    _made: Any = None

    num_at_once = 1
    names = ()

    def check(self, columns: Collection[str]) -> None:
        """Check that it can be made and asked.

        Raises:
            UserCodeError: It cannot.
        """
        if inspect.isclass(self.part.value):
            self.part.check_positional(())
        step = getattr(self.part.value, "step", None)
        arguments = ("self", "responses") if inspect.isclass(self.part.value) else ("responses",)
        UserCode(f"{self.part.label}.step", step).check_positional(arguments)

    def __call__(self, responses: Sequence[Response]) -> list[Outcome]:
        """Step each; they may be none, so that it is only made."""
        if self._made is None:
            self._made = self.part.make()
        if not responses:
            return []
        with self.part.telling():
            outcomes = self._made.step(list(responses))
            outcomes = list(outcomes) if isinstance(outcomes, Iterable) else outcomes
        if not isinstance(outcomes, list):
            raise UserCodeError(
                f"{self.part.label} ({self.part.place}): step returned {_short(outcomes)}; return a list with a Score "
                "or an Observation for each response"
            )
        if len(outcomes) != len(responses):
            raise UserCodeError(
                f"{self.part.label}: step returned {len(outcomes)} outcomes for {len(responses)} responses; return one "
                "for each"
            )
        return [self._checked(outcome, response) for outcome, response in zip(outcomes, responses, strict=True)]

    def close(self) -> None:
        """Let what was made in this process end, if it can."""
        made, self._made = self._made, None
        if made is not None and hasattr(made, "close"):
            with self.part.telling():
                made.close()

    def _checked(self, outcome: Any, response: Response) -> Score | Observation:
        if isinstance(outcome, Observation):
            if not isinstance(outcome.text, str):
                raise UserCodeError(f"{self.part.label}: an Observation's text is {outcome.text!r}; make it text")
            _as_score(self.part, outcome.otherwise, response)
            return outcome
        return _as_score(self.part, outcome, response)

    def __getstate__(self) -> dict[str, Any]:
        return {"part": self.part, "_made": None}


class CustomEnvironment:
    """An environment of a user's.

    Args:
        steps: What scores.
        num_workers: Processes; each has one response at a time, or as many as `steps` wants at once. 0 scores all
            responses in one call in this process, without a time limit.
        timeout_s: Seconds for one response.
        name: For messages: `env.NAME`.

    Raises:
        UserCodeError: It cannot be made.
    """

    def __init__(
        self, steps: RewardFunctions | EnvironmentSteps, *, num_workers: int, timeout_s: float, name: str
    ) -> None:
        self._steps = steps
        self._name = name
        self._pool: GradingPool | None = None
        self._num_workers = num_workers
        if num_workers == 0:
            steps([])
            return
        limit_s = timeout_s + _ASYNC_SLACK_S if steps.num_at_once > 1 else timeout_s
        self._pool = GradingPool(steps, num_workers=num_workers, timeout_s=limit_s, warm_up=([],))
        try:
            self._pool.wait_until_ready()
        except BaseException:
            self._pool.close()
            raise

    def step(self, responses: Sequence[Response]) -> Sequence[Score | Observation]:
        """See `Environment`.

        Raises:
            UserCodeError: The user's code failed; the message has its place.
        """
        if self._pool is None:
            outcomes = self._steps(responses)
        else:
            size = min(self._steps.num_at_once, -(-len(responses) // self._num_workers))
            chunks = [responses[start : start + size] for start in range(0, len(responses), max(size, 1))]
            jobs = [(list(chunk),) for chunk in chunks]
            outcomes = [
                outcome
                for chunk, answer in zip(chunks, self._pool.map(jobs), strict=True)
                for outcome in (answer if isinstance(answer, list) else [answer] * len(chunk))
            ]
        self._warn(outcomes)
        return [_no_reward_without_outcome(outcome, self._steps.names) for outcome in outcomes]

    def close(self) -> None:
        """See `Environment`."""
        if self._pool is not None:
            self._pool.close()
        elif isinstance(self._steps, EnvironmentSteps):
            self._steps.close()

    def _warn(self, outcomes: Sequence[Outcome]) -> None:
        num_late = sum(isinstance(outcome, TimedOut) for outcome in outcomes)
        if num_late:
            logger.warning(
                "%s: %d of %d responses could not be scored in time: reward 0; raise %s.timeout_s if they are to be",
                self._name,
                num_late,
                len(outcomes),
                self._name,
            )
        failed = [outcome.reason for outcome in outcomes if isinstance(outcome, Failed)]
        if failed:
            logger.warning("%s: %d of %d responses: %s: reward 0", self._name, len(failed), len(outcomes), failed[0])


def custom_environment(
    name: str,
    parts: Sequence[UserCode],
    *,
    weights: Sequence[float] | None,
    columns: Collection[str],
    num_workers: int,
    timeout_s: float,
) -> Environment:
    """The environment `env.NAME` of a user's: one environment, or reward functions.

    Args:
        name: NAME.
        parts: A class or object with a method `step`, or functions.
        weights: Of the functions; None for 1 each.
        columns: That the rows have whose responses it scores.
        num_workers: See `CustomEnvironment`.
        timeout_s: See `CustomEnvironment`.

    Raises:
        UserCodeError: It cannot be made, or asks for what it does not get.
    """
    steps: RewardFunctions | EnvironmentSteps
    if len(parts) == 1 and (inspect.isclass(parts[0].value) or hasattr(parts[0].value, "step")):
        steps = EnvironmentSteps(parts[0])
        if not hasattr(parts[0].value, "step"):
            raise UserCodeError(f"{parts[0].label} ({parts[0].place}): the class has no method `step`; write one")
        if weights is not None:
            raise UserCodeError(f"env.{name}.weights is set, but {parts[0].label} is an environment; set it to null")
    else:
        steps = RewardFunctions(tuple(parts), tuple(weights or (1.0,) * len(parts)), timeout_s)
    steps.check(columns)
    return CustomEnvironment(steps, num_workers=num_workers, timeout_s=timeout_s, name=f"env.{name}")


def _call(part: UserCode, response: Response) -> Any:
    given: Mapping[str, Any] = {
        **response.metadata,
        "prompt": response.question,
        "response": response.text,
        "answer": response.reference_answer,
    }
    on_demand = {
        "truncated": response.truncated,
        "rendered_prompt": response.prompt_text,
        "earlier": response.earlier,
    }
    return part.call_named(given, {name: value for name, value in on_demand.items() if name not in response.metadata})


def _as_score(part: UserCode, value: Any, response: Response) -> Score:
    """A `Score` as it is; a number as one, which counts as correct from 1 on."""
    if isinstance(value, Score):
        reward, score = value.reward, value
    elif isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        reward, score = None, None
    else:
        reward, score = None, None
        with suppress(TypeError, ValueError, OverflowError):  # an array of several, for example
            reward = float(value)
            score = Score(reward=reward, correct=reward >= 1)
    if score is None or not all(map(_is_finite, (reward, *score.parts.values()))):
        raise UserCodeError(
            f"{part.label} ({part.place}): it returned {_short(value)} for the response {_short(response.text)}; "
            "return a finite number"
        )
    return score


def _no_reward_without_outcome(outcome: Outcome, names: Sequence[str]) -> Score | Observation:
    match outcome:
        case Refused(message):
            raise UserCodeError(message)
        case TimedOut() | Failed():
            return Score(reward=0.0, correct=False, parts=dict.fromkeys(names, 0.0))
    return outcome


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
