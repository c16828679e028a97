"""Prompts from a JSONL file: one object per line with a question and its answer."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_offload_rl.data.records import Row, Splits
from nemo_offload_rl.data.settings import ResponseDatasetSettings
from nemo_offload_rl.errors import DataError


def load_jsonl(settings: ResponseDatasetSettings) -> Splits[Row]:
    """Read the file and keep a seeded share of its lines for validation.

    Raises:
        DataError: The file is missing or empty, or a line is not what it should be; the message names file and line.
    """
    rows = read_rows(Path(settings.path), input_key=settings.input_key, output_key=settings.output_key)
    return split_rows(rows, share=settings.split_validation_size, seed=settings.seed)


def split_rows(rows: Sequence[Row], *, share: float, seed: int) -> Splits[Row]:
    """Put a seeded share of the rows aside for validation; rows that ask the same question stay together."""
    questions = sorted({row.question for row in rows})
    random.Random(seed).shuffle(questions)
    held_out = set(questions[: round(len(questions) * share)])
    return Splits(
        train=tuple(row for row in rows if row.question not in held_out),
        validation=tuple(row for row in rows if row.question in held_out),
    )


def read_rows(path: Path, *, input_key: str, output_key: str) -> list[Row]:
    """Rows of a JSONL file in its order; blank lines are skipped.

    Raises:
        DataError: As in `load_jsonl`.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"data file {path} cannot be read: {error.strerror}; set `path` to a JSONL file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"data file {path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    rows = [
        _parse_row(line, f"{path}:{number}", input_key, output_key)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not rows:
        raise DataError(f"data file {path} has no rows; write one JSON object with {input_key!r} on each line")
    return rows


def _parse_row(line: str, origin: str, input_key: str, output_key: str) -> Row:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        fact = f"{origin} is not JSON ({error.msg}, column {error.colno})"
        raise DataError(f"{fact}; put one object on each line") from error
    if not isinstance(fields, dict):
        raise DataError(f"{origin} holds a JSON {type(fields).__name__}; put one object on each line")
    rest = {key: value for key, value in fields.items() if key not in (input_key, output_key)}
    return Row(
        question=_text_field(fields, input_key, "input_key", origin),
        answer=_text_field(fields, output_key, "output_key", origin),
        origin=origin,
        metadata=rest,
    )


def _text_field(fields: Mapping[str, object], key: str, setting: str, origin: str) -> str:
    if key not in fields:
        known = ", ".join(sorted(fields)) or "none"
        raise DataError(f"{origin} has no field {key!r} (fields: {known}); set {setting} to one of them")
    value = fields[key]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{origin}: field {key!r} is a {type(value).__name__}; write text or a number")
    return str(value)
