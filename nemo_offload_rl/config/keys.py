"""Lists the documented keys of a configuration section, for messages and for the generated reference."""

import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from nemo_offload_rl.keys.section import default_of, is_section, keys_of, names_of_data_sets, sections_of, unwrap

_TYPE_NAMES = {bool: "true or false", int: "integer", float: "number", str: "text", Any: "any", type(None): "null"}
_SIGNS = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))


@dataclass(frozen=True)
class KeyDoc:
    """One key.

    Attributes:
        path: Dotted name; `[]` stands for a list index and `NAME` for a free key.
        values: Allowed values, in words.
        description: Purpose and unit; None if it was forgotten (a test forbids it).
        is_section: Other keys are below it.
        variant: The data set or entry kind that the key belongs to, if there are several.
        default: The default value as the only entry of a tuple; () if there is none.
        is_required: A file must set it: it has no default, and its absence has no meaning.
    """

    path: str
    values: str
    description: str | None
    is_section: bool
    variant: str | None
    default: tuple[Any, ...]
    is_required: bool


def walk_keys(section: Any, prefix: str = "", variant: str | None = None) -> Iterator[KeyDoc]:
    """Yield the keys of `section` and of all sections below it, in the order of their definition."""
    for name, (hint, is_required) in keys_of(section).items():
        kind, metadata = unwrap(hint)
        path = f"{prefix}{name}"
        children = list(_children(kind))
        yield KeyDoc(
            path=path,
            values=describe_values(kind, metadata),
            description=next((m.description for m in metadata if isinstance(m, FieldInfo) and m.description), None),
            is_section=bool(children),
            variant=variant,
            default=default_of(section, name),
            is_required=is_required and not default_of(section, name),
        )
        for infix, child in children:
            child_variant = (", ".join(names_of_data_sets(child)) or None) if len(children) > 1 else variant
            yield from walk_keys(child, f"{path}{infix}.", child_variant)


def known_keys(section: Any) -> list[str]:
    """List the dotted name of every key once."""
    return list(dict.fromkeys(key.path for key in walk_keys(section)))


def takes_text(section: Any, path: str) -> bool:
    """Tell whether the key at a dotted path takes text, or one of some words, and apart from null nothing else."""
    kinds = [kind for kind in _kinds_at(section, path.split(".")) if kind is not type(None)]
    words = (get_args(kind) if get_origin(kind) is Literal else (kind,) for kind in kinds)
    return bool(kinds) and all(word is str or isinstance(word, str) for some in words for word in some)


def _kinds_at(hint: Any, parts: Sequence[str]) -> Iterator[Any]:
    """Yield the types of values at a path below a type: of a union, or of a data set, all that may be there."""
    kind, _ = unwrap(hint)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _kinds_at(argument, parts)
    elif not parts:
        yield kind
    elif origin is tuple or (origin is dict and arguments):
        yield from _kinds_at(arguments[-1] if origin is dict else arguments[0], parts[1:])
    elif is_section(kind) and parts[0] in (keys := keys_of(kind)):
        yield from _kinds_at(keys[parts[0]][0], parts[1:])


def describe_values(kind: Any, metadata: tuple[Any, ...] = ()) -> str:
    """Describe the values of a type in words."""
    kind, inner = unwrap(kind)
    metadata = (*metadata, *inner)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(str(value) for value in arguments)
    if origin in (Union, types.UnionType):
        if all(sections_of(argument) for argument in arguments):
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


def _children(hint: Any) -> Iterator[tuple[str, Any]]:
    kind, _ = unwrap(hint)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        yield from (("[]", found) for found in sections_of(arguments[0]))
    elif origin is dict:
        yield from ((".NAME", found) for found in sections_of(arguments[1]))
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from _children(argument)
    elif is_section(kind):
        yield "", kind
