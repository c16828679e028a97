"""Loading a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nemo_offload_rl.data.records import Example
from nemo_offload_rl.errors import DataError
from nemo_offload_rl.keys.data import TokenizerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

type Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""


def load_tokenizer(settings: TokenizerConfig) -> PreTrainedTokenizerBase:
    """The tokenizer with a chat template, an end token and a padding token (the end token where it has none).

    Raises:
        DataError: The folder has no tokenizer, or the tokenizer has no chat template or no end token, or the one that
            is set is no template.
    """
    from transformers import AutoTokenizer  # heavy

    try:
        tokenizer = AutoTokenizer.from_pretrained(settings.name)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise DataError(
            f"no tokenizer can be loaded from {settings.name} ({str(error).splitlines()[0]}); set "
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
    """What `policy.tokenizer.chat_template` means: a template's text; None for the tokenizer's own."""
    if given is None or given.lower() == "default":
        return None
    text, where = given, f"policy.tokenizer.chat_template {given!r}"
    if given.endswith(".jinja"):
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8-sig")
        except OSError as error:
            raise DataError(f"{where} cannot be read: {error.strerror}; correct the path or set null") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{where} is not UTF-8 text (byte {error.start}); save it as UTF-8 or set null") from error
    if "{{" not in text and "{%" not in text:
        raise DataError(
            f"{where} has no Jinja expression, so every prompt would be that text; write a template with {{{{ }}}}, "
            "the path of a .jinja file, or `default` for the tokenizer's own"
        )
    return text


def check_token_ids(
    tokenizer: PreTrainedTokenizerBase, rows: Iterable[Sequence[int] | np.ndarray], vocab_size: int | None
) -> None:
    """Refuse rows with tokens that the model has no embedding for.

    A tokenizer may know more tokens than its model, as that of Gemma 3 knows images, if rows have none of these.

    Args:
        tokenizer: With which rows were encoded.
        rows: Token ids of each; read only if the tokenizer is larger than the model.
        vocab_size: Embeddings of the model; None where its config.json leaves them to the model library's default.

    Raises:
        DataError: With the largest such token.
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
    """What rows are filled up with; `load_tokenizer` has seen to it that there is one."""
    assert isinstance(tokenizer.pad_token_id, int)
    return tokenizer.pad_token_id


def whole_text(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """A function that decodes every token, special ones included."""

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))

    return decode


def example_text(example: Example, decode: Decode) -> str:
    """The text of an example, with [[ ]] around what the loss counts."""
    runs = groupby(zip(example.token_ids.tolist(), example.token_mask.tolist(), strict=True), key=lambda pair: pair[1])
    texts = [(is_counted, decode([token for token, _ in run])) for is_counted, run in runs]
    return "".join(f"[[{text}]]" if is_counted else text for is_counted, text in texts)
