"""From the fields of a row to a question with its answer, a conversation, or a pair."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from numbers import Real
from pathlib import Path
from typing import Any

from nemo_offload_rl.data.readers import Record, read_records
from nemo_offload_rl.data.records import Conversation, Message, PreferencePair, Row, Splits
from nemo_offload_rl.data.tools import tools_of, with_tool_calls
from nemo_offload_rl.errors import DataError
from nemo_offload_rl.keys.data import (
    BinaryPreferenceConfig,
    OpenAIFormatConfig,
    PreferenceConfig,
    ResponseDatasetConfig,
)
from nemo_offload_rl.keys.data_source import FileKeys, GivenRows

logger = logging.getLogger(__name__)


def load_responses(settings: ResponseDatasetConfig) -> Splits[Row]:
    """Questions with their answers; a seeded share is kept for validation.

    Raises:
        DataError: The data cannot be read, or a row has the wrong form; the message names file and line.
    """
    records = _with_whole_numbers(_records(settings), settings.output_key)
    rows = [
        replace(
            response_row(record, settings.input_key, settings.output_key), tools=tools_of(record, settings.tool_key)
        )
        for record in records
    ]
    return split_by(rows, lambda row: row.asked, size=settings.split_validation_size, seed=settings.seed)


def _with_whole_numbers(records: list[Record], key: str) -> list[Record]:
    """Turn 42.0 into 42 in the field `key`, if all its numbers with a decimal point are whole.

    Tables turn whole numbers into such numbers where some cells of the column are empty.
    """
    floats = [value for record in records if isinstance(value := record.fields.get(key), float)]
    if not floats or not all(value.is_integer() for value in floats):
        return records
    logger.warning(
        "%s and others: %d of %d answers in the field %s are whole numbers with a decimal point, such as %r; they are "
        "read as numbers without one, such as %d",
        records[0].origin, len(floats), len(records), key, floats[0], floats[0],
    )  # fmt: skip
    return [
        replace(record, fields={**record.fields, key: int(value)})
        if isinstance(value := record.fields.get(key), float)
        else record
        for record in records
    ]


def load_conversations(settings: OpenAIFormatConfig) -> Splits[Conversation]:
    """Conversations; those with the same opening stay on one side of the split. Errors as in `load_responses`."""
    records = _records(settings)
    rows = [conversation(record, settings.chat_key, settings.tool_key) for record in records]
    return split_by(rows, lambda row: opening(row.messages), size=settings.split_validation_size, seed=settings.seed)


def load_pairs(settings: BinaryPreferenceConfig | PreferenceConfig) -> Splits[PreferencePair]:
    """Pairs; those with the same prompt stay on one side of the split. Errors as in `load_responses`."""
    records = _records(settings)
    if isinstance(settings, PreferenceConfig):
        rows = [ranked_pair(record) for record in records]
    else:
        keys = settings.prompt_key, settings.chosen_key, settings.rejected_key
        rows = [binary_pair(record, *keys) for record in records]
    pairs = zip(rows, records, strict=True)
    rows = [replace(row, tools=tools_of(record, settings.tool_key)) for row, record in pairs]
    return split_by(rows, lambda row: repr(row.prompt), size=settings.split_validation_size, seed=settings.seed)


def _records(settings: FileKeys) -> list[Record]:
    if not isinstance(settings, GivenRows):
        return read_records(Path(settings.path), settings.split, subset=settings.subset)
    if not settings.rows:
        raise DataError(f"{settings.path} has no rows; give some")
    records = []
    for number, row in enumerate(settings.rows):
        if not isinstance(row, Mapping):
            raise DataError(f"{settings.path}[{number}] is a {type(row).__name__}; give a dictionary for each row")
        records.append(Record(row, f"{settings.path}[{number}]"))
    return records


def split_by[T](rows: Sequence[T], key: Callable[[T], str], *, size: float, seed: int) -> Splits[T]:
    """Put rows aside for validation; rows with the same key stay together.

    Args:
        rows: All rows.
        key: Groups them.
        size: Below 1: a share of the keys. From 1 on: a number of rows, or fewer if whole groups do not fit exactly.
        seed: Picks the keys.
    """
    sizes = Counter(map(key, rows))
    keys = sorted(sizes)
    random.Random(seed).shuffle(keys)
    if size < 1:
        held_out = set(keys[: round(len(keys) * size)])
    else:
        held_out, room = set[str](), int(size)
        for one in keys:
            if sizes[one] <= room:
                held_out.add(one)
                room -= sizes[one]
    return Splits(
        train=tuple(row for row in rows if key(row) not in held_out),
        validation=tuple(row for row in rows if key(row) in held_out),
    )


def response_row(record: Record, input_key: str, output_key: str) -> Row:
    """A prompt and its answer; every other field, and the answer's under its own name, as metadata.

    The prompt is text, a number, or a list of messages; the answer is text, a number, or one message of the assistant.
    """
    rest = {key: value for key, value in record.fields.items() if key != input_key}
    messages = _prompt_messages(record, input_key)
    if messages is None:
        question = text_of(record, input_key, "input_key")
    else:
        question = next(message["content"] for message in reversed(messages) if message["role"] == "user")
    return Row(
        question=question,
        answer=_answer(record, output_key),
        origin=record.origin,
        metadata=rest,
        messages=messages,
    )


def _prompt_messages(record: Record, key: str) -> tuple[Message, ...] | None:
    """The prompt as messages; None if the field holds something else."""
    value = field_of(record, key, "input_key")
    if not is_message_list(value):
        return None
    messages = _messages(value, key, record.origin)
    if not any(message["role"] == "user" for message in messages):
        raise DataError(f"{record.origin}: field {key!r} has no message of the user; a prompt needs one")
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{record.origin}: field {key!r} ends with the assistant, so there is nothing left to answer; leave that "
            "message out, or for SFT use dataset_name=OpenAIFormatDataset"
        )
    return messages


def _answer(record: Record, key: str) -> str:
    """A field with text, a number or a list of one message of the assistant, as text."""
    value = field_of(record, key, "output_key")
    if not is_message_list(value):
        return text_of(record, key, "output_key")
    messages = _messages(value, key, record.origin)
    if [message["role"] for message in messages] != ["assistant"] or "tool_calls" in messages[0]:
        raise DataError(
            f"{record.origin}: field {key!r} is not one message of the assistant with text alone; for SFT write the "
            "whole conversation into one field and use dataset_name=OpenAIFormatDataset"
        )
    return messages[0]["content"]


def is_message_list(value: Any) -> bool:
    """Tell whether a field holds messages: a list of objects, with `role` in the first."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and "role" in value[0]


def conversation(record: Record, chat_key: str, tool_key: str | None) -> Conversation:
    """Messages, at least one of them the assistant's, and the row's tools."""
    messages = _messages(field_of(record, chat_key, "chat_key"), chat_key, record.origin)
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(
            f"{record.origin}: no message is the assistant's, so there is nothing to learn; take the row out"
        )
    return Conversation(messages=messages, origin=record.origin, tools=tools_of(record, tool_key))


def binary_pair(record: Record, prompt_key: str | None, chosen_key: str, rejected_key: str) -> PreferencePair:
    """A pair from fields with text or messages.

    Responses may repeat the prompt's messages, as in much published data; these are cut off. Without a `prompt_key` the
    prompt is the common beginning of both.
    """
    chosen = _as_messages(field_of(record, chosen_key, "chosen_key"), chosen_key, "assistant", record.origin)
    rejected = _as_messages(field_of(record, rejected_key, "rejected_key"), rejected_key, "assistant", record.origin)
    if prompt_key is None:
        pairs = zip(chosen, rejected, strict=False)
        prompt = tuple(message for message, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if not prompt:
            raise DataError(
                f"{record.origin}: {chosen_key!r} and {rejected_key!r} begin with no common message that could be the "
                "prompt; set prompt_key to the field that holds it"
            )
    else:
        prompt = _as_messages(field_of(record, prompt_key, "prompt_key"), prompt_key, "user", record.origin)
    return _pair(prompt, chosen, rejected, record.origin)


def ranked_pair(record: Record) -> PreferencePair:
    """A pair from `context` and ranked `completions`: the lowest rank is the better response, the highest the worse."""
    prompt = _as_messages(field_of(record, "context", None), "context", "user", record.origin)
    completions = field_of(record, "completions", None)
    is_list = isinstance(completions, list) and all(isinstance(entry, Mapping) for entry in completions)
    if not is_list or len(completions) < 2:
        raise DataError(f"{record.origin}: field 'completions' is no list of two or more objects; write it as one")
    ranked = []
    for number, entry in enumerate(completions, start=1):
        if not isinstance(entry.get("rank"), int) or "completion" not in entry:
            raise DataError(f"{record.origin}: completion {number} has no whole 'rank' or no 'completion'; write both")
        ranked.append((entry["rank"], _as_messages(entry["completion"], "completion", "assistant", record.origin)))
    best, worst = min(ranked, key=lambda entry: entry[0]), max(ranked, key=lambda entry: entry[0])
    if best[0] == worst[0]:
        raise DataError(f"{record.origin}: all completions have the rank {best[0]}; take the row out or rank them")
    return _pair(prompt, best[1], worst[1], record.origin)


def _pair(
    prompt: tuple[Message, ...], chosen: tuple[Message, ...], rejected: tuple[Message, ...], origin: str
) -> PreferencePair:
    chosen, rejected = (
        response[len(prompt) :] if response[: len(prompt)] == prompt else response for response in (chosen, rejected)
    )
    for name, response in (("better", chosen), ("worse", rejected)):
        if not response or response[-1]["role"] != "assistant":
            raise DataError(f"{origin}: the {name} response does not end with the assistant; correct it or take it out")
    if chosen == rejected:
        raise DataError(f"{origin}: the two responses are the same, so neither is better; take the row out")
    return PreferencePair(prompt=prompt, chosen=chosen, rejected=rejected, origin=origin)


def field_of(record: Record, key: str, setting: str | None) -> Any:
    """A field by its name, or by a dotted path of names and list indices."""
    if key in record.fields:
        return record.fields[key]
    value: Any = record.fields
    for part in key.split("."):
        if isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            known = ", ".join(sorted(record.fields)) or "none"
            fix = f"set {setting} to one of them" if setting is not None else f"write {key!r} into each row"
            raise DataError(f"{record.origin} has no field {key!r} (fields: {known}); {fix}")
    return value


def text_of(record: Record, key: str, setting: str) -> str:
    """A field with text or a number, as text."""
    value = field_of(record, key, setting)
    if isinstance(value, bool) or not isinstance(value, str | Real) or value != value:
        kind = {"NoneType": "empty (null)", "float": "not a number (NaN)"}.get(type(value).__name__)
        path = f", or name the entry in it, such as {setting}={key}.0" if isinstance(value, list) else ""
        fact = f"{record.origin}: field {key!r} is {kind or 'a ' + type(value).__name__}"
        raise DataError(f"{fact}; write text or a number{path}")
    return str(value)


def _as_messages(value: Any, key: str, role: str, origin: str) -> tuple[Message, ...]:
    return ({"role": role, "content": value},) if isinstance(value, str) else _messages(value, key, origin)


def _messages(value: Any, key: str, origin: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else f"a {type(value).__name__}"
        raise DataError(f"{origin}: field {key!r} is {kind}; write a list of messages with `role` and `content`")
    messages = []
    for number, entry in enumerate(value, start=1):
        # Tables give every message all fields of any, None for those that it lacks.
        message = {k: v for k, v in entry.items() if v is not None} if isinstance(entry, Mapping) else {}
        message = with_tool_calls(message, f"{origin}: message {number} of {key!r}")
        if isinstance(message.get("content"), list):
            message["content"] = _joined(message["content"], f"{origin}: message {number} of {key!r}")
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise DataError(
                f"{origin}: message {number} of {key!r} has no text for `role` or `content`; write both (a message "
                "with `tool_calls` needs no `content`)"
            )
        messages.append(message)
    return tuple(messages)


def _joined(parts: Sequence[Any], where: str) -> str:
    """The text of a content that is a list of parts, as in OpenAI's format."""
    texts = []
    for part in parts:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise DataError(f"{where} has a part of type {kind}; text alone is trained on, take the row out")
        texts.append(part["text"])
    return "".join(texts)


def opening(messages: Sequence[Message]) -> str:
    """The messages before the assistant's first turn, or that turn if the conversation begins with it."""
    first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
    return repr(messages[: max(first, 1)])
