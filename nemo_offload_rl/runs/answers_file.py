"""The answers of an evaluation on disk: written as they come, and continued after an interruption.

1. `unfinished.json` says what the answers in `responses.jsonl` depend on. It is there from the first answers to the
   results.
2. An evaluation that finds it goes on after the last prompt whose answers are complete, or is refused if it would
   answer otherwise. Without it, the folder's files are those of a finished evaluation, and are overwritten.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from nemo_offload_rl.algorithms.identity import Identity, first_difference
from nemo_offload_rl.errors import ConfigError

RESULTS_FILE, RESPONSES_FILE, PAGE_FILE, UNFINISHED_FILE = (
    "results.json", "responses.jsonl", "index.html", "unfinished.json",
)  # fmt: skip

type AnswerRecord = Mapping[str, Any]
"""One answer: a line of responses.jsonl."""


class AnswersFile:
    """Answers to one prompt after the other, in memory and in a folder.

    Args:
        folder: The folder; None keeps the answers in memory only.
        identity: What the answers depend on.
        num_answers: Answers to each prompt.

    Attributes:
        records: All answers.

    Raises:
        ConfigError: The folder cannot be written, or has the answers of an interrupted evaluation of another identity.
    """

    def __init__(self, folder: Path | None, identity: Identity, num_answers: int) -> None:
        self._folder = folder
        self._identity = identity
        self._num_answers = num_answers
        self.records: list[AnswerRecord] = []
        self._has_begun = False
        if folder is None:
            return
        with writing(folder):
            if (folder / UNFINISHED_FILE).exists():
                self._continue(folder)

    @property
    def num_prompts(self) -> int:
        """Prompts whose answers are complete."""
        return len(self.records) // self._num_answers

    def add(self, records: Sequence[AnswerRecord]) -> None:
        """Append all answers to the next prompts.

        Raises:
            ConfigError: The folder cannot be written.
        """
        if self._folder is not None:
            with writing(self._folder) as folder:
                if not self._has_begun:
                    self._begin(folder)
                _write(folder / RESPONSES_FILE, records, "a")
        self.records.extend(records)

    def finish(self) -> None:
        """Note that the results are written."""
        if self._folder is not None:
            (self._folder / UNFINISHED_FILE).unlink(missing_ok=True)

    def way_to_go_on(self, num_prompts: int) -> str:
        """How to continue an evaluation of `num_prompts` prompts that ends early."""
        if self._folder is None or not self.records:
            return "no answers were written"
        return (
            f"{self.num_prompts} of {num_prompts} prompts are answered in {self._folder / RESPONSES_FILE}; the same "
            "command goes on from there"
        )

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
        self.records = list(self._complete(folder / RESPONSES_FILE))
        partial = folder / f"{RESPONSES_FILE}.partial"
        _write(partial, self.records, "w")  # the last line may be cut
        partial.replace(folder / RESPONSES_FILE)
        self._has_begun = True

    def _complete(self, path: Path) -> Iterator[AnswerRecord]:
        """The answers in a file up to the first prompt that lacks some."""
        groups = groupby(_read(path), key=lambda record: record["prompt_index"])
        for number, (index, group) in enumerate(groups):
            answers = list(group)
            if index != number or len(answers) != self._num_answers:
                return
            yield from answers


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


def _write(path: Path, records: Sequence[AnswerRecord], mode: str) -> None:
    # UTF-8 cannot encode a lone surrogate; its escape is valid JSON.
    with path.open(mode, encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> Iterator[AnswerRecord]:
    """The answers up to a line that is cut."""
    for line in path.read_bytes().split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            return
        yield record
