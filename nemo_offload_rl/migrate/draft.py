"""A half-converted configuration, and the register of functions that convert keys."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.migrate.report import Outcome, Report
from nemo_offload_rl.migrate.rules import ABSENT

DEFAULT_THERE = "NeMo-RL's default"
_ABSENT = object()


@dataclass
class Draft:
    """NeMo-RL's values, ours so far, and a report.

    Attributes:
        theirs: NeMo-RL's file with what it inherits, resolved.
        ours: Our exemplar, changed by the values that were taken over.
        report: One row for each key.
        algorithm: One of `ALGORITHMS`.
        folder: The folder of NeMo-RL's file, None if there is no file.
        done: NeMo-RL's keys that have a row.
        written: Our keys that have a value from NeMo-RL's file.
    """

    theirs: Mapping[str, Any]
    ours: dict[str, Any]
    report: Report
    algorithm: str
    folder: Path | None = None
    done: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)

    @property
    def samples(self) -> bool:
        """Whether the algorithm has an engine."""
        return self.algorithm in ("grpo", "distillation")

    def get(self, path: str, default: Any = None) -> Any:
        """Return NeMo-RL's value; for a key that the file leaves out NeMo-RL's default, if known, or `default`."""
        return at(self.theirs, path, ABSENT.get(path, default))

    def number(self, path: str, default: float | None = None) -> Any:
        """Return NeMo-RL's value; `ConfigError` unless it is a number, or null with a `default` of None."""
        value = self.get(path, default)
        if (isinstance(value, int | float) and not isinstance(value, bool)) or (value is None and default is None):
            return value
        raise ConfigError(f"{path}: given {value!r}, wanted a number; correct it in NeMo-RL's file")

    def section(self, path: str) -> Mapping[str, Any]:
        """Return NeMo-RL's section, empty if it is null or left out; `ConfigError` if it is anything else."""
        value = self.get(path)
        if value is None:
            return {}
        if isinstance(value, Mapping):
            return value
        raise ConfigError(f"{path}: given {value!r}, wanted a mapping; correct it in NeMo-RL's file")

    def has(self, path: str) -> bool:
        """Tell whether NeMo-RL's file has the key."""
        return at(self.theirs, path, _ABSENT) is not _ABSENT

    def keep(self, path: str, value: Any = _ABSENT) -> None:
        """Take a key over with its value, or with `value`; the row says if the file leaves the key out."""
        self._write(path, self.get(path) if value is _ABSENT else value)
        if self.has(path):
            self._row(Outcome.SAME, path, path, "")
        else:
            self._row(Outcome.FILLED, "", path, DEFAULT_THERE)

    def keep_unless(self, is_other: Any, path: str, value: Any, note: str) -> None:
        """Take a key of the file over, with another value and a note if `is_other`."""
        if self.has(path) and is_other:
            self.convert(path, value, note)
        elif self.has(path):
            self.keep(path)

    def convert(self, theirs: str, value: Any, note: str, ours: str = "") -> None:
        """Take a key over with another value, under the name `ours` if given; the note says why."""
        self._write(ours or theirs, value)
        self._row(Outcome.CONVERTED, theirs, ours or theirs, note)

    def rename(self, theirs: str, ours: str, value: Any, note: str) -> None:
        """Take a value over under another name or in another unit."""
        self._write(ours, value)
        self._row(Outcome.RENAMED, theirs, ours, note)

    def ignore(self, theirs: str, reason: str) -> None:
        """Leave out a key of NeMo-RL's."""
        self._row(Outcome.IGNORED, theirs, "", reason)

    def fill(self, ours: str, value: Any, reason: str) -> None:
        """Set a key that NeMo-RL's file does not have."""
        self._write(ours, value)
        self._row(Outcome.FILLED, "", ours, reason)

    def missing(self, theirs: str, feature: str = "") -> None:
        """Report a feature that is not available here; without words for it, the key stands for it."""
        self._row(Outcome.MISSING, theirs, "", feature)

    def _write(self, path: str, value: Any) -> None:
        put(self.ours, path, value)
        self.written.add(path)

    def _row(self, outcome: Outcome, theirs: str, ours: str, note: str) -> None:
        self.report.add(outcome, theirs, ours, note)
        if theirs:
            self.done.add(theirs)


def at(node: Any, path: str, default: Any = None) -> Any:
    """Return the value at a dotted key of nested dictionaries."""
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def put(node: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted key, making sections on the way."""
    *parents, leaf = path.split(".")
    for part in parents:
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    node[leaf] = value


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values, without sections; an empty section counts as a value."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def matches(pattern: str, path: str) -> bool:
    """Tell whether a pattern (a key, or a section with `.*`) includes a key."""
    if pattern.endswith(".*"):
        return path == pattern[:-2] or path.startswith(pattern[:-1])
    return path == pattern


@dataclass(frozen=True)
class Conversion:
    """A function that takes several keys over; docs/guides/from-nemo-rl.md has a row for each.

    Attributes:
        keys: Patterns of NeMo-RL's keys that it accounts for.
        reads: Further keys that it reads; rules account for them.
        algorithms: Those that have the keys.
        apply: Takes the keys over.
    """

    keys: tuple[str, ...]
    reads: tuple[str, ...]
    algorithms: tuple[str, ...]
    apply: Callable[[Draft], None]


CONVERSIONS: list[Conversion] = []
"""Filled by `converts` when `mapping` imports the modules of conversions."""


def converts(
    keys: str = "", *, reads: str = "", algorithms: str = "grpo sft dpo distillation"
) -> Callable[[Callable[[Draft], None]], Callable[[Draft], None]]:
    """Register a function as a conversion; see `Conversion`. Names are separated by spaces."""

    def register(apply: Callable[[Draft], None]) -> Callable[[Draft], None]:
        CONVERSIONS.append(Conversion(tuple(keys.split()), tuple(reads.split()), tuple(algorithms.split()), apply))
        return apply

    return register
