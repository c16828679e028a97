"""Where a prompt file puts the question, beside what `str.format` does where NeMo-RL would use it."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from nemo_offload_rl.data.prompts import read_prompt_file, read_text_file
from nemo_offload_rl.errors import DataError

QUESTION = "What is {x} {} {{}}?"
ENDS_WITH_COMMAND = re.compile(r"\\[A-Za-z]+\*?$")


def filled(tmp_path, text: str) -> str:
    path = tmp_path / "prompt.txt"
    path.write_text(text, encoding="utf-8", newline="")
    return read_prompt_file(str(path)).fill(QUESTION)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "Q"),
        ("Put it in \\\\boxed{{}} tags.:\n{}\n\nThink", "Put it in \\\\boxed{} tags.:\nQ\n\nThink"),
        ("{} in \\boxed{}.", "Q in \\boxed{}."),
        ("Write \\boxed{}.\n{}", "Write \\boxed{}.\nQ"),
        ("\\boxed{answer}\n\n{}", "\\boxed{answer}\n\nQ"),
        ("\\textbf{{{}}} in \\boxed{{}}", "\\textbf{Q} in \\boxed{}"),
        ('{} as {"a": {"b": 1}}', 'Q as {"a": {"b": 1}}'),
        ('{"q": {}}', '{"q": Q}'),
        ("{ {} }", "{ Q }"),
        ("\\operatorname*{} {}", "\\operatorname*{} Q"),
    ],
)
def test_the_question_goes_to_the_only_place_and_nothing_else_is_lost(tmp_path, text, expected):
    assert filled(tmp_path, text) == expected.replace("Q", QUESTION)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no place", "has 0 places marked {}"),
        ("{} and {}", "has 2 places marked {}"),
        ("Answer in \\boxed{}.", "has 0 places marked {} (after a LaTeX command"),
        ("{question}", "has 0 places marked {}"),
        ("{} in \\boxed{{}} as {json}", "has both {{}} and single braces"),
    ],
)
def test_a_file_without_exactly_one_place_is_refused(tmp_path, text, message):
    with pytest.raises(DataError, match=re.escape(message)) as error:
        filled(tmp_path, text)
    assert "\n" not in str(error.value)


TEXT = st.text(st.sampled_from("ab{}\\ \n\u2028é"), max_size=12)


@settings(max_examples=200)
@given(before=TEXT, after=TEXT)
@example(before="\\boxed{", after="}")
def test_what_is_escaped_for_str_format_is_read_as_str_format_reads_it(tmp_path_factory, before, after):
    assume(not ENDS_WITH_COMMAND.search(before))
    template = "{}".join(part.replace("{", "{{").replace("}", "}}") for part in (before, after))
    assert template.format(QUESTION) == f"{before}{QUESTION}{after}"
    assert filled(tmp_path_factory.getbasetemp(), template) == template.format(QUESTION)


@settings(max_examples=200)
@given(template=st.text(st.sampled_from("a{}\\"), max_size=10))
def test_no_file_loses_a_brace_or_raises_anything_but_a_line(tmp_path_factory, template):
    try:
        text = filled(tmp_path_factory.getbasetemp(), template)
    except DataError as error:
        assert "\n" not in str(error)
        return
    before, after = text.split(QUESTION)
    as_plain = f"{before}{{}}{after}" == template
    as_format = template == "{}".join(part.replace("{", "{{").replace("}", "}}") for part in (before, after))
    assert as_plain or as_format or template.format(QUESTION) == text


def test_a_file_that_is_no_text_is_named_with_its_key(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    with pytest.raises(DataError, match=r"system_prompt_file .*latin\.txt is not UTF-8 text"):
        read_text_file(str(tmp_path / "latin.txt"), "system_prompt_file")
