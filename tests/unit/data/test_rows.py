import json
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_offload_rl.data.readers import Record
from nemo_offload_rl.data.records import Row
from nemo_offload_rl.data.rows import binary_pair, conversation, opening, ranked_pair, response_row, split_by
from nemo_offload_rl.errors import DataError


def record(**fields) -> Record:
    return Record(fields, "data.jsonl:2")


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_a_row_keeps_its_place_and_its_other_fields():
    row = response_row(record(q="1+1", a=2, level="easy"), "q", "a")
    assert row == Row(question="1+1", answer="2", origin="data.jsonl:2", metadata={"a": 2, "level": "easy"})
    assert response_row(record(q="1+1", a=np.int64(2), level="easy"), "q", "a") == row


def test_a_prompt_of_messages_keeps_them_and_asks_what_the_user_says_last():
    system, parts = {"role": "system", "content": "Be brief."}, [{"type": "text", "text": t} for t in ("a", "b")]
    prompt = [system, user("1+1"), assistant("2"), user(parts)]
    row = response_row(record(q=prompt, a=[assistant("ab")]), "q", "a")
    messages = (system, user("1+1"), assistant("2"), user("ab"))
    assert row == Row(
        question="ab", answer="ab", origin="data.jsonl:2", messages=messages, metadata={"a": row.metadata["a"]}
    )
    others = [response_row(record(q=[system, user("ab")], a="ab"), "q", "a"), row]
    assert len({other.asked for other in others}) == 2  # the same question after other turns is another problem


def test_one_conversation_means_the_same_in_every_published_form():
    messages = [assistant("Hello."), user("1+1"), assistant("2")]
    authors = {"user": "human", "assistant": "gpt"}
    shared = [{"from": authors[message["role"]], "value": message["content"]} for message in messages]
    roles = [{"from": message["role"], "value": message["content"]} for message in messages]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    for form in (messages, shared, roles, parts, json.dumps(messages), json.dumps(shared)):
        row = response_row(record(m=form), "m", "m")
        assert (row.question, row.answer, row.messages) == ("1+1", "2", tuple(messages[:2]))
        assert conversation(record(m=form), "m", None).messages == tuple(messages)
        pair = binary_pair(record(c=form, r=[*messages[:2], assistant("3")]), None, "c", "r")
        assert (pair.prompt, pair.chosen) == (tuple(messages[:2]), (messages[2],))
    with pytest.raises(DataError, match=r"the answer in the field 'm' is not one message of the assistant"):
        response_row(record(m=[user("x")]), "m", "m")


def test_a_list_of_answers_has_all_of_them_and_no_field_none():
    assert response_row(record(q="x", a=["1/2", 0.5, Decimal("0.50")]), "q", "a").answer == ["1/2", "0.5", "0.50"]
    assert response_row(record(q="x", a=["1"]), "q", "a").answer == "1"
    assert response_row(record(q="x", a="1"), "q", None) == Row(
        question="x", answer="", origin="data.jsonl:2", metadata={"a": "1"}
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"question": "x", "a": "y"}, r"data.jsonl:2 has no field 'q' \(fields: a, question\); set input_key"),
        ({"q": "x"}, r"data.jsonl:2 has no field 'a' .*set output_key"),
        ({"q": ["x"], "a": "y"}, r"data.jsonl:2: field 'q' is a list, but not of messages; .* input_key=q\.0$"),
        ({"q": [], "a": "y"}, r"data.jsonl:2: field 'q' is a list, but not of messages"),
        ({"q": [user("x"), assistant("y")], "a": "y"}, r"field .q. ends with the assistant.* set output_key=q too"),
        ({"q": [{"from": "bot", "value": "x"}], "a": "y"}, r"message 1 of 'q' is from 'bot'; write one of human, gpt"),
        ({"q": [user([{"type": "image_url", "text": "x"}])], "a": "y"}, r"has a part of type image_url"),
        ({"q": [{"role": "system", "content": "x"}], "a": "y"}, r"field 'q' has no message of the user"),
        ({"q": [user("x"), {"role": "user"}], "a": "y"}, r"message 2 of 'q' has no text"),
        ({"q": [user([{"type": "image", "url": "x"}])], "a": "y"}, r"message 1 of 'q' has a part of type image"),
        ({"q": "x", "a": [user("y")]}, r"the answer in the field 'a' is not one message of the assistant"),
        ({"q": "x", "a": []}, r"field 'a' is a list"),
        ({"q": "x", "a": ["y", None]}, r"field 'a\.1' is empty \(null\)"),
        ({"q": "x", "a": None}, r"data.jsonl:2: field 'a' is empty \(null\)"),
        ({"q": "x", "a": float("nan")}, r"data.jsonl:2: field 'a' is not a number \(NaN\)"),
    ],
)
def test_a_bad_row_is_an_error_that_names_its_place_and_the_mend(fields, message):
    with pytest.raises(DataError, match=message):
        response_row(record(**fields), "q", "a")


def test_the_split_is_seeded_and_keeps_rows_with_the_same_question_together():
    rows = [Row(question=f"q{i % 50}", answer=str(i), origin=str(i)) for i in range(100)]

    def split(seed):
        return split_by(rows, lambda row: row.question, size=0.2, seed=seed)

    splits = split(3)
    assert splits == split(3)
    assert splits != split(4)
    assert len(splits.validation) == 20
    assert len(splits.train) == 80
    assert not {row.question for row in splits.train} & {row.question for row in splits.validation}


def test_a_conversation_loses_the_empty_fields_that_tables_give_every_message():
    given = [{**user("a"), "name": None}, {**assistant("b"), "name": "bot"}]
    assert conversation(record(m=given), "m", "tools").messages == (user("a"), {**assistant("b"), "name": "bot"})


def test_conversations_that_begin_with_the_assistant_are_told_apart_by_what_it_says():
    assert opening([assistant("a"), user("b")]) != opening([assistant("c"), user("b")])
    assert opening([user("a"), assistant("b")]) == opening([user("a"), assistant("c")])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "field 'm' is a str; write a list of messages"),
        ([], "field 'm' is an empty list"),
        ([user("a"), {"role": "assistant"}], "message 2 of 'm' has no text for `role` or `content`"),
        (["a"], "message 1 of 'm' has no text"),
        ([user("a")], "no message is the assistant's"),
    ],
)
def test_a_bad_conversation_is_an_error_that_names_its_place(value, message):
    with pytest.raises(DataError, match=message) as error:
        conversation(record(m=value), "m", "tools")
    assert str(error.value).startswith("data.jsonl:2")


@pytest.mark.parametrize(
    ("fields", "prompt_key"),
    [
        ({"p": "q", "c": "good", "r": "bad"}, "p"),
        ({"p": [user("q")], "c": [assistant("good")], "r": [assistant("bad")]}, "p"),
        ({"p": "q", "c": [user("q"), assistant("good")], "r": [user("q"), assistant("bad")]}, "p"),
        ({"c": [user("q"), assistant("good")], "r": [user("q"), assistant("bad")]}, None),
    ],
    ids=["text", "messages", "prompt repeated", "prompt implied"],
)
def test_published_ways_to_write_a_pair_mean_the_same(fields, prompt_key):
    pair = binary_pair(record(**fields), prompt_key, "c", "r")
    assert (pair.prompt, pair.chosen, pair.rejected) == ((user("q"),), (assistant("good"),), (assistant("bad"),))


def test_ranked_completions_give_the_lowest_and_the_highest_rank():
    entries = [{"rank": 2, "completion": "bad"}, {"rank": 0, "completion": [assistant("good")]}]
    entries.insert(1, {"rank": 1, "completion": "middling"})
    pair = ranked_pair(record(context=[user("q")], completions=entries))
    assert (pair.prompt, pair.chosen, pair.rejected) == ((user("q"),), (assistant("good"),), (assistant("bad"),))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: binary_pair(record(p="q", c="a"), "p", "c", "r"), "has no field 'r' .*set rejected_key"),
        (lambda: binary_pair(record(p="q", c="a", r="a"), "p", "c", "r"), "are the same"),
        (lambda: binary_pair(record(c="a", r="b"), None, "c", "r"), "no common message.*set prompt_key"),
        (lambda: binary_pair(record(p="q", c=[user("a")], r="b"), "p", "c", "r"), "better response does not end"),
        (lambda: ranked_pair(record(context="q", completions=[])), "'completions' is not a list of two or more"),
        (
            lambda: ranked_pair(record(context="q", completions=[{"rank": 0}] * 2)),
            "completion 1 lacks an integer",
        ),
        (
            lambda: ranked_pair(record(context="q", completions=[{"rank": 0, "completion": x} for x in "ab"])),
            "all completions have the rank 0",
        ),
        (lambda: ranked_pair(record(completions=[])), "no field 'context'.*write 'context' into each row"),
    ],
)
def test_a_bad_pair_is_an_error_that_names_its_place(make, message):
    with pytest.raises(DataError, match=message) as error:
        make()
    assert str(error.value).startswith("data.jsonl:2")


@pytest.mark.parametrize(("size", "num_held_out"), [(0, 0), (0.25, 10), (1, 1), (7.0, 7), (39, 39), (40, 40), (99, 40)])
def test_rows_are_kept_for_validation_by_share_or_by_number(size, num_held_out):
    splits = split_by(range(40), str, size=size, seed=3)
    assert len(splits.validation) == num_held_out
    assert sorted((*splits.train, *splits.validation)) == list(range(40))


@settings(max_examples=50)
@given(st.lists(st.sampled_from("abcdefgh"), min_size=1), st.integers(1, 20))
def test_rows_of_one_question_are_on_one_side_and_no_more_are_held_out_than_told(rows, size):
    splits = split_by(rows, str, size=size, seed=0)
    assert not {*splits.train} & {*splits.validation}
    assert len(splits.validation) <= size
    assert all(len(splits.validation) + splits.train.count(left) > size for left in splits.train)
