"""Published data sets that are known by name: where they are, and which fields are question, answer or pair.

Names and conversions are those of NeMo-RL (its nemo_rl/data/datasets) for every set that it has.
"""

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_offload_rl.data.bad_rows import BadRows
from nemo_offload_rl.data.readers import Record, read_records
from nemo_offload_rl.data.records import Conversation, PreferencePair, Row, Splits
from nemo_offload_rl.data.rows import binary_pair, conversation, field_of, opening, split_by, text_of
from nemo_offload_rl.errors import DataError
from nemo_offload_rl.keys.published import (
    ConversationsConfig,
    Gsm8kConfig,
    MathConfig,
    MathProblemsConfig,
    OpenMathInstruct2Config,
    PublishedConversations,
    PublishedKeys,
    PublishedPairsConfig,
    PublishedQuestions,
    SquadConfig,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Source:
    """Where a data set is published.

    Attributes:
        repository: Its name on the hub.
        split: The default split.
        columns: Columns that are read of the hub.
        subsets: Its parts; all are read.
    """

    repository: str
    split: str
    columns: tuple[str, ...]
    subsets: tuple[str | None, ...] = (None,)


@dataclass(frozen=True)
class _Problems:
    """Problems with answers: their place, both fields, and a function that finds the answer in its field's text."""

    source: _Source
    input_key: str
    output_key: str
    extract: Callable[[str], str | None] = field(default=lambda text: text)


_MATH_PARTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip


def _problem(repository: str, input_key: str = "problem", output_key: str = "answer", **source: Any) -> _Problems:
    columns = tuple(key.partition(".")[0] for key in (input_key, output_key))
    return _Problems(_Source(repository, columns=columns, **{"split": "train", **source}), input_key, output_key)


def after_hashes(solution: str) -> str | None:
    """The answer of a solution of GSM8K, or None."""
    parts = solution.split("####")
    return parts[1].strip() if len(parts) > 1 else None


def last_boxed(solution: str) -> str | None:
    r"""The content of the last `\boxed{...}` of a solution, or the text from `\boxed` to a `$`; None for neither."""
    start = solution.rfind("\\boxed")
    if start < 0:
        return None
    rest = solution[start + len("\\boxed") :]
    if not rest.startswith("{"):
        return rest.partition("$")[0].strip() or None
    depth = 0
    for index, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[1:index]
    return None


_DAPO = {"input_key": "prompt.0.content", "output_key": "reward_model.ground_truth"}
_PROBLEMS: Mapping[str, _Problems] = {
    "DAPOMath17K": _problem("BytedTsinghua-SIA/DAPO-Math-17k", **_DAPO),
    "DAPOMathAIME2024": _problem("BytedTsinghua-SIA/AIME-2024", **_DAPO),
    "DeepScaler": _problem("agentica-org/DeepScaleR-Preview-Dataset"),
    "AIME2024": _problem("HuggingFaceH4/aime_2024"),
    "AIME2025": _problem("opencompass/AIME2025", "question", split="test", subsets=("AIME2025-I", "AIME2025-II")),
    "AIME2026": _problem("MathArena/aime_2026"),
    "MATH-500": _problem("HuggingFaceH4/MATH-500", split="test"),
}
_SQUAD = _Source("rajpurkar/squad", "train", ("context", "question", "answers"))
_CONVERSATIONS: Mapping[str, _Source] = {
    "tulu3_sft_mixture": _Source("allenai/tulu-3-sft-mixture", "train", ("messages",)),
    "Nemotron-Cascade-2-SFT-Math": _Source("nvidia/Nemotron-Cascade-2-SFT-Data", "train", ("messages",), ("math",)),
}
_PAIRS: Mapping[str, _Source] = {
    "HelpSteer3": _Source(
        "nvidia/HelpSteer3", "train", ("context", "response1", "response2", "overall_preference"), ("preference",)
    ),
    "Tulu3Preference": _Source("allenai/llama-3.1-tulu-3-8b-preference-mixture", "train", ("chosen", "rejected")),
    "UltraFeedback": _Source("HuggingFaceH4/ultrafeedback_binarized", "train_prefs", ("chosen", "rejected")),
}


def load_questions(settings: PublishedQuestions, bad: BadRows) -> Splits[Row]:
    """Questions with their answers; equal ones share one row.

    Args:
        settings: The keys of the data set.
        bad: Decides about rows of another form than the published ones.

    Raises:
        DataError: The data cannot be read, or a row has another form; the message names it.
    """
    problems, split = _problems_of(settings)
    unique: dict[tuple[str, str], Row] = {}

    def row_of(record: Record) -> Row:
        text = text_of(record, problems.output_key, "path")
        answer = problems.extract(text)
        if answer is None:
            raise DataError(f"{record.origin}: {problems.output_key!r} has no answer; set extract_answer to false")
        question = text_of(record, problems.input_key, "path")
        return unique.setdefault((question, answer), Row(question=question, answer=answer, origin=record.origin))

    rows = list(bad.usable(_records(settings, problems.source, split, bad), row_of))
    rows *= settings.repeat if isinstance(settings, MathProblemsConfig) else 1
    return split_by(rows, lambda row: row.question, size=settings.split_validation_size, seed=settings.seed)


def load_published_conversations(settings: PublishedConversations, bad: BadRows) -> Splits[Conversation]:
    """Conversations; with `max_samples`, a seeded draw of so many. The rest is as in `load_questions`."""
    match settings:
        case SquadConfig():
            rows = list(bad.usable(_records(settings, _SQUAD, settings.split, bad), _squad))
        case ConversationsConfig():
            records = list(_records(settings, _CONVERSATIONS[settings.dataset_name], None, bad))
            if settings.max_samples is not None and settings.max_samples < len(records):
                records = random.Random(settings.seed).sample(records, settings.max_samples)
            rows = list(bad.usable(records, lambda record: conversation(record, "messages", None)))
    return split_by(rows, lambda row: opening(row.messages), size=settings.split_validation_size, seed=settings.seed)


def load_published_pairs(settings: PublishedPairsConfig, bad: BadRows) -> Splits[PreferencePair]:
    """Pairs, without those in which neither response is better. The rest is as in `load_questions`."""
    name = settings.dataset_name
    pair_of = _helpsteer3 if name == "HelpSteer3" else _whole_conversations
    pairs = list(bad.usable(_records(settings, _PAIRS[name], settings.split, bad), pair_of))
    rows = [pair for pair in pairs if pair is not None]
    if len(rows) < len(pairs):
        logger.warning(
            "%d of %d pairs of %s have no better response and are left out", len(pairs) - len(rows), len(pairs), name
        )
    return split_by(rows, lambda row: repr(row.prompt), size=settings.split_validation_size, seed=settings.seed)


def _problems_of(settings: PublishedQuestions) -> tuple[_Problems, str | None]:
    """The problems of a section, and the split that it names."""
    match settings:
        case OpenMathInstruct2Config():
            found = _problem("nvidia/OpenMathInstruct-2", output_key=settings.output_key, split="train_1M")
            return found, settings.split
        case Gsm8kConfig():
            source = _Source("openai/gsm8k", "train", ("question", "answer"), (settings.subset or "main",))
            extract = after_hashes if settings.extract_answer else str
            return _Problems(source, "question", "answer", extract), settings.split
        case MathConfig():
            source = _Source("EleutherAI/hendrycks_math", "train", ("problem", "solution"), _MATH_PARTS)
            extract = last_boxed if settings.extract_answer else str
            return _Problems(source, "problem", "solution", extract), settings.split
        case MathProblemsConfig():
            return _PROBLEMS[settings.dataset_name], None


def _records(settings: PublishedKeys, source: _Source, split: str | None, bad: BadRows) -> Iterator[Record]:
    if settings.path is not None:
        path = Path(settings.path)
        # A file has one split. The key may name that of the published data set, and takes no null.
        yield from read_records(path, None if path.is_file() else split, columns=source.columns, bad=bad)
        return
    for subset in source.subsets:
        yield from read_records(
            Path(source.repository), split or source.split, subset=subset, columns=source.columns, bad=bad
        )


def _squad(record: Record) -> Conversation:
    messages = (
        {"role": "system", "content": text_of(record, "context", "path")},
        {"role": "user", "content": text_of(record, "question", "path")},
        {"role": "assistant", "content": text_of(record, "answers.text.0", "path")},
    )
    return Conversation(messages=messages, origin=record.origin)


def _helpsteer3(record: Record) -> PreferencePair | None:
    """A pair by `overall_preference`: below 0 the first response is better, at 0 neither (None)."""
    preference = field_of(record, "overall_preference", "path")
    if not isinstance(preference, int | float):
        raise DataError(f"{record.origin}: field 'overall_preference' is {preference!r}; write a number")
    first, second = (text_of(record, name, "path") for name in ("response1", "response2"))
    if preference == 0 or first == second:
        return None
    keys = ("response1", "response2") if preference < 0 else ("response2", "response1")
    return binary_pair(record, "context", *keys)


def _whole_conversations(record: Record) -> PreferencePair | None:
    """A pair of conversations whose common beginning is the prompt; None if they are equal."""
    if field_of(record, "chosen", "path") == field_of(record, "rejected", "path"):
        return None
    return binary_pair(record, None, "chosen", "rejected")
