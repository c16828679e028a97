"""Runs a user's rewards and environments in worker processes with a time limit.

A reward is a function `(prompt, response, answer, **row) -> float`, sync or async, or several of them with weights. An
environment is a class or an object with a method `step` (`Environment`).
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from nemo_offload_rl.environments.grading_pool import GradingPool, MadeOnce, Refused, TimedOut, graded
from nemo_offload_rl.environments.interfaces import Environment, Observation, Response, Score, Unscored
from nemo_offload_rl.environments.outcomes import NO_REWARD, OnError, Outcome, plain_score, settled
from nemo_offload_rl.errors import UserCodeError, UserError
from nemo_offload_rl.targets import UserCode

_GIVEN = ("prompt", "response", "answer")
_ON_DEMAND = ("truncated", "rendered_prompt", "earlier")
_MOST_AT_ONCE = 64  # responses that one worker awaits together
_ASYNC_SLACK_S = 5.0  # extra time of a worker beyond the limit of its awaited calls


@dataclass(frozen=True)
class RewardFunctions:
    """Weighted sum of reward functions; the first that applies decides whether a response is correct.

    A function that returns None does not apply to the response and is left out.

    Args:
        parts: The functions.
        weights: A factor for each.
        timeout_s: Seconds for one response, if functions are awaited.
    """

    parts: tuple[UserCode, ...]
    weights: tuple[float, ...]
    timeout_s: float

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions in metrics, numbered if two are equal; () for a single function."""
        names = [part.name for part in self.parts]
        if len(names) == 1:
            return ()
        counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
        return tuple(name if count == 1 else f"{name}_{count}" for name, count in zip(names, counts, strict=True))

    @property
    def num_at_once(self) -> int:
        """Responses in one call: many if functions are awaited, so that they wait together."""
        return _MOST_AT_ONCE if all(part.is_async for part in self.parts) else 1

    def check(self, columns: Collection[str]) -> None:
        """Refuse functions with a parameter that rows with these columns cannot fill.

        Raises:
            UserCodeError: A function has such a parameter.
        """
        for part in self.parts:
            part.check_named((*_GIVEN, *sorted({*columns} - {*_GIVEN})), optional=_ON_DEMAND)

    def __call__(self, responses: Sequence[Response]) -> list[Outcome]:
        """Score each response; it is `Refused` if a function fails on it."""
        if any(part.is_async for part in self.parts):
            # In its own thread, because a notebook's main thread already runs an event loop.
            with ThreadPoolExecutor(max_workers=1) as pool:
                return pool.submit(asyncio.run, self._score_together(responses)).result()
        return [self._score(response) for response in responses]

    def _score(self, response: Response) -> Outcome:
        try:
            return self._sum([_call(part, response) for part in self.parts], response)
        except UserError as error:
            return Refused(str(error))

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
                return self._sum(values, response)
        except TimeoutError:
            return TimedOut()
        except UserError as error:
            return Refused(str(error))

    def _sum(self, values: Sequence[Any], response: Response) -> Score | Unscored:
        found = [_as_score(part, value, response) for part, value in zip(self.parts, values, strict=True)]
        scores = [(weight, one) for weight, one in zip(self.weights, found, strict=True) if isinstance(one, Score)]
        if not scores:
            return NO_REWARD
        rewards = [one.reward if isinstance(one, Score) else math.nan for one in found]
        total = sum(weight * score.reward for weight, score in scores)
        (_, first), *_ = scores
        parts = dict(zip(self.names, rewards, strict=True)) if self.names else first.parts
        return replace(first, reward=total, parts=parts)


class EnvironmentSteps(MadeOnce):
    """Calls `step` of a user's environment."""

    num_at_once = 1

    def check(self, columns: Collection[str]) -> None:
        """Refuse an environment that cannot be made, or whose `step` cannot be called.

        Raises:
            UserCodeError: The environment is refused.
        """
        if inspect.isclass(self.part.value):
            self.part.check_positional(())
        step = getattr(self.part.value, "step", None)
        arguments = ("self", "responses") if inspect.isclass(self.part.value) else ("responses",)
        UserCode(f"{self.part.label}.step", step).check_positional(arguments)

    def __call__(self, responses: Sequence[Response]) -> list[Outcome]:
        """Call `step` with the responses; without responses, only make the environment."""
        made = self.made()
        if not responses:
            return []
        with self.part.telling():
            outcomes = made.step(list(responses))
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

    def _checked(self, outcome: Any, response: Response) -> Score | Observation | Unscored:
        if isinstance(outcome, Observation):
            if not isinstance(outcome.text, str):
                raise UserCodeError(f"{self.part.label}: an Observation's text is {outcome.text!r}; make it text")
            return replace(outcome, otherwise=_as_score(self.part, outcome.otherwise, response))
        return _as_score(self.part, outcome, response)


class CustomEnvironment:
    """A user's environment or reward functions.

    Args:
        steps: Scores responses.
        num_workers: Processes; each has `steps.num_at_once` responses at a time. 0 scores all responses in one call in
            this process, without a time limit.
        timeout_s: Seconds for one response.
        name: For messages: `env.NAME`.
        on_error: The key `env.NAME.on_error`.

    Raises:
        UserCodeError: The environment cannot be made.
    """

    def __init__(
        self,
        steps: RewardFunctions | EnvironmentSteps,
        *,
        num_workers: int,
        timeout_s: float,
        name: str,
        on_error: OnError = None,
    ) -> None:
        self._steps = steps
        self._name = name
        self._timeout_s = timeout_s
        self._on_error: OnError = on_error
        self._pool: GradingPool | None = None
        self._num_workers = num_workers
        if num_workers == 0:
            steps([])
            return
        limit_s = timeout_s + _ASYNC_SLACK_S if steps.num_at_once > 1 else timeout_s
        self._pool = GradingPool(steps, num_workers=num_workers, timeout_s=limit_s, warm_up=([],), waits=True)

    def step(self, responses: Sequence[Response]) -> Sequence[Score | Observation | Unscored]:
        """See `Environment`.

        Raises:
            UserCodeError: The user's code failed, and `on_error` does not skip that.
        """
        return settled(
            responses,
            self._outcomes,
            on_error=self._on_error,
            name=self._name,
            what="scores",
            timeout_s=self._timeout_s,
        )

    def _outcomes(self, responses: Sequence[Response]) -> list[Outcome]:
        if self._pool is None:
            chunks = [responses]
            answers = [graded(self._steps, (responses,))]
        else:
            size = min(self._steps.num_at_once, -(-len(responses) // self._num_workers))
            chunks = [responses[start : start + size] for start in range(0, len(responses), max(size, 1))]
            answers = self._pool.map([(list(chunk),) for chunk in chunks])
        return [
            outcome
            for chunk, answer in zip(chunks, answers, strict=True)
            for outcome in (answer if isinstance(answer, list) else [answer] * len(chunk))
        ]

    def close(self) -> None:
        """See `Environment`."""
        if self._pool is not None:
            self._pool.close()
        elif isinstance(self._steps, EnvironmentSteps):
            self._steps.close()


def custom_environment(
    name: str,
    parts: Sequence[UserCode],
    *,
    weights: Sequence[float] | None,
    columns: Collection[str],
    num_workers: int,
    timeout_s: float,
    on_error: OnError = None,
) -> Environment:
    """Make the environment `env.NAME` from a user's code.

    Args:
        name: NAME.
        parts: A class or object with a method `step`, or functions.
        weights: Weights of the functions; None for 1 each.
        columns: Columns of the rows whose responses it scores.
        num_workers: As for `CustomEnvironment`.
        timeout_s: Seconds for one response.
        on_error: The key `env.NAME.on_error`.

    Raises:
        UserCodeError: The environment cannot be made, or asks for something that it does not get.
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
    return CustomEnvironment(steps, num_workers=num_workers, timeout_s=timeout_s, name=f"env.{name}", on_error=on_error)


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


def _as_score(part: UserCode, value: Any, response: Response) -> Score | Unscored:
    try:
        return plain_score(value)
    except ValueError as error:
        raise UserCodeError(
            f"{part.label} ({part.place}): it returned {_short(value)} for the response {_short(response.text)}; "
            f"{error}"
        ) from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
