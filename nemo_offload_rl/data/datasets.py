"""From the settings `data.*` to tokenized data: the one place that knows every kind of data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.data.arithmetic import load_arithmetic
from nemo_offload_rl.data.data_set_names import data_set_names
from nemo_offload_rl.data.encoding import ChatEncoder
from nemo_offload_rl.data.length_limit import LengthLimit
from nemo_offload_rl.data.processors import (
    PromptEncoder,
    PromptTemplates,
    encode_prompts,
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
)
from nemo_offload_rl.data.rows import load_conversations, load_pairs, load_responses
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
    SupervisedDataKeys,
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


def load_rows(settings: DataSource) -> Splits[Row]:
    """Questions with answers of one data set, split in training and validation.

    Raises:
        DataError: The data cannot be used; the message says which file, line or key.
    """
    match settings:
        case ArithmeticConfig():
            return load_arithmetic(settings)
        case ResponseDatasetConfig():
            return load_responses(settings)
        case OpenMathInstruct2Config() | MathProblemsConfig() | Gsm8kConfig() | MathConfig():
            return load_questions(settings)
        case _:
            raise DataError(f"{settings.dataset_name} has no questions with answers; name a data set that has")


def load_prompts(
    settings: DataConfig | EvalDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> Splits[Prompt]:
    """Prompts for training, and for validation what `data.train` keeps aside and all of `data.validation`.

    An evaluation has no `data.train`, and no prompts for training.

    Args:
        settings: The keys `data.*`.
        tokenizer: What makes token ids, with a chat template.
        chat_template_kwargs: Extra variables for the chat template.

    Raises:
        DataError: A data set is empty, or a row cannot be used; a prompt longer than the limit, for example.
    """

    def load(source: DataSource, name: str) -> tuple[Splits[Row], Callable[[Sequence[Row]], tuple[Prompt, ...]]]:
        encoder = PromptEncoder(
            tokenizer=tokenizer,
            task=source,
            templates=load_templates(source),
            max_input_seq_length=settings.max_input_seq_length,
            overlong_rows=settings.overlong_rows,
            add_bos=settings.add_bos,
            chat_template_kwargs=dict(chat_template_kwargs or {}),
            data_set=name,
        )
        return load_rows(source), lambda rows: encode_prompts(encoder, rows)

    return _load_splits(settings, load)


def load_examples(
    settings: SftDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None,
    *,
    last_turn_only: bool,
) -> Splits[Example]:
    """Tokenized conversations for SFT, as `load_prompts` finds prompts.

    Raises:
        DataError: A data set is empty, or a row cannot be used; one longer than the limit, for example.
    """
    encoder = _chat_encoder(settings, tokenizer, chat_template_kwargs, last_turn_only)

    def load(
        source: DataSource, name: str
    ) -> tuple[Splits[Conversation], Callable[[Sequence[Conversation]], tuple[Example, ...]]]:
        def encode(rows: Sequence[Conversation]) -> tuple[Example, ...]:
            limit = LengthLimit(settings, name)
            examples = ((row, encoder.encode(row.messages, row.origin, tools=row.tools)) for row in rows)
            held = (limit.held(row.origin, (replace(example, data_set=name),)) for row, example in examples)
            return limit.checked([example for kept in held for example in kept], len(rows))

        return _conversations(source), encode

    return _load_splits(settings, load)


def load_example_pairs(
    settings: DpoDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> Splits[ExamplePair]:
    """Tokenized pairs for DPO, as `load_prompts` finds prompts; a pair is as long as its longer response.

    Raises:
        DataError: A data set is empty, or a row cannot be used; one longer than the limit, for example.
    """
    encoder = _chat_encoder(settings, tokenizer, chat_template_kwargs, last_turn_only=False)

    def load(
        source: DataSource, name: str
    ) -> tuple[Splits[PreferencePair], Callable[[Sequence[PreferencePair]], tuple[ExamplePair, ...]]]:
        assert isinstance(source, BinaryPreferenceConfig | PreferenceConfig | PublishedPairsConfig), type(source)
        templates = load_templates(source)

        def encode(rows: Sequence[PreferencePair]) -> tuple[ExamplePair, ...]:
            limit = LengthLimit(settings, name)
            held = (limit.held(row.origin, _encode_pair(encoder, row, templates, name)) for row in rows)
            pairs = [ExamplePair(chosen=kept[0], rejected=kept[1]) for kept in held if kept]
            return limit.checked(pairs, len(rows))

        loaded = load_published_pairs(source) if isinstance(source, PublishedPairsConfig) else load_pairs(source)
        return loaded, encode

    return _load_splits(settings, load)


def _load_splits[R, T: (Prompt, Example, ExamplePair)](
    settings: DataConfig | EvalDataConfig | SftDataConfig | DpoDataConfig,
    load: Callable[[DataSource, str], tuple[Splits[R], Callable[[Sequence[R]], tuple[T, ...]]]],
) -> Splits[T]:
    """Rows of every data set, encoded.

    Training rows of a mixture are put one data set after the other, with its parts beside them. Validation rows are
    taken from each data set in turn, so that a run that validates on the first of them sees every set.

    Args:
        settings: The keys `data.*`.
        load: From a data set and its name to its rows and what encodes them.
    """
    train: list[tuple[T, ...]] = []
    validation: list[tuple[T, ...]] = []
    weights: list[float] = []
    overlong: dict[str, int] = {}
    training = None if isinstance(settings, EvalDataConfig) else settings.train
    sources = () if training is None else _parts(training)
    more = () if settings.validation is None else _parts(settings.validation)
    names = iter(data_set_names([source for source, _ in (*sources, *more)]))
    for source, weight in sources:
        name = next(names)
        rows, encode = load(source, name)
        encoded = encode(rows.train)
        overlong[name] = len(rows.train) - sum(row.loss_multiplier != 0 for row in encoded)
        if not encoded:
            raise DataError(
                f"data.train has no rows to train on{_where(source)}; lower split_validation_size or add rows"
            )
        train.append(encoded)
        weights.append(len(encoded) if weight is None else weight)
        validation.append(encode(rows.validation))
    for source, _ in more:
        rows, encode = load(source, next(names))
        # Of made-up problems those that training never sees; of anything else all rows.
        is_made_up = isinstance(source, ArithmeticConfig)
        validation.append(encode(rows.validation if is_made_up else (*rows.train, *rows.validation)))
        if not validation[-1]:
            raise DataError(f"data.validation has no rows{_where(source)}; add rows, or set data.validation to null")
    parts = tuple(Part(len(rows), weight) for rows, weight in zip(train, weights, strict=True))
    return Splits(
        train=tuple(row for rows in train for row in rows),
        validation=_in_turn(validation),
        parts=parts if isinstance(training, MixtureKeys) else (),
        overlong=overlong,
    )


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


def _conversations(source: DataSource) -> Splits[Conversation]:
    """Any data set of SFT as conversations."""
    templates = load_templates(source)
    if isinstance(source, OpenAIFormatConfig | SquadConfig | ConversationsConfig):
        loaded = (
            load_conversations(source)
            if isinstance(source, OpenAIFormatConfig)
            else load_published_conversations(source)
        )

        def finish(row: Conversation) -> Conversation:
            return replace(row, messages=tuple(with_prompt_files(row.messages, templates)))

        return Splits(
            train=tuple(finish(row) for row in loaded.train), validation=tuple(finish(row) for row in loaded.validation)
        )
    rows, process = load_rows(source), processor_named(source.processor)

    def answered(row: Row) -> Conversation:
        messages = (*process(row, templates), {"role": "assistant", "content": row.answer})
        return Conversation(messages=messages, origin=row.origin, tools=row.tools)

    return Splits(
        train=tuple(answered(row) for row in rows.train), validation=tuple(answered(row) for row in rows.validation)
    )


def _encode_pair(
    encoder: ChatEncoder, row: PreferencePair, templates: PromptTemplates, name: str
) -> tuple[Example, Example]:
    prompt = with_system_prompt(row.prompt, templates)
    chosen, rejected = (
        replace(encoder.encode([*prompt, *response], row.origin, num_given=len(prompt), tools=row.tools), data_set=name)
        for response in (row.chosen, row.rejected)
    )
    return chosen, rejected


def _chat_encoder(
    settings: SupervisedDataKeys,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None,
    last_turn_only: bool,
) -> ChatEncoder:
    return ChatEncoder(
        tokenizer=tokenizer,
        chat_template_kwargs=dict(chat_template_kwargs or {}),
        add_bos=settings.add_bos,
        add_eos=settings.add_eos,
        loss_span=settings.loss_span,
        last_turn_only=last_turn_only,
    )
