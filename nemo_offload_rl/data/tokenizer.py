"""Loads and checks a tokenizer."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_offload_rl.data.records import Example
from nemo_offload_rl.errors import DataError, first_line
from nemo_offload_rl.keys.data import TokenizerConfig
from nemo_offload_rl.utils.hub import looking_up

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_NUM_TOLD = 20

type Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""


def load_tokenizer(settings: TokenizerConfig) -> PreTrainedTokenizerBase:
    """The tokenizer with a chat template, an end token and a padding token (the end token if it has none).

    Raises:
        DataError: There is no tokenizer, it has no chat template or end token, or the configured template is none.
    """
    from transformers import AutoTokenizer  # heavy

    try:
        with looking_up(settings.name):
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


class LostCharacters:
    """Characters of a run's texts that its tokenizer drops or replaces by the unknown token.

    White space, case, accents and compatible forms of Unicode, which tokenizers may change, do not count.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._seen: set[str] = set()
        self._lost: list[str] = []
        self._origin = ""

    def look(self, text: str, origin: str) -> None:
        """Encode and decode a text that has characters which no earlier one had; `origin` says whose it is."""
        new = set(text) - self._seen
        if not new:
            return
        self._seen |= new
        tokenizer: Any = self._tokenizer
        others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        unknown = None if tokenizer.unk_token_id in others else tokenizer.unk_token_id
        known = [token for token in tokenizer.encode(text, add_special_tokens=False) if token != unknown]
        kept = set(_plain(tokenizer.decode(known, skip_special_tokens=False)))
        if lost := sorted(one for one in new if not kept.issuperset(_plain(one))):
            self._origin = self._origin or origin
            self._lost += lost

    def tell(self) -> None:
        """Warn of the characters, if there are any."""
        if self._lost:
            more = f" and {len(self._lost) - _NUM_TOLD} more" if len(self._lost) > _NUM_TOLD else ""
            logger.warning(
                "the tokenizer %s loses characters of the data, which the model never sees: %s%s (first in %s); set "
                "policy.tokenizer.name to one that knows them, or change the data",
                self._tokenizer.name_or_path, " ".join(self._lost[:_NUM_TOLD]), more, self._origin,
            )  # fmt: skip


def _plain(text: str) -> str:
    """Decompose a text, without marks, spaces, control characters and case; "▁" is SentencePiece's space."""
    decomposed = unicodedata.normalize("NFKD", text.casefold())
    return "".join(one for one in decomposed if one != "▁" and unicodedata.category(one)[0] not in "MZC")


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
