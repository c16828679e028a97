import gzip
import json
import tempfile
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_offload_rl.data.bad_rows import BadRows
from nemo_offload_rl.data.readers import read_records
from nemo_offload_rl.errors import DataError

ROWS = [{"q": "1", "m": [{"role": "user", "content": "é"}]}, {"q": "2", "m": [{"role": "user", "content": "b"}]}]


def write_jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path, rows=ROWS):
    from datasets import Dataset

    Dataset.from_list(rows).to_parquet(path)
    return path


def write_saved(path, rows=ROWS):
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(path)
    return path


def write_json(path, rows=ROWS):
    path.write_text(json.dumps(rows))
    return path


def compressed(write):
    def written(path, rows=ROWS):
        path.write_bytes(gzip.compress(write(path, rows).read_bytes()))
        return path

    return written


@pytest.mark.parametrize(
    ("write", "name", "second"),
    [
        (write_jsonl, "d.jsonl", ":2"),
        (write_json, "d.json", ", row 2"),
        (compressed(write_jsonl), "d.jsonl.gz", ":2"),
        (compressed(write_json), "d.v1.json.gz", ", row 2"),
        (write_parquet, "d.parquet", ", row 2"),
        (write_saved, "saved", ", row 2"),
    ],
)
def test_every_format_gives_the_same_rows_with_their_places(tmp_path, write, name, second):
    path = write(tmp_path / name)
    records = read_records(path)
    assert [record.fields for record in records] == ROWS
    assert records[1].origin == f"{path}{second}"


def test_a_folder_of_files_is_read_in_the_order_of_names_and_a_split_picks_some(tmp_path):
    write_jsonl(tmp_path / "train-1.jsonl", [{"q": "b"}])
    write_parquet(tmp_path / "train-0.parquet", [{"q": "a"}])
    write_json(tmp_path / "test-0.json", [{"q": "c"}])
    (tmp_path / "README.md").write_text("not data")
    assert [record.fields["q"] for record in read_records(tmp_path)] == ["c", "a", "b"]
    assert [record.fields["q"] for record in read_records(tmp_path, "train")] == ["a", "b"]
    with pytest.raises(DataError, match=r"no file whose name begins with 'dev' that ends in one of \.jsonl, "):
        read_records(tmp_path, "dev")


def test_a_saved_folder_with_splits_needs_one_of_them(tmp_path):
    from datasets import Dataset, DatasetDict

    DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS[:1])).save_to_disk(tmp_path / "d")
    assert len(read_records(tmp_path / "d", "test")) == 1
    assert read_records(tmp_path / "d", "test")[0].origin == f"{tmp_path / 'd'} (test), row 1"
    with pytest.raises(DataError, match="has the splits train, test, and no split is named"):
        read_records(tmp_path / "d")
    with pytest.raises(DataError, match="there is no split 'dev'"):
        read_records(tmp_path / "d", "dev")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"data.jsonl:2 is not JSON .*column 2"),
        ("[1, 2]", r"data.jsonl:2 holds a JSON list"),
        ('{"q": "\\ud83d"}', r"data.jsonl:2 has half of a surrogate pair \(\\ud83d\)"),
        ("[" * 100_000, r"data.jsonl:2 is not JSON \(nested too deeply\)"),
        ('{"q": ' + "9" * 5000 + "}", r"data.jsonl:2 is not JSON \(Exceeds the limit"),
    ],
)
def test_a_bad_line_is_an_error_that_names_file_and_line(tmp_path, line, message):
    (tmp_path / "data.jsonl").write_text('{"q": "1"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read_records(tmp_path / "data.jsonl")


CSV = '\ufeffq,a\n"one, ""1""\ntwo",007\n\nx,NA\n'


def test_cells_of_csv_are_the_text_that_stands_there_and_their_rows_the_lines_where_they_begin(tmp_path):
    (tmp_path / "d.csv").write_text(CSV)
    (tmp_path / "e.csv.gz").write_bytes(gzip.compress(CSV.replace("\n", "\r\n").encode()))
    records = read_records(tmp_path)
    rows = [{"q": 'one, "1"\ntwo', "a": "007"}, {"q": "x", "a": "NA"}]
    assert [record.fields for record in records[:2]] == rows
    assert [record.fields["a"] for record in records[2:]] == ["007", "NA"]
    assert [record.origin.rpartition(":")[2] for record in records] == ["2", "5"] * 2
    long = "y" * 200_000
    (tmp_path / "long.csv").write_text(f"q,a\n{long},1\n")
    assert read_records(tmp_path / "long.csv")[0].fields["q"] == long


def test_decimals_of_a_table_are_numbers_with_all_their_digits(tmp_path):
    digits = "0.1234567890123456789"
    rows = [{"a": Decimal(text), "m": [{"x": Decimal("7.0")}]} for text in ("42.00", "3.50", digits)]
    fields = [record.fields for record in read_records(write_parquet(tmp_path / "d.parquet", rows))]
    assert [(row["a"], row["m"][0]["x"]) for row in fields] == [(42, 7), (3.5, 7), (digits, 7)]
    assert isinstance(fields[0]["a"], int)


def test_rows_that_are_no_objects_are_left_out_if_so_told_and_the_error_says_how(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b'{"q": "1"}\noops\n{"q": "\xe9"}\n[1]\n{"q": "2"}\n')
    (tmp_path / "e.csv").write_text("q,a\n1,2\n3\n4,5,6\n")
    (tmp_path / "f.json").write_text('[{"q": "1"}, 7]')
    bad = BadRows("drop")
    assert [record.origin.rpartition("/")[2] for record in read_records(tmp_path, bad=bad)] == [
        *("d.jsonl:1", "d.jsonl:5"), "e.csv:2", "f.json, row 1",
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"d\.jsonl:2 is not JSON .* \(no row of d is left: .* left out 6\)$"):
        bad.tell("d", num_left=0)
    with pytest.raises(DataError, match=r"d\.jsonl:2 is not JSON .*; or leave such rows out with data\.bad_rows=drop$"):
        read_records(tmp_path / "d.jsonl")
    with pytest.raises(DataError, match=r"e\.csv:3: the number of cells is 1, but the first line names 2 columns"):
        read_records(tmp_path / "e.csv")


def test_blank_lines_are_skipped_and_counted(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"q": 1}\n\n{"q": 2}\n')
    assert [record.origin[-2:] for record in read_records(tmp_path / "d.jsonl")] == [":1", ":3"]


# What ends a line to str.splitlines, or might be taken for the end or the beginning of a file.
LINE_BREAKS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\ufeff"
WORDS = st.text(st.sampled_from(f'a"\\\n\r\té{LINE_BREAKS}') | st.characters(exclude_categories=["Cs"]))
FIELDS = st.dictionaries(WORDS, WORDS | st.lists(st.dictionaries(WORDS, WORDS | st.none()), max_size=2), max_size=3)


@settings(max_examples=100)
@given(
    rows=st.lists(FIELDS, min_size=1, max_size=4),
    escaped=st.booleans(),
    mark=st.sampled_from(["", "\ufeff"]),
    end=st.sampled_from(["\n", "\r\n"]),
    form=st.sampled_from(["jsonl", "json"]),
)
def test_any_text_survives_json_with_and_without_escapes_marks_and_carriage_returns(rows, escaped, mark, end, form):
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / f"d.{form}"
        lines = [json.dumps(row, ensure_ascii=escaped) for row in rows]
        text = f"[{f',{end}'.join(lines)}]" if form == "json" else "".join(f"{mark}{line}{end}" for line in lines)
        path.write_bytes((mark + text).encode())
        assert [record.fields for record in read_records(path)] == rows


def test_what_tables_fill_objects_up_with_is_gone_and_json_keeps_its_nulls(tmp_path):
    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "say", "arguments": {"text": "x"}}]
    rows = [{"m": [{"role": "assistant", "tool_calls": [call]}], "empty": None} for call in calls]
    for path in (write_parquet(tmp_path / "d.parquet", rows), write_saved(tmp_path / "saved", rows)):
        assert [record.fields for record in read_records(path)] == rows
    schema = [{"tools": [{"name": "say", "parameters": {"default": None}}]}]
    assert read_records(write_jsonl(tmp_path / "d.jsonl", schema))[0].fields == schema[0]


def unreadable(folder, kind):
    path = folder / {"missing": "none.jsonl", "empty": "e.jsonl", "latin": "l.jsonl"}.get(kind, kind)
    match kind:
        case "empty":
            path.write_text("\n\n")
        case "latin":
            path.write_bytes(b'{"q": "\xe9"}')
        case "broken.parquet" | "x.tsv" | "broken.json.gz":
            path.write_text("a,b")
        case "cut.csv.gz":
            path.write_bytes(gzip.compress(b"a,b" * 100)[:-9])
        case "quote.csv":
            path.write_text('a,b\n1,"2\n')
        case "twice.csv":
            path.write_text("a,a\n1,2\n")
        case "broken.json":
            path.write_text('[{"q": 1},\n oops]')
        case "object.json":
            path.write_text("{}")
        case "broken_folder":
            write_saved(path)
            for arrow in path.glob("*.arrow"):
                arrow.unlink()
        case "empty_folder":
            path.mkdir()
    return path


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", r"none.jsonl cannot be read: No such file or directory; set `path`"),
        ("empty", "e.jsonl has no rows"),
        ("latin", r"l.jsonl:1 is not UTF-8 text \(byte 7\)"),
        ("x.tsv", r"has the suffix '.tsv'; name a file that ends in one of .jsonl, .json, .csv, .parquet, .jsonl.gz"),
        ("broken.json.gz", "broken.json.gz cannot be decompressed"),
        ("cut.csv.gz", "cut.csv.gz cannot be decompressed"),
        ("quote.csv", r"quote.csv:2 is not CSV \(unexpected end of data\)"),
        ("twice.csv", "twice.csv:1 names the column 'a' more than once"),
        ("broken.parquet", "broken.parquet cannot be read as Parquet"),
        ("broken.json", "broken.json:2 is not JSON"),
        ("object.json", "holds a JSON dict; write a list of objects"),
        ("broken_folder", "broken_folder cannot be read by `datasets`"),
        ("empty_folder", "has no file that ends in one of .jsonl, .* and was not saved by `datasets`"),
    ],
)
def test_what_cannot_be_read_is_an_error_of_one_line(tmp_path, kind, message):
    path = unreadable(tmp_path, kind)
    with pytest.raises(DataError, match=message) as error:
        read_records(path)
    assert "\n" not in str(error.value)
