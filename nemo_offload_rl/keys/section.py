"""Declares keys of the YAML: each one once, as a field of a section.

A section is a class with the decorator `section`, and its fields are written
`name: Annotated[type, doc("purpose, values, unit", ge=1)]`. Pydantic checks values by that line,
`tests/support/configuration_pages.py` writes docs/reference/configuration.md from it, and the package reads the value.
A list of the YAML is declared, and read, as `tuple[type, ...]`.

A file may leave out a key whose field has a default: `fill_defaults` sets it. The default `value_of("${...}")` is the
value of another key. A field `Annotated[type, doc(...)] | None = None` is None if and only if the key is left out: the
YAML cannot set it to null.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, cast, dataclass_transform, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema


class ValueOf(str):
    """Text with `${...}`: a default that is computed from other keys."""


def doc(text: str, **limits: Any) -> Any:
    """Describe a key: purpose, values and unit, and `ge`, `gt`, `le` or `lt` limits that pydantic enforces."""
    return Field(description=text, **limits)


def value_of(text: str) -> Any:
    """Make a default from the value of other keys, written as in a file."""
    return ValueOf(text)


def unwrap(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the bare type, and the metadata of all `Annotated` around it."""
    metadata: tuple[Any, ...] = ()
    while get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        metadata = (*metadata, *more)
    return hint, metadata


def default_of(kind: type, name: str) -> tuple[Any, ...]:
    """Return the default of a key as a file would write it, as the only entry of a tuple; () if there is none.

    Required keys have no default, and neither do keys whose absence has a meaning of its own.
    """
    (entry,) = (entry for entry in dataclasses.fields(cast(Any, kind)) if entry.name == name)
    default = entry.default
    if entry.default_factory is not dataclasses.MISSING:
        default = entry.default_factory()
    if default is dataclasses.MISSING:
        return ()
    if default is None and get_origin(_hints(kind)[name]) is not Annotated:
        return ()
    return (list(cast("tuple[Any, ...]", default)) if isinstance(default, tuple) else default,)


def sections_of(hint: Any) -> list[Any]:
    """List the sections that a value of this type may be; of a union, all of them."""
    kind, _ = unwrap(hint)
    if is_section(kind):
        return [kind]
    if get_origin(kind) in (Union, UnionType):
        return [found for argument in get_args(kind) for found in sections_of(argument)]
    return []


def fill_defaults(kind: type, values: dict[str, Any]) -> None:
    """Set keys that are left out and have a default, in a section and in all sections below it.

    Args:
        kind: The section.
        values: Its keys as in a file, with unresolved interpolations; changed in place.
    """
    for name, (hint, is_required) in keys_of(kind).items():
        if name not in values:
            if default := default_of(kind, name):
                values[name] = default[0]
            elif is_required and is_section(unwrap(hint)[0]):
                keys: dict[str, Any] = {}
                fill_defaults(unwrap(hint)[0], keys)
                values |= {name: keys} if keys else {}  # one message on the section says more than one on each key
        _fill_below(hint, values.get(name))


def _fill_below(hint: Any, value: Any) -> None:
    kind, _ = unwrap(hint)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple and isinstance(value, list):
        for entry in cast("list[Any]", value):
            _fill_below(arguments[0], entry)
    elif origin is dict and isinstance(value, dict):
        for entry in cast("dict[str, Any]", value).values():
            _fill_below(arguments[1], entry)
    elif isinstance(value, dict):
        keys, sections = cast("dict[str, Any]", value), sections_of(kind)
        if len(sections) > 1:  # data sets: `dataset_name` says which one
            sections = [section for section in sections if keys.get("dataset_name") in names_of_data_sets(section)]
        if len(sections) == 1:
            fill_defaults(sections[0], keys)


def names_of_data_sets(kind: type) -> tuple[str, ...]:
    """Return the values of `dataset_name` that select this section; () if it is no section of a data set."""
    keys = keys_of(kind)
    return get_args(unwrap(keys["dataset_name"][0])[0]) if "dataset_name" in keys else ()


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
def section[C](cls: type[C]) -> type[C]:
    """Make a class a section: a frozen dataclass with keyword arguments, which pydantic builds from a mapping.

    Unknown keys and missing keys without a default are errors.
    """
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    cast(Any, made).__get_pydantic_core_schema__ = classmethod(_core_schema)
    return made


def is_section(kind: Any) -> bool:
    """Whether a type is a section."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


@cache
def keys_of(kind: type) -> dict[str, tuple[Any, bool]]:
    """Return for each key of a section the type that a file may write, with `Annotated`, and whether it is required."""
    hints = _hints(kind)
    fields = {field.name: field for field in dataclasses.fields(cast(Any, kind))}
    has_value = {name: field.default is not dataclasses.MISSING for name, field in fields.items()}
    is_required = {
        name: (not has_value[name] and field.default_factory is dataclasses.MISSING)
        or isinstance(field.default, ValueOf)
        for name, field in fields.items()
    }
    return {name: (hint if is_required[name] else _if_written(hint), is_required[name]) for name, hint in hints.items()}


def from_mapping[T](kind: type[T], values: Mapping[str, Any]) -> T:
    """Make a section from nested dictionaries and lists.

    Raises:
        pydantic.ValidationError: A key is unknown or missing, or its value is not allowed.
    """
    return _adapter(kind).validate_python(as_used(values), strict=True)


class FromEnvironment(str):
    """Text of a configuration that comes from the environment, and may be a secret.

    The object is the text itself; its `repr` shows what the file says. `as_used` turns it into plain text for the
    sections, `as_written` into what the file says for the records of a run.

    Attributes:
        written: What the file says, with the interpolation, such as `${oc.env:NAME}`.
    """

    written: str

    def __new__(cls, text: str, written: str) -> FromEnvironment:
        made = super().__new__(cls, text)
        made.written = written
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.written

    def __str__(self) -> str:
        return "".join(self)

    def __repr__(self) -> str:
        return repr(self.written)


def as_used(node: Any) -> Any:
    """Replace text from the environment by plain text, in nested dictionaries and lists."""
    return _with_texts(node, str)


def as_written(node: Any) -> Any:
    """Replace text from the environment by what the file says, in nested dictionaries and lists, for records."""
    return _with_texts(node, lambda text: text.written)


def _with_texts(node: Any, replace: Callable[[FromEnvironment], str]) -> Any:
    if isinstance(node, Mapping):
        items = cast("Mapping[Any, Any]", node).items()
        return {key: _with_texts(value, replace) for key, value in items}
    if isinstance(node, list):
        return [_with_texts(value, replace) for value in cast("list[Any]", node)]
    return replace(node) if isinstance(node, FromEnvironment) else node


def extend[T](target: type[T], base: Any, **more: Any) -> T:
    """Make a dataclass from the fields that it shares with `base`; `more` has the others, and may replace some."""
    names = {field.name for field in dataclasses.fields(cast(Any, target))}
    taken = {field.name: getattr(base, field.name) for field in dataclasses.fields(base) if field.name in names}
    return target(**{**taken, **more})


def replace_key(node: Any, path: str, value: Any) -> Any:
    """Copy a section or a mapping with another value at a dotted key, unchecked; only the last part may be new."""
    name, _, below = path.partition(".")
    if isinstance(node, Mapping):
        entries = cast("Mapping[str, Any]", node)
        return {**entries, name: replace_key(entries[name], below, value) if below else value}
    return dataclasses.replace(node, **{name: replace_key(getattr(node, name), below, value) if below else value})


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _if_written(hint: Any) -> Any:
    """Remove the None next to `Annotated`, which means that the key is left out."""
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(kind for kind in get_args(hint) if kind is not NoneType)]  # noqa: UP007
    return hint


def _core_schema(cls: Any, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    fields = {
        name: core_schema.typed_dict_field(handler.generate_schema(_for_pydantic(hint)), required=required)
        for name, (hint, required) in keys_of(cls).items()
    }
    keys = core_schema.typed_dict_schema(fields, extra_behavior="forbid")
    return core_schema.no_info_after_validator_function(lambda values: cls(**values), keys)


def _for_pydantic(hint: Any) -> Any:
    """Replace tuples by lists, which become tuples after their check, and refuse numbers that are not finite."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is float:
        return Annotated[float, Field(allow_inf_nan=False)]
    if origin is Annotated:
        return Annotated[_for_pydantic(arguments[0]), *arguments[1:]]
    if origin is tuple:
        return Annotated[list[_for_pydantic(arguments[0])], AfterValidator(tuple)]
    if origin in (Union, UnionType):
        return Union[tuple(map(_for_pydantic, arguments))]  # noqa: UP007
    return hint
