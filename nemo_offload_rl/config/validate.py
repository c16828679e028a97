"""Checks types, limits and unknown keys with pydantic; reports up to three problems in one line."""

import copy
from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nemo_offload_rl.config.keys import known_keys, walk_keys
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import EXEMPLARS
from nemo_offload_rl.keys.section import FromEnvironment, from_mapping
from nemo_offload_rl.utils.config import flatten_keys, unknown_key_message

_MAX_SHOWN = 3
# Keys of earlier versions and of NeMo-RL that have no use here, and what to do.
USELESS_KEYS: Mapping[str, str] = {
    "policy.reference_dir": (
        "removed; leave it out: the reference is in host memory, in policy.precision; docs/guides/memory.md says what "
        "needs less"
    ),
    "policy.use_coalesced_optimizer_offload": (
        "a key of NeMo-RL's; leave it out: with policy.use_pinned_optimizer_offload, which is on by default, all "
        "offloaded state shares one pinned buffer"
    ),
}
# Only one of the two sections is in use, so a key of one is never suggested for a key of the other.
_EXCLUDE_EACH_OTHER = (("dtensor_cfg", "megatron_cfg"), ("megatron_cfg", "dtensor_cfg"))


def validate_keys[Config](raw: Mapping[str, Any], schema: type[Config]) -> Config:
    """Check every key of a resolved configuration by itself, and make its sections.

    Args:
        raw: Nested dictionaries and lists.
        schema: A section, such as `GrpoMasterConfig`, `SftMasterConfig` or `DpoMasterConfig`.

    Raises:
        ConfigError: One line with the dotted key, what was given and what is expected; up to three problems.
    """
    try:
        return from_mapping(schema, raw)
    except ValidationError as error:
        messages = _messages(error.errors(include_url=False), raw, schema)
    raise ConfigError(join_problems(messages))


def missing_key_message(schema: type, raw: Mapping[str, Any], path: str, value: Any) -> str:
    """Compose the message for an override of a key that the configuration does not have.

    Args:
        schema: As for `validate_keys`.
        raw: The configuration, with unresolved interpolations.
        path: The dotted key.
        value: The override's value.
    """
    if _takes(schema, _with_value(raw, path, value), path):
        return f"{path}: not set by the file; write +{path} to add it"
    if path in USELESS_KEYS:
        return f"{path}: {USELESS_KEYS[path]}"
    known = _known_at(schema, path)
    present = set(flatten_keys(raw))
    if path in known:  # a key of another kind of section: name its first part that is missing
        parts = path.split(".")
        path = next(prefix for prefix in map(".".join, accumulate([part] for part in parts)) if prefix not in present)
    return unknown_key_message(path, known, partial(_accepts, schema, raw, path, value))


def join_problems(messages: list[str]) -> str:
    """Join the first problems into one line."""
    shown = "; also ".join(messages[:_MAX_SHOWN])
    return shown if len(messages) <= _MAX_SHOWN else f"{shown}; and {len(messages) - _MAX_SHOWN} more problems"


def _messages(errors: list[ErrorDetails], raw: Mapping[str, Any], schema: type) -> list[str]:
    unknown = {_path(e["loc"], raw): e["input"] for e in errors if e["type"] == "extra_forbidden"}
    messages = [
        f"{path}: {USELESS_KEYS[path]}"
        if path in USELESS_KEYS
        else unknown_key_message(path, _known_at(schema, path), partial(_accepts, schema, raw, path, value))
        for path, value in unknown.items()
    ]
    # A misspelt key makes the right one missing; both get one message.
    sections_with_unknown = {path.rpartition(".")[0] for path in unknown}
    for error in errors:
        path = _path(error["loc"], raw)
        if error["type"] == "extra_forbidden" or (
            error["type"] == "missing" and path.rpartition(".")[0] in sections_with_unknown
        ):
            continue
        messages.append(_one_line(error, path, schema, _written(raw, error)))
    return messages


def _known_at(schema: type, path: str) -> list[str]:
    return [_concrete(key, path) for key in known_keys(schema)]


def _accepts(schema: type, raw: Mapping[str, Any], path: str, value: Any, candidate: str) -> bool:
    """Tell whether the configuration is valid at `candidate` if the value moves there from `path`."""
    if any(one in path.split(".") and other in candidate.split(".") for one, other in _EXCLUDE_EACH_OTHER):
        return False
    changed = _with_value(_without(raw, path), candidate, value)
    return changed is not None and _takes(schema, changed, candidate)


def _takes(schema: type, raw: Mapping[str, Any] | None, path: str) -> bool:
    """Tell whether the schema knows the key `path` and accepts its value."""
    if raw is None:
        return False
    try:
        from_mapping(schema, raw)
    except ValidationError as error:
        errors = [(_path(e["loc"], raw), e["type"]) for e in error.errors(include_url=False)]
        # A section that is not a mapping, or of an unknown kind, hides the problems below it.
        return not any(
            at == path or at.startswith(f"{path}.") or (path.startswith(f"{at}.") and kind != "missing")
            for at, kind in errors
        )
    return True


def _with_value(raw: Mapping[str, Any], path: str, value: Any) -> Mapping[str, Any] | None:
    """Copy nested dictionaries and lists and set a value; None if its section cannot have keys."""
    changed, section, leaf = _copied(raw, path, makes_sections=True)
    if section is None:
        return None
    section[leaf] = value
    return changed


def _without(raw: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    changed, section, leaf = _copied(raw, path, makes_sections=False)
    if section is not None:
        section.pop(leaf, None)
    return changed


def _copied(
    raw: Mapping[str, Any], path: str, *, makes_sections: bool
) -> tuple[dict[str, Any], dict[str, Any] | None, str]:
    """Return a copy, the key's section in the copy (None if there is none), and the key's name in that section."""
    changed = copy.deepcopy(dict(raw))
    node: Any = changed
    *parents, leaf = path.split(".")
    for part in parents:
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict):
            node = node.setdefault(part, {}) if makes_sections else node.get(part)
        else:
            return changed, None, leaf
    return changed, node if isinstance(node, dict) else None, leaf


def _written(raw: Any, error: ErrorDetails) -> Any:
    """Return the value of an error; text from the environment comes as `FromEnvironment`."""
    for part in error["loc"]:
        if isinstance(raw, Mapping) and part in raw:
            raw = raw[part]
        elif isinstance(raw, list) and isinstance(part, int) and part < len(raw):
            raw = raw[part]  # other parts are pydantic's union tags
    return raw if isinstance(raw, FromEnvironment) else error["input"]


def _one_line(error: ErrorDetails, path: str, schema: type, value: Any) -> str:
    if error["type"] == "missing":
        return f"{path}: missing; set it, or begin with `defaults: {EXEMPLARS[schema]}`, which sets every key"
    given = _shown(value)
    context = error.get("ctx", {})
    if error["type"] == "union_tag_invalid":
        return f"{path}.dataset_name: given {context['tag']!r}, wanted one of {context['expected_tags']}"
    if error["type"] == "union_tag_not_found":
        return f"{path}.dataset_name: missing; it says which data set this is"
    kind = "finite " if error["type"] == "finite_number" else ""
    return f"{path}: given {given}, wanted {kind}{_wanted(path, error, schema)}"


def _wanted(path: str, error: ErrorDetails, schema: type) -> str:
    parent, _, index = path.rpartition(".")
    wanted: set[str] = set()
    for key in walk_keys(schema):
        if _concrete(key.path, path) == path:
            wanted.add(key.values)
        elif index.isdigit() and key.path == parent:
            wanted.add(key.values.removeprefix("list of ").removesuffix(" or null"))
    if len(wanted) == 1:
        return wanted.pop()
    # Several kinds of a section have the key with other values, and pydantic knows which kind this is.
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
    """Return the dotted key of a pydantic location, without the union tags that pydantic puts between keys."""
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
    """Fill a documented path such as `env.NAME.num_workers` with the free name and list indices of `path`."""
    given = path.split(".")
    wanted = pattern.replace("[]", ".[]").split(".")
    filled = [given[i] if part in ("NAME", "[]") and i < len(given) else part for i, part in enumerate(wanted)]
    return ".".join(filled)
