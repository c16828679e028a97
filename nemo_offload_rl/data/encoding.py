"""From messages to token ids, and which of them the assistant wrote.

The chat template alone tells the authors apart. If it marks the assistant's text (`{% generation %}`), the marks count;
a mark belongs to the assistant's message that the template has read last.
Otherwise the conversation is rendered up to each turn of the assistant, with the generation prompt, and up to the
turn's end: the text between is the turn. This needs the shorter rendering to be the beginning of the longer one, which
is checked; a template that shows a turn differently once others follow is refused.

In a rollout of several turns the assistant's own words are never tokenized again, since other tokens may spell the same
text: `TurnEncoder` makes the tokens between two responses only.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_offload_rl.data.records import Example, Message, Tools
from nemo_offload_rl.data.tools import check_shown
from nemo_offload_rl.errors import DataError, first_line
from nemo_offload_rl.keys.data import SupervisedDataKeys

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BEGINS_MARK = re.compile(r"(\{%[-+]?\s*generation\s*)([-+]?)%\}")
_ENDS_MARK = re.compile(r"\{%([-+]?)(\s*endgeneration\s*[-+]?%\})")
# In the mark, in blocks as its own tags are, so that a template's white space stays as it is.
_SHOWN_BEGIN = r"\1%}{% if true %}{{ mark_begins }}{% endif \2%}"
_SHOWN_END = r"{%\1 if true %}{{ mark_ends() }}{% endif %}{%\2"


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
        raise DataError(
            f"{origin}: the chat template fails ({type(error).__name__}: {first_line(error)}); change the messages, or "
            "set policy.tokenizer.chat_template"
        ) from error


def missing_bos(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[int]:
    """The begin token to put before a text: [] if the tokenizer has none or the chat template has written it.

    SFT, DPO and the prompts of rollouts all ask here, so that the same conversation has the same tokens everywhere.
    """
    bos: Any = tokenizer.bos_token_id
    return [bos] if isinstance(bos, int) and list(token_ids[:1]) != [bos] else []


@dataclass(frozen=True, kw_only=True)
class ChatEncoder:
    """Turns conversations into examples.

    Attributes:
        tokenizer: A fast Hugging Face tokenizer with a chat template.
        chat_template_kwargs: Extra variables for the chat template.
        add_bos: Begin with the begin token if there is one and the template does not write it.
        add_eos: End with the end-of-sequence token if the template does not write it.
        last_turn_only: The loss counts the last turn of the assistant only.
        loss_span: The part of a turn that it counts, see `data.loss_span`.
    """

    tokenizer: PreTrainedTokenizerBase
    chat_template_kwargs: Mapping[str, Any]
    add_bos: bool
    add_eos: bool
    last_turn_only: bool
    loss_span: str = "response"

    @classmethod
    def of(
        cls,
        settings: SupervisedDataKeys,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: Mapping[str, Any] | None,
        *,
        last_turn_only: bool = False,
    ) -> ChatEncoder:
        """The encoder that the keys `data.*` describe."""
        return cls(
            tokenizer=tokenizer,
            chat_template_kwargs=dict(chat_template_kwargs or {}),
            add_bos=settings.add_bos,
            add_eos=settings.add_eos,
            loss_span=settings.loss_span,
            last_turn_only=last_turn_only,
        )

    def __post_init__(self) -> None:
        if not self.tokenizer.is_fast:
            raise DataError(
                f"tokenizer {self.tokenizer.name_or_path} cannot tell which text a token stands for (it is not a fast "
                "tokenizer); set policy.tokenizer.name to one with a tokenizer.json"
            )

    def encode(
        self, messages: Sequence[Message], origin: str, *, num_given: int = 0, tools: Tools | None = None
    ) -> Example:
        """Tokens of a conversation, with a mask of those that the loss counts.

        Args:
            messages: The conversation.
            origin: Where it comes from, for error messages.
            num_given: This many messages at the beginning are not counted, whatever their role.
            tools: Functions that the assistant may call, for the chat template.

        Raises:
            DataError: The template fails, leaves out a tool or a call, or does not show which tokens are the
                assistant's; or no token is.
        """
        if tools is not None:
            with_tools = replace(self, chat_template_kwargs={**self.chat_template_kwargs, "tools": tools})
            return with_tools.encode(messages, origin, num_given=num_given)
        self._check_tools(messages, origin)
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        counted = turns[-1:] if self.last_turn_only else [index for index in turns if index >= num_given]
        whole = self._render(messages, origin, add_generation_prompt=False)
        if self.loss_span == "response" and _BEGINS_MARK.search(str(self.tokenizer.chat_template)):
            spans = self._marked(messages, whole, counted, origin)
        else:
            spans = list(self._measured(messages, whole, counted, origin))
        token_ids, begins = self._tokenize(whole, [begin for begin, _ in spans])
        mask = np.zeros(len(begins), dtype=bool)
        for begin, end in spans:
            # A token that begins before the turn was read by the assistant, not written.
            mask |= (begins >= begin) & (begins < end)
        token_ids, mask = self._with_ends(token_ids, mask, ends_counted=counted[-1:] == [len(messages) - 1])
        mask[0] = False  # the first token has no logprob
        if not mask.any():
            raise DataError(f"{origin}: the assistant wrote no token, so there is nothing to learn; take the row out")
        return Example(token_ids=token_ids, token_mask=mask)

    def _marked(
        self, messages: Sequence[Message], whole: str, counted: Sequence[int], origin: str
    ) -> list[tuple[int, int]]:
        """Where in `whole` the template's own marks of the counted turns begin and end."""
        watch = _Watch()
        template = _BEGINS_MARK.sub(_SHOWN_BEGIN, self.tokenizer.get_chat_template(None, self._tools))
        kwargs = {
            **self.chat_template_kwargs,
            "chat_template": _ENDS_MARK.sub(_SHOWN_END, template),
            "mark_begins": watch.begins,
            "mark_ends": watch.ends,
        }
        watched = [_Watched(message, index, watch) for index, message in enumerate(messages)]
        shown = render(self.tokenizer, watched, origin, add_generation_prompt=False, kwargs=kwargs)
        text, spans, begin = "", [], 0
        for piece in watch.pieces(shown):
            if piece == watch.begins:
                begin = len(text)
            elif piece.startswith(watch.end):
                spans.append((int(piece.removeprefix(watch.end)), begin, len(text)))
            else:
                text += piece
        if text != whole:
            raise DataError(
                f"{origin}: the chat template changes the text of {{% generation %}} afterwards, so the assistant's "
                "part cannot be found; set policy.tokenizer.chat_template to one that keeps it"
            )
        return [(begin, end) for turn, begin, end in spans if turn in counted]

    def _tokenize(self, text: str, cuts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids of a text, and the place in it where each begins.

        A rollout's prompt is tokenized without the response. So that training reads the same tokens, the text is cut
        where a turn of the assistant begins, if its tokens up to there differ from those of the prompt alone: a token
        may cross the cut, and later text may decide how white space before it is divided. A tokenizer that cannot go
        on in the middle of a text (some put a space before it) gets the text as a whole.
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
        """Token ids, and where each begins and ends, shifted by `start`."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return encoded["input_ids"], [(start + begin, start + end) for begin, end in encoded["offset_mapping"]]

    def _measured(
        self, messages: Sequence[Message], whole: str, counted: Sequence[int], origin: str
    ) -> Iterator[tuple[int, int]]:
        """Where in `whole` each counted turn begins and ends, as `loss_span` says, by rendering up to both."""
        for turn in counted:
            is_last = turn == len(messages) - 1
            after = whole if is_last else self._render(messages[: turn + 1], origin, add_generation_prompt=False)
            if turn:
                before = self._render(messages[:turn], origin, add_generation_prompt=self.loss_span != "message")
            else:
                before = self._before_first(messages[0], origin)
            if not (after.startswith(before) and whole.startswith(after)):
                fix = "sft.only_unmask_final=true, or set " if not (is_last or self.last_turn_only) else ""
                raise DataError(
                    f"{origin}: the chat template renders the messages up to {turn + 1} differently alone than in the "
                    f"whole conversation, so the assistant's part cannot be found; use {fix}"
                    "policy.tokenizer.chat_template to one that only appends, or that marks it with {% generation %}"
                )
            end_token = self.tokenizer.eos_token
            has_end = end_token is not None and after.rstrip().endswith(str(end_token))
            end = len(after.rstrip()) if has_end and self.loss_span == "response" else len(after)
            yield len(before), max(end, len(before))

    def _before_first(self, message: Message, origin: str) -> str:
        """The template's text before that of a first message; it cannot render an empty conversation."""
        text = "text of the assistant"
        before, found, _ = self._render([{**message, "content": text}], origin, add_generation_prompt=False).partition(
            text
        )
        if self.loss_span == "message" or not found:
            raise DataError(
                f"{origin}: the conversation begins with the assistant, and the template's text before it may be a "
                "system prompt; set data.loss_span=response, or begin with another message"
            )
        return before

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

    @property
    def _tools(self) -> Any:
        return self.chat_template_kwargs.get("tools")

    def _check_tools(self, messages: Sequence[Message], origin: str) -> None:
        if self._tools is not None or any("tool_calls" in message for message in messages):
            check_shown(self._render(messages, origin, add_generation_prompt=False), messages, self._tools, origin)

    def _render(self, messages: Sequence[Message], origin: str, *, add_generation_prompt: bool) -> str:
        return render(
            self.tokenizer,
            messages,
            origin,
            add_generation_prompt=add_generation_prompt,
            kwargs=self.chat_template_kwargs,
        )


class _Watch:
    """Shows in a rendered text where marks are, each with the number of its message.

    The message is the assistant's last one of which the template has read more than the role.
    """

    def __init__(self) -> None:
        self._secret = uuid.uuid4().hex  # occurs in no text
        self._last_read = -1
        self.begins, self.end = f"{self._secret}(", f"{self._secret})"

    def saw(self, index: int, role: object, key: object) -> None:
        if role == "assistant" and key != "role":
            self._last_read = index

    def ends(self) -> str:
        return f"{self.end}{self._last_read};"

    def pieces(self, shown: str) -> Iterator[str]:
        """Text, and marks as `begins`, and as `end` and the number."""
        for piece in re.split(rf"({self._secret}(?:\(|\)-?\d+;))", shown):
            yield piece.removesuffix(";") if piece.startswith(self.end) else piece


class _Watched(dict[str, Any]):
    """A message that tells a watch which of its fields are read."""

    def __init__(self, message: Message, index: int, watch: _Watch) -> None:
        super().__init__(message)
        self._index, self._watch = index, watch

    def __getitem__(self, key: str) -> Any:
        self._watch.saw(self._index, super().get("role"), key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._watch.saw(self._index, super().get("role"), key)
        return super().get(key, default)


class TurnEncoder:
    """Turns a message to the policy into the tokens from the end of its response to the beginning of the next.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        chat_template_kwargs: Extra variables for the chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any] | None) -> None:
        self.tokenizer = tokenizer
        self._kwargs = dict(chat_template_kwargs or {})
        self._said = uuid.uuid4().hex  # stands for the assistant's words, and occurs in no text

    def __call__(self, message: str, response: Sequence[int]) -> tuple[int, ...]:
        """`after` for one user message that follows a response to any question."""
        asked, told = {"role": "user", "content": "?"}, {"role": "user", "content": message}
        return self.after([asked], [told], response)

    def after(
        self,
        earlier: Sequence[Message],
        later: Sequence[Message],
        response: Sequence[int],
        kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Token ids from the end of a response to the beginning of the next.

        Args:
            earlier: The conversation before the response.
            later: The messages after it, at least one.
            response: Its token ids. If the last one is the token with which the template ends a turn, it is not
                written again.
            kwargs: Further variables for the chat template, such as `tools`.

        Raises:
            DataError: The template fails, or does not show the response and the messages after it exactly once.
        """
        said = {"role": "assistant", "content": self._said}
        messages, kwargs = [*earlier, said, *later], {**self._kwargs, **(kwargs or {})}
        text = render(
            self.tokenizer, messages, "a message between two turns", add_generation_prompt=True, kwargs=kwargs
        )
        _, *rest = text.split(self._said)
        told = [message["content"] for message in later if message["role"] == "user"]
        lost = [content for content in told if rest and isinstance(content, str) and content.strip() not in rest[-1]]
        if len(rest) != 1 or lost:
            raise DataError(
                f"the chat template does not show the assistant's response and the message {(lost or told)[0]!r} after "
                "it exactly once; set policy.tokenizer.chat_template, or max_rollout_turns of grpo or distillation to 1"
            )
        token_ids = list(self.tokenizer.encode(rest[0], add_special_tokens=False))
        if response and response[-1] in token_ids:
            end = token_ids.index(response[-1])
            if not str(self.tokenizer.decode(token_ids[:end])).strip():  # some templates write a space before the end
                token_ids = token_ids[end + 1 :]
        return tuple(token_ids)
