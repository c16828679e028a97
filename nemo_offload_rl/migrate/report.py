"""What became of each key of a NeMo-RL file, as one table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """What became of a key."""

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


@dataclass(frozen=True)
class Row:
    """One key.

    Attributes:
        outcome: What became of it.
        theirs: Its dotted name in NeMo-RL's file, "" for a key that only this package has.
        ours: Its dotted name here, "" for none.
        note: Why, or what changed. Of what is missing: the feature.
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
        """The rows of one outcome."""
        return [row for row in self.rows if row.outcome is outcome]

    @property
    def missing(self) -> dict[str, list[str]]:
        """Features that the file uses and this package lacks, with the keys that turn them on."""
        found: dict[str, list[str]] = {}
        for row in self.of(Outcome.MISSING):
            found.setdefault(row.note, []).append(row.theirs)
        return found

    def render(self) -> str:
        """The table: one line for each reason, the keys that share it together."""
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
            by_note.setdefault(row.note, []).append(_names(row))
        for note, names in by_note.items():
            *first, last = listed(names)
            yield from ((f"  {name}", "") for name in first)
            yield f"  {last}", note


def _names(row: Row) -> str:
    if row.outcome is Outcome.RENAMED or (row.outcome is Outcome.CONVERTED and row.theirs and row.ours != row.theirs):
        return f"{row.theirs} -> {row.ours}"
    return row.theirs or row.ours


def listed(names: Sequence[str]) -> list[str]:
    """The first names, and how many more there are."""
    names = list(dict.fromkeys(names))
    if len(names) <= _MAX_LISTED:
        return names
    return [*names[: _MAX_LISTED - 1], f"and {len(names) - _MAX_LISTED + 1} more"]
