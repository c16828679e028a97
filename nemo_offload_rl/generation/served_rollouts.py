"""Conversations that an agent holds over HTTP, kept as the tokens that they were.

A client sends messages, which are text. Where they begin with what an earlier call of the same rollout was asked and
answered, the prompt begins with that call's tokens, prompt and response, and only what stands after them is tokenized:
what the policy said is never tokenized again, also where its text has other tokens too, or the client has left out its
reasoning.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.data.records import Message
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.engine import Completion

type AfterResponse = Callable[
    [Sequence[Message], Sequence[Message], Sequence[int], Mapping[str, Any] | None], Sequence[int]
]
"""`TurnEncoder.after`."""


@dataclass(frozen=True, kw_only=True)
class ServedCall:
    """One call that was answered.

    Attributes:
        prompt_token_ids: What the engine was asked.
        completion: What it answered.
        parent: Number of the call whose prompt and completion this prompt begins with; None for a new conversation.
        weight_version: Of the weights that answered.
    """

    prompt_token_ids: tuple[int, ...]
    completion: Completion
    parent: int | None
    weight_version: int


@dataclass(frozen=True, kw_only=True)
class ServedPrompt:
    """A prompt of a call, and the call that it goes on from, if any."""

    token_ids: tuple[int, ...]
    parent: int | None


@dataclass(frozen=True)
class _Said:
    """What a call was asked and has answered, as clients repeat it."""

    messages: tuple[Any, ...]
    reply: Any
    variables: str


class ServedRollout:
    """The calls of one rollout.

    Args:
        sampling: How all of its tokens are drawn.
    """

    def __init__(self, sampling: SamplingSettings) -> None:
        self.sampling = sampling
        self.calls: list[ServedCall] = []
        self._said: list[_Said] = []
        self._num_asked: Counter[tuple[int, ...]] = Counter()

    def prompt(
        self, messages: Sequence[Message], variables: Mapping[str, Any], rendered: Sequence[int], after: AfterResponse
    ) -> ServedPrompt:
        """The prompt for these messages.

        Args:
            messages: All that the client sent.
            variables: Of the chat template, as `tools`: a conversation goes on with the same only.
            rendered: The messages as the chat template has them, for a new conversation.
            after: How messages after a response become tokens.

        Raises:
            DataError: As `TurnEncoder.after`.
        """
        keys, written = tuple(map(_key, messages)), _written(variables)
        parent = None
        for number, said in enumerate(self._said):
            size = len(said.messages)
            goes_on = keys[: size + 1] == (*said.messages, said.reply) and len(keys) > size + 1
            if goes_on and said.variables == written and (parent is None or size >= len(self._said[parent].messages)):
                parent = number
        if parent is None:
            return ServedPrompt(token_ids=tuple(rendered), parent=None)
        call, size = self.calls[parent], len(self._said[parent].messages)
        response = call.completion.token_ids
        between = after(messages[:size], messages[size + 1 :], response, variables)
        return ServedPrompt(token_ids=(*call.prompt_token_ids, *response, *between), parent=parent)

    def seed(self, prompt: ServedPrompt) -> int | None:
        """Seed of a call: it depends on the rollout's, the prompt, and how often that was asked before."""
        if self.sampling.seed is None:
            return None
        number = self._num_asked[prompt.token_ids]
        self._num_asked[prompt.token_ids] += 1
        return call_seed(self.sampling.seed, prompt.token_ids, number)

    def add(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any],
        prompt: ServedPrompt,
        completion: Completion,
        reply: Message,
        weight_version: int,
    ) -> None:
        """Keep a call that was answered with the message `reply`."""
        self._said.append(_Said(tuple(map(_key, messages)), _key(reply), _written(variables)))
        self.calls.append(
            ServedCall(
                prompt_token_ids=prompt.token_ids,
                completion=completion,
                parent=prompt.parent,
                weight_version=weight_version,
            )
        )


def call_seed(seed: int, prompt: Sequence[int], number: int) -> int:
    """A seed from that of the rollout for the call `number`, from 0, with the same prompt."""
    told = f"{seed}:{number}:{','.join(map(str, prompt))}"
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "big") >> 1


def conversations(calls: Sequence[ServedCall]) -> list[list[tuple[ServedCall, bool]]]:
    """The conversations of a rollout, each as its calls in order: first that with the most sampled tokens.

    Conversations that begin alike have calls in common; the flag of a call is True in the first that has it. The
    others come in the order of their last calls, those of which nothing was sampled left out.
    """
    goes_on = {call.parent for call in calls}
    found: list[list[int]] = []
    for last in range(len(calls)):
        if last not in goes_on:
            path = [last]
            while (parent := calls[path[0]].parent) is not None:
                path.insert(0, parent)
            found.append(path)
    sizes = [sum(len(calls[call].completion.token_ids) for call in path) for path in found]
    if found:
        found.insert(0, found.pop(sizes.index(max(sizes))))
    seen: set[int] = set()
    result = []
    for path in found:
        new = [call for call in path if call not in seen]
        if not result or any(calls[call].completion.token_ids for call in new):
            result.append([(calls[call], call not in seen) for call in path])
            seen.update(path)
    return result


def _key(message: Message) -> Any:
    """What a message says, whatever way a client writes it: its role, text, and calls of tools."""
    text, role = _text(message.get("content")), message["role"]
    calls = tuple(_call(call) for call in message.get("tool_calls") or ())
    return role, text.strip() if role == "assistant" else text, calls


def _text(content: Any) -> str:
    """Text that comes as such, or in parts; what is no text is written out."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    return "".join(part if isinstance(part, str) else _written(part) for part in parts)


def _call(call: Any) -> tuple[str, str]:
    """Name and arguments; those are JSON that may be written in several ways."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return function["name"], arguments
    return function["name"], _written(arguments)


def _written(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
