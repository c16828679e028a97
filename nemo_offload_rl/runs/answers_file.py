"""The answers of an evaluation on disk: written as they come, and continued after an interruption.

1. `unfinished.json` says what the answers in `responses.jsonl` depend on. It is there from the first answers to the
   results.
2. Answers are appended in the order in which they finish. Each append is one write of whole lines.
3. An evaluation that finds `unfinished.json` asks for the answers that are missing, or is refused if it would answer
   otherwise. Without it, the folder's files are those of a finished evaluation, and are overwritten.
4. At the end the answers are written anew in the order of the data.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from nemo_offload_rl.algorithms.identity import Identity, first_difference
from nemo_offload_rl.errors import ConfigError

RESULTS_FILE, RESPONSES_FILE, PAGE_FILE, UNFINISHED_FILE = (
    "results.json", "responses.jsonl", "index.html", "unfinished.json",
)  # fmt: skip

type AnswerRecord = Mapping[str, Any]
"""One answer: a line of responses.jsonl."""


class AnswerKey(NamedTuple):
    """Which answer a record is; its fields have these names in the record."""

    prompt_index: int
    kind: str
    sample: int


class AnswersFile:
    """Answers of an evaluation in any order, in memory and in a folder.

    Args:
        folder: The folder; None keeps the answers in memory only.
        identity: What the answers depend on.
        num_prompts: Prompts of the evaluation.
        num_answers: Answers to each prompt, by kind.

    Raises:
        ConfigError: The folder cannot be written, or has the answers of an interrupted evaluation of another identity.
    """

    def __init__(
        self, folder: Path | None, identity: Identity, num_prompts: int, num_answers: Mapping[str, int]
    ) -> None:
        self._folder = folder
        self._identity = identity
        self._keys = [
            AnswerKey(index, kind, sample)
            for index in range(num_prompts)
            for kind, num in num_answers.items()
            for sample in range(num)
        ]
        self._found: dict[AnswerKey, AnswerRecord] = {}
        self._has_begun = False
        if folder is None:
            return
        with writing(folder):
            if (folder / UNFINISHED_FILE).exists():
                self._continue(folder)

    @property
    def records(self) -> list[AnswerRecord]:
        """The answers that are there, in the order of the data."""
        return [self._found[key] for key in self._keys if key in self._found]

    def missing(self) -> list[AnswerKey]:
        """Return the answers that are not there, in the order of the data."""
        return [key for key in self._keys if key not in self._found]

    def count(self) -> str:
        """Tell how many answers of all are there, such as "3 of 8"."""
        return f"{len(self._found)} of {len(self._keys)}"

    def add(self, records: Iterable[AnswerRecord]) -> None:
        """Append answers.

        Raises:
            ConfigError: The folder cannot be written.
        """
        found = {_key(record): record for record in records}
        if found and self._folder is not None:
            with writing(self._folder) as folder:
                if not self._has_begun:
                    self._begin(folder)
                _write(folder / RESPONSES_FILE, found.values(), "ab")
        self._found |= found

    def finish(self) -> None:
        """Write the answers in the order of the data, and note that the results are written.

        Raises:
            ConfigError: The folder cannot be written.
        """
        if self._folder is not None:
            with writing(self._folder) as folder:
                self._write_anew(folder)
                (folder / UNFINISHED_FILE).unlink(missing_ok=True)

    def way_to_go_on(self) -> str:
        """How to continue an evaluation that ends early."""
        if self._folder is None or not self._found:
            return "no answers were written"
        return f"{self.count()} answers are in {self._folder / RESPONSES_FILE}; the same command goes on from there"

    def _begin(self, folder: Path) -> None:
        """Remove the files of an earlier evaluation. Its answers go before the new identity is written."""
        for name in (RESULTS_FILE, PAGE_FILE, RESPONSES_FILE):
            (folder / name).unlink(missing_ok=True)
        (folder / RESPONSES_FILE).touch()
        partial = folder / f"{UNFINISHED_FILE}.partial"
        partial.write_text(json.dumps(self._identity, indent=2) + "\n", encoding="utf-8")
        partial.replace(folder / UNFINISHED_FILE)
        self._has_begun = True

    def _continue(self, folder: Path) -> None:
        found = json.loads((folder / UNFINISHED_FILE).read_text(encoding="utf-8"))
        absent = {"name": "nothing", "digest": ""}
        recorded, own = (
            {key: one.get(key, absent) for key in {**found, **self._identity}} for one in (found, self._identity)
        )
        if (key := first_difference(recorded, own)) is not None:
            theirs, mine = recorded[key]["name"], own[key]["name"]
            other = f"{mine} here" if theirs != mine else "something else under this name by now"
            raise ConfigError(
                f"{folder} (eval.save_path) has the answers of an interrupted evaluation with {key}={theirs}, which is "
                f"{other}; set it as it was to go on, name another folder, or remove {folder / UNFINISHED_FILE} to "
                "start anew"
            )
        self._found = {_key(record): record for record in _read(folder / RESPONSES_FILE)}
        self._write_anew(folder)  # the last line may be cut
        self._has_begun = True

    def _write_anew(self, folder: Path) -> None:
        partial = folder / f"{RESPONSES_FILE}.partial"
        _write(partial, self.records, "wb")
        partial.replace(folder / RESPONSES_FILE)


def check_writable(folder: Path) -> None:
    """Create the folder and its file of answers if they do not exist.

    Raises:
        ConfigError: The folder cannot be written.
    """
    with writing(folder):
        (folder / RESPONSES_FILE).open("a").close()


@contextmanager
def writing(folder: Path) -> Iterator[Path]:
    """Create `folder`, and turn errors of writing in the block into a `ConfigError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        raise ConfigError(
            f"eval.save_path {folder} cannot be written: {error.strerror}; name another folder or set null"
        ) from error


def _key(record: AnswerRecord) -> AnswerKey:
    return AnswerKey(*(record[name] for name in AnswerKey._fields))


def _write(path: Path, records: Iterable[AnswerRecord], mode: str) -> None:
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    with path.open(mode) as file:
        # UTF-8 cannot encode a lone surrogate; its escape is valid JSON.
        file.write(lines.encode(errors="backslashreplace"))
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> Iterator[AnswerRecord]:
    """The answers up to a line that is cut."""
    num_read = Counter[tuple[int, str]]()
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            return
        kind = record["prompt_index"], record["kind"]
        record.setdefault("sample", num_read[kind])  # earlier versions did not write it, and wrote in order
        num_read[kind] += 1
        yield record
