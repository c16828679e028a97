"""The protocol of environments, and the values that they exchange with rollouts."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from nemo_offload_rl.data.records import Answer, Message


@dataclass(frozen=True)
class Turn:
    """The policy's text without special tokens, and the environment's reply."""

    text: str
    observation: str


@dataclass(frozen=True, kw_only=True)
class Response:
    """A response to score or to answer.

    Attributes:
        prompt_text: The rendered prompt.
        text: The policy's text in this turn, without special tokens.
        truncated: The response was cut at a token limit.
        reference_answer: The right answer; a list if the row has several, each of them right.
        metadata: The problem's metadata.
        earlier: The turns before this one, in their order.
        may_go_on: The policy may have another turn; otherwise this response is the last.
        question: The row's prompt, without prompt file and chat template.
        messages: The row's prompt, if it is a list of messages.
        token_ids: The tokens of `text`, special tokens included.
        trained_steps: Training steps before it, or of asynchronous training before it is trained on; 0 outside of
            training.
    """

    prompt_text: str
    text: str
    truncated: bool
    reference_answer: Answer
    metadata: Mapping[str, Any]
    earlier: tuple[Turn, ...] = ()
    may_go_on: bool = False
    question: str = ""
    messages: Sequence[Message] | None = None
    token_ids: Sequence[int] = ()
    trained_steps: int = 0


@dataclass(frozen=True)
class Score:
    """The score of a rollout.

    Attributes:
        reward: The reward that training uses.
        correct: The response counts as correct in accuracy.
        parts: Parts of the reward by name, before weights: for metrics and for `adv_estimator.name: gdpo`.
        answer: The answer that was found in the response, for cons@k; None if none was.
        extra: Further values by name, for `rollouts/` and, where they are numbers, for metrics.
    """

    reward: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Unscored:
    """Result without a score: the rollout counts in no loss, baseline, pass@k or accuracy, but in metrics of its own.

    Attributes:
        why: `failed` or `timed_out`: scoring or an agent's rollout did so. `no_reward`: no reward applies.
        reason: Readable failure; empty if `why` says all.
    """

    why: Literal["failed", "timed_out", "no_reward"]
    reason: str = ""


@dataclass(frozen=True)
class Observation:
    """A message to the policy, which has another turn to answer it.

    Attributes:
        text: Content of the user message.
        otherwise: The rollout's fallback score if no turn is left, or no room for message and answer.
    """

    text: str
    otherwise: Score | Unscored = Score(reward=0.0, correct=False)


class Environment(Protocol):
    """A verifiable task. It keeps no state of a rollout: each `Response` has everything that it needs."""

    def step(self, responses: Sequence[Response]) -> Sequence[Score | Observation | Unscored]:
        """Return for each response, in order, a score that ends the rollout or a message to the policy.

        A user's class may return None instead of `Unscored("no_reward")`.
        """
        ...

    def close(self) -> None:
        """End worker processes; safe to call twice."""
        ...


class OneAtATime:
    """An `Environment` that several threads may call; only one call runs at a time."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._lock = threading.Lock()
        self.close = environment.close

    def step(self, responses: Sequence[Response]) -> Sequence[Score | Observation | Unscored]:
        with self._lock:
            return self._environment.step(responses)


def for_threads(environment: Environment) -> Environment:
    """Return the environment for calls by several threads: itself, if it says `overlaps`."""
    return environment if getattr(environment, "overlaps", False) else OneAtATime(environment)


class ReferenceChecker(Protocol):
    """Environment that compares answers with references, and can tell which references no answer can match.

    Attributes:
        compares_text: Answers are compared as text, so another spelling of a number does not match.
    """

    compares_text: bool

    def match_themselves(self, references: Sequence[str]) -> list[bool]:
        """Tell for each reference whether a response with exactly this answer is correct."""
        ...
