import json

import pytest

from nemo_offload_rl.data.jsonl import read_rows, split_rows
from nemo_offload_rl.data.records import Row
from nemo_offload_rl.errors import DataError


def read(path):
    return read_rows(path, input_key="q", output_key="a")


def test_rows_keep_their_order_line_numbers_and_other_fields(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"q": "1+1", "a": 2, "level": "easy"}\n\n{"q": "é", "a": "x"}\n', encoding="utf-8")
    first, second = read(path)
    assert first == Row(question="1+1", answer="2", origin=f"{path}:1", metadata={"level": "easy"})
    assert (second.question, second.origin) == ("é", f"{path}:3")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"data.jsonl:2 is not JSON .*column 2"),
        ("[1, 2]", r"data.jsonl:2 holds a JSON list"),
        ('{"question": "x", "a": "y"}', r"data.jsonl:2 has no field 'q' \(fields: a, question\); set input_key"),
        ('{"q": "x"}', r"data.jsonl:2 has no field 'a' .*set output_key"),
        ('{"q": ["x"], "a": "y"}', r"data.jsonl:2: field 'q' is a list"),
        ('{"q": "x", "a": null}', r"data.jsonl:2: field 'a' is a NoneType"),
    ],
)
def test_a_bad_line_is_an_error_that_names_file_line_and_mend(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_text('{"q": "1", "a": "1"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read(path)


def test_a_missing_or_empty_file_is_an_error_of_one_line(tmp_path):
    with pytest.raises(DataError, match=r"none.jsonl cannot be read: No such file or directory; set `path`") as missing:
        read(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"empty.jsonl has no rows") as empty:
        read(tmp_path / "empty.jsonl")
    assert "\n" not in str(missing.value) + str(empty.value)


def test_a_file_that_is_not_utf_8_is_an_error(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(json.dumps({"q": "x", "a": "y"}).encode() + b"\xe9")
    with pytest.raises(DataError, match="not UTF-8"):
        read(tmp_path / "latin.jsonl")


def test_the_split_is_seeded_and_keeps_rows_with_the_same_question_together():
    rows = [Row(question=f"q{i % 50}", answer=str(i), origin=str(i)) for i in range(100)]
    splits = split_rows(rows, share=0.2, seed=3)
    assert splits == split_rows(rows, share=0.2, seed=3)
    assert splits != split_rows(rows, share=0.2, seed=4)
    assert len(splits.validation) == 20
    assert len(splits.train) == 80
    assert not {row.question for row in splits.train} & {row.question for row in splits.validation}
