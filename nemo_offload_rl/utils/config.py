"""Reads a YAML file and command-line overrides into a plain dictionary without interpolations.

1. Read the file and the files that its `defaults:` name (a path or a list), parents first, later wins. A path is
   relative to the file. A name without a folder that is not there, of a parent or of the file itself, is looked up in
   the package's `EXEMPLARS`. A mapping with `_override_: true` replaces the inherited one instead of being merged into
   it; a mapping with `_remove_: true` as its only key removes the inherited one.
2. Apply overrides in Hydra's grammar, in order: `a.b=c`, `+a.b=c`, `++a.b=c`, `~a.b`. For a key that takes only text,
   the value is what is written after the first `=`, unless it is `null` or in quotes. Any other value that Hydra can
   read only in quotes, such as `a=b` or `später`, is text too.
3. Resolve OmegaConf interpolations, with the resolvers `add`, `mul`, `div` and `max`. Text from the environment
   (`oc.env`) remembers its interpolation (`FromEnvironment`), so that records of a run hold no secrets.

Every failure raises `ConfigError` with one line. `nemo_offload_rl.config` checks the meaning of keys afterwards.
"""

import copy
import difflib
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from nemo_offload_rl.errors import ConfigError, first_line
from nemo_offload_rl.keys.section import FromEnvironment

EXEMPLARS = Path(__file__).parents[1] / "exemplars"
"""The folder of the configurations that the package brings; in a checkout `examples/configs`."""

_REPLACE_MARK = "_override_"
_REMOVE_MARK = "_remove_"
_VARIABLE = re.compile(r"oc\.env:\s*([A-Za-z_]\w*)")
_SECRET = re.compile("TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_KEY|ACCESS_KEY")
_SHORTEST_SECRET = 8  # a shorter value is found in other text by chance
_is_marking: ContextVar[bool] = ContextVar("is_marking", default=False)

type MissingKeyMessage = Callable[[dict[str, Any], str, Any], str]
"""Composes a message from the unresolved configuration, a key that it does not have and the value for it."""


def load_config(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] | Mapping[str, Any] = (),
    missing: MissingKeyMessage | None = None,
    fill: Callable[[dict[str, Any]], None] | None = None,
    takes_text: Callable[[str], bool] = lambda key: False,
    finish: Callable[[DictConfig], None] = lambda config: None,
) -> dict[str, Any]:
    """Read, inherit, override and resolve.

    Args:
        source: The YAML file, the name of an exemplar, or a dictionary of sections, whose `defaults` are relative to
            the working directory.
        overrides: Hydra overrides, applied in order; or values by dotted key, which replace the present ones.
        missing: Composes the message for an override of a missing key; by default from the keys of the file.
        fill: Sets keys that are left out, in nested dictionaries with unresolved interpolations. Called before the
            overrides, which may change these keys, and after them, for sections that they add.
        takes_text: Tells whether a dotted key takes text and no other kind of value, apart from null.
        finish: Changes keys in place, after the overrides and before interpolations.

    Returns:
        Nested dictionaries and lists without interpolations.

    Raises:
        ConfigError: The file, an override or an interpolation is wrong.
    """
    _register_resolvers()
    file, config = _from_mapping(source, fill) if isinstance(source, Mapping) else _from_file(source, fill)
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            _set(config, key, value)
        overrides = ()
    for text in overrides:
        _apply_override(config, text, missing, file, takes_text)
    config = _filled(config, fill)
    finish(config)
    try:
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_interpolation_message(error, config)) from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in _marked(config, resolved).items()}


def _filled(config: DictConfig, fill: Callable[[dict[str, Any]], None] | None) -> DictConfig:
    if fill is None:
        return config
    keys = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))
    before = copy.deepcopy(keys)
    fill(keys)
    return config if keys == before else OmegaConf.create(keys)


def is_text_at(section: Any, key: str, text: str) -> bool:
    """Tell whether a key of an unresolved section has this text itself, not by an interpolation."""
    if not isinstance(section, DictConfig) or key not in section or OmegaConf.is_interpolation(section, key):
        return False
    return section[key] == text


def load_unresolved(path: str | Path) -> DictConfig:
    """Read a file with its `defaults:`, without resolving interpolations."""
    return _from_file(path, None)[0]


def nearest_keys(name: str, known: Iterable[str]) -> list[str]:
    """List the dotted keys that a misspelt or misplaced `name` may mean, the likeliest first.

    In this order: very similar names in the same section, the same name in other sections, similar names in the same
    section, very similar names anywhere.
    """
    known = list(known)
    parent, _, leaf = name.rpartition(".")
    leaves = {key: key.rpartition(".")[2] for key in known}
    like = {key: difflib.SequenceMatcher(None, leaf, other).ratio() for key, other in leaves.items()}
    in_section = [key for key in known if key.rpartition(".")[0] == parent]
    likeness_of_place = {key: difflib.SequenceMatcher(None, key, name).ratio() for key in known}

    def best(keys: Iterable[str], cutoff: float) -> list[str]:
        return sorted((key for key in keys if like[key] >= cutoff), key=lambda key: -like[key])

    same = sorted((key for key in known if leaves[key] == leaf), key=lambda key: -likeness_of_place[key])
    ranked = [*best(in_section, 0.85), *same, *best(in_section, 0.7), *best(known, 0.85)]
    return [key for key in dict.fromkeys(ranked) if key != name]


def nearest_key(name: str, known: Iterable[str]) -> str | None:
    """Return the first of `nearest_keys`, or None."""
    return next(iter(nearest_keys(name, known)), None)


def unknown_key_message(name: str, known: Iterable[str], accepts: Callable[[str], bool] = lambda key: True) -> str:
    """Compose one line on an unknown dotted key: with the nearest key, or the keys of its section.

    Args:
        name: The key.
        known: All keys.
        accepts: Tells whether a key may have the value given to `name`; others are not suggested.
    """
    known = list(known)
    if name in known:
        section = name.rpartition(".")[0]
        return (
            f"{name}: a key of another kind of {section} than this one; leave it out, or replace the whole section: "
            f"`_override_: true` in a file, `~{section} +{section}={{...}}` on the command line"
        )
    if (nearest := next(filter(accepts, nearest_keys(name, known)), None)) is not None:
        return f"{name}: unknown key; did you mean {nearest}?"
    parent = name.rpartition(".")[0]
    while parent and parent not in known:
        parent = parent.rpartition(".")[0]
    siblings = sorted(key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == parent)
    where = f"{parent} has" if parent else "the configuration has"
    listed = ", ".join(siblings[:12]) + (", ..." if len(siblings) > 12 else "")
    return f"{name}: unknown key; {where} {listed or 'no keys'}"


def flatten_keys(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all keys in nested dictionaries, sections included."""
    if isinstance(config, dict):
        for key, value in config.items():
            yield f"{prefix}{key}"
            yield from flatten_keys(value, f"{prefix}{key}.")


def _register_resolvers() -> None:
    def divide(a: float, b: float) -> float:
        quotient = a / b
        return int(quotient) if quotient == int(quotient) else quotient

    OmegaConf.register_new_resolver("add", lambda *values: sum(values), replace=True)
    OmegaConf.register_new_resolver("mul", lambda a, b: a * b, replace=True)
    OmegaConf.register_new_resolver("div", divide, replace=True)
    OmegaConf.register_new_resolver("max", lambda *values: max(values), replace=True)
    OmegaConf.register_new_resolver("oc.env", _environment, replace=True)


# ---------------------------------------------------------------- environment


def _environment(name: str, *default: Any) -> Any:
    """Resolve like OmegaConf; but while `_marked` runs, keep the interpolation of a variable that is set."""
    if _is_marking.get() and name in os.environ:
        return f"${{oc.env:{','.join(str(part) for part in (name, *default))}}}"
    return oc.env(name, *default)


def _marked(node: DictConfig | ListConfig, resolved: Any) -> Any:
    """Return the resolved configuration with all text that depends on environment variables as `FromEnvironment`.

    Such text resolves differently while variables stay interpolations, or contains the secret of a variable that a
    shell has expanded.
    """
    if isinstance(resolved, dict):
        return {key: _marked_child(node, key, value) for key, value in resolved.items()}
    return [_marked_child(node, index, value) for index, value in enumerate(resolved)]


def _marked_child(node: Any, key: Any, value: Any) -> Any:
    if not isinstance(value, (str, dict, list)):
        return value
    token = _is_marking.set(True)
    try:
        written = node[key]
    except OmegaConfBaseException:  # a resolver that computes, such as `mul`, cannot take the text of an interpolation
        written = cast("Any", OmegaConf.to_container(node, resolve=False))[key]
    finally:
        _is_marking.reset(token)
    if isinstance(written, (DictConfig, ListConfig)) and isinstance(value, (dict, list)):
        return _marked(written, value)
    if isinstance(value, str) and written == value:
        written = without_secrets(value)
    return value if written == value else _all_from_environment(value, str(written))


def without_secrets(text: str) -> str:
    """Replace secrets in a text, the values of environment variables, by interpolations of their names."""
    if len(text) < _SHORTEST_SECRET:
        return text
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET.search(name) and value in text:
            text = text.replace(value, f"${{oc.env:{name}}}")
    return text


def _all_from_environment(value: Any, written: str) -> Any:
    match value:
        case dict():
            return {key: _all_from_environment(inside, written) for key, inside in value.items()}
        case list():
            return [_all_from_environment(inside, written) for inside in value]
        case str():
            return FromEnvironment(value, written)
        case _:
            return value


# ---------------------------------------------------------------- files


class _Files:
    """The files that a configuration is made of.

    Attributes:
        texts: The text of each.
        absent: Paths at which a file would have been read instead of an exemplar.
    """

    def __init__(self) -> None:
        self.texts: dict[Path, str] = {}
        self.absent: set[Path] = set()

    def read(self, path: Path) -> str:
        text = self.texts[path.absolute()] = path.read_text(encoding="utf-8")
        return text

    def are_unchanged(self) -> bool:
        try:
            is_same = all(path.read_text(encoding="utf-8") == text for path, text in self.texts.items())
        except (OSError, UnicodeDecodeError):
            return False
        return is_same and not any(path.exists() for path in self.absent)


# The last files that were loaded, and what became of each without and with `fill`, pickled: OmegaConf takes ten times
# longer to make or copy a configuration than pickle to read it.
_loaded: dict[tuple[Path, Any], tuple[_Files, tuple[bytes, bytes]]] = {}
_MAX_LOADED = 64


def _from_file(path: str | Path, fill: Callable[[dict[str, Any]], None] | None) -> tuple[DictConfig, DictConfig]:
    """Return the configuration of a file, as it is and with `fill`, as new objects that the caller may change."""
    files = _Files()
    found = _find_file(Path(), str(path), files)
    key = (found.absolute(), fill)
    if key not in _loaded or not _loaded[key][0].are_unchanged():
        both = _pickled(_load_with_defaults(found, (), files), fill)
        _loaded.pop(key, None)
        if len(_loaded) == _MAX_LOADED:
            del _loaded[next(iter(_loaded))]
        _loaded[key] = (files, both)
    file, filled = _loaded[key][1]
    return pickle.loads(file), pickle.loads(filled)


def _from_mapping(
    source: Mapping[str, Any], fill: Callable[[dict[str, Any]], None] | None
) -> tuple[DictConfig, DictConfig]:
    """Return the configuration of a dictionary, as it is and with `fill`."""
    file, filled = _pickled(_mapping_with_defaults(source), fill)
    return pickle.loads(file), pickle.loads(filled)


def _pickled(config: DictConfig, fill: Callable[[dict[str, Any]], None] | None) -> tuple[bytes, bytes]:
    return pickle.dumps(config), pickle.dumps(_filled(config, fill))


def _load_with_defaults(path: Path, seen: tuple[Path, ...], files: _Files) -> DictConfig:
    resolved_path = path.resolve()
    if resolved_path in seen:
        chain = " -> ".join(p.name for p in (*seen, resolved_path))
        raise ConfigError(f"{path}: `defaults` form a circle ({chain}); remove one of them")
    return _with_defaults(_read_yaml(path, files), path, (*seen, resolved_path), files)


def _mapping_with_defaults(source: Mapping[str, Any]) -> DictConfig:
    try:
        config = OmegaConf.create(_plain(source))
    except OmegaConfBaseException as error:
        raise ConfigError(f"the dictionary is no configuration: {first_line(error)}") from error
    assert isinstance(config, DictConfig)
    return _with_defaults(config, Path("the dictionary"), (), _Files())


def _plain(value: Any) -> Any:
    """A value from Python code, with the types that a YAML file has."""
    match value:
        case Mapping():
            return {key: _plain(inside) for key, inside in value.items()}
        case list() | tuple():
            return [_plain(inside) for inside in value]
        case Path():
            return str(value)
        case _:
            return value


def _with_defaults(own: DictConfig, path: Path, seen: tuple[Path, ...], files: _Files) -> DictConfig:
    parents = own.pop("defaults", None)
    if parents is None:
        parents = []
    elif isinstance(parents, str):
        parents = [parents]
    if not isinstance(parents, (list, ListConfig)) or not all(isinstance(name, str) for name in parents):
        raise ConfigError(f"{path}: `defaults` is {parents!r}; write the path of a YAML file or a list of paths")
    config = None
    for name in parents:
        config = _merge(config, _load_with_defaults(_find_file(path.parent, name, files), seen, files))
    _apply_marks(config, own)
    return _merge(config, own)


def _find_file(folder: Path, name: str, files: _Files) -> Path:
    """Return the file `name`, relative to a folder, or the exemplar of that name.

    Raises:
        ConfigError: There is neither.
    """
    path = folder / name
    if path.exists():
        return path
    is_name = Path(name).name == name
    if is_name and (EXEMPLARS / name).is_file():
        files.absent.add(path.absolute())
        return EXEMPLARS / name
    others = {file.stem: file for place in (EXEMPLARS, path.parent) for file in sorted(place.glob("*.y*ml"))}
    close = difflib.get_close_matches(path.stem, others, n=1)
    hint = f"did you mean {others[close[0]]}?" if close else "check the path"
    places = f"{path.parent.absolute()}" + (f" and among the package's in {EXEMPLARS}" if is_name else "")
    raise ConfigError(f"{path}: no such configuration file in {places}; {hint}")


def _read_yaml(path: Path, files: _Files) -> DictConfig:
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a YAML file")
    try:
        loaded = yaml.load(files.read(path), _yaml_loader())
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(
                f"{path}: holds a list or a single value; write a configuration, which is a mapping of sections"
            )
        return OmegaConf.create(loaded or {})
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}" if error.problem_mark is not None else "somewhere"
        raise ConfigError(f"{path}: not valid YAML at {where}: {error.problem}; correct that line") from error
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {first_line(error)}") from error


@cache
def _yaml_loader() -> Any:
    """Make OmegaConf's loader with the parser of libyaml, which is ten times faster, if PyYAML has it."""
    of_omegaconf = get_yaml_loader()
    if not yaml.__with_libyaml__:
        return of_omegaconf
    from yaml._yaml import CParser

    class Loader(CParser, of_omegaconf):
        def __init__(self, text: str) -> None:
            CParser.__init__(self, text)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return Loader


def _apply_marks(base: DictConfig | None, over: DictConfig) -> None:
    """Take out of `base` what mappings of `over` with a mark replace or remove, and the marks out of `over`."""
    for key in _marked_paths(over, _REMOVE_MARK):
        for config in (over, base):
            parent_key, _, leaf = key.rpartition(".")
            parent = OmegaConf.select(config, parent_key) if parent_key and config is not None else config
            if isinstance(parent, DictConfig):
                parent.pop(leaf, None)
    for key in _marked_paths(over, _REPLACE_MARK):
        section = OmegaConf.select(over, key)
        section.pop(_REPLACE_MARK)
        if base is not None and OmegaConf.select(base, key, throw_on_missing=False) is not None:
            OmegaConf.update(base, key, {}, merge=False)


def _marked_paths(config: DictConfig, mark: str) -> list[str]:
    plain = OmegaConf.to_container(config, resolve=False)
    suffix = f".{mark}"
    return [key[: -len(suffix)] for key in flatten_keys(plain) if key.endswith(suffix)]


def _merge(base: DictConfig | None, over: DictConfig) -> DictConfig:
    if base is None:
        return over
    try:
        merged = OmegaConf.unsafe_merge(base, over)  # without copies: nothing reads the two afterwards
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{first_line(error)}; a section and a plain value of one name cannot be merged: give both files the same"
        ) from error
    assert isinstance(merged, DictConfig)
    return merged


# ---------------------------------------------------------------- overrides


def _apply_override(
    config: DictConfig,
    text: str,
    missing: MissingKeyMessage | None,
    file: DictConfig,
    takes_text: Callable[[str], bool],
) -> None:
    override, value = _parse_override(text, config, takes_text)
    key = override.key_or_group
    exists = _has_key(config, key)
    if override.is_delete():
        _delete(config, override, exists)
        return
    if not exists:
        _require_section(config, key)
    if override.is_add():
        if exists and _has_key(file, key):  # a default that was filled in may be added as well as changed
            raise ConfigError(f"+{key}: the key is there already; drop the + to change it")
    elif not override.is_force_add() and not exists:
        raw = cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False))
        raise ConfigError(unknown_key_message(key, flatten_keys(raw)) if missing is None else missing(raw, key, value))
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise ConfigError(f"override {text!r} cannot be applied: {first_line(error)}") from error


def _set(config: DictConfig, key: str, value: Any) -> None:
    """Replace the value of a dotted key, or add the key."""
    _require_section(config, key)
    try:
        OmegaConf.update(config, key, _plain(value), merge=False, force_add=True)
    except (OmegaConfBaseException, TypeError, ValueError) as error:
        raise ConfigError(f"{key} cannot be set to {value!r}: {first_line(error)}") from error


def _parse_override(text: str, config: DictConfig, takes_text: Callable[[str], bool]) -> tuple[Override, Any]:
    """Parse an override; returns Hydra's object and the value."""
    parser = OverridesParser.create()
    before, equals, written = text.partition("=")
    if equals and takes_text(before.lstrip("+")):
        return _parsed(parser, f"{before}=null", text), _text_value(parser, written)
    try:
        override = _parsed(parser, text, text)
    except ConfigError as error:
        try:
            override = _parsed(parser, _quoted(text), text)
        except ConfigError:
            raise error from None
    if override.is_sweep_override():
        if not isinstance(_raw_value(config, override.key_or_group), str | None):
            raise ConfigError(
                f"override {text!r} is a sweep; give one value, a list as {before}=[{written}], or text as "
                f"\"{before}='{written}'\" with both kinds of quotes"
            )
        override = _parsed(parser, _quoted(text), text)
    if override.package is not None:
        raise ConfigError(f"override {text!r} names a package with @; write the dotted key instead")
    return override, override.value()


def _parsed(parser: OverridesParser, text: str, given: str) -> Override:
    try:
        return parser.parse_override(text)
    except HydraException as error:
        raise ConfigError(
            f"override {given!r} is not in Hydra's grammar ({first_line(error)}); write key=value, +key=value or ~key"
        ) from error


def _text_value(parser: OverridesParser, written: str) -> str | None:
    """The value of a key that takes text: None for null, what is inside a pair of quotes, or the text as it is."""
    if written.strip().lower() == "null":
        return None
    if written.lstrip()[:1] in {"'", '"'}:
        with suppress(HydraException):
            override = parser.parse_override(f"key={written}")
            if not override.is_sweep_override() and isinstance(value := override.value(), str):
                return value
    return written


def _quoted(text: str) -> str:
    """Put the value of an override in quotes; unchanged if it is in quotes already, or a list or mapping."""
    key, equals, value = text.partition("=")
    if not equals or value.lstrip()[:1] in {"[", "{", "'", '"'}:
        return text
    # A backslash is itself, except before a quote.
    escaped = re.sub(r'(\\*)("|$)', lambda match: 2 * match[1] + ("\\" + match[2] if match[2] else ""), value)
    return f'{key}="{escaped}"'


def _raw_value(config: DictConfig, key: str) -> Any:
    """Return the unresolved value of a key, or None."""
    node: Any = OmegaConf.to_container(config, resolve=False)
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _delete(config: DictConfig, override: Override, exists: bool) -> None:
    key = override.key_or_group
    if not exists:
        known = flatten_keys(OmegaConf.to_container(config, resolve=False))
        raise ConfigError(f"~{unknown_key_message(key, known)}")
    parent_key, _, leaf = key.rpartition(".")
    parent = OmegaConf.select(config, parent_key) if parent_key else config
    wanted = override.value()
    if wanted is not None and OmegaConf.select(config, key) != wanted:
        raise ConfigError(f"~{key}={wanted}: its value is {OmegaConf.select(config, key)}; write ~{key} to delete it")
    del parent[int(leaf) if isinstance(parent, ListConfig) else leaf]


def _has_key(config: DictConfig, key: str) -> bool:
    node: Any = config
    for part in key.split("."):
        if isinstance(node, DictConfig) and part in {str(name) for name in node}:
            node = OmegaConf.select(node, part, throw_on_missing=False)
        elif isinstance(node, ListConfig) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        else:
            return False
    return True


def _require_section(config: DictConfig, key: str) -> None:
    """Refuse a key below a plain value, which the override would replace, or beyond the end of a list."""
    parts = key.split(".")[:-1]
    for end in range(1, len(parts) + 1):
        section = ".".join(parts[:end])
        if not _has_key(config, section):
            return
        value = OmegaConf.select(config, section, throw_on_missing=False)
        below = key.split(".")[end]
        if below.isdigit() and (value is None or (isinstance(value, ListConfig) and int(below) >= len(value))):
            num_entries = 0 if value is None else len(value)
            raise ConfigError(
                f"{key}: {section} has {num_entries} entries and none with the index {below}; set the whole list, "
                f"{section}=[...]"
            )
        if value is not None and not isinstance(value, (DictConfig, ListConfig)):
            raise ConfigError(f"{key}: {section} is the value {value!r}, so nothing can be below it; correct the key")


# ---------------------------------------------------------------- messages


def _interpolation_message(error: OmegaConfBaseException, config: DictConfig) -> str:
    where = error.full_key or "the configuration"
    raw = OmegaConf.to_container(config, resolve=False)
    for part in str(error.full_key or "").split("."):
        raw = raw[part] if isinstance(raw, dict) and part in raw else None
    if raw == "???":
        return f"{where}: needs a value; set {where}=..."
    given = f" {raw!r}" if isinstance(raw, str) else ""
    reason = first_line(error).rpartition("raised while resolving interpolation: ")[2]
    if missing := re.search(r"Interpolation key '(.+)' not found", reason):
        known = flatten_keys(OmegaConf.to_container(config, resolve=False))
        nearest = nearest_key(missing[1], known)
        reason = f"there is no {missing[1]}" + (f"; did you mean {nearest}?" if nearest else "")
    for name in _VARIABLE.findall(given):
        if value := os.environ.get(name):
            reason = reason.replace(value, f"${{oc.env:{name}}}")
    return f"{where}: the interpolation{given} cannot be resolved: {reason}"
