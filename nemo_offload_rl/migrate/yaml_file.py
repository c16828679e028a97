"""Our YAML, with what became of each key as comments."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from nemo_offload_rl.migrate.mapping import Migration
from nemo_offload_rl.migrate.report import Outcome, listed


def render_yaml(migration: Migration, source: str) -> str:
    """The whole configuration; what was converted, renamed or filled in by a rule has a comment.

    Args:
        migration: With nothing missing.
        source: The name of NeMo-RL's file, for the first line.
    """
    report = migration.report
    notes = {
        row.ours: f"{row.theirs} there" if row.outcome is Outcome.RENAMED and not row.note else row.note
        for row in report.rows
        if row.outcome in (Outcome.CONVERTED, Outcome.RENAMED, Outcome.FILLED) and not row.note.startswith("as ")
    }
    ignored: dict[str, list[str]] = {}
    for row in report.of(Outcome.IGNORED):
        ignored.setdefault(row.note, []).append(row.theirs)
    head = [f"# From NeMo-RL's {source}, by `python -m nemo_offload_rl.migrate`.", "# Left out:"]
    head += [f"#   {', '.join(listed(keys))}: {reason}" for reason, keys in ignored.items()]
    return "\n".join([*head, "", *_lines(migration.config, notes)]) + "\n"


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
        # YAML reads 5e-06 as text: its numbers have a point.
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    return yaml.safe_dump(_with_floats(value), default_flow_style=True, width=math.inf).removesuffix("\n...\n").rstrip()


def _with_floats(value: Any) -> Any:
    """Without shared lists, which YAML would write as anchors."""
    if isinstance(value, Mapping):
        return {key: _with_floats(inner) for key, inner in value.items()}
    return [_with_floats(inner) for inner in value] if isinstance(value, list | tuple) else value
