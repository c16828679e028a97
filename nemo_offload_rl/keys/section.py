"""Building blocks of the YAML border: a key is declared once, as the field of a section.

A section is a class with the decorator `section`, and its fields are written
`name: Annotated[type, doc("purpose, values, unit", ge=1)]`. That one line is what pydantic checks a value of the YAML
by, what `nemo_offload_rl.config.reference` writes docs/reference/configuration.md from, and the attribute that the
package reads. Defaults are in YAML only. What is a list there is declared, and read, as `tuple[type, ...]`.

The default of a key that may be left out says what that means: `Annotated[type, doc(...)] | None = None` is None,
which the YAML cannot say, and `Annotated[type | None, doc(...)] = None` for what null means too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, cast, dataclass_transform, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, TypeAdapter
from pydantic_core import CoreSchema, core_schema


def doc(text: str, **limits: Any) -> Any:
    """Describe a key: purpose, values and unit, and `ge`, `gt`, `le` or `lt` limits that pydantic enforces."""
    return Field(description=text, **limits)


@dataclass_transform(kw_only_default=True, frozen_default=True)
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
    is_required = {name: fields[name].default is dataclasses.MISSING for name in hints}
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
    """Without the None beside `Annotated`, which stands for what is left out."""
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
