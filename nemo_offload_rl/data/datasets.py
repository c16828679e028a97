"""From the settings `data.*` to encoded prompts: the one place that knows every kind of data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.data.arithmetic import load_arithmetic
from nemo_offload_rl.data.hub import load_open_math_instruct_2
from nemo_offload_rl.data.jsonl import load_jsonl
from nemo_offload_rl.data.processors import PromptEncoder, encode_prompts, load_templates
from nemo_offload_rl.data.records import Prompt, Row, Splits
from nemo_offload_rl.data.settings import (
    ArithmeticSettings,
    DatasetSettings,
    DataSettings,
    OpenMathInstruct2Settings,
    ResponseDatasetSettings,
)
from nemo_offload_rl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_rows(settings: DatasetSettings) -> Splits[Row]:
    """Rows of one data set, split in training and validation.

    Raises:
        DataError: The data cannot be used; the message says which file, line or key.
    """
    match settings:
        case ArithmeticSettings():
            return load_arithmetic(settings)
        case ResponseDatasetSettings():
            return load_jsonl(settings)
        case OpenMathInstruct2Settings():
            return load_open_math_instruct_2(settings)


def load_prompts(
    settings: DataSettings, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any] | None
) -> Splits[Prompt]:
    """Prompts for training, and for validation from `data.validation` or else from what `data.train` keeps aside.

    Args:
        settings: The keys `data.*`.
        tokenizer: What makes token ids, with a chat template.
        chat_template_kwargs: Extra variables for the chat template.

    Raises:
        DataError: A data set is empty, or a row cannot be used; a prompt longer than the limit, for example.
    """

    def encode(rows: Sequence[Row], source: DatasetSettings) -> tuple[Prompt, ...]:
        return encode_prompts(prompt_encoder(source, settings, tokenizer, chat_template_kwargs), rows)

    train = load_rows(settings.train)
    if not train.train:
        raise DataError("data.train has no rows to train on; lower split_validation_size or add rows")
    if settings.validation is None:
        return Splits(train=encode(train.train, settings.train), validation=encode(train.validation, settings.train))
    validation = load_rows(settings.validation)
    return Splits(
        train=encode(train.train, settings.train),
        validation=encode(validation.validation or validation.train, settings.validation),
    )


def prompt_encoder(
    source: DatasetSettings,
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any] | None,
) -> PromptEncoder:
    """The encoder for the rows of `source`."""
    return PromptEncoder(
        tokenizer=tokenizer,
        task=source.task,
        templates=load_templates(source.task),
        max_input_seq_length=settings.max_input_seq_length,
        chat_template_kwargs=dict(chat_template_kwargs) if chat_template_kwargs is not None else {},
    )
