"""Types, limits and unknown keys: what pydantic finds, said in one line each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from nemo_offload_rl.config.keys import known_keys, walk_keys
from nemo_offload_rl.config.schema import EXEMPLARS
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.utils.config import unknown_key_message

_MAX_SHOWN = 3


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def validate_keys[Config](raw: Mapping[str, Any], schema: type[Config]) -> Config:
    """Check every key of a resolved configuration by itself.

    Args:
        raw: Nested dictionaries and lists.
        schema: `GrpoMasterConfig`, `SftMasterConfig` or `DpoMasterConfig`.

    Raises:
        ConfigError: One line with the dotted key, what was given and what is wanted; up to three problems.
    """
    try:
        return _adapter(schema).validate_python(raw, strict=True)
    except ValidationError as error:
        messages = _messages(error.errors(include_url=False), raw, schema)
    raise ConfigError(join_problems(messages))


def join_problems(messages: list[str]) -> str:
    """The first problems of a list as one line."""
    shown = "; also ".join(messages[:_MAX_SHOWN])
    return shown if len(messages) <= _MAX_SHOWN else f"{shown}; and {len(messages) - _MAX_SHOWN} more problems"


def _messages(errors: list[ErrorDetails], raw: Mapping[str, Any], schema: type) -> list[str]:
    known = known_keys(schema)
    unknown = [_path(e["loc"], raw) for e in errors if e["type"] == "extra_forbidden"]
    messages = [unknown_key_message(path, [_concrete(key, path) for key in known]) for path in unknown]
    # A misspelt key makes the right one missing: one message for both.
    sections_with_unknown = {path.rpartition(".")[0] for path in unknown}
    for error in errors:
        path = _path(error["loc"], raw)
        if error["type"] == "extra_forbidden" or (
            error["type"] == "missing" and path.rpartition(".")[0] in sections_with_unknown
        ):
            continue
        messages.append(_one_line(error, path, schema))
    return messages


def _one_line(error: ErrorDetails, path: str, schema: type) -> str:
    if error["type"] == "missing":
        return f"{path}: missing; set it, or begin with `defaults: {EXEMPLARS[schema]}`, which sets every key"
    given = _shown(error["input"])
    context = error.get("ctx", {})
    if error["type"] == "union_tag_invalid":
        return f"{path}.dataset_name: given {context['tag']!r}, wanted one of {context['expected_tags']}"
    if error["type"] == "union_tag_not_found":
        return f"{path}.dataset_name: missing; it says which data set this is"
    return f"{path}: given {given}, wanted {_wanted(path, error, schema)}"


def _wanted(path: str, error: ErrorDetails, schema: type) -> str:
    parent, _, index = path.rpartition(".")
    for key in walk_keys(schema):
        if _concrete(key.path, path) == path:
            return key.values
        if index.isdigit() and key.path == parent:
            return key.values.removeprefix("list of ").removesuffix(" or null")
    return error["msg"].removeprefix("Input should be ")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[cast("bool | None", value)]
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"the text {text}" if isinstance(value, str) else text


def _path(loc: tuple[int | str, ...], raw: Any) -> str:
    """Dotted key of a pydantic location, without the union tags that pydantic puts between the keys."""
    parts: list[str] = []
    node: Any = raw
    for index, entry in enumerate(loc):
        last = index == len(loc) - 1
        if isinstance(node, Mapping):
            if entry in node:
                node = node[entry]
            elif not last:
                continue
        elif isinstance(node, list) and isinstance(entry, int):
            node = node[entry]
        elif not last or isinstance(entry, str):
            continue
        parts.append(str(entry))
    return ".".join(parts)


def _concrete(pattern: str, path: str) -> str:
    """A documented path such as `env.NAME.num_workers`, with the free name and list indices that `path` has."""
    given = path.split(".")
    wanted = pattern.replace("[]", ".[]").split(".")
    filled = [given[i] if part in ("NAME", "[]") and i < len(given) else part for i, part in enumerate(wanted)]
    return ".".join(filled)
