r"""Prompt files: a text with one place for the question.

The place is `{}`. What else has braces is read in one of two ways:

1. As a format string of Python, as NeMo-RL reads it, where the file is one with `{}` as its only field: `{{` and `}}`
   stand for single braces, so that `\boxed{{}}` becomes `\boxed{}`.
2. As plain text in any other file: braces stand for themselves, and a `{}` that follows a LaTeX command, as in
   `\boxed{}`, is no place for the question.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from pathlib import Path

from nemo_offload_rl.errors import DataError

_AFTER_COMMAND = re.compile(r"\\[A-Za-z]+\*?$")
_PLACE = re.compile(r"(?<!\{)\{\}|\{\}(?!\})")


@dataclass(frozen=True)
class PromptFile:
    """What stands before and after the question."""

    before: str
    after: str

    def fill(self, question: str) -> str:
        """The prompt of one question."""
        return f"{self.before}{question}{self.after}"


def read_prompt_file(path: str) -> PromptFile:
    """Read and split a prompt file.

    Raises:
        DataError: It cannot be read, or does not have exactly one place for the question.
    """
    text = read_text_file(path, "prompt_file")
    parsed = _as_format_string(text)
    return parsed if parsed is not None else _as_plain_text(text, path)


def read_text_file(path: str, setting: str) -> str:
    """The text of a prompt file or system prompt file.

    Raises:
        DataError: It cannot be read; `setting` is the key that names it.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{setting} {path} cannot be read: {error.strerror}; correct the path or set null") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{setting} {path} is not UTF-8 text (byte {error.start}); save it as UTF-8 or set null"
        ) from error


def _as_format_string(text: str) -> PromptFile | None:
    """None where the text is no format string whose only field is `{}`, or where that follows a LaTeX command."""
    try:
        pieces = list(string.Formatter().parse(text))
    except ValueError:
        return None
    fields = [index for index, (_, name, _, _) in enumerate(pieces) if name is not None]
    if len(fields) != 1:
        return None
    literal, *field = pieces[fields[0]]
    if field != ["", "", None] or _AFTER_COMMAND.search(literal):
        return None
    literals = [piece[0] for piece in pieces]
    return PromptFile("".join(literals[: fields[0] + 1]), "".join(literals[fields[0] + 1 :]))


def _as_plain_text(text: str, path: str) -> PromptFile:
    places = [match for match in _PLACE.finditer(text) if not _AFTER_COMMAND.search(text[: match.start()])]
    if len(places) != 1:
        raise DataError(
            f"prompt file {path} has {len(places)} places marked {{}} (after a LaTeX command, as in \\boxed{{}}, it is "
            "text): the question goes to exactly one; mark it, or set prompt_file to null"
        )
    if "{{}}" in text:
        raise DataError(
            f"prompt file {path} has both {{{{}}}} and single braces, so it is unclear which are literal; write every "
            "literal brace twice, or every one once"
        )
    return PromptFile(text[: places[0].start()], text[places[0].end() :])
