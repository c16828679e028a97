"""Every documented key of a configuration section, for messages and for the generated reference."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from nemo_offload_rl.keys.section import is_section, keys_of

_TYPE_NAMES = {bool: "true or false", int: "integer", float: "number", str: "text", Any: "any", type(None): "null"}
_SIGNS = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))


@dataclass(frozen=True)
class KeyDoc:
    """One key.

    Attributes:
        path: Dotted name; `[]` stands for a list index and `NAME` for a free key.
        values: What may be written, in words.
        description: Purpose and unit; None when it was forgotten (a test forbids it).
        is_section: True when other keys are below it.
        variant: The data set or entry kind that the key belongs to, where there are several.
    """

    path: str
    values: str
    description: str | None
    is_section: bool
    variant: str | None


def walk_keys(section: Any, prefix: str = "", variant: str | None = None) -> Iterator[KeyDoc]:
    """Keys of `section` and of all sections below it, in the order they are written in."""
    for name, (hint, _) in keys_of(section).items():
        kind, metadata = _unwrap(hint)
        path = f"{prefix}{name}"
        children = list(_children(kind))
        yield KeyDoc(
            path=path,
            values=describe_values(kind, metadata),
            description=next((m.description for m in metadata if isinstance(m, FieldInfo) and m.description), None),
            is_section=bool(children),
            variant=variant,
        )
        for infix, child in children:
            child_variant = _variant_of(child) if len(children) > 1 else variant
            yield from walk_keys(child, f"{path}{infix}.", child_variant)


def known_keys(section: Any) -> list[str]:
    """Dotted names of every key, each once."""
    return list(dict.fromkeys(key.path for key in walk_keys(section)))


def describe_values(kind: Any, metadata: tuple[Any, ...] = ()) -> str:
    """What may be given for a type, in words."""
    kind, inner = _unwrap(kind)
    metadata = (*metadata, *inner)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(str(value) for value in arguments)
    if origin in (Union, types.UnionType):
        if all(_sections(argument) for argument in arguments):
            return "mapping"
        return " or ".join(dict.fromkeys(_limited(argument, metadata) for argument in arguments))
    if origin is tuple:
        return f"list of {describe_values(arguments[0])}"
    if origin is dict or kind is dict or is_section(kind):
        return "mapping"
    return _limited(kind, metadata)


def _limited(kind: Any, metadata: tuple[Any, ...]) -> str:
    if kind not in (int, float):
        return _TYPE_NAMES[kind] if kind in _TYPE_NAMES else describe_values(kind)
    limits = []
    for entry in metadata:
        for constraint in entry.metadata if isinstance(entry, FieldInfo) else (entry,):
            limits += [f"{sign} {getattr(constraint, a):g}" for cls, a, sign in _SIGNS if isinstance(constraint, cls)]
    return " ".join([_TYPE_NAMES[kind], " and ".join(limits)]).strip()


def _unwrap(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The bare type, and the metadata of all `Annotated` around it."""
    metadata: tuple[Any, ...] = ()
    while get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        metadata = (*metadata, *more)
    return hint, metadata


def _sections(hint: Any) -> list[Any]:
    kind, _ = _unwrap(hint)
    if is_section(kind):
        return [kind]
    if get_origin(kind) in (Union, types.UnionType):
        return [found for argument in get_args(kind) for found in _sections(argument)]
    return []


def _children(hint: Any) -> Iterator[tuple[str, Any]]:
    kind, _ = _unwrap(hint)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        yield from (("[]", found) for found in _sections(arguments[0]))
    elif origin is dict:
        yield from ((".NAME", found) for found in _sections(arguments[1]))
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _children(argument)
    elif is_section(kind):
        yield "", kind


def _variant_of(section: Any) -> str | None:
    keys = keys_of(section)
    if "dataset_name" not in keys:
        return None
    name, _ = keys["dataset_name"]
    return ", ".join(get_args(_unwrap(name)[0]))
