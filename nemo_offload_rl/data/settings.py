"""Frozen settings of data sets and the tokenizer: what the YAML keys `data.*`, `env.*` and `policy.tokenizer` become.

Field names and meanings are those of the YAML keys, documented in `data/config.py`. None has a default: YAML is the
only source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """How a row becomes a prompt and who scores the response: `data.default`, with a data set's own keys over it."""

    prompt_file: str | None
    system_prompt_file: str | None
    processor: str
    env_name: str


@dataclass(frozen=True, kw_only=True)
class ArithmeticSettings:
    """The built-in arithmetic problems."""

    task: TaskSettings
    num_digits: int  # digits of each operand, at most
    operators: tuple[str, ...]  # of "+", "-" and "*"
    size: int  # training problems
    holdout: int  # problems kept for validation; training never sees them
    seed: int


@dataclass(frozen=True, kw_only=True)
class ResponseDatasetSettings:
    """A JSONL file with one prompt and its answer per line."""

    task: TaskSettings
    path: str
    input_key: str
    output_key: str
    split_validation_size: float  # share of the rows kept for validation
    seed: int


@dataclass(frozen=True, kw_only=True)
class OpenMathInstruct2Settings:
    """nvidia/OpenMathInstruct-2 from the Hugging Face hub."""

    task: TaskSettings
    split: str
    split_validation_size: float  # share of the rows kept for validation
    seed: int


type DatasetSettings = ArithmeticSettings | ResponseDatasetSettings | OpenMathInstruct2Settings


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The keys `data.*`."""

    max_input_seq_length: int  # tokens of a prompt
    shuffle: bool
    train: DatasetSettings
    validation: DatasetSettings | None  # None: the held-out part of `train`


@dataclass(frozen=True, kw_only=True)
class EnvSettings:
    """One entry of `env.*`."""

    num_workers: int


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """The keys `policy.tokenizer.*`."""

    name: str
    chat_template: str | None  # a Jinja template; None: the tokenizer's own
    chat_template_kwargs: Mapping[str, Any] | None
