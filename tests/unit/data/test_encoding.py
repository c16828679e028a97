"""Which tokens the loss counts, for templates of the kinds that are in use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_models import EOS_TOKEN, make_tokenizer
from transformers import AddedToken

from nemo_offload_rl.data.encoding import ChatEncoder, TurnEncoder
from nemo_offload_rl.data.tokenizer import example_text, whole_text
from nemo_offload_rl.errors import DataError

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As Qwen3's: what was thought is shown in the last turn only.
FORGETS_THOUGHTS = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' and loop.last %}[thinks]{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PASS_THROUGH = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TWO_TURNS = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Grüße"},
    {"role": "assistant", "content": "héllo"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": " bye "},
]


def make_encoder(template: str, **changes) -> ChatEncoder:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    encoder = ChatEncoder(
        tokenizer=tokenizer, chat_template_kwargs={}, add_bos=True, add_eos=True, last_turn_only=False
    )
    return replace(encoder, **changes)


def shown(template: str, messages=TWO_TURNS, num_given: int = 0, **changes) -> str:
    encoder = make_encoder(template, **changes)
    return example_text(encoder.encode(messages, "d.jsonl:1", num_given=num_given), whole_text(encoder.tokenizer))


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["measured", "marked by the template"])
def test_every_turn_of_the_assistant_counts_with_its_end_and_nothing_else(template):
    assert shown(template) == (
        "<system>Be kind.<|im_end|>\n<user>Grüße<|im_end|>\n<assistant>[[héllo<|im_end|>]]\n"
        "<user>And?<|im_end|>\n<assistant>[[ bye <|im_end|>]]\n"
    )


def by_messages(messages, template: str, names_before: bool) -> str:
    """What NeMo-RL counts: a message is what its rendering adds to that of the messages before it."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    before, text = "", tokenizer.bos_token or ""
    for number, message in enumerate(messages, 1):
        given = names_before and message["role"] == "user"
        whole = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=given)
        added = whole[len(before) :]
        text += f"[[{added}]]" if message["role"] == "assistant" else added
        before = whole
    return text


@pytest.mark.parametrize("template", [CHATML, MARKED, PASS_THROUGH], ids=["measured", "marked", "contents alone"])
@pytest.mark.parametrize("loss_span", ["response_and_end", "message"])
def test_on_demand_whole_messages_count_or_all_but_the_speakers_name(template, loss_span):
    text = shown(template, loss_span=loss_span, add_eos=template != PASS_THROUGH)
    assert text == by_messages(TWO_TURNS, template, names_before=loss_span == "response_and_end")


@pytest.mark.parametrize("loss_span", ["response", "response_and_end", "message"])
def test_an_end_token_is_added_once_whatever_counts(loss_span):
    assert shown(PASS_THROUGH, TWO_TURNS[1:3], loss_span=loss_span) == f"Grüße[[héllo{EOS_TOKEN}]]"
    whole = shown(CHATML, TWO_TURNS[1:3], loss_span=loss_span)
    assert whole.count(EOS_TOKEN) == 2 and whole.replace("]]", "").endswith(f"{EOS_TOKEN}\n")
    spaces = [*TWO_TURNS[1:2], {"role": "assistant", "content": " \n"}]
    assert shown(PASS_THROUGH, spaces, loss_span=loss_span) == f"Grüße[[ \n{EOS_TOKEN}]]"


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["measured", "marked by the template"])
def test_on_demand_the_last_turn_alone_counts(template):
    text = shown(template, last_turn_only=True)
    assert text.count("[[") == 1
    assert "[[ bye <|im_end|>]]" in text


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["measured", "marked by the template"])
def test_turns_that_are_given_do_not_count(template):
    text = shown(template, num_given=4)
    assert text.count("[[") == 1
    assert "[[ bye <|im_end|>]]" in text


# Calls of tools have no mark, and what was thought has one of its own.
MARKS_TEXTS_ONLY = (
    "{% for m in messages %}<{{ m.role }}>\n"
    "    {%- if m.tool_calls %}{{ m.tool_calls | tojson }}\n"
    "    {%- elif m.role == 'assistant' %}\n"
    "        {%- generation -%}\n  ({{ m.thought or '' }})\n {%- endgeneration %} \n"
    "        {% generation %}\n{{ m.content }}<|im_end|>{% endgeneration %}\n"
    "    {%- else %}{{ m.content }}{% endif %}\n"
    "{% endfor %}"
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
WITH_A_CALL = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "two", "thought": "easy"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "yes"},
]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["measured", "marked by the template"])
def test_a_conversation_may_begin_with_the_assistant(template):
    messages = [{"role": "assistant", "content": "assistant"}, *TWO_TURNS[1:3]]
    told = "<assistant>[[assistant<|im_end|>]]\n<user>Grüße<|im_end|>\n<assistant>[[héllo<|im_end|>]]\n"
    assert shown(template, messages) == told
    assert shown(template, messages, last_turn_only=True) == told.replace("[[", "", 1).replace("]]", "", 1)
    with pytest.raises(DataError, match=r"^d\.jsonl:1: the conversation begins with the assistant"):
        shown(template, messages, loss_span="message")


def test_marks_belong_to_the_turn_that_they_stand_in_though_other_turns_have_none_or_several():
    encoder = make_encoder(MARKS_TEXTS_ONLY, add_bos=False)
    plain = encoder.tokenizer.apply_chat_template(WITH_A_CALL, tokenize=False)
    marked = encoder.tokenizer.apply_chat_template(
        WITH_A_CALL, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    whole = encoder.encode(WITH_A_CALL, "x")
    assert encoder.tokenizer.decode(whole.token_ids) == plain
    assert whole.token_ids.tolist() == marked["input_ids"]
    assert whole.token_mask.tolist() == [bool(mark) for mark in marked["assistant_masks"]]
    texts = shown(MARKS_TEXTS_ONLY, WITH_A_CALL).replace("]][[", "")
    assert [piece.partition("]]")[0] for piece in texts.split("[[")[1:]] == [
        "(easy)", "two<|im_end|>", "()", "yes<|im_end|>",
    ]  # fmt: skip
    # The turn before is a call without a mark, then one with two marks, which is a prompt's in DPO.
    for messages, num_given, expected in (
        (WITH_A_CALL[:4], 3, ["(easy)", "two<|im_end|>"]), (WITH_A_CALL[2:], 3, ["()", "yes<|im_end|>"]),
    ):  # fmt: skip
        for changes in ({"last_turn_only": True}, {"num_given": num_given}):
            found = shown(MARKS_TEXTS_ONLY, messages, **changes)
            assert [piece.partition("]]")[0] for piece in found.split("[[")[1:]] == expected


def test_a_last_turn_without_a_mark_is_nothing_to_learn_and_no_earlier_turn_takes_its_place():
    with pytest.raises(DataError, match="the assistant wrote no token"):
        shown(MARKS_TEXTS_ONLY, [*WITH_A_CALL, WITH_A_CALL[1]], last_turn_only=True)


def test_a_template_that_changes_what_it_has_marked_is_refused():
    template = "{% set all %}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    with pytest.raises(DataError, match=r"changes the text of \{% generation %\} afterwards"):
        shown(template + "{% endset %}{{ all[1:] }}")


def test_the_text_is_tokenized_as_the_engine_will_read_it():
    encoder = make_encoder(CHATML)
    prompt = encoder.tokenizer.apply_chat_template(TWO_TURNS[:2], tokenize=False, add_generation_prompt=True)
    prompt_ids = encoder.tokenizer.encode(prompt, add_special_tokens=False)
    example = encoder.encode(TWO_TURNS[:3], "x")
    assert example.token_ids[: len(prompt_ids)].tolist() == prompt_ids
    assert example.token_mask[: len(prompt_ids)].tolist() == [False] * len(prompt_ids)
    assert example.token_mask[len(prompt_ids)]


def test_a_template_that_writes_a_turn_differently_later_is_refused_with_a_way_out():
    with pytest.raises(
        DataError, match=r"d\.jsonl:1: the chat template renders the messages up to 3 .*only_unmask_final"
    ):
        shown(FORGETS_THOUGHTS)
    assert "<assistant>[[[thinks] bye <|im_end|>]]\n" in shown(FORGETS_THOUGHTS, last_turn_only=True)


def test_an_end_token_is_added_only_where_the_template_writes_none():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert shown(PASS_THROUGH, messages) == f"a[[b{EOS_TOKEN}]]"
    assert shown(PASS_THROUGH, messages, add_eos=False) == "a[[b]]"
    assert shown(CHATML, messages).count(EOS_TOKEN) == 2


def test_a_begin_token_is_added_only_where_the_template_writes_none():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = PASS_THROUGH
    tokenizer.bos_token = "<300>"
    encoder = ChatEncoder(
        tokenizer=tokenizer, chat_template_kwargs={}, add_bos=True, add_eos=False, last_turn_only=False
    )
    assert encoder.encode(messages, "x").token_ids[0] == 300
    assert replace(encoder, add_bos=False).encode(messages, "x").token_ids[0] != 300
    tokenizer.chat_template = "{{ bos_token }}" + PASS_THROUGH
    assert encoder.encode(messages, "x").token_ids.tolist().count(300) == 1


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for m in messages %}{{ m.content.nothing() }}{% endfor %}",
        "{% for m in messages %}",
        "{{ messages[0] + 1 }}",
    ],
    ids=["raises", "undefined", "syntax", "type"],
)
def test_a_template_that_fails_is_an_error_of_one_line_that_names_the_row(template):
    with pytest.raises(DataError, match=r"d\.jsonl:1: the chat template fails") as error:
        shown(template)
    assert "\n" not in str(error.value)


def test_a_conversation_in_which_nothing_counts_is_an_error():
    with pytest.raises(DataError, match="the assistant wrote no token"):
        shown(PASS_THROUGH, [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}], add_eos=False)


TURNS = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}" + EOS_TOKEN + "\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPEAKERS = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}" + EOS_TOKEN + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITHOUT_END = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
FORGETFUL = "{{ messages[-1]['content'] }}"
QUESTION, ANSWER, MESSAGE = "1+1=", "3", "no, again"


def rendered(tokenizer, *messages: tuple[str, str]) -> list[int]:
    chat = [{"role": role, "content": content} for role, content in messages]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("template", [TURNS, SPEAKERS], ids=["chatml", "speakers"])
@pytest.mark.parametrize("ends", [True, False], ids=["ended by its end token", "ended by a stop string"])
def test_prompt_response_and_what_follows_are_the_templates_whole_conversation(template, ends):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    response = tokenizer.encode(ANSWER + (EOS_TOKEN if ends else ""), add_special_tokens=False)
    between = TurnEncoder(tokenizer, None)(MESSAGE, response)
    whole = rendered(tokenizer, ("user", QUESTION), ("assistant", ANSWER), ("user", MESSAGE))
    assert [*rendered(tokenizer, ("user", QUESTION)), *response, *between] == whole


def test_an_end_token_that_the_template_does_not_write_is_left_to_the_response():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = WITHOUT_END
    between = TurnEncoder(tokenizer, None)(MESSAGE, tokenizer.encode(ANSWER + EOS_TOKEN, add_special_tokens=False))
    assert tokenizer.decode(between) == f";{MESSAGE};"


SPACED = "{% for m in messages %}[{{ m['content'] }} <stop>]{% endfor %}"


@pytest.mark.parametrize("is_special", [True, False])
def test_an_end_token_that_the_tokenizer_has_no_name_for_is_not_written_again(is_special):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken("<stop>", special=is_special, normalized=False)])
    tokenizer.chat_template = SPACED
    between = TurnEncoder(tokenizer, None)(MESSAGE, tokenizer.encode(f"{ANSWER}<stop>", add_special_tokens=False))
    assert tokenizer.decode(between) == f"][{MESSAGE} <stop>]"


def test_variables_of_the_template_are_handed_over():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TURNS + "{{ mood }}"
    assert tokenizer.decode(TurnEncoder(tokenizer, {"mood": "calm"})(MESSAGE, ())).endswith("assistant\ncalm")


def test_a_template_that_forgets_what_was_said_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(DataError, match="does not show the assistant's response"):
        TurnEncoder(tokenizer, None)(MESSAGE, ())


def test_a_template_that_leaves_out_the_message_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[1]['content'] }}"
    with pytest.raises(DataError, match="and the message 'no, again' after it"):
        TurnEncoder(tokenizer, None)(MESSAGE, ())
