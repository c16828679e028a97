from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import TypeAdapter

from nemo_offload_rl.config.keys import known_keys, takes_text, walk_keys
from nemo_offload_rl.config.validate import validate_keys
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import DistillationMasterConfig, DpoMasterConfig, GrpoMasterConfig, SftMasterConfig
from nemo_offload_rl.keys.section import ValueOf, default_of, doc, keys_of, section

MASTERS = (GrpoMasterConfig, DistillationMasterConfig, SftMasterConfig, DpoMasterConfig)


def test_every_key_is_documented() -> None:
    keys = list(walk_keys(GrpoMasterConfig))
    assert len(keys) > 200
    undocumented = [key.path for key in keys if not key.description]
    assert undocumented == []
    assert [key.path for key in keys if key.description and not key.description.endswith((".", "`"))] == []


def test_values_are_told_in_words() -> None:
    values = {key.path: key.values for key in walk_keys(GrpoMasterConfig)}
    assert values["loss_fn.ratio_clip_min"] == "number >= 0 and <= 1"
    assert values["policy.generation.stop_token_ids"] == "list of integer or null"
    assert values["policy.scheduler[].milestones"] == "list of integer"
    assert values["env.NAME.num_workers"] == "integer >= 0"


@pytest.mark.parametrize(
    ("path", "is_text"),
    [
        ("policy.model_name", True),
        ("policy.precision", True),
        ("policy.tokenizer.chat_template", True),
        ("data.train.path", True),
        ("env.any.retry_message", True),
        ("policy.megatron_cfg.env_vars.ANY", True),
        ("logger.sinks.0.target", True),
        ("policy.max_grad_norm", False),
        ("data.train.seed", False),
        ("env.any.target", False),  # may be a list
        ("policy.generation.stop_strings", False),
        ("policy.optimizer.kwargs.lr", False),
        ("grpo", False),
        ("grpo.nowhere", False),
    ],
)
def test_keys_that_take_text_are_known(path: str, is_text: bool) -> None:
    assert takes_text(GrpoMasterConfig, path) == is_text


# -- one declaration


@section
class Wheel:
    """`wheels[]`."""

    size_mm: Annotated[float, doc("Diameter, in millimetres.", gt=0)]


@section
class Bicycle:
    """A configuration that nothing else knows of."""

    kind: Annotated[Literal["road", "city"], doc("What it is for.")]
    wheels: Annotated[tuple[Wheel, ...], doc("From the front.", min_length=1)]
    gears: Annotated[tuple[int, ...] | None, doc("Teeth; null for one gear.")]
    lamp: Annotated[Wheel, doc("May be left out, but not be null.")] | None = None
    bell: Annotated[str | None, doc("Left out: null.")] = None


BICYCLE: dict[str, Any] = {"kind": "road", "wheels": [{"size_mm": 622}, {"size_mm": 622.5}], "gears": [11, 13]}


def test_a_key_is_declared_once_and_then_is_read_as_a_typed_frozen_attribute() -> None:
    made = validate_keys(BICYCLE, Bicycle)
    assert made == Bicycle(kind="road", wheels=(Wheel(size_mm=622.0), Wheel(size_mm=622.5)), gears=(11, 13))
    assert isinstance(made.wheels[0].size_mm, float)
    assert (made.lamp, made.bell) == (None, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.kind = "city"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"kynd": "road"}, "kynd: unknown key; did you mean kind?"),
        ({"kind": "boat"}, "kind: given the text 'boat', wanted one of road, city"),
        ({"wheels": [{"size_mm": 0}]}, "wheels.0.size_mm: given 0, wanted number > 0"),
        ({"wheels": [{"size_mm": "1"}]}, "wheels.0.size_mm: given the text '1', wanted number > 0"),
        ({"wheels": []}, "wheels: given a list, wanted list of mapping"),
        ({"gears": [True]}, "gears.0: given true, wanted integer"),
        ({"gears": "many"}, "gears: given the text 'many', wanted list of integer or null"),
        ({"lamp": None}, "lamp: given null, wanted mapping"),
        ({"lamp": {"size_mm": 1, "size_nm": 1}}, "lamp.size_nm: unknown key; did you mean lamp.size_mm?"),
    ],
)
def test_a_value_that_its_declaration_excludes_is_refused_in_one_line(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_keys({**BICYCLE, **changes}, Bicycle)
    assert str(caught.value) == expected


def test_the_reference_has_the_declaration_in_words() -> None:
    found = {key.path: (key.values, key.description) for key in walk_keys(Bicycle)}
    assert found == {
        "kind": ("one of road, city", "What it is for."),
        "wheels": ("list of mapping", "From the front."),
        "wheels[].size_mm": ("number > 0", "Diameter, in millimetres."),
        "gears": ("list of integer or null", "Teeth; null for one gear."),
        "lamp": ("mapping", "May be left out, but not be null."),
        "lamp.size_mm": ("number > 0", "Diameter, in millimetres."),
        "bell": ("text or null", "Left out: null."),
    }
    assert known_keys(Bicycle) == list(found)


# -- and only once


def dataclasses_of_the_package() -> dict[str, Any]:
    """Every dataclass of a module that needs no GPU library, by its dotted name."""
    found: dict[str, Any] = {}
    for path in sorted(Path("nemo_offload_rl").rglob("*.py")):
        if path.stem.startswith("__") or ({"vllm", "megatron"} & {*path.parts} and path.stem != "config"):
            continue
        name = ".".join(path.with_suffix("").parts)
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == name:
                found[f"{name}.{value.__name__}"] = value
    return found


def sections_of(kind: Any, found: set[Any]) -> set[Any]:
    """A section and all sections below it."""
    from nemo_offload_rl.config.keys import _children

    if kind not in found:
        found.add(kind)
        for hint, _ in keys_of(kind).values():
            for _, child in _children(hint):
                sections_of(child, found)
    return found


def test_no_other_class_writes_down_the_keys_of_a_section() -> None:
    sections = set().union(*(sections_of(master, set()) for master in MASTERS))
    assert len(sections) > 40
    declaring = {base for kind in sections for base in kind.__mro__}
    own = {kind: set(vars(kind).get("__annotations__", {})) for kind in dataclasses_of_the_package().values()}
    assert sections <= own.keys()
    twins = [
        (kind.__name__, other.__name__)
        for kind in sections
        for other in own
        if other not in declaring and len(own[kind]) >= 3 and own[kind] <= own[other]
    ]
    assert twins == []


def test_sections_are_frozen_and_each_default_is_a_value_that_the_key_takes() -> None:
    for kind in set().union(*(sections_of(master, set()) for master in MASTERS)):
        assert kind.__dataclass_params__.frozen, kind
        for name, (hint, _) in keys_of(kind).items():
            default = default_of(kind, name)
            if default and not isinstance(default[0], ValueOf):
                taken = TypeAdapter(hint).validate_python(default[0])
                assert default == (list(taken) if isinstance(taken, tuple) else taken,), (kind, name)
