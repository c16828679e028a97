"""From the fields of a row to a question with its answer, a conversation, or a pair."""

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from itertools import takewhile
from numbers import Real
from pathlib import Path
from typing import Any

from nemo_offload_rl.data.bad_rows import BadRows
from nemo_offload_rl.data.readers import Record, read_records
from nemo_offload_rl.data.records import Answer, Conversation, Message, PreferencePair, Row, Splits
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


def load_responses(settings: ResponseDatasetConfig, bad: BadRows) -> Splits[Row]:
    """Questions with their answers; a seeded share is kept for validation.

    Args:
        settings: The keys of the data set.
        bad: Decides about rows of the wrong form.

    Raises:
        DataError: The data cannot be read, or a row has the wrong form; the message names file and line.
    """

    def row_of(record: Record) -> Row:
        row = response_row(record, settings.input_key, settings.output_key)
        return replace(row, tools=tools_of(record, settings.tool_key))

    records = _records(settings, bad)
    if settings.output_key is not None:
        records = _with_whole_numbers(records, settings.output_key)
    rows = list(bad.usable(records, row_of))
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


def load_conversations(settings: OpenAIFormatConfig, bad: BadRows) -> Splits[Conversation]:
    """Conversations; those with the same opening stay on one side of the split. The rest is as in `load_responses`."""
    records = _records(settings, bad)
    rows = list(bad.usable(records, lambda record: conversation(record, settings.chat_key, settings.tool_key)))
    return split_by(rows, lambda row: opening(row.messages), size=settings.split_validation_size, seed=settings.seed)


def load_pairs(settings: BinaryPreferenceConfig | PreferenceConfig, bad: BadRows) -> Splits[PreferencePair]:
    """Pairs; those with the same prompt stay on one side of the split. The rest is as in `load_responses`."""

    def pair_of(record: Record) -> PreferencePair:
        if isinstance(settings, PreferenceConfig):
            pair = ranked_pair(record)
        else:
            pair = binary_pair(record, settings.prompt_key, settings.chosen_key, settings.rejected_key)
        return replace(pair, tools=tools_of(record, settings.tool_key))

    rows = list(bad.usable(_records(settings, bad), pair_of))
    return split_by(rows, lambda row: repr(row.prompt), size=settings.split_validation_size, seed=settings.seed)


def _records(settings: FileKeys, bad: BadRows) -> list[Record]:
    if not isinstance(settings, GivenRows):
        return read_records(Path(settings.path), settings.split, subset=settings.subset, bad=bad)
    if not settings.rows:
        raise DataError(f"{settings.path} has no rows; give some")
    rows = ((f"{settings.path}[{number}]", row) for number, row in enumerate(settings.rows))
    return list(bad.usable(rows, lambda row: _given_record(*row)))


def _given_record(origin: str, row: Any) -> Record:
    if not isinstance(row, Mapping):
        raise DataError(f"{origin} is a {type(row).__name__}; give a dictionary for each row")
    return Record(row, origin)


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


def response_row(record: Record, input_key: str, output_key: str | None) -> Row:
    """A prompt and its answer; every other field, and the answer's under its own name, as metadata.

    The prompt is text, a number, or a list of messages. The answer is text, a number, a list of these, or one message
    of the assistant. If both keys name the same list of messages, its last one is the answer. Without an `output_key`
    the answer is "".
    """
    rest = {key: value for key, value in record.fields.items() if key != input_key}
    value = field_of(record, input_key, "input_key")
    given = message_list(value)
    if given is None:
        if isinstance(value, list):
            raise DataError(
                f"{record.origin}: field {input_key!r} is a list, but not of messages; write objects with `role` and "
                f"`content`, or text, or name the entry with the text, such as input_key={input_key}.0"
            )
        return Row(
            question=text_of(record, input_key, "input_key"),
            answer=_answer(record, output_key),
            origin=record.origin,
            metadata=rest,
        )
    messages, answer = _messages(given, input_key, record.origin), None
    if input_key == output_key:
        messages, answer = messages[:-1], _text_of_answer(messages[-1:], input_key, record.origin)
    return Row(
        question=_question(messages, input_key, record.origin),
        answer=_answer(record, output_key) if answer is None else answer,
        origin=record.origin,
        metadata=rest,
        messages=messages,
    )


def _question(messages: Sequence[Message], key: str, origin: str) -> str:
    """What the user says last in a prompt."""
    said = [message["content"] for message in messages if message["role"] == "user"]
    if not said:
        raise DataError(f"{origin}: field {key!r} has no message of the user; a prompt needs one")
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{origin}: field {key!r} ends with the assistant, so there is nothing left to answer; leave that message "
            f"out, or set output_key={key} too, which makes it the answer"
        )
    return said[-1]


def _answer(record: Record, key: str | None) -> Answer:
    """A field with text, a number, a list of these, or a list of one message of the assistant."""
    if key is None:
        return ""
    value = field_of(record, key, "output_key")
    if (given := message_list(value)) is not None:
        return _text_of_answer(_messages(given, key, record.origin), key, record.origin)
    if not isinstance(value, list) or not value:
        return text_of(record, key, "output_key")
    texts = [_text(entry, record.origin, f"{key}.{index}", "output_key") for index, entry in enumerate(value)]
    return texts if len(texts) > 1 else texts[0]


def _text_of_answer(messages: Sequence[Message], key: str, origin: str) -> str:
    if [message["role"] for message in messages] != ["assistant"] or "tool_calls" in messages[0]:
        raise DataError(
            f"{origin}: the answer in the field {key!r} is not one message of the assistant with text alone; for SFT "
            "write the whole conversation into one field and use dataset_name=OpenAIFormatDataset"
        )
    return messages[0]["content"]


def message_list(value: Any) -> list[Any] | None:
    """The messages in a field: a list of objects with `role` (or ShareGPT's `from`) in the first, or its JSON text.

    Returns:
        The list; None if the field holds something else.
    """
    if isinstance(value, str) and value.lstrip().startswith("[") and value.rstrip().endswith("]"):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, list) or not value or not isinstance(value[0], Mapping):
        return None
    return value if "role" in value[0] or "from" in value[0] else None


def conversation(record: Record, chat_key: str, tool_key: str | None) -> Conversation:
    """Messages, at least one of them the assistant's, and the row's tools."""
    value = field_of(record, chat_key, "chat_key")
    messages = _messages(message_list(value) or value, chat_key, record.origin)
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
        raise DataError(f"{record.origin}: field 'completions' is not a list of two or more objects; write it as one")
    ranked = []
    for number, entry in enumerate(completions, start=1):
        if not isinstance(entry.get("rank"), int) or "completion" not in entry:
            raise DataError(f"{record.origin}: completion {number} lacks an integer 'rank' or 'completion'; write both")
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
    return _text(field_of(record, key, setting), record.origin, key, setting)


def _text(value: Any, origin: str, key: str, setting: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | Real | Decimal) or value != value:
        kind = {"NoneType": "empty (null)", "float": "not a number (NaN)"}.get(type(value).__name__)
        path = f", or name the entry in it, such as {setting}={key}.0" if isinstance(value, list) else ""
        fact = f"{origin}: field {key!r} is {kind or 'a ' + type(value).__name__}"
        raise DataError(f"{fact}; write text or a number{path}")
    return str(value)


def _as_messages(value: Any, key: str, role: str, origin: str) -> tuple[Message, ...]:
    """Messages, or text as one message of `role`."""
    given = message_list(value)
    if given is None and isinstance(value, str):
        return ({"role": role, "content": value},)
    return _messages(value if given is None else given, key, origin)


def _messages(value: Any, key: str, origin: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else f"a {type(value).__name__}"
        raise DataError(f"{origin}: field {key!r} is {kind}; write a list of messages with `role` and `content`")
    return tuple(
        _message(entry, f"{origin}: message {number} of {key!r}") for number, entry in enumerate(value, start=1)
    )


_SHARE_GPT = {"human": "user", "gpt": "assistant"}
_ROLES = ("system", "user", "assistant", "tool")


def _message(entry: Any, where: str) -> Message:
    """One message with text as its content; `where` names it in errors."""
    # Tables give every message all fields of any, None for those that it lacks.
    message = {k: v for k, v in entry.items() if v is not None} if isinstance(entry, Mapping) else {}
    if "from" in message and "role" not in message:
        author, said = message.pop("from"), message.pop("value", None)
        role = _SHARE_GPT.get(author, author)
        if role not in _ROLES:
            raise DataError(f"{where} is from {author!r}; write one of {', '.join((*_SHARE_GPT, *_ROLES))}")
        message = {"role": role, "content": said, **message}
    message = with_tool_calls(message, where)
    if isinstance(message.get("content"), list):
        message["content"] = _joined(message["content"], where)
    if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
        raise DataError(
            f"{where} has no text for `role` or `content`; write both (a message with `tool_calls` needs no `content`)"
        )
    return message


_TEXT_PARTS = ("text", "input_text", "output_text")  # of OpenAI's chat completions and responses


def _joined(parts: Sequence[Any], where: str) -> str:
    """The text of a content that is a list of parts, as in OpenAI's format."""
    texts = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise DataError(
                f"{where} has a part of type {kind}, and models are trained on text alone; take the row out"
            )
        texts.append(part["text"])
    return "".join(texts)


def opening(messages: Sequence[Message]) -> str:
    """The messages before the assistant's first turn, or that turn if the conversation begins with it."""
    first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
    return repr(messages[: max(first, 1)])
