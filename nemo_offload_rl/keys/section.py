"""Building blocks of the YAML border: a key is declared once, as the field of a section.

A section is a class with the decorator `section`, and its fields are written
`name: Annotated[type, doc("purpose, values, unit", ge=1)]`. That one line is what pydantic checks a value of the YAML
by, what `nemo_offload_rl.config.reference` writes docs/reference/configuration.md from, and the attribute that the
package reads. What is a list there is declared, and read, as `tuple[type, ...]`.

A file may leave out a key whose field has a default: `fill_defaults` sets it. `value_of("${...}")` is the value of
another key. A field `Annotated[type, doc(...)] | None = None` is None where it is left out, which the YAML cannot say:
its absence has a meaning of its own.
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
    """Text with `${...}`: a default that is made of the values of other keys."""


def doc(text: str, **limits: Any) -> Any:
    """Describe a key: purpose, values and unit, and `ge`, `gt`, `le` or `lt` limits that pydantic enforces."""
    return Field(description=text, **limits)


def value_of(text: str) -> Any:
    """The default of a key that takes the value of another one, as a file would write it."""
    return ValueOf(text)


def unwrap(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """The bare type, and the metadata of all `Annotated` around it."""
    metadata: tuple[Any, ...] = ()
    while get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        metadata = (*metadata, *more)
    return hint, metadata


def default_of(kind: type, name: str) -> tuple[Any, ...]:
    """The default of a key, as a file would write it, in a tuple of its own; () without one.

    A required key has none, nor has a key whose absence has a meaning of its own.
    """
    (entry,) = (entry for entry in dataclasses.fields(cast(Any, kind)) if entry.name == name)
    default = entry.default
    if entry.default_factory is not dataclasses.MISSING:
        default = entry.default_factory()
    if default is dataclasses.MISSING:
        return ()
    if default is None and get_origin(get_type_hints(kind, include_extras=True)[name]) is not Annotated:
        return ()
    return (list(cast("tuple[Any, ...]", default)) if isinstance(default, tuple) else default,)


def sections_of(hint: Any) -> list[Any]:
    """The sections that a value of a type may be, of a union all."""
    kind, _ = unwrap(hint)
    if is_section(kind):
        return [kind]
    if get_origin(kind) in (Union, UnionType):
        return [found for argument in get_args(kind) for found in sections_of(argument)]
    return []


def fill_defaults(kind: type, values: dict[str, Any]) -> None:
    """Set the keys of a section, and of those below it, that have a default and are left out.

    Args:
        kind: The section.
        values: Its keys as a file has them, interpolations unresolved; changed in place.
    """
    for name, (hint, is_required) in keys_of(kind).items():
        if name not in values:
            if default := default_of(kind, name):
                values[name] = default[0]
            elif is_required and is_section(unwrap(hint)[0]):
                keys: dict[str, Any] = {}
                fill_defaults(unwrap(hint)[0], keys)
                values |= {name: keys} if keys else {}  # a message on the section says more than those on its keys
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
        if len(sections) > 1:  # data sets, which their names tell apart
            sections = [section for section in sections if keys.get("dataset_name") in names_of_data_sets(section)]
        if len(sections) == 1:
            fill_defaults(sections[0], keys)


def names_of_data_sets(kind: type) -> tuple[str, ...]:
    """The values of `dataset_name` for which a data set has the keys of this section; () for other sections."""
    keys = keys_of(kind)
    return get_args(unwrap(keys["dataset_name"][0])[0]) if "dataset_name" in keys else ()


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(dataclasses.field,))
def section[C](cls: type[C]) -> type[C]:
    """Class decorator: a frozen dataclass with keyword arguments, which pydantic makes of a mapping.

    A mapping with a key that is no field, or without a field that has no default, is an error.
    """
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    cast(Any, made).__get_pydantic_core_schema__ = classmethod(_core_schema)
    return made


def is_section(kind: Any) -> bool:
    """Whether a type is a section."""
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def keys_of(kind: type) -> dict[str, tuple[Any, bool]]:
    """Of each key of a section its type as it may be written, with `Annotated`, and whether it must be."""
    hints = get_type_hints(kind, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cast(Any, kind))}
    has_value = {name: field.default is not dataclasses.MISSING for name, field in fields.items()}
    is_required = {
        name: (not has_value[name] and field.default_factory is dataclasses.MISSING)
        or isinstance(field.default, ValueOf)
        for name, field in fields.items()
    }
    return {name: (hint if is_required[name] else _if_written(hint), is_required[name]) for name, hint in hints.items()}


def from_mapping[T](kind: type[T], values: Mapping[str, Any]) -> T:
    """A section of nested dictionaries and lists.

    Raises:
        pydantic.ValidationError: A key is unknown, missing, or has another value than it may have.
    """
    return _adapter(kind).validate_python(as_used(values), strict=True)


class FromEnvironment(str):
    """Text of a configuration that comes from the environment, which may be a secret.

    It is the text, and `repr` shows the text as it is written in the configuration. A configuration consists of these
    until sections are made of it (`as_used`), and what is recorded of it is made by `as_written`.

    Attributes:
        written: The text with the interpolation in it, such as `${oc.env:NAME}`.
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
    """Nested dictionaries and lists with text from the environment as plain text."""
    return _with_texts(node, str)


def as_written(node: Any) -> Any:
    """Nested dictionaries and lists with text from the environment as it is written, for records of a run."""
    return _with_texts(node, lambda text: text.written)


def _with_texts(node: Any, replace: Callable[[FromEnvironment], str]) -> Any:
    if isinstance(node, Mapping):
        items = cast("Mapping[Any, Any]", node).items()
        return {key: _with_texts(value, replace) for key, value in items}
    if isinstance(node, list):
        return [_with_texts(value, replace) for value in cast("list[Any]", node)]
    return replace(node) if isinstance(node, FromEnvironment) else node


def extend[T](target: type[T], base: Any, **more: Any) -> T:
    """A dataclass with the fields of another one that it has too, and `more`, which go first."""
    names = {field.name for field in dataclasses.fields(cast(Any, target))}
    taken = {field.name: getattr(base, field.name) for field in dataclasses.fields(base) if field.name in names}
    return target(**{**taken, **more})


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _if_written(hint: Any) -> Any:
    """Remove the None outside `Annotated`, which stands for a key that is left out."""
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(kind for kind in get_args(hint) if kind is not NoneType)]  # noqa: UP007
    return hint


def _core_schema(cls: Any, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
    fields = {
        name: core_schema.typed_dict_field(handler.generate_schema(_with_lists(hint)), required=required)
        for name, (hint, required) in keys_of(cls).items()
    }
    keys = core_schema.typed_dict_schema(fields, extra_behavior="forbid")
    return core_schema.no_info_after_validator_function(lambda values: cls(**values), keys)


def _with_lists(hint: Any) -> Any:
    """Tuples become lists, which are made tuples once they are checked."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return Annotated[_with_lists(arguments[0]), *arguments[1:]]
    if origin is tuple:
        return Annotated[list[_with_lists(arguments[0])], AfterValidator(tuple)]
    if origin in (Union, UnionType):
        return Union[tuple(map(_with_lists, arguments))]  # noqa: UP007
    return hint
