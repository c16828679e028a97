"""Rows of data sets, before and after tokenization."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

type Message = dict[str, Any]
"""`role`, `content`, and any other field that a chat template reads, such as `tool_calls`."""

type Tools = list[dict[str, Any]]
"""Functions that the assistant may call, each a JSON schema, as chat templates read them."""

type Answer = str | list[str]
"""The right answer, or several answers of which any is right."""

_MASKED_TOKENS = 4  # that are kept of a too long row; NeMo-RL keeps as many of each message


def accepted(answer: Answer) -> list[str]:
    """All answers that are right."""
    return [answer] if isinstance(answer, str) else answer


@dataclass(frozen=True, kw_only=True)
class Row:
    """One problem as a data set holds it.

    Attributes:
        question: The user's question, without prompt file or chat template; of `messages` the text of the user's last.
        answer: The reference answer that an environment compares with, or the response that SFT imitates; "" for none.
        origin: Where the row comes from, for error messages: "train.jsonl:12" or "arithmetic problem 3".
        metadata: Anything else that an environment reads.
        tools: For the chat template; None if the assistant has none.
        messages: The prompt as messages, not ending with the assistant; None if the prompt is `question` alone.
    """

    question: str
    answer: Answer
    origin: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tools: Tools | None = None
    messages: tuple[Message, ...] | None = None

    @property
    def asked(self) -> str:
        """The whole prompt as text; rows with the same are the same problem."""
        return self.question if self.messages is None else repr(self.messages)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, ready for an engine.

    Attributes:
        token_ids: The rendered prompt, chat template included.
        text: The rendered prompt as text.
        reference_answer: The answer that the environment compares responses with.
        env_name: The environment that scores the responses.
        metadata: The row's metadata.
        data_set: Name of the data set in metrics.
        loss_multiplier: 0 for a prompt that is too long: it keeps its first tokens, and no response is trained on.
        question: The row's `question`.
        messages: The row's `messages`.
    """

    token_ids: tuple[int, ...]
    text: str
    reference_answer: Answer
    env_name: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    data_set: str = ""
    loss_multiplier: float = 1.0
    question: str = ""
    messages: tuple[Message, ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)

    def masked(self, limit: int) -> Self:
        """A prompt that keeps its place and trains nothing."""
        return replace(self, token_ids=self.token_ids[: min(_MASKED_TOKENS, limit)], loss_multiplier=0.0)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages, at least one of them the assistant's; `tools` and `origin` as in `Row`."""

    messages: tuple[Message, ...]
    origin: str
    tools: Tools | None = None


@dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """A prompt with a better and a worse continuation; `tools` and `origin` as in `Row`."""

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    origin: str
    tools: Tools | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Example:
    """One tokenized sequence.

    Attributes:
        token_ids: [T] int32.
        token_mask: [T] bool, True for tokens that the loss counts.
        data_set: Name of the data set in metrics.
        loss_multiplier: 0 for a row that is too long: it keeps its first tokens and is not trained on.
    """

    token_ids: np.ndarray
    token_mask: np.ndarray
    data_set: str = ""
    loss_multiplier: float = 1.0

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence."""
        return len(self.token_ids)

    def masked(self, limit: int) -> Self:
        """A sequence that keeps its place and trains nothing."""
        size = min(_MASKED_TOKENS, limit)
        kept = {"token_ids": self.token_ids[:size], "token_mask": self.token_mask[:size]}
        return replace(self, **kept, loss_multiplier=0.0)


@dataclass(frozen=True, kw_only=True)
class ExamplePair:
    """A tokenized pair: prompt and better response, prompt and worse response; the loss counts the responses."""

    chosen: Example
    rejected: Example

    @property
    def data_set(self) -> str:
        """Name of the data set in metrics."""
        return self.chosen.data_set

    @property
    def loss_multiplier(self) -> float:
        """See `Example`; equal for both sequences."""
        return self.chosen.loss_multiplier

    @property
    def num_tokens(self) -> int:
        """Tokens of the longer sequence."""
        return max(self.chosen.num_tokens, self.rejected.num_tokens)

    def masked(self, limit: int) -> Self:
        """A pair that keeps its place and trains nothing."""
        return replace(self, chosen=self.chosen.masked(limit), rejected=self.rejected.masked(limit))


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a mixture that come from one data set, and the data set's share relative to the others."""

    num_items: int
    weight: float


@dataclass(frozen=True)
class Splits[T]:
    """The two parts of a data set. No problem is in both.

    Attributes:
        train: Rows to train on.
        validation: Rows kept aside; of several data sets one of each in turn, so that the first rows are of all.
        parts: Of a mixture: the runs of `train` that its data sets gave, in order; () if there is no mixture.
        overlong: Training rows that are longer than the limit, masked or left out, by data set.
    """

    train: tuple[T, ...]
    validation: tuple[T, ...]
    parts: tuple[Part, ...] = ()
    overlong: Mapping[str, int] = field(default_factory=dict)

    def map[U](self, change: Callable[[T], U]) -> Splits[U]:
        """Both parts with every row changed."""
        return Splits(tuple(map(change, self.train)), tuple(map(change, self.validation)))


def digest_of_lengths(rows: Iterable[Prompt | Example | ExamplePair]) -> str:
    """SHA-256 of the token counts of all rows in order; tells data sets with equally many rows apart."""
    lengths: list[int] = []
    for row in rows:
        sequences = (row.chosen, row.rejected) if isinstance(row, ExamplePair) else (row,)
        lengths.extend(len(sequence.token_ids) for sequence in sequences)
    return hashlib.sha256(np.array(lengths, dtype="<i8").tobytes()).hexdigest()
