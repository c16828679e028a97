"""What a data set yields, before and after tokenization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """One problem as a data set holds it.

    Attributes:
        question: What the user asks, without prompt file or chat template.
        answer: The reference answer: what an environment compares with, or what SFT imitates.
        origin: Where the row comes from, for error messages: "train.jsonl:12" or "arithmetic problem 3".
        metadata: Anything else that an environment wants to know.
    """

    question: str
    answer: str
    origin: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt, ready for an engine.

    Attributes:
        token_ids: The rendered prompt, chat template included.
        text: The same as text.
        reference_answer: What the environment compares responses with.
        env_name: The environment that scores the responses.
        metadata: The row's metadata.
    """

    token_ids: tuple[int, ...]
    text: str
    reference_answer: str
    env_name: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """One prompt with the response that SFT imitates; `response_ids` ends with the end-of-sequence token."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]


@dataclass(frozen=True)
class Splits[T]:
    """The two parts of a data set. No problem is in both."""

    train: tuple[T, ...]
    validation: tuple[T, ...]
