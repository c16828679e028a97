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
    """How a row becomes a prompt and who scores the response: `data.default`, with a data set's own keys over it.

    What an algorithm has no use for is None.
    """

    prompt_file: str | None
    system_prompt_file: str | None
    processor: str | None
    env_name: str | None


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
    """A file or folder with one prompt and its answer per row."""

    task: TaskSettings
    path: str
    split: str | None
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


@dataclass(frozen=True, kw_only=True)
class OpenAIFormatSettings:
    """A file or folder with one conversation per row."""

    task: TaskSettings
    path: str
    split: str | None
    chat_key: str
    tool_key: str | None  # field with the tools that the assistant may call
    split_validation_size: float  # share of the rows kept for validation
    seed: int


@dataclass(frozen=True, kw_only=True)
class BinaryPreferenceSettings:
    """A file or folder with a better and a worse response per row."""

    task: TaskSettings
    path: str
    split: str | None
    prompt_key: str | None  # None: both responses are whole conversations
    chosen_key: str
    rejected_key: str
    tool_key: str | None  # as above
    split_validation_size: float  # share of the rows kept for validation
    seed: int


@dataclass(frozen=True, kw_only=True)
class PreferenceSettings:
    """A file or folder with a context and ranked completions per row."""

    task: TaskSettings
    path: str
    split: str | None
    tool_key: str | None  # as above
    split_validation_size: float  # share of the rows kept for validation
    seed: int


type DatasetSettings = (
    ArithmeticSettings
    | ResponseDatasetSettings
    | OpenMathInstruct2Settings
    | OpenAIFormatSettings
    | BinaryPreferenceSettings
    | PreferenceSettings
)


@dataclass(frozen=True, kw_only=True)
class MixtureSettings:
    """Several data sets, and how many rows each gives in proportion to the others."""

    datasets: tuple[DatasetSettings, ...]
    weights: tuple[float, ...]

    @staticmethod
    def parts(source: DatasetSettings | MixtureSettings) -> tuple[tuple[DatasetSettings, float], ...]:
        """The data sets of a mixture with their weights; another data set is its own only part."""
        if isinstance(source, MixtureSettings):
            return tuple(zip(source.datasets, source.weights, strict=True))
        return ((source, 1.0),)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The keys `data.*`."""

    max_input_seq_length: int  # tokens of a prompt
    overlong_rows: str  # "error", "drop" or, of prompts, "mask"
    shuffle: bool
    train: DatasetSettings | MixtureSettings
    validation: DatasetSettings | MixtureSettings | None  # beside the held-out part of `train`
    add_bos: bool


@dataclass(frozen=True, kw_only=True)
class SupervisedDataSettings(DataSettings):
    """The keys `data.*` of SFT and DPO; `max_input_seq_length` counts the response too."""

    add_eos: bool


@dataclass(frozen=True, kw_only=True)
class EnvSettings:
    """One entry of `env.*`."""

    num_workers: int
    retry_message: str | None  # to a wrong answer; None: no further turn


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """The keys `policy.tokenizer.*`."""

    name: str
    chat_template: str | None  # a Jinja template or a .jinja file; None or "default": the tokenizer's own
    chat_template_kwargs: Mapping[str, Any] | None
