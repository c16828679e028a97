"""Runs a user's rewards and environments in worker processes with a time limit.

A reward is a function or several of them with weights (`reward_functions.py`). An environment is a class or an object
with a method `step` (`Environment`).
"""

import inspect
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from nemo_offload_rl.environments.grading_pool import GradingPool, MadeOnce, graded
from nemo_offload_rl.environments.interfaces import Environment, Observation, Response, Score, Unscored
from nemo_offload_rl.environments.outcomes import OnError, Outcome, settled
from nemo_offload_rl.environments.reward_functions import RewardFunctions, as_score, short, takes_batches
from nemo_offload_rl.errors import UserCodeError
from nemo_offload_rl.targets import UserCode

SCORING_TIMEOUT_S = 5.0
BATCH_TIMEOUT_S = 600.0
_ASYNC_SLACK_S = 5.0  # extra time of a worker beyond the limit of its awaited calls


class EnvironmentSteps(MadeOnce):
    """Calls `step` of a user's environment."""

    num_at_once = 1

    def check(self) -> None:
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
                f"{self.part.label} ({self.part.place}): step returned {short(outcomes)}; return a list with a Score "
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
            return replace(outcome, otherwise=as_score(self.part, outcome.otherwise, response))
        return as_score(self.part, outcome, response)


class CustomEnvironment:
    """An `Environment` of a user's environment or reward functions.

    Args:
        steps: Scores responses.
        num_workers: Processes; each has `steps.num_at_once` responses at a time. 0 scores all responses in one call in
            this process, without a time limit.
        timeout_s: Seconds for one response, or for one call of a function of a batch.
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
        self._num_workers = num_workers = min(num_workers, 1) if steps.num_at_once is None else num_workers
        if num_workers == 0:
            steps([])
            return
        limit_s = timeout_s if steps.num_at_once == 1 else timeout_s + _ASYNC_SLACK_S
        self._pool = GradingPool(steps, num_workers=num_workers, timeout_s=limit_s, warm_up=([],), waits=True)

    @property
    def overlaps(self) -> bool:
        """Whether several threads may call `step` at the same time."""
        return self._pool is not None

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
            size = min(self._steps.num_at_once or len(responses), -(-len(responses) // self._num_workers))
            chunks = [responses[start : start + size] for start in range(0, len(responses), max(size, 1))]
            answers = self._pool.map([(list(chunk),) for chunk in chunks])
        return [
            outcome
            for chunk, answer in zip(chunks, answers, strict=True)
            for outcome in (answer if isinstance(answer, list) else [answer] * len(chunk))
        ]

    def close(self) -> None:
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
    timeout_s: float | None,
    on_error: OnError = None,
) -> Environment:
    """Make the environment `env.NAME` from a user's code.

    Args:
        name: NAME.
        parts: A class or object with a method `step`, or functions.
        weights: Weights of the functions; None for 1 each.
        columns: Columns of the rows whose responses it scores.
        num_workers: As for `CustomEnvironment`.
        timeout_s: As for `CustomEnvironment`; None for `SCORING_TIMEOUT_S`, or `BATCH_TIMEOUT_S` for functions of a
            batch.
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
        if timeout_s is None and takes_batches(parts, columns):
            timeout_s = BATCH_TIMEOUT_S
        timeout_s = timeout_s or SCORING_TIMEOUT_S
        weights = weights or (1.0,) * len(parts)
        steps = RewardFunctions(tuple(parts), tuple(weights), timeout_s, frozenset(columns))
    steps.check()
    return CustomEnvironment(
        steps,
        num_workers=num_workers,
        timeout_s=timeout_s or SCORING_TIMEOUT_S,
        name=f"env.{name}",
        on_error=on_error,
    )
