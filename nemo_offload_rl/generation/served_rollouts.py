"""Keeps the tokens of conversations that an agent holds over HTTP.

A client sends messages as text. If they continue an earlier call of the same rollout, the prompt starts with the tokens
of that call's prompt and response, and only the new messages are tokenized. The policy's own text is never tokenized
again, even if the client left out reasoning, because that could give other tokens.
"""

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
"""Signature of `TurnEncoder.after`."""


@dataclass(frozen=True, kw_only=True)
class ServedCall:
    """One answered call.

    Attributes:
        prompt_token_ids: Tokens of the prompt.
        completion: The engine's answer.
        parent: Number of the call that this one continues; None for a new conversation.
        weight_version: Version of the weights that answered.
    """

    prompt_token_ids: tuple[int, ...]
    completion: Completion
    parent: int | None
    weight_version: int


@dataclass(frozen=True, kw_only=True)
class ServedPrompt:
    """Prompt of a call, and the number of the call that it continues."""

    token_ids: tuple[int, ...]
    parent: int | None


@dataclass(frozen=True)
class _Said:
    """Normalized messages and reply of a call, for comparison with later requests."""

    messages: tuple[Any, ...]
    reply: Any
    variables: str


class ServedRollout:
    """Calls of one rollout, all sampled with `sampling`."""

    def __init__(self, sampling: SamplingSettings) -> None:
        self.sampling = sampling
        self.calls: list[ServedCall] = []
        self._said: list[_Said] = []
        self._num_asked: Counter[tuple[int, ...]] = Counter()

    def prompt(
        self, messages: Sequence[Message], variables: Mapping[str, Any], rendered: Sequence[int], after: AfterResponse
    ) -> ServedPrompt:
        """Build the prompt for these messages.

        Args:
            messages: All messages of the client.
            variables: Variables of the chat template, such as `tools`; a conversation continues only with equal ones.
            rendered: Tokens of all messages by the chat template; used for a new conversation.
            after: Turns messages after a response into tokens.

        Raises:
            DataError: As in `TurnEncoder.after`.
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
        """Derive a call's seed from the rollout's seed, the prompt and the number of earlier calls with that prompt."""
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
        """Add a call that was answered with the message `reply`."""
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
    """Seed of call `number`, from 0, with this prompt, in a rollout with this seed."""
    told = f"{seed}:{number}:{','.join(map(str, prompt))}"
    return int.from_bytes(hashlib.blake2b(told.encode(), digest_size=8).digest(), "big") >> 1


def conversations(calls: Sequence[ServedCall]) -> list[list[tuple[ServedCall, bool]]]:
    """Split a rollout into conversations, each with its calls in order; the one with most sampled tokens is first.

    Conversations may share their first calls; a call's flag is True only in the first conversation that has it. The
    others are ordered by their last calls. A conversation that adds no sampled tokens is left out.
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
    """Return role, text and tool calls of a message in one form, however the client writes them."""
    text, role = _text(message.get("content")), message["role"]
    calls = tuple(_call(call) for call in message.get("tool_calls") or ())
    return role, text.strip() if role == "assistant" else text, calls


def _text(content: Any) -> str:
    """Join a message's content into text; parts that are not text become JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    return "".join(part if isinstance(part, str) else _written(part) for part in parts)


def _call(call: Any) -> tuple[str, str]:
    """Name of a tool call, and its arguments as normalized JSON."""
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
