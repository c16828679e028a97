"""What a data set yields, before and after tokenization."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

type Message = dict[str, Any]
"""`role`, `content`, and whatever else a chat template reads, as `tool_calls`."""

type Tools = list[dict[str, Any]]
"""Functions that the assistant may call, each a JSON schema, as chat templates read them."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One problem as a data set holds it.

    Attributes:
        question: What the user asks, without prompt file or chat template; of `messages` the text of the user's last.
        answer: The reference answer: what an environment compares with, or what SFT imitates.
        origin: Where the row comes from, for error messages: "train.jsonl:12" or "arithmetic problem 3".
        metadata: Anything else that an environment reads.
        tools: What the assistant may call, for the chat template; None where there is nothing.
        messages: The prompt, where the data set writes it as messages; it does not end with the assistant. None where
            the prompt is `question` alone.
    """

    question: str
    answer: str
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
        text: The same as text.
        reference_answer: What the environment compares responses with.
        env_name: The environment that scores the responses.
        metadata: The row's metadata.
        data_set: Where the row comes from, as metrics name it.
        loss_multiplier: 0 for a prompt that is too long: `token_ids` are its first ones, and no response to it is
            trained on.
        question: The row's `question`.
        messages: The row's `messages`.
    """

    token_ids: tuple[int, ...]
    text: str
    reference_answer: str
    env_name: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    data_set: str = ""
    loss_multiplier: float = 1.0
    question: str = ""
    messages: tuple[Message, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages, some of which are the assistant's, and the tools that it may call; `origin` as in `Row`."""

    messages: tuple[Message, ...]
    origin: str
    tools: Tools | None = None


@dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """A prompt and two ways to go on, the better and the worse; `tools` and `origin` as in `Conversation`."""

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
        data_set: As in `Prompt`.
        loss_multiplier: 0 for a row that is too long, which has its first tokens only and is not trained on.
    """

    token_ids: np.ndarray
    token_mask: np.ndarray
    data_set: str = ""
    loss_multiplier: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ExamplePair:
    """A tokenized pair: prompt and better response, prompt and worse response; the loss counts the responses."""

    chosen: Example
    rejected: Example

    @property
    def data_set(self) -> str:
        """As in `Prompt`."""
        return self.chosen.data_set

    @property
    def loss_multiplier(self) -> float:
        """As in `Example`, the same for both responses."""
        return self.chosen.loss_multiplier


@dataclass(frozen=True)
class Part:
    """A run of rows of a mixture, and how many of every drawn row come from it, in proportion to the other parts."""

    num_items: int
    weight: float


@dataclass(frozen=True)
class Splits[T]:
    """The two parts of a data set. No problem is in both.

    Attributes:
        train: Rows to train on.
        validation: Rows kept aside; of several data sets one of each in turn, so that the first rows are of all.
        parts: Of a mixture: the runs of `train` that its data sets gave, in order; () where there is no mixture.
        overlong: Rows for training that are longer than the limit, masked or left out, by data set.
    """

    train: tuple[T, ...]
    validation: tuple[T, ...]
    parts: tuple[Part, ...] = ()
    overlong: Mapping[str, int] = field(default_factory=dict)


def digest_of_lengths(rows: Iterable[Prompt | Example | ExamplePair]) -> str:
    """Tells data sets of as many rows apart, by how many tokens their rows have in order."""
    lengths: list[int] = []
    for row in rows:
        sequences = (row.chosen, row.rejected) if isinstance(row, ExamplePair) else (row,)
        lengths.extend(len(sequence.token_ids) for sequence in sequences)
    return hashlib.sha256(np.array(lengths, dtype="<i8").tobytes()).hexdigest()
