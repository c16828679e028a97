"""What stands between two turns, beside what the chat template makes of the whole conversation."""

from __future__ import annotations

import pytest
from tiny_models import EOS_TOKEN, make_tokenizer
from transformers import AddedToken

from nemo_offload_rl.data.turns import TurnEncoder
from nemo_offload_rl.errors import DataError

CHATML = (
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


@pytest.mark.parametrize("template", [CHATML, SPEAKERS], ids=["chatml", "speakers"])
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
    tokenizer.chat_template = CHATML + "{{ mood }}"
    assert tokenizer.decode(TurnEncoder(tokenizer, {"mood": "calm"})(MESSAGE, ())).endswith("assistant\ncalm")


def test_a_template_that_forgets_what_was_said_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(DataError, match="does not show once what the assistant said"):
        TurnEncoder(tokenizer, None)(MESSAGE, ())


def test_a_template_that_leaves_out_the_message_is_refused():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[1]['content'] }}"
    with pytest.raises(DataError, match="and the message 'no, again' after it"):
        TurnEncoder(tokenizer, None)(MESSAGE, ())
