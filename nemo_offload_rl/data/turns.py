"""What stands between two turns of the policy, in tokens.

The chat template says how a conversation goes on after the assistant; what the assistant itself said is not tokenized
again, since other tokens may spell the same text.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.data.encoding import render
from nemo_offload_rl.data.records import Message
from nemo_offload_rl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ORIGIN = "a message between two turns"


class TurnEncoder:
    """Turns a message to the policy into the tokens from the end of its response to the beginning of the next.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        chat_template_kwargs: Extra variables for the chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any] | None) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(chat_template_kwargs or {})
        self._said = uuid.uuid4().hex  # stands for what the assistant said, and occurs in no text

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""
        return self._tokenizer

    def __call__(self, message: str, response: Sequence[int]) -> tuple[int, ...]:
        """`after` a conversation of one response, which was told `message` as the user's.

        Raises:
            DataError: As `after`.
        """
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
            later: What followed it, at least one message.
            response: Its token ids. Where they end with the token with which the template ends a turn, it is not
                written again.
            kwargs: Further variables for the chat template, as `tools`.

        Raises:
            DataError: The template fails, or does not show what the assistant said and the messages after it, once.
        """
        said = {"role": "assistant", "content": self._said}
        messages, kwargs = [*earlier, said, *later], {**self._kwargs, **(kwargs or {})}
        text = render(self._tokenizer, messages, _ORIGIN, add_generation_prompt=True, kwargs=kwargs)
        _, *rest = text.split(self._said)
        told = [message["content"] for message in later if message["role"] == "user"]
        lost = (
            [content for content in told if isinstance(content, str) and content.strip() not in rest[-1]]
            if rest
            else []
        )
        if len(rest) != 1 or lost:
            raise DataError(
                f"the chat template does not show once what the assistant said, and the message {(lost or told)[0]!r} "
                "after it; set policy.tokenizer.chat_template, or max_rollout_turns of grpo or distillation to 1"
            )
        token_ids = list(self._tokenizer.encode(rest[0], add_special_tokens=False))
        if response and response[-1] in token_ids:
            end = token_ids.index(response[-1])
            if not str(self._tokenizer.decode(token_ids[:end])).strip():  # some templates write a space before the end
                token_ids = token_ids[end + 1 :]
        return tuple(token_ids)
