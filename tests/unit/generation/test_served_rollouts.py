"""Conversations are recognized by what was said, however a client writes it, and go on with the tokens they had."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_offload_rl.generation.served_rollouts import ServedCall, ServedRollout, call_seed, conversations
from nemo_offload_rl.keys.generation import SamplingSettings
from nemo_offload_rl.protocols.engine import Completion

ASKED = [{"role": "user", "content": "What?"}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
TOLD = {"role": "user", "content": "And?"}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def between(earlier: Any, later: Any, response: Any, variables: Any) -> list[int]:
    """Stands for `TurnEncoder.after`: tells what it was asked."""
    return [1000 + len(earlier), 2000 + len(later), 3000 + response[-1]]


def answered(rollout: ServedRollout, messages: list[Any], reply: Any, tokens: list[int], **variables: Any) -> list[int]:
    prompt = rollout.prompt(messages, variables, [7, 8], between)
    rollout.add(messages, variables, prompt, Completion(tokens, [0.0] * len(tokens), "stop"), reply, 3)
    return list(prompt.token_ids)


def asked(rollout: ServedRollout, messages: list[Any], **variables: Any) -> list[int]:
    return list(rollout.prompt(messages, variables, [7, 8], between).token_ids)


@pytest.mark.parametrize(
    ("reply", "repeated"),
    [
        (said("Yes."), said("Yes.")),
        (said(" Yes.\n"), said("Yes.")),
        (said("Yes."), said([{"type": "text", "text": "Yes."}])),
        (said("Yes."), said([{"type": "text", "text": "Ye"}, {"type": "text", "text": "s."}], name="x", refusal=None)),
        (said("Yes.", reasoning="Because."), said("Yes.")),
        (said(None, tool_calls=[CALL]), said("", tool_calls=[CALL])),
        (
            said(None, tool_calls=[CALL]),
            said(None, tool_calls=[{"id": "2", "function": {"name": "add", "arguments": {"b": 2, "a": 1}}}]),
        ),
    ],
)
def test_a_reply_is_recognized_in_every_way_that_clients_write_it(reply: Any, repeated: Any) -> None:
    rollout = ServedRollout(SamplingSettings(max_new_tokens=4))
    assert answered(rollout, ASKED, reply, [20, 21]) == [7, 8]
    assert asked(rollout, [*ASKED, repeated, TOLD]) == [7, 8, 20, 21, 1001, 2001, 3021]


@pytest.mark.parametrize(
    "messages",
    [
        [*ASKED, said("No."), TOLD],
        [*ASKED, said("Yes.", tool_calls=[CALL]), TOLD],
        [{"role": "user", "content": "What? "}, said("Yes."), TOLD],
        [{"role": "system", "content": "What?"}, said("Yes."), TOLD],
        [*ASKED, {"role": "user", "content": "Yes."}, TOLD],
        [TOLD, *ASKED, said("Yes."), TOLD],
        ASKED,
        [*ASKED, said("Yes.")],  # nothing was said since: there is no turn to begin
    ],
)
def test_what_was_not_said_begins_a_conversation_of_its_own(messages: list[Any]) -> None:
    rollout = ServedRollout(SamplingSettings(max_new_tokens=4))
    answered(rollout, ASKED, said("Yes."), [20, 21])
    assert asked(rollout, messages) == [7, 8]
    assert asked(rollout, [*ASKED, said("Yes."), TOLD], tools=[CALL]) == [7, 8]


def test_the_longest_part_that_was_said_is_what_a_call_goes_on_from_and_the_last_of_equals() -> None:
    rollout = ServedRollout(SamplingSettings(max_new_tokens=4))
    answered(rollout, ASKED, said("Yes."), [20])
    answered(rollout, ASKED, said("Yes."), [30])
    assert asked(rollout, [*ASKED, said("Yes."), TOLD])[2:3] == [30]
    second = [*ASKED, said("Yes."), TOLD]
    answered(rollout, second, said("Sure."), [40])
    third = asked(rollout, [*second, said("Sure."), TOLD, {"role": "tool", "content": "3"}])
    assert third == [7, 8, 30, 1001, 2001, 3030, 40, 1003, 2002, 3040]


def test_seeds_differ_by_prompt_and_by_how_often_it_was_asked_and_are_the_same_in_another_run() -> None:
    first, second = (ServedRollout(SamplingSettings(max_new_tokens=4, seed=9)) for _ in range(2))
    prompts = [rollout.prompt(ASKED, {}, tokens, between) for rollout in (first,) for tokens in ([1, 2], [12], [1, 2])]
    seeds = [first.seed(prompt) for prompt in prompts]
    assert len(set(seeds)) == 3 and all(seed is not None and 0 <= seed < 2**63 for seed in seeds)
    assert [second.seed(prompt) for prompt in (prompts[1], prompts[0], prompts[2])] == [seeds[1], seeds[0], seeds[2]]
    assert seeds[0] == call_seed(9, [1, 2], 0) != call_seed(8, [1, 2], 0)
    assert ServedRollout(SamplingSettings(max_new_tokens=4)).seed(prompts[0]) is None


@st.composite
def calls_of_rollouts(draw: st.DrawFn) -> list[ServedCall]:
    """Any forest of calls, parents before children."""
    calls: list[ServedCall] = []
    for number in range(draw(st.integers(0, 7))):
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        size = draw(st.integers(0, 4))
        said = Completion([number] * size, [0.0] * size, "stop")
        calls.append(ServedCall(prompt_token_ids=(number,), completion=said, parent=parent, weight_version=0))
    return calls


@given(calls_of_rollouts())
def test_every_call_is_counted_once_in_paths_from_first_calls_the_longest_first(calls: list[ServedCall]) -> None:
    found = conversations(calls)
    for conversation in found:
        path = [call for call, _ in conversation]
        for parent, call in zip([None, *path], path, strict=False):
            assert (calls[call.parent] if call.parent is not None else None) is parent
    sizes = [sum(len(call.completion.token_ids) for call, _ in conversation) for conversation in found]
    assert not sizes or sizes[0] == max(sizes)
    counted = [id(call) for conversation in found for call, is_counted in conversation if is_counted]
    assert len(counted) == len(set(counted))
    assert {id(call) for call in calls if call.completion.token_ids} <= set(counted)
    assert all(any(c and call.completion.token_ids for call, c in conversation) for conversation in found[1:])
