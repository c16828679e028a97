"""What a rollout knows of an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Response:
    """A response to score.

    Attributes:
        prompt_text: What the policy was shown.
        text: What it answered, special tokens left out.
        truncated: The response was cut at the token limit.
        reference_answer: The right answer.
        metadata: The problem's metadata.
    """

    prompt_text: str
    text: str
    truncated: bool
    reference_answer: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class Score:
    """The reward that training uses, and whether the response counts as correct when accuracy is reported."""

    reward: float
    correct: bool


class Environment(Protocol):
    """Scores responses to verifiable tasks."""

    def score(self, responses: Sequence[Response]) -> list[Score]:
        """One score for each response, in their order."""
        ...

    def close(self) -> None:
        """End worker processes; safe to call twice."""
        ...
