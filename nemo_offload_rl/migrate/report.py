"""Outcome of each key of a NeMo-RL file, as a table and as comments in our YAML."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import yaml


class Outcome(StrEnum):
    """Outcome of a key."""

    SAME = "same"
    RENAMED = "renamed"
    CONVERTED = "converted"
    IGNORED = "ignored"
    FILLED = "filled in"
    MISSING = "missing"


_HEADINGS = {
    Outcome.SAME: "taken over as they are",
    Outcome.RENAMED: "taken over under another name",
    Outcome.CONVERTED: "taken over with another value",
    Outcome.IGNORED: "not taken over, and why that is harmless",
    Outcome.FILLED: "not in the file",
    Outcome.MISSING: "not available here",
}
_MAX_LISTED = 6
# Keys that follow one of `policy` in NeMo-RL's files and ours, so that an override of the latter changes both.
_FOLLOWS = {
    "policy.tokenizer.name": "model_name",
    "policy.generation.vllm_cfg.max_model_len": "max_total_sequence_length",
}


@dataclass(frozen=True)
class Row:
    """One key.

    Attributes:
        outcome: See `Outcome`.
        theirs: Its dotted name in NeMo-RL's file, "" for a key that only this package has.
        ours: Its dotted name here, "" for none.
        note: The reason or the change; for `MISSING` the feature, "" if the key says all.
    """

    outcome: Outcome
    theirs: str
    ours: str
    note: str


@dataclass
class Report:
    """Every key of a NeMo-RL file, and every key that was filled in."""

    rows: list[Row] = field(default_factory=list)

    def add(self, outcome: Outcome, theirs: str, ours: str, note: str = "") -> None:
        """Record one key."""
        self.rows.append(Row(outcome, theirs, ours, note))

    def of(self, outcome: Outcome) -> list[Row]:
        """Return the rows with one outcome."""
        return [row for row in self.rows if row.outcome is outcome]

    @property
    def missing(self) -> dict[str, list[str]]:
        """Features that the file uses and this package lacks, each with the keys that turn it on.

        A feature without words has the name of its key.
        """
        found: dict[str, list[str]] = {}
        for row in self.of(Outcome.MISSING):
            found.setdefault(row.note or row.theirs, []).append(row.theirs)
        return found

    def render(self) -> str:
        """Render the table: one line for each reason, with all keys that have it."""
        lines = [line for outcome in Outcome for line in self._section(outcome)]
        width = max((len(left) for left, _ in lines), default=0)
        return "\n".join(f"{left:<{min(width, 76)}}  {right}".rstrip() for left, right in lines)

    def _section(self, outcome: Outcome) -> Iterator[tuple[str, str]]:
        rows = self.of(outcome)
        if not rows:
            return
        yield f"{_HEADINGS[outcome]}: {len(rows)}", ""
        if outcome is Outcome.SAME:
            sections = dict.fromkeys(row.ours.partition(".")[0] for row in rows)
            yield f"  {', '.join(f'{name}.*' for name in sections)}", ""
            return
        by_note: dict[str, list[str]] = {}
        for row in rows:
            is_unnamed = outcome is Outcome.MISSING and not row.note
            by_note.setdefault(row.theirs if is_unnamed else row.note, []).append(_names(row))
        for note, names in by_note.items():
            *first, last = listed(names)
            yield from ((f"  {name}", "") for name in first)
            yield f"  {last}", "" if note in names else note


def _names(row: Row) -> str:
    if row.outcome is Outcome.RENAMED or (row.outcome is Outcome.CONVERTED and row.theirs and row.ours != row.theirs):
        return f"{row.theirs} -> {row.ours}"
    return row.theirs or row.ours


def listed(names: Sequence[str]) -> list[str]:
    """Return the first names, and how many more there are."""
    names = list(dict.fromkeys(names))
    if len(names) <= _MAX_LISTED:
        return names
    return [*names[: _MAX_LISTED - 1], f"and {len(names) - _MAX_LISTED + 1} more"]


def render_yaml(config: Mapping[str, Any], report: Report, source: str) -> str:
    """Render the whole configuration; keys that were converted, renamed or filled in by a rule have a comment.

    Args:
        config: Our keys.
        report: Of the migration, with nothing missing.
        source: The name of NeMo-RL's file, for the first line.
    """
    notes = {
        row.ours: f"{row.theirs} in NeMo-RL" if row.outcome is Outcome.RENAMED and not row.note else row.note
        for row in report.rows
        if row.outcome in (Outcome.CONVERTED, Outcome.RENAMED, Outcome.FILLED) and not row.note.startswith("as ")
    }
    ignored: dict[str, list[str]] = {}
    for row in report.of(Outcome.IGNORED):
        ignored.setdefault(row.note, []).append(row.theirs)
    head = [f"# From NeMo-RL's {source}, by `python -m nemo_offload_rl.migrate`.", "# Left out:"]
    head += [f"#   {', '.join(listed(keys))}: {reason}" for reason, keys in ignored.items()]
    return "\n".join([*head, "", *_lines(_tied(config), notes)]) + "\n"


def _tied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the configuration; values that NeMo-RL's files take from another key follow it again."""
    changed = copy.deepcopy(dict(config))
    for path, source in _FOLLOWS.items():
        *parents, leaf = path.split(".")
        section, of_policy = changed, config.get("policy", {}).get(source)
        for part in parents:
            section = section.get(part) or {}
        if of_policy is not None and section.get(leaf) == of_policy:
            section[leaf] = f"${{policy.{source}}}"
    return changed


def _lines(section: Mapping[str, Any], notes: Mapping[str, str], prefix: str = "", indent: str = "") -> Iterator[str]:
    for key, value in section.items():
        path = f"{prefix}{key}"
        comment = f"  # {notes[path]}" if path in notes else ""
        if isinstance(value, Mapping) and value:
            yield f"{indent}{key}:{comment}"
            yield from _lines(value, notes, f"{path}.", f"{indent}  ")
        else:
            yield f"{indent}{key}: {_scalar(value)}{comment}"


def _scalar(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        # YAML 1.1 reads 5e-06 as text, 5.0e-06 as a number.
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    return yaml.safe_dump(_with_floats(value), default_flow_style=True, width=math.inf).removesuffix("\n...\n").rstrip()


def _with_floats(value: Any) -> Any:
    """Copy nested values, so that YAML writes no anchors for shared lists."""
    if isinstance(value, Mapping):
        return {key: _with_floats(inner) for key, inner in value.items()}
    return [_with_floats(inner) for inner in value] if isinstance(value, list | tuple) else value
