"""Loads and checks a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nemo_offload_rl.data.records import Example
from nemo_offload_rl.errors import DataError, first_line
from nemo_offload_rl.keys.data import TokenizerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""


def load_tokenizer(settings: TokenizerConfig) -> PreTrainedTokenizerBase:
    """The tokenizer with a chat template, an end token and a padding token (the end token if it has none).

    Raises:
        DataError: There is no tokenizer, it has no chat template or end token, or the configured template is none.
    """
    from transformers import AutoTokenizer  # heavy

    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.name)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise DataError(
            f"no tokenizer can be loaded from {settings.name} ({first_line(error)}); set "
            f"policy.tokenizer.name to a folder with tokenizer.json and tokenizer_config.json, or to a model on the hub"
        ) from error
    if (template := template_text(settings.chat_template)) is not None:
        tokenizer.chat_template = template
    if tokenizer.chat_template is None:
        raise DataError(
            f"tokenizer {settings.name} has no chat template and prompts are built with one; set "
            f"policy.tokenizer.chat_template"
        )
    if tokenizer.eos_token_id is None:
        raise DataError(f"tokenizer {settings.name} has no end-of-sequence token; set eos_token in its configuration")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def template_text(given: str | None) -> str | None:
    """The template's text that `policy.tokenizer.chat_template` names; None for the tokenizer's own."""
    key = "policy.tokenizer.chat_template"
    if given is None or given.lower() == "default":
        return None
    text = read_text_file(given, key) if given.endswith(".jinja") else given
    if "{{" not in text and "{%" not in text:
        raise DataError(
            f"{key} {given!r} has no Jinja expression, so every prompt would be that text; write a template with "
            "{{ }}, the path of a .jinja file, or `default` for the tokenizer's own"
        )
    return text


def read_text_file(path: str, key: str) -> str:
    """The text of the file that a key of the configuration names.

    Raises:
        DataError: It cannot be read.
    """
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"{key} {path} cannot be read: {error.strerror}; correct the path or set null") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{key} {path} is not UTF-8 text (byte {error.start}); save it as UTF-8 or set null") from error


def check_token_ids(
    tokenizer: PreTrainedTokenizerBase, rows: Iterable[Sequence[int] | np.ndarray], vocab_size: int | None
) -> None:
    """Refuse rows with tokens that the model has no embedding for.

    A tokenizer may know more tokens than its model if no row has one of them; that of Gemma 3 knows images.

    Args:
        tokenizer: The one that encoded the rows.
        rows: Token ids of each; read only if the tokenizer is larger than the model.
        vocab_size: Embeddings of the model; None where its config.json leaves them to the model library's default.

    Raises:
        DataError: There is such a token; the message names the largest.
    """
    known = 1 + max(tokenizer.get_vocab().values())
    if vocab_size is None or known <= vocab_size:
        return
    largest = max((int(max(row)) for row in rows if len(row)), default=0)
    largest = max(largest, padding_id(tokenizer))
    if largest >= vocab_size:
        raise DataError(
            f"the tokenizer makes token {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}), but the model has "
            f"embeddings for {vocab_size} tokens (vocab_size in its config.json); set policy.tokenizer.name to the "
            f"model's own, or save the model with model.resize_token_embeddings({known})"
        )


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that fills rows up, which `load_tokenizer` has made sure of."""
    assert isinstance(tokenizer.pad_token_id, int)
    return tokenizer.pad_token_id


def whole_text(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """A function that decodes every token, special ones included."""

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))

    return decode


def example_text(example: Example, decode: Decode) -> str:
    """The text of an example, with [[ ]] around counted tokens."""
    runs = groupby(zip(example.token_ids.tolist(), example.token_mask.tolist(), strict=True), key=lambda pair: pair[1])
    texts = [(is_counted, decode([token for token, _ in run])) for is_counted, run in runs]
    return "".join(f"[[{text}]]" if is_counted else text for is_counted, text in texts)
