"""From the settings `data.*` to tokenized data: the one place that knows every kind of data set."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.data.arithmetic import load_arithmetic
from nemo_offload_rl.data.bad_rows import BadRows
from nemo_offload_rl.data.encoding import ChatEncoder
from nemo_offload_rl.data.prompts import (
    PromptEncoder,
    load_templates,
    processor_named,
    with_prompt_files,
    with_system_prompt,
)
from nemo_offload_rl.data.published import load_published_conversations, load_published_pairs, load_questions
from nemo_offload_rl.data.records import (
    Conversation,
    Example,
    ExamplePair,
    Part,
    PreferencePair,
    Prompt,
    Row,
    Splits,
    accepted,
)
from nemo_offload_rl.data.rows import load_conversations, load_pairs, load_responses
from nemo_offload_rl.data.tokenizer import LostCharacters
from nemo_offload_rl.errors import DataError
from nemo_offload_rl.keys.data import (
    ArithmeticConfig,
    BinaryPreferenceConfig,
    DataConfig,
    DataSource,
    DpoDataConfig,
    EvalDataConfig,
    MixtureConfig,
    MixtureKeys,
    OpenAIFormatConfig,
    PreferenceConfig,
    ResponseDatasetConfig,
    SftDataConfig,
)
from nemo_offload_rl.keys.data_source import FileKeys
from nemo_offload_rl.keys.published import (
    ConversationsConfig,
    Gsm8kConfig,
    MathConfig,
    MathProblemsConfig,
    OpenMathInstruct2Config,
    PublishedPairsConfig,
    SquadConfig,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

type DataSettings = DataConfig | EvalDataConfig | SftDataConfig | DpoDataConfig
type Encode[R, T] = Callable[[R], T]


def load_prompts(
    settings: DataConfig | EvalDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> Splits[Prompt]:
    """Prompts for training, and for validation: rows that `data.train` keeps aside and all of `data.validation`.

    An evaluation has no `data.train`, and no prompts for training.

    Args:
        settings: The keys `data.*`.
        tokenizer: Has a chat template.
        chat_template_kwargs: Extra variables for the chat template.

    Raises:
        DataError: A data set is empty, or a row cannot be used; one longer than the limit, for example.
    """

    def load(source: DataSource, name: str, bad: BadRows) -> tuple[Splits[Row], Encode[Row, Prompt]]:
        encoder = PromptEncoder(
            tokenizer=tokenizer,
            task=source,
            templates=load_templates(source),
            add_bos=settings.add_bos,
            chat_template_kwargs=dict(chat_template_kwargs or {}),
            data_set=name,
        )
        return load_rows(source, bad), encoder.prompt

    return _load_splits(settings, tokenizer, load)


def load_examples(
    settings: SftDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None,
    *,
    last_turn_only: bool,
) -> Splits[Example]:
    """Tokenized conversations for SFT; splits and errors as in `load_prompts`."""
    encoder = ChatEncoder.of(settings, tokenizer, chat_template_kwargs, last_turn_only=last_turn_only)

    def load(source: DataSource, name: str, bad: BadRows) -> tuple[Splits[Conversation], Encode[Conversation, Example]]:
        def encode(row: Conversation) -> Example:
            return replace(encoder.encode(row.messages, row.origin, tools=row.tools), data_set=name)

        return _conversations(source, bad), encode

    return _load_splits(settings, tokenizer, load)


def load_example_pairs(
    settings: DpoDataConfig, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any] | None
) -> Splits[ExamplePair]:
    """Tokenized pairs for DPO, each as long as its longer response; splits and errors as in `load_prompts`."""
    encoder = ChatEncoder.of(settings, tokenizer, chat_template_kwargs)

    def load(
        source: DataSource, name: str, bad: BadRows
    ) -> tuple[Splits[PreferencePair], Encode[PreferencePair, ExamplePair]]:
        assert isinstance(source, BinaryPreferenceConfig | PreferenceConfig | PublishedPairsConfig), type(source)
        templates = load_templates(source)

        def encode(row: PreferencePair) -> ExamplePair:
            prompt = with_system_prompt(row.prompt, templates)
            chosen, rejected = (
                encoder.encode([*prompt, *response], row.origin, num_given=len(prompt), tools=row.tools)
                for response in (row.chosen, row.rejected)
            )
            return ExamplePair(chosen=replace(chosen, data_set=name), rejected=replace(rejected, data_set=name))

        if isinstance(source, PublishedPairsConfig):
            return load_published_pairs(source, bad), encode
        return load_pairs(source, bad), encode

    return _load_splits(settings, tokenizer, load)


def _load_splits[R: (Row, Conversation, PreferencePair), T: (Prompt, Example, ExamplePair)](
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    load: Callable[[DataSource, str, BadRows], tuple[Splits[R], Encode[R, T]]],
) -> Splits[T]:
    """Load and encode every data set.

    Training rows of a mixture come data set by data set, with `parts` saying where each begins. Validation rows are
    taken from each data set in turn, so that a run that validates on the first of them sees every set.

    Args:
        settings: The keys `data.*`.
        tokenizer: The one that encodes; characters that it loses are warned of.
        load: From a data set and its name to its rows and the function that encodes one; the last argument decides
            about unusable rows.
    """
    train: list[tuple[T, ...]] = []
    validation: list[tuple[T, ...]] = []
    weights: list[float] = []
    overlong: dict[str, int] = {}
    training = None if isinstance(settings, EvalDataConfig) else settings.train
    sources = () if training is None else _parts(training)
    more = () if settings.validation is None else _parts(settings.validation)
    names, characters = iter(data_set_names([source for source, _ in (*sources, *more)])), LostCharacters(tokenizer)

    def look(row: R, one: T) -> None:
        for text in _texts(row, one):
            characters.look(text, row.origin)

    for source, weight in sources:
        name, bad = next(names), BadRows(settings.bad_rows)
        rows, encode = load(source, name, bad)
        encoded, overlong[name] = _within_limit(settings, name, rows.train, encode, bad, look)
        kept_aside, _ = _within_limit(settings, name, rows.validation, encode, bad, look)
        bad.tell(name, len(encoded) + len(kept_aside))
        if not encoded:
            raise DataError(
                f"data.train has no rows to train on{_where(source)}; lower split_validation_size or add rows"
            )
        train.append(encoded)
        weights.append(len(encoded) if weight is None else weight)
        validation.append(kept_aside)
    for source, _ in more:
        name, bad = next(names), BadRows(settings.bad_rows)
        rows, encode = load(source, name, bad)
        # Made-up problems: only those that training never sees. Any other data set: all rows.
        is_made_up = isinstance(source, ArithmeticConfig)
        held_out = rows.validation if is_made_up else (*rows.train, *rows.validation)
        validation.append(_within_limit(settings, name, held_out, encode, bad, look)[0])
        bad.tell(name, len(validation[-1]))
        if not validation[-1]:
            raise DataError(f"data.validation has no rows{_where(source)}; add rows, or set data.validation to null")
    characters.tell()
    parts = tuple(Part(len(rows), weight) for rows, weight in zip(train, weights, strict=True))
    return Splits(
        train=tuple(row for rows in train for row in rows),
        validation=_in_turn(validation),
        parts=parts if isinstance(training, MixtureKeys) else (),
        overlong=overlong,
    )


def _within_limit[R: (Row, Conversation, PreferencePair), T: (Prompt, Example, ExamplePair)](
    settings: DataSettings,
    data_set: str,
    rows: Sequence[R],
    encode: Encode[R, T],
    bad: BadRows,
    look: Callable[[R, T], None],
) -> tuple[tuple[T, ...], int]:
    """Encode rows; refuse, mask or leave out the too long ones, as `data.overlong_rows` says, with a warning.

    Each encoded row is shown to `look`.

    Returns:
        The rows, and how many were too long.

    Raises:
        DataError: A row is too long and that is an error, or all are too long, or one cannot be used.
    """
    limit, way = settings.max_input_seq_length, settings.overlong_rows
    encoded: dict[int, T] = {}  # by identity: published data sets have the same row up to a hundred times
    for row, one in bad.usable({id(row): row for row in rows}.values(), lambda row: (row, encode(row))):
        if one.num_tokens > limit:
            if way == "error":
                raise DataError(
                    f"{row.origin}: the row has {one.num_tokens} tokens, more than data.max_input_seq_length={limit}; "
                    "raise the limit, take the row out, or set data.overlong_rows=drop or mask"
                )
            one = one.masked(limit)
        look(row, one)
        encoded[id(row)] = one
    usable = [row for row in rows if id(row) in encoded]
    overlong = [row.origin for row in usable if not encoded[id(row)].loss_multiplier]
    if overlong and len(overlong) == len(usable):
        raise DataError(
            f"{overlong[0]}: this row and all others of {data_set} are longer than "
            f"data.max_input_seq_length={limit} tokens; raise the limit"
        )
    if overlong:
        logger.warning(
            "%d of %d rows of %s are longer than data.max_input_seq_length=%d tokens, first %s: they are %s",
            len(overlong), len(usable), data_set, limit, overlong[0],
            "left out" if way == "drop" else "not trained on",
        )  # fmt: skip
    found = (encoded[id(row)] for row in usable)
    return tuple(one for one in found if one.loss_multiplier or way != "drop"), len(overlong)


def _texts(row: Row | Conversation | PreferencePair, one: Prompt | Example | ExamplePair) -> Iterator[str]:
    """Yield the texts of a row that the model reads or should write."""
    if isinstance(row, Row):
        assert isinstance(one, Prompt)
        yield from (one.text, *accepted(row.answer))
        return
    messages = row.messages if isinstance(row, Conversation) else (*row.prompt, *row.chosen, *row.rejected)
    yield from (content for message in messages if isinstance(content := message.get("content"), str))


def _parts(source: DataSource | MixtureConfig) -> tuple[tuple[DataSource, float | None], ...]:
    """The data sets of a mixture with their weights, None for their sizes; another data set is its own only part."""
    if isinstance(source, MixtureKeys):
        weights = source.weights if source.weights is not None else [None] * len(source.datasets)
        return tuple(zip(source.datasets, weights, strict=True))
    return ((source, None),)


def _in_turn[T](parts: Sequence[Sequence[T]]) -> tuple[T, ...]:
    """The first row of each part, then the second of each, and so on."""
    longest = max(map(len, parts), default=0)
    return tuple(part[index] for index in range(longest) for part in parts if index < len(part))


def _where(source: DataSource) -> str:
    return f" in {source.path if isinstance(source, FileKeys) else source.dataset_name}"


def load_rows(settings: DataSource, bad: BadRows) -> Splits[Row]:
    """Questions with answers of one data set, split in training and validation.

    Args:
        settings: The keys of the data set.
        bad: Decides about rows that cannot be used.

    Raises:
        DataError: The data cannot be used; the message says which file, line or key.
    """
    match settings:
        case ArithmeticConfig():
            return load_arithmetic(settings)
        case ResponseDatasetConfig():
            return load_responses(settings, bad)
        case OpenMathInstruct2Config() | MathProblemsConfig() | Gsm8kConfig() | MathConfig():
            return load_questions(settings, bad)
        case _:
            raise DataError(f"{settings.dataset_name} has no questions with answers; name a data set that has")


def _conversations(source: DataSource, bad: BadRows) -> Splits[Conversation]:
    """Any data set of SFT as conversations."""
    templates = load_templates(source)

    def in_templates(row: Conversation) -> Conversation:
        return replace(row, messages=tuple(with_prompt_files(row.messages, templates)))

    def answered(row: Row) -> Conversation:
        if not isinstance(row.answer, str):
            raise DataError(
                f"{row.origin}: there are {len(row.answer)} answers, and SFT imitates one; name it, such as "
                "output_key=answers.0"
            )
        messages = (*process(row, templates), {"role": "assistant", "content": row.answer})
        return Conversation(messages=messages, origin=row.origin, tools=row.tools)

    if isinstance(source, OpenAIFormatConfig):
        return load_conversations(source, bad).map(in_templates)
    if isinstance(source, SquadConfig | ConversationsConfig):
        return load_published_conversations(source, bad).map(in_templates)
    process = processor_named(source.processor)
    rows = load_rows(source, bad)
    train, validation = (tuple(bad.usable(part, answered)) for part in (rows.train, rows.validation))
    return Splits(train, validation)


def data_set_names(sources: Sequence[DataSource]) -> list[str]:
    """Names of data sets in metrics.

    A file or folder has its own name, with its parent folder's where two are alike; a data set of the hub has the
    second part of its name there, and a published one its `dataset_name`. A number tells apart those that are still
    alike.
    """
    names = [_name(source, with_folder=False) for source in sources]
    alike = {name for name, count in Counter(names).items() if count > 1}
    names = [_name(source, with_folder=name in alike) for source, name in zip(sources, names, strict=True)]
    counts, seen = Counter(names), Counter[str]()
    for index, name in enumerate(names):
        seen[name] += 1
        if counts[name] > 1:
            names[index] = f"{name}_{seen[name]}"
    return names


def _name(source: DataSource, *, with_folder: bool) -> str:
    if not isinstance(source, FileKeys):
        return source.dataset_name
    path = Path(source.path)
    name = f"{path.parent.name}_{path.stem}" if with_folder else path.stem
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)
