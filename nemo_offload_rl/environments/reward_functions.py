"""Calls a user's reward functions, of one response or of a batch of responses, and adds their rewards.

A function of one response gets the row's values: `(prompt, response, answer, **row) -> float`. A function of a batch
has TRL's signature: `(prompts, completions, answer, **rows) -> list[float | None]`, each argument a list with an entry
for each response. A function with a parameter `prompts`, `completions` or `completion_ids` is one of a batch.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_offload_rl.environments.grading_pool import Refused, TimedOut
from nemo_offload_rl.environments.interfaces import Response, Score, Unscored
from nemo_offload_rl.environments.outcomes import FAILURES, NO_REWARD, Outcome, finite_number, loggable, plain_score
from nemo_offload_rl.errors import UserCodeError, UserError
from nemo_offload_rl.targets import UserCode
from nemo_offload_rl.utils.threads import in_thread

_GIVEN = ("prompt", "response", "answer")
_OF_BATCH = ("prompts", "completions", "completion_ids")
_GIVEN_TO_BATCH = (*_OF_BATCH, "answer", "trainer_state", "log_extra", "log_metric")
_ON_DEMAND = ("truncated", "rendered_prompt", "earlier")
_MOST_AT_ONCE = 64  # responses that one worker awaits together


@dataclass(frozen=True)
class TrainerState:
    """The part of TRL's `trainer_state` that exists here.

    Attributes:
        global_step: Training steps that have ended.
    """

    global_step: int

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer_state.{name} does not exist here, only global_step; give the value as a parameter of the "
            "function, with env.NAME.kwargs"
        )


@dataclass(frozen=True)
class RewardFunctions:
    """Weighted sum of reward functions; the first that applies decides whether a response is correct.

    A function that returns None does not apply to the response and is left out.

    Args:
        parts: The functions.
        weights: A factor for each.
        timeout_s: Seconds for one awaited call.
        columns: Columns that all rows have. A parameter of such a name is a column, not a list of TRL's.
    """

    parts: tuple[UserCode, ...]
    weights: tuple[float, ...]
    timeout_s: float
    columns: frozenset[str]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the functions in metrics, numbered if two are equal; () for a single function."""
        names = [part.name for part in self.parts]
        if len(names) == 1:
            return ()
        counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
        return tuple(name if count == 1 else f"{name}_{count}" for name, count in zip(names, counts, strict=True))

    @property
    def num_at_once(self) -> int | None:
        """Responses in one call: many if functions are awaited, so that they wait together; None for all."""
        if takes_batches(self.parts, self.columns):
            return None
        return _MOST_AT_ONCE if all(part.is_async for part in self.parts) else 1

    def check(self) -> None:
        """Refuse models, and functions with a parameter that the rows cannot fill.

        Raises:
            UserCodeError: One is refused.
        """
        for part in self.parts:
            if hasattr(part.value, "forward"):
                raise UserCodeError(f"{part.label}: it is a model; call it inside a function of yours, and name that")
            is_of_batch = takes_batches([part], self.columns)
            given = _GIVEN_TO_BATCH if is_of_batch else _GIVEN
            part.check_named(
                (*given, *sorted(self.columns.difference(given))),
                optional=_ON_DEMAND,
                elsewhere=() if is_of_batch else _OF_BATCH,
            )

    def __call__(self, responses: Sequence[Response]) -> list[Outcome]:
        """Score each response; it is `Refused` if a function fails on it."""
        calls = [self._calls(part, responses) for part in self.parts]
        for call in (call for some in calls for call in some if not call.part.is_async):
            call.run()
        if awaited := [call for some in calls for call in some if call.part.is_async]:
            # In its own thread, because a notebook's main thread already runs an event loop.
            in_thread(asyncio.run, _run_together(awaited, self.timeout_s)).result()
        by_part = [[one for call in some for one in call.results()] for some in calls]
        return [self._sum(found) for found in zip(*by_part, strict=True)]

    def _calls(self, part: UserCode, responses: Sequence[Response]) -> list[_Call]:
        if not takes_batches([part], self.columns):
            return [_Call(part, [response], is_of_batch=False) for response in responses]
        return [_Call(part, responses, is_of_batch=True)] if responses else []

    def _sum(self, found: Sequence[tuple[Outcome, Mapping[str, Any]]]) -> Outcome:
        """Add what each function found, its outcome and the values that it logged, for one response."""
        outcomes = [outcome for outcome, _ in found]
        if failures := [outcome for outcome in outcomes if isinstance(outcome, FAILURES)]:
            return failures[0]
        scores = [(weight, one) for weight, one in zip(self.weights, outcomes, strict=True) if isinstance(one, Score)]
        if not scores:
            return NO_REWARD
        rewards = [one.reward if isinstance(one, Score) else math.nan for one in outcomes]
        total = sum(weight * score.reward for weight, score in scores)
        (_, first), *_ = scores
        parts = dict(zip(self.names, rewards, strict=True)) if self.names else first.parts
        extra = {name: value for _, score in scores for name, value in score.extra.items()}
        extra |= {name: loggable(value) for _, logged in found for name, value in logged.items()}
        return replace(first, reward=total, parts=parts, extra=extra)


def takes_batches(parts: Iterable[UserCode], columns: Collection[str]) -> bool:
    """Tell whether one of the functions is of a batch.

    Raises:
        UserCodeError: One has no signature.
    """
    return any(not part.parameter_names.intersection(_OF_BATCH).issubset(columns) for part in parts)


@dataclass
class _Call:
    """A call of one function, its outcome for each response, and the values that it logged."""

    part: UserCode
    responses: Sequence[Response]
    is_of_batch: bool
    outcomes: list[Outcome] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)

    def run(self) -> None:
        """Call the function."""
        try:
            self.outcomes = self._checked(self._begin())
        except UserError as error:
            self._fail(Refused(str(error)))

    async def run_in_time(self, timeout_s: float) -> None:
        """Call and await the function."""
        try:
            async with asyncio.timeout(timeout_s):
                with self.part.telling():
                    value = self._begin()
                    value = await value if inspect.isawaitable(value) else value
                self.outcomes = self._checked(value)
        except TimeoutError:
            self._fail(TimedOut())
        except UserError as error:
            self._fail(Refused(str(error)))

    def results(self) -> Iterable[tuple[Outcome, Mapping[str, Any]]]:
        """Yield the outcome of each response and the values logged for it, by name."""
        means = {name: sum(values) / len(values) for name, values in self.metrics.items()}
        for row, outcome in enumerate(self.outcomes):
            yield outcome, {**means, **{name: values[row] for name, values in self.columns.items()}}

    def log_extra(self, column: str, values: Iterable[Any]) -> None:
        """Log a value of each response, as TRL's `log_extra`."""
        listed = list(values)
        if len(listed) != len(self.responses):
            raise UserCodeError(
                f"{self._where}: log_extra({column!r}, ...) got {len(listed)} values for {len(self.responses)} "
                "responses; give one for each"
            )
        self.columns[column] = listed

    def log_metric(self, name: str, value: Any) -> None:
        """Log a number of the batch, as TRL's `log_metric`; the mean of several calls counts."""
        try:
            number = finite_number(value)
        except ValueError as error:
            raise UserCodeError(f"{self._where}: log_metric({name!r}, {short(value)}); give a finite number") from error
        self.metrics.setdefault(name, []).append(number)

    @property
    def _where(self) -> str:
        return f"{self.part.label} ({self.part.place})"

    def _fail(self, failure: Outcome) -> None:
        self.outcomes = [failure] * len(self.responses)

    def _begin(self) -> Any:
        """Call the function and return its value, which may have to be awaited."""
        about = [_about(response) for response in self.responses]
        if not self.is_of_batch:
            (response,), (on_demand,) = self.responses, about
            given = {
                **response.metadata,
                "prompt": response.question,
                "response": response.text,
                "answer": response.reference_answer,
            }
            return self.part.call_named(given, _without(on_demand, response.metadata))
        columns = dict.fromkeys(name for response in self.responses for name in response.metadata)
        rows = {name: [response.metadata.get(name) for response in self.responses] for name in columns}
        given = {
            "answer": [response.reference_answer for response in self.responses],
            **rows,
            "prompts": [_prompt(response) for response in self.responses],
            "completions": [_completion(response) for response in self.responses],
            "completion_ids": [list(response.token_ids) for response in self.responses],
            "trainer_state": TrainerState(global_step=self.responses[0].trained_steps),
            "log_extra": self.log_extra,
            "log_metric": self.log_metric,
        }
        return self.part.call_named(given, _without({name: [one[name] for one in about] for name in _ON_DEMAND}, rows))

    def _checked(self, value: Any) -> list[Outcome]:
        if not self.is_of_batch:
            return [as_score(self.part, value, self.responses[0])]
        num = len(self.responses)
        if not (isinstance(value, list | tuple) or getattr(value, "ndim", 0) == 1):
            raise UserCodeError(
                f"{self._where}: it returned {short(value)}; return a list with a reward or None for each of the {num} "
                "responses"
            )
        values = list(value)
        if len(values) != num:
            raise UserCodeError(
                f"{self._where}: it returned {len(values)} rewards for {num} responses; return one for each, None "
                "where it does not apply"
            )
        return [as_score(self.part, one, response) for one, response in zip(values, self.responses, strict=True)]


async def _run_together(calls: Sequence[_Call], timeout_s: float) -> None:
    await asyncio.gather(*(call.run_in_time(timeout_s) for call in calls))


def _prompt(response: Response) -> Any:
    return response.question if response.messages is None else [dict(message) for message in response.messages]


def _completion(response: Response) -> Any:
    return response.text if response.messages is None else [{"role": "assistant", "content": response.text}]


def _about(response: Response) -> dict[str, Any]:
    """Return the values of `_ON_DEMAND`."""
    return {
        "truncated": response.truncated,
        "rendered_prompt": response.prompt_text,
        "earlier": response.earlier,
    }


def _without(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def as_score(part: UserCode, value: Any, response: Response) -> Score | Unscored:
    """Turn the value that a user's code returned for a response into its score.

    Raises:
        UserCodeError: It is no score.
    """
    try:
        return plain_score(value)
    except ValueError as error:
        raise UserCodeError(
            f"{part.label} ({part.place}): it returned {short(value)} for the response {short(response.text)}; {error}"
        ) from error


def short(value: Any) -> str:
    """Return at most 80 characters of the value's `repr`."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
