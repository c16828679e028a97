"""Another try for wrong answers."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_offload_rl.environments.interfaces import Environment, Observation, Response, Score, Unscored


class RetryEnvironment:
    """Another environment, with a message after a wrong answer while the policy has turns left.

    Args:
        environment: It scores, and ends the rollout of a right answer.
        message: What the policy gets after a wrong one.
    """

    def __init__(self, environment: Environment, message: str) -> None:
        self._environment = environment
        self._message = message

    def step(self, responses: Sequence[Response]) -> Sequence[Score | Observation | Unscored]:
        """See `Environment`."""
        outcomes = self._environment.step(responses)
        return [
            Observation(self._message, otherwise=outcome)
            if response.may_go_on and isinstance(outcome, Score) and not outcome.correct
            else outcome
            for response, outcome in zip(responses, outcomes, strict=True)
        ]

    def close(self) -> None:
        """See `Environment`."""
        self._environment.close()
