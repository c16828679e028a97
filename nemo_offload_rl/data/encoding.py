"""From messages to token ids, and which of them the assistant wrote.

The chat template alone says what is whose. Where it marks the assistant's text (`{% generation %}`), that is taken.
Otherwise the conversation is rendered up to each turn of the assistant, with the generation prompt, and up to the
turn's end: what lies between is the turn. That holds only where the shorter rendering is the beginning of the longer
one, which is checked; a template that shows a turn differently once others follow is refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_offload_rl.data.records import Example, Message, Tools
from nemo_offload_rl.data.tools import check_shown
from nemo_offload_rl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKS_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    origin: str,
    *,
    add_generation_prompt: bool,
    kwargs: Mapping[str, Any],
) -> str:
    """The chat template's text.

    Raises:
        DataError: The template fails on these messages; `origin` says whose they are.
    """
    import jinja2

    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise _template_error(origin, error) from error


def missing_bos(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[int]:
    """The begin token, where the tokenizer has one and the chat template has not written it; what goes before a text.

    SFT, DPO and the prompts of rollouts all begin by it, so that the same conversation has the same tokens everywhere.
    """
    bos: Any = tokenizer.bos_token_id
    return [bos] if isinstance(bos, int) and list(token_ids[:1]) != [bos] else []


@dataclass(frozen=True, kw_only=True)
class ChatEncoder:
    """Turns conversations into examples.

    Attributes:
        tokenizer: A fast Hugging Face tokenizer with a chat template.
        chat_template_kwargs: Extra variables for the chat template.
        add_bos: Begin with the begin token, where there is one and the template does not write it.
        add_eos: End with the end-of-sequence token where the template does not write it.
        last_turn_only: The loss counts the last turn of the assistant only.
        loss_span: What of a turn it counts, see `data.loss_span`.
    """

    tokenizer: PreTrainedTokenizerBase
    chat_template_kwargs: Mapping[str, Any]
    add_bos: bool
    add_eos: bool
    last_turn_only: bool
    loss_span: str = "response"

    def __post_init__(self) -> None:
        if not self.tokenizer.is_fast:
            raise DataError(
                f"tokenizer {self.tokenizer.name_or_path} cannot tell which text a token stands for (it is no fast "
                "tokenizer); set policy.tokenizer.name to one with a tokenizer.json"
            )

    def encode(
        self, messages: Sequence[Message], origin: str, *, num_given: int = 0, tools: Tools | None = None
    ) -> Example:
        """One example.

        Args:
            messages: The conversation.
            origin: Where it comes from, for error messages.
            num_given: This many messages at the beginning are not counted, whatever their role.
            tools: What the assistant may call, for the chat template.

        Raises:
            DataError: The template fails, or does not show which tokens are the assistant's, or none is; or it leaves
                out a tool or a call.
        """
        if tools is not None:
            with_tools = replace(self, chat_template_kwargs={**self.chat_template_kwargs, "tools": tools})
            return with_tools.encode(messages, origin, num_given=num_given)
        self._check_tools(messages, origin)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        skipped = sum(index < num_given for index in turns)
        counted = turns[-1:] if self.last_turn_only else turns[skipped:]
        if self.loss_span == "response" and _MARKS_GENERATION.search(str(self.tokenizer.chat_template)):
            token_ids, mask = self._marked(messages, origin, num_skipped=len(turns) - len(counted))
        else:
            token_ids, mask = self._measured(messages, origin, counted)
        token_ids, mask = self._with_ends(token_ids, mask, ends_counted=counted[-1:] == [len(messages) - 1])
        mask[0] = False  # the first token has no logprob
        if not mask.any():
            raise DataError(f"{origin}: no token is the assistant's, so there is nothing to learn; take the row out")
        return Example(token_ids=token_ids, token_mask=mask)

    def _marked(self, messages: Sequence[Message], origin: str, *, num_skipped: int) -> tuple[np.ndarray, np.ndarray]:
        """By the template's own marks; the first `num_skipped` turns are not counted."""
        import jinja2

        try:
            rendered: Any = self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **self.chat_template_kwargs,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise _template_error(origin, error) from error
        mask = np.array(rendered["assistant_masks"], dtype=bool)
        begins = np.flatnonzero(np.diff(np.concatenate(([False], mask)).astype(np.int8)) == 1)
        if num_skipped and num_skipped < len(begins):
            mask[: begins[num_skipped]] = False
        return np.array(rendered["input_ids"], dtype=np.int32), mask

    def _measured(
        self, messages: Sequence[Message], origin: str, counted: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """By rendering up to each counted turn and up to its end."""
        whole = self._render(messages, origin, add_generation_prompt=False)
        spans = list(self._spans(messages, whole, counted, origin))
        token_ids, begins = self._tokenize(whole, [begin for begin, _ in spans])
        mask = np.zeros(len(begins), dtype=bool)
        for begin, end in spans:
            # A token that begins before the turn was read by the assistant, not written.
            mask |= (begins >= begin) & (begins < end)
        return token_ids, mask

    def _tokenize(self, text: str, cuts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of a text, and where in it each begins.

        A rollout's prompt is tokenized without the response. So that training reads the same tokens, a text is cut
        where a turn of the assistant begins, if it would not be tokenized up to there as it is by itself: a token may
        cross the cut, and what follows may decide how white space before it is divided. But where the tokenizer cannot
        go on in the middle of a text (some put a space before it), the text is tokenized as a whole.
        """
        token_ids, offsets = self._tokens(text, 0)
        needed = [cut for cut in cuts if (read := self._tokens(text[:cut], 0)[0]) != token_ids[: len(read)]]
        if needed:
            edges = [0, *needed, len(text)]
            pieces = [self._tokens(text[begin:end], begin) for begin, end in itertools.pairwise(edges)]
            in_pieces = [token for tokens, _ in pieces for token in tokens]
            if self.tokenizer.decode(in_pieces) == self.tokenizer.decode(token_ids):
                token_ids, offsets = in_pieces, [place for _, places in pieces for place in places]
        begins = np.array([begin for begin, _ in offsets], dtype=np.int64)
        return np.array(token_ids, dtype=np.int32), begins

    def _tokens(self, text: str, start: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and from where to where each goes, counted from `start` on."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], [(start + begin, start + end) for begin, end in encoded["offset_mapping"]]

    def _spans(
        self, messages: Sequence[Message], whole: str, counted: Sequence[int], origin: str
    ) -> Iterator[tuple[int, int]]:
        """Where in `whole` each counted turn begins and ends, as `loss_span` says."""
        for turn in counted:
            before = self._render(messages[:turn], origin, add_generation_prompt=self.loss_span != "message")
            is_last = turn == len(messages) - 1
            after = whole if is_last else self._render(messages[: turn + 1], origin, add_generation_prompt=False)
            if not (after.startswith(before) and whole.startswith(after)):
                fix = "sft.only_unmask_final=true, or set " if not (is_last or self.last_turn_only) else ""
                raise DataError(
                    f"{origin}: the chat template writes what comes up to message {turn + 1} differently than it does "
                    f"in the whole conversation, so the assistant's part cannot be told; use {fix}"
                    "policy.tokenizer.chat_template to one that only appends, or that marks it with {% generation %}"
                )
            end_token = self.tokenizer.eos_token
            has_end = end_token is not None and after.rstrip().endswith(str(end_token))
            end = len(after.rstrip()) if has_end and self.loss_span == "response" else len(after)
            yield len(before), max(end, len(before))

    def _with_ends(
        self, token_ids: np.ndarray, mask: np.ndarray, *, ends_counted: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        eos: Any = self.tokenizer.eos_token_id
        if self.add_bos and (bos := missing_bos(self.tokenizer, token_ids.tolist())):
            token_ids, mask = np.insert(token_ids, 0, bos), np.insert(mask, 0, False)
        # The template may write an end token that it does not count, or a line break after one.
        last_written = int(np.flatnonzero(mask)[-1]) if mask.any() else 0
        while (
            self.loss_span != "response"
            and last_written
            and str(self.tokenizer.decode(int(token_ids[last_written]))).isspace()
        ):
            last_written -= 1
        if self.add_eos and ends_counted and mask.any() and eos not in token_ids[last_written:]:
            token_ids, mask = np.append(token_ids, np.int32(eos)), np.append(mask, True)
        return token_ids, mask

    def _check_tools(self, messages: Sequence[Message], origin: str) -> None:
        tools = self.chat_template_kwargs.get("tools")
        if tools is not None or any("tool_calls" in message for message in messages):
            check_shown(self._render(messages, origin, add_generation_prompt=False), messages, tools, origin)

    def _render(self, messages: Sequence[Message], origin: str, *, add_generation_prompt: bool) -> str:
        return render(
            self.tokenizer,
            messages,
            origin,
            add_generation_prompt=add_generation_prompt,
            kwargs=self.chat_template_kwargs,
        )


def _template_error(origin: str, error: Exception) -> DataError:
    said = (str(error).splitlines() or ["no more is known"])[0]
    return DataError(
        f"{origin}: the chat template fails ({type(error).__name__}: {said}); change the messages, or set "
        "policy.tokenizer.chat_template"
    )
