"""Tools and tool calls, from the row to the tokens, beside what transformers makes of the same conversation."""

from __future__ import annotations

import json

import pytest
from tiny_models import EOS_TOKEN, make_tokenizer

from nemo_offload_rl.data.encoding import ChatEncoder
from nemo_offload_rl.data.readers import Record
from nemo_offload_rl.data.rows import conversation
from nemo_offload_rl.data.tokenizer import example_text, whole_text
from nemo_offload_rl.errors import DataError

# As Qwen's: tools in the beginning, calls as JSON.
TEMPLATE = (
    "{% if tools %}{% for t in tools %}<tool>{{ t | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    f"{EOS_TOKEN}\n{{% endfor %}}{{% if add_generation_prompt %}}<assistant>{{% endif %}}"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "default": None}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
MESSAGES = [
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]


def encoder(template=TEMPLATE) -> ChatEncoder:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return ChatEncoder(tokenizer=tokenizer, chat_template_kwargs={}, add_bos=True, add_eos=True, last_turn_only=False)


def row(messages=MESSAGES, **fields):
    return conversation(Record({"m": messages, **fields}, "d.jsonl:1"), "m", "tools")


def text_of(found, template=TEMPLATE) -> str:
    made = encoder(template)
    return example_text(made.encode(found.messages, found.origin, tools=found.tools), whole_text(made.tokenizer))


def written(**changes):
    """The conversation with another way to write its call."""
    return [MESSAGES[0], {**MESSAGES[1], **changes}, *MESSAGES[2:]]


@pytest.mark.parametrize("tools", [[ADD], json.dumps([ADD])], ids=["objects", "text"])
@pytest.mark.parametrize(
    "messages",
    [
        MESSAGES,
        written(content=None),
        [MESSAGES[0], {"role": "assistant", "tool_calls": [CALL]}, *MESSAGES[2:]],
        written(tool_calls=[{**CALL, "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]),
    ],
    ids=["empty content", "null content", "no content", "arguments as text"],
)
def test_every_way_to_write_a_call_gives_the_tokens_that_transformers_gives_the_plain_one(messages, tools):
    made = encoder()
    reference = made.tokenizer.apply_chat_template(MESSAGES, tools=[ADD], tokenize=True, return_dict=True)["input_ids"]
    found = row(messages, tools=tools)
    example = made.encode(found.messages, found.origin, tools=found.tools)
    assert example.token_ids.tolist() == reference
    counted = text_of(found)
    assert f'<assistant>[[<call>add{{"a": 1, "b": 2}}{EOS_TOKEN}]]' in counted
    assert "<tool>[[3" not in counted and counted.count("[[") == 2


def test_rows_without_tools_and_without_calls_are_as_they_were():
    plain = [MESSAGES[0], MESSAGES[3]]
    for fields in ({}, {"tools": None}, {"tools": []}, {"tools": "[]"}, {"tools": ""}):
        assert row(plain, **fields).tools is None
    assert row([MESSAGES[0], {**MESSAGES[3], "tool_calls": []}]).messages == tuple(plain)
    assert conversation(Record({"m": plain, "t": [ADD]}, "x"), "m", "t").tools == [ADD]
    assert conversation(Record({"m": plain, "tools": [ADD]}, "x"), "m", None).tools is None


@pytest.mark.parametrize(
    ("messages", "fields", "message"),
    [
        (MESSAGES, {"tools": 3}, "field 'tools' holds the tools .* not a list of objects; .*tool_key"),
        (MESSAGES, {"tools": ["add"]}, "not a list of objects"),
        (MESSAGES, {"tools": "{"}, "field 'tools' are text that is not JSON"),
        (written(tool_calls="add"), {}, "message 2 of 'm' has `tool_calls` that are not a list"),
        (written(tool_calls=[{"function": {}}]), {}, "message 2 of 'm' has a tool call without a `name`"),
        (
            written(tool_calls=[{"name": "add", "arguments": "{"}]),
            {},
            "`arguments` of its call of add are text that is",
        ),
        (written(tool_calls=[{"name": "add", "arguments": [1]}]), {}, "`arguments` of its call of add are a list"),
        (written(content=3), {}, "message 2 of 'm' has no text for `role` or `content`"),
        ([MESSAGES[0], {"role": "assistant", "content": None}], {}, "message 2 of 'm' has no text"),
    ],
)
def test_tools_that_are_none_are_refused_by_place(messages, fields, message):
    with pytest.raises(DataError, match=message) as error:
        row(messages, **fields)
    assert str(error.value).startswith("d.jsonl:1") and "\n" not in str(error.value)


FORGETS_BOTH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}.{% endfor %}"


@pytest.mark.parametrize(
    ("messages", "tools", "message"),
    [
        ([MESSAGES[0], MESSAGES[3]], [ADD], "does not show the tool add; .* tool_key to null"),
        (MESSAGES, None, "does not show the call of the tool add; set policy.tokenizer.chat_template"),
    ],
)
def test_a_template_that_leaves_tools_out_is_refused(messages, tools, message):
    with pytest.raises(DataError, match=message):
        text_of(row(messages, tools=tools), FORGETS_BOTH)
