"""A configuration on its way from NeMo-RL's keys to ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.migrate.fills import ABSENT
from nemo_offload_rl.migrate.report import Outcome, Report

DEFAULT_THERE = "the default there"
_ABSENT = object()


@dataclass
class Draft:
    """Their values, ours so far, and what became of each key.

    Attributes:
        theirs: Their file, inherited and resolved.
        ours: Our exemplar, with what was taken over.
        report: What became of each key.
        algorithm: "grpo", "sft", "dpo", "distillation" or "eval".
        folder: Where their file lies; None where it is no file.
        done: Their keys that have a row.
        written: Our keys that have a value from their file.
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
        """Whether an engine generates."""
        return self.algorithm in ("grpo", "distillation")

    def get(self, path: str, default: Any = None) -> Any:
        """Their value; where their file leaves the key out, what NeMo-RL takes then, else `default`."""
        return at(self.theirs, path, ABSENT.get(path, default))

    def number(self, path: str, default: float | None = None) -> Any:
        """Their value where it has to be a number or, with a default of None, null.

        Raises:
            ConfigError: It is something else.
        """
        value = self.get(path, default)
        if (isinstance(value, int | float) and not isinstance(value, bool)) or (value is None and default is None):
            return value
        raise ConfigError(f"{path}: given {value!r}, wanted a number; correct it in NeMo-RL's file")

    def section(self, path: str) -> Mapping[str, Any]:
        """Their section; an empty one where it is null or left out.

        Raises:
            ConfigError: It is something else.
        """
        value = self.get(path)
        if value is None:
            return {}
        if isinstance(value, Mapping):
            return value
        raise ConfigError(f"{path}: given {value!r}, wanted a mapping; correct it in NeMo-RL's file")

    def has(self, path: str) -> bool:
        """Whether their file has the key."""
        return at(self.theirs, path, _ABSENT) is not _ABSENT

    def keep(self, theirs: str, ours: str, value: Any) -> None:
        """Take a value over; a row says under which name, or that their file leaves the key out."""
        self._write(ours, value)
        if not self.has(theirs):
            self._row(Outcome.FILLED, "", ours, DEFAULT_THERE)
            return
        self._row(Outcome.SAME if theirs == ours else Outcome.RENAMED, theirs, ours, "")

    def convert(self, theirs: str, ours: str, value: Any, note: str) -> None:
        """Take another value over; the note says which and why."""
        self._write(ours, value)
        self._row(Outcome.CONVERTED, theirs, ours, note)

    def rename(self, theirs: str, ours: str, value: Any, note: str) -> None:
        """Take a value over under another name or in another unit."""
        self._write(ours, value)
        self._row(Outcome.RENAMED, theirs, ours, note)

    def ignore(self, theirs: str, reason: str) -> None:
        """Leave a key of theirs out."""
        self._row(Outcome.IGNORED, theirs, "", reason)

    def fill(self, ours: str, value: Any, reason: str) -> None:
        """Set a key that their file does not have."""
        self._write(ours, value)
        self._row(Outcome.FILLED, "", ours, reason)

    def missing(self, theirs: str, feature: str) -> None:
        """Their file uses something that is not available here."""
        self._row(Outcome.MISSING, theirs, "", feature)

    def _write(self, path: str, value: Any) -> None:
        put(self.ours, path, value)
        self.written.add(path)

    def _row(self, outcome: Outcome, theirs: str, ours: str, note: str) -> None:
        self.report.add(outcome, theirs, ours, note)
        if theirs:
            self.done.add(theirs)


def at(node: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted key of nested dictionaries."""
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def put(node: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted key; sections on the way are made."""
    *parents, leaf = path.split(".")
    for part in parents:
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    node[leaf] = value


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of all values that are no section; an empty section is a value."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern of the rules is about a key."""
    if pattern.endswith(".*"):
        return path == pattern[:-2] or path.startswith(pattern[:-1])
    return path == pattern
