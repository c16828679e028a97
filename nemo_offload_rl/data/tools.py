"""Tools that an assistant may call and the calls that it makes, in the form that chat templates read.

vLLM hands conversations to templates in this form, so training and serving render alike: arguments are an object, not
JSON text, and a message that only calls tools has the content "".
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_offload_rl.data.readers import Record
from nemo_offload_rl.data.records import Message, Tools
from nemo_offload_rl.errors import DataError, first_line


def tools_of(record: Record, key: str | None) -> Tools | None:
    """Tool definitions in the field `key`: a list of objects, or that list as JSON text; None for no tools.

    Raises:
        DataError: The field holds something else.
    """
    value = record.fields[key] if key is not None and key in record.fields else None
    if isinstance(value, str):
        value = _parsed(value, f"{record.origin}: field {key!r}")
    if not value or value != value:  # NaN is an empty cell of pandas
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError(
            f"{record.origin}: field {key!r} holds the tools that the assistant may call and is not a list of objects; "
            "write one, or set tool_key to another field or null"
        )
    return [dict(tool) for tool in value]


def with_tool_calls(message: Mapping[str, Any], where: str) -> Message:
    """The message with its `tool_calls`, if any, in the form of the file header; `where` names it in errors.

    Raises:
        DataError: The calls are in neither OpenAI's format nor that of chat templates.
    """
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    if "tool_calls" not in message:
        return rest
    value = message["tool_calls"]
    if not isinstance(value, list) or not all(isinstance(call, Mapping) for call in value):
        raise DataError(f"{where} has `tool_calls` that are not a list of objects; write a list of calls")
    calls = [_call(call, where) for call in value]
    return {"content": "", **rest, "tool_calls": calls} if calls else rest


def check_shown(text: str, messages: Sequence[Message], tools: Tools | None, origin: str) -> None:
    """Refuse a rendered text without a tool or a call: a chat template that knows no tools leaves them out silently.

    Raises:
        DataError: A tool or a call is missing.
    """
    for tool in tools or ():
        name = _function(tool).get("name")
        if isinstance(name, str) and name not in text:
            raise DataError(
                f"{origin}: the chat template does not show the tool {name}; set policy.tokenizer.chat_template to one "
                "that shows tools, or tool_key to null to leave the tools out"
            )
    for message in messages:
        for call in message.get("tool_calls", ()):
            if _function(call)["name"] not in text:
                raise DataError(
                    f"{origin}: the chat template does not show the call of the tool {_function(call)['name']}; set "
                    "policy.tokenizer.chat_template to one that shows tool calls, or take the row out"
                )


def _call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = _function(call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise DataError(f"{where} has a tool call without a `name`; write `name` and `arguments` for each call")
    given = function.get("arguments")
    what = f"{where}: the `arguments` of its call of {function['name']}"
    arguments = (_parsed(given, what) if isinstance(given, str) else given) or {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"{what} are a {type(arguments).__name__}; write an object")
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def _function(entry: Mapping[str, Any]) -> Any:
    """The object with `name` and `arguments`, one level down in OpenAI's format."""
    return entry.get("function", entry)


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{what} are text that is not JSON ({first_line(error)}); correct it") from error
