"""Data sets that a script gives as rows: lists of dictionaries, or similar iterables such as `datasets.Dataset`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nemo_offload_rl.data.readers import plain_row
from nemo_offload_rl.keys.data import (
    BinaryPreferenceConfig,
    DataConfig,
    DpoDataConfig,
    EvalDataConfig,
    OpenAIFormatConfig,
    ResponseDatasetConfig,
    SftDataConfig,
)
from nemo_offload_rl.keys.data_source import GivenRows, TaskKeys
from nemo_offload_rl.keys.section import keys_of

type Rows = Iterable[Mapping[str, Any]]
"""Rows with the columns of the algorithm; see `with_given_rows`."""


@dataclass(frozen=True, kw_only=True)
class GivenQuestions(GivenRows, ResponseDatasetConfig):
    """A prompt and its answer or completion in each row."""


@dataclass(frozen=True, kw_only=True)
class GivenConversations(GivenRows, OpenAIFormatConfig):
    """A conversation in each row."""


@dataclass(frozen=True, kw_only=True)
class GivenPairs(GivenRows, BinaryPreferenceConfig):
    """A better and a worse response in each row."""


def with_given_rows[Data: (DataConfig, EvalDataConfig, SftDataConfig, DpoDataConfig)](
    data: Data, train: Rows | None, validation: Rows | None
) -> Data:
    """The section `data` with rows instead of its data sets; `data.default` applies to them.

    Columns for GRPO and distillation are `prompt`, or `messages` or `conversations` whose last message is the answer,
    and `answer` (may be absent). For SFT they are `messages` or `conversations`, or `prompt` and `completion`. For DPO
    they are `prompt` (may be absent), `chosen` and `rejected`. All other columns reach rewards and processors.

    Args:
        data: The section.
        train: Replaces `data.train` and removes `data.validation`; None leaves both.
        validation: Replaces `data.validation`; None does not.
    """
    if train is not None:
        data = replace(data, train=_source(data, train, "train_data"), validation=None)
    if validation is not None:
        data = replace(data, validation=_source(data, validation, "validation_data"))
    return data


def _source(data: Any, rows: Rows, name: str) -> Any:
    is_table = hasattr(rows, "column_names")  # a `datasets.Dataset`
    found: Sequence[Any] = [_readable(row, is_table) if isinstance(row, Mapping) else row for row in rows]
    columns = set(found[0]) if found and isinstance(found[0], Mapping) else set()
    default = {key: getattr(data.default, key) for key in keys_of(TaskKeys) if hasattr(data.default, key)}
    common = {"path": name, "split_validation_size": 0.0, "seed": 0, **default}
    chat_key = next((key for key in ("messages", "conversations") if key in columns), None)
    if isinstance(data, DpoDataConfig):
        return GivenPairs(
            dataset_name="BinaryPreferenceDataset",
            prompt_key="prompt" if "prompt" in columns else None,
            chosen_key="chosen",
            rejected_key="rejected",
            rows=found,
            **common,
        )
    if isinstance(data, SftDataConfig) and chat_key is not None:
        return GivenConversations(dataset_name="OpenAIFormatDataset", chat_key=chat_key, rows=found, **common)
    input_key = "prompt" if "prompt" in columns or chat_key is None else chat_key
    output_key = "completion" if isinstance(data, SftDataConfig) else "answer"
    if input_key == chat_key and "answer" not in columns and _is_answered(found[0][chat_key]):
        output_key = chat_key
    if output_key == "answer":
        found = [{"answer": "", **row} if isinstance(row, Mapping) else row for row in found]
    return GivenQuestions(
        dataset_name="ResponseDataset", input_key=input_key, output_key=output_key, rows=found, **common
    )


def _is_answered(messages: Any) -> bool:
    """Whether the last message is the assistant's."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    return isinstance(last, Mapping) and last.get("role", last.get("from")) in ("assistant", "gpt")


_READ = ("prompt", "answer", "completion", "messages", "conversations", "chosen", "rejected", "tools")


def _readable(row: Mapping[str, Any], is_table: bool) -> dict[str, Any]:
    """The row with the columns that are read as those of a file are; all others stay as they are."""
    read = {key: _with_lists(row[key]) for key in _READ if key in row}
    return {**row, **(plain_row(read) if is_table else read)}


def _with_lists(value: Any) -> Any:
    """Turn arrays of NumPy, which rows of pandas have, into lists."""
    if isinstance(value, Mapping):
        return {key: _with_lists(entry) for key, entry in value.items()}
    return [_with_lists(entry) for entry in value] if isinstance(value, list | np.ndarray) else value
