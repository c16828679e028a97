"""Published data sets, from files with their columns and rows made here: no test reads the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nemo_offload_rl.data import published
from nemo_offload_rl.data.bad_rows import BadRows
from nemo_offload_rl.data.readers import read_records
from nemo_offload_rl.errors import DataError
from nemo_offload_rl.keys.data import DpoMixtureConfig, GrpoMixtureConfig, SftMixtureConfig
from nemo_offload_rl.keys.published import (
    ConversationsConfig,
    Gsm8kConfig,
    MathConfig,
    MathProblemsConfig,
    OpenMathInstruct2Config,
    PublishedPairsConfig,
    SquadConfig,
)
from nemo_offload_rl.keys.section import from_mapping

type Rows = Sequence[Mapping[str, Any]]

load_questions, load_published_conversations, load_published_pairs = (
    partial(load, bad=BadRows())
    for load in (published.load_questions, published.load_published_conversations, published.load_published_pairs)
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def dapo_row(question: str, answer: str) -> dict[str, Any]:
    return {
        "data_source": "math_dapo",
        "prompt": [user(question)],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": "i"},
    }


# The section's name, its further keys, rows with the published columns, and the questions with answers that they are.
QUESTIONS: list[tuple[str, Mapping[str, Any], Rows, list[tuple[str, str]]]] = [
    (
        "OpenMathInstruct-2", {},
        [{"problem": "p", "generated_solution": "s: 3", "expected_answer": "3", "problem_source": "math"}],
        [("p", "3")],
    ),
    (
        "OpenMathInstruct-2", {"output_key": "generated_solution"},
        [{"problem": "p", "generated_solution": "s: 3", "expected_answer": "3", "problem_source": "math"}],
        [("p", "s: 3")],
    ),
    ("DAPOMath17K", {}, [dapo_row("p", "3"), dapo_row("q", "4")], [("p", "3"), ("q", "4")]),
    ("DAPOMathAIME2024", {"repeat": 2}, [dapo_row("p", "3"), dapo_row("q", "4")], [("p", "3"), ("q", "4")] * 2),
    ("DeepScaler", {}, [{"problem": "p", "answer": "3", "solution": "s"}], [("p", "3")]),
    ("AIME2024", {}, [{"id": 60, "problem": "p", "solution": "s", "answer": "204", "url": "u", "year": "2024"}],
     [("p", "204")]),
    ("AIME2025", {}, [{"question": "p", "answer": "70"}], [("p", "70")]),
    ("AIME2026", {"repeat": 3}, [{"problem_idx": 1, "problem": "p", "answer": 277}], [("p", "277")] * 3),
    ("MATH-500", {}, [{"problem": "p", "solution": "s", "answer": "\\frac12", "level": 2}], [("p", "\\frac12")]),
    ("gsm8k", {}, [{"question": "p", "answer": "half of 8 is <<8/2=4>>4\n#### 1,004"}], [("p", "1,004")]),
    ("GSM8K", {"extract_answer": False}, [{"question": "p", "answer": "so\n#### 4"}], [("p", "so\n#### 4")]),
    (
        "MATH", {},
        [{"problem": "p", "level": "Level 5", "type": "Algebra", "solution": r"$\boxed{1}$: $\boxed{\frac{1}{2}}$"}],
        [("p", r"\frac{1}{2}")],
    ),
    ("MATH", {}, [{"problem": "p", "solution": r"it is $\boxed 7$."}], [("p", "7")]),
    ("MATH", {"extract_answer": False}, [{"problem": "p", "solution": r"$\boxed{1}$"}], [("p", r"$\boxed{1}$")]),
]  # fmt: skip


def settings_of(keys: Mapping[str, Any], mixture: type = GrpoMixtureConfig) -> Any:
    """The section as the YAML makes it."""
    return from_mapping(mixture, {"dataset_name": "mixture", "weights": None, "datasets": [dict(keys)]}).datasets[0]


def write(path: Path, rows: Rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(("name", "keys", "rows", "expected"), QUESTIONS)
def test_rows_with_the_published_columns_are_questions_with_answers(tmp_path, name, keys, rows, expected):
    settings = settings_of({"dataset_name": name, "path": write(tmp_path / "d.jsonl", rows), **keys})
    read = load_questions(settings)
    assert [(row.question, row.answer) for row in read.train] == expected
    assert read.validation == ()
    assert load_questions(settings_of({"dataset_name": name, "path": settings.path, **keys}, SftMixtureConfig)) == read


def test_a_problem_that_is_there_many_times_is_one_row_many_times(tmp_path):
    rows = [dapo_row(f"problem {i % 3}", str(i % 3)) for i in range(30)]
    read = load_questions(settings_of({"dataset_name": "DAPOMath17K", "path": write(tmp_path / "d.jsonl", rows)})).train
    assert len(read) == 30
    assert len({id(row) for row in read}) == 3
    assert read[4].origin.endswith("d.jsonl:2"), "the place where it came first"


@pytest.mark.parametrize(
    ("keys", "row", "message"),
    [
        ({"dataset_name": "gsm8k"}, {"question": "q", "answer": "no"}, r"d\.jsonl:1: 'answer' has no answer; set"),
        ({"dataset_name": "MATH"}, {"problem": "q", "solution": "none"}, r"d\.jsonl:1: 'solution' has no answer; set"),
        ({"dataset_name": "DeepScaler"}, {"question": "q"}, r"d\.jsonl:1 has no field 'answer' .* set path"),
        ({"dataset_name": "DAPOMath17K"}, {"prompt": [], "reward_model": {"ground_truth": "1"}},
         r"has no field 'prompt\.0\.content'"),
        ({"dataset_name": "DAPOMath17K"}, {"prompt": [user("q")], "reward_model": {"ground_truth": None}},
         r"field 'reward_model\.ground_truth' is empty"),
    ],
)  # fmt: skip
def test_a_row_that_is_not_as_published_is_an_error_with_its_place(tmp_path, keys, row, message):
    settings = settings_of({**keys, "path": write(tmp_path / "d.jsonl", [row])})
    with pytest.raises(DataError, match=message):
        load_questions(settings)


# -- SFT and DPO


def test_squad_has_its_text_as_system_message_and_its_first_answer(tmp_path):
    row = {
        "id": "1",
        "title": "t",
        "context": "A text.",
        "question": "q",
        "answers": {"text": ["a", "b"], "answer_start": [0, 1]},
    }
    # A file has one split, whichever of the published ones the key names.
    keys = {"dataset_name": "squad", "split": "validation", "path": write(tmp_path / "d.jsonl", [row])}
    (read,) = load_published_conversations(settings_of(keys, SftMixtureConfig)).train
    assert read.messages == ({"role": "system", "content": "A text."}, user("q"), assistant("a"))


def test_tulu_conversations_are_drawn_by_the_seed_and_split(tmp_path):
    rows = [{"id": str(i), "source": "s", "messages": [user(f"q{i}"), assistant("a")]} for i in range(40)]
    keys = {"dataset_name": "tulu3_sft_mixture", "path": write(tmp_path / "d.jsonl", rows)}

    def questions(**more: Any) -> list[str]:
        read = load_published_conversations(settings_of({**keys, **more}, SftMixtureConfig))
        assert not {row.messages[0]["content"] for row in read.train} & {
            row.messages[0]["content"] for row in read.validation
        }
        return [row.messages[0]["content"] for row in (*read.train, *read.validation)]

    assert questions() == [f"q{i}" for i in range(40)]
    drawn = questions(max_samples=10, seed=3)
    assert len(set(drawn)) == 10
    assert drawn == questions(max_samples=10, seed=3) != questions(max_samples=10, seed=4)
    assert sorted(questions(max_samples=41, split_validation_size=0.25)) == sorted(questions())


def test_helpsteer3_prefers_by_sign_and_leaves_out_what_is_alike(tmp_path, caplog):
    context = [user("hi"), assistant("hello"), user("q")]
    rows = [
        {"domain": "general", "context": context, "response1": "one", "response2": "two", "overall_preference": value}
        for value in (-3, -1, 0, 2)
    ]
    rows.append({**rows[0], "context": "as text", "response2": "one"})
    rows.append({**rows[3], "context": "as text"})
    keys = {"dataset_name": "HelpSteer3", "path": write(tmp_path / "d.jsonl", rows)}
    read = load_published_pairs(settings_of(keys, DpoMixtureConfig)).train
    assert [(pair.chosen, pair.rejected) for pair in read] == [
        ((assistant("one"),), (assistant("two"),)),
        ((assistant("one"),), (assistant("two"),)),
        ((assistant("two"),), (assistant("one"),)),
        ((assistant("two"),), (assistant("one"),)),
    ]
    assert [pair.prompt for pair in read] == [tuple(context)] * 3 + [(user("as text"),)]
    assert "2 of 6 pairs of HelpSteer3 have no better response" in caplog.text


@pytest.mark.parametrize("name", ["Tulu3Preference", "UltraFeedback"])
def test_pairs_of_whole_conversations_begin_with_the_same_prompt(tmp_path, name):
    begin = [user("q"), assistant("w"), user("r")]
    rows = [{"prompt": "q", "chosen": [*begin, assistant(good)], "rejected": [*begin, assistant("b")]} for good in "ab"]
    keys = {"dataset_name": name, "path": write(tmp_path / "d.jsonl", rows)}
    (pair,) = load_published_pairs(settings_of(keys, DpoMixtureConfig)).train
    assert (pair.prompt, pair.chosen, pair.rejected) == (tuple(begin), (assistant("a"),), (assistant("b"),))


# -- the hub


def publish(folder: Path, parts: Mapping[str, Mapping[str, Rows]]) -> None:
    """A copy of a data set as it is on the hub: Parquet files, and their parts and splits in the README."""
    from datasets import Dataset

    lines = ["---", "configs:"]
    for part, splits in parts.items():
        lines += [f"- config_name: {part}", "  data_files:"]
        for split, rows in splits.items():
            (folder / part).mkdir(parents=True, exist_ok=True)
            Dataset.from_list([dict(row) for row in rows]).to_parquet(folder / part / f"{split}-00000-of-00001.parquet")
            lines += [f"  - split: {split}", f"    path: {part}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A working folder in which `owner/name` is a copy of that data set, which `datasets` prefers to the hub."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def question(text: str) -> dict[str, str]:
    return {"question": text, "answer": f"so\n#### {len(text)}"}


GSM8K = {
    "main": {"train": [question("a"), question("bb")], "test": [question("ccc")]},
    "socratic": {"train": [question("dddd")], "test": [question("eeeee")]},
}


def test_a_data_set_of_the_hub_is_read_by_name_part_and_split(hub):
    publish(hub / "openai/gsm8k", GSM8K)

    def answers(**keys: str) -> list[str]:
        return [row.answer for row in load_questions(settings_of({"dataset_name": "gsm8k", **keys})).train]

    assert answers() == ["1", "2"]
    assert answers(split="test") == ["3"]
    assert answers(subset="socratic", split="train") == ["4"]
    (record,) = read_records(Path("openai/gsm8k"), "test", subset="main")
    assert record.fields == GSM8K["main"]["test"][0]
    assert record.origin == "openai/gsm8k (main, test), row 1"
    for keys, message in [
        ({"subset": None}, r"openai/gsm8k is not a file or folder .* available configs: \['main', 'socratic'\]"),
        ({"subset": "main"}, r"openai/gsm8k \(main\) has the splits train, test, and no split is named; set `split`"),
        ({"subset": "main", "split": "dev"}, r"Unknown split \"dev\"\. Should be one of \['train', 'test'\]"),
        ({"subset": "x"}, r"BuilderConfig 'x' not found\. Available: \['main', 'socratic'\]"),
    ]:
        with pytest.raises(DataError, match=message):
            read_records(Path("openai/gsm8k"), keys.get("split"), subset=keys["subset"])


def test_all_parts_of_a_data_set_are_read_where_it_has_several(hub):
    parts = {part: {"test": [{"question": part, "answer": "1"}]} for part in ("AIME2025-I", "AIME2025-II")}
    publish(hub / "opencompass/AIME2025", parts)
    read = load_questions(settings_of({"dataset_name": "AIME2025", "repeat": 2})).train
    assert [row.question for row in read] == ["AIME2025-I", "AIME2025-II"] * 2


def test_columns_that_are_not_needed_are_not_read_and_one_that_is_missing_is_named(hub):
    publish(hub / "nvidia/OpenMathInstruct-2", {"default": {"train_1M": [{"problem": "p", "expected_answer": "3"}]}})
    assert [row.answer for row in load_questions(settings_of({"dataset_name": "OpenMathInstruct-2"})).train] == ["3"]
    with pytest.raises(DataError, match=r"no column 'generated_solution' \(columns: problem, expected_answer\)"):
        load_questions(settings_of({"dataset_name": "OpenMathInstruct-2", "output_key": "generated_solution"}))
    (record,) = read_records(Path("nvidia/OpenMathInstruct-2"), columns=("problem",))
    assert record.fields == {"problem": "p"}


def test_what_was_fetched_once_is_read_from_the_cache_without_a_network(hub, monkeypatch):
    publish(hub / "openai/gsm8k", GSM8K)
    load_questions(settings_of({"dataset_name": "gsm8k"}))
    (hub / "cache/gsm8k").rename(hub / "cache/openai___gsm8k")  # where `datasets` keeps what came from the hub
    (hub / "elsewhere").mkdir()
    monkeypatch.chdir(hub / "elsewhere")
    read = load_questions(settings_of({"dataset_name": "gsm8k", "split": "test"})).train
    assert [row.answer for row in read] == ["3"]


def test_a_name_that_is_neither_here_nor_on_the_hub_is_one_line(hub):
    with pytest.raises(DataError, match=r"^data set a/b is not a file or folder here and cannot be loaded") as caught:
        read_records(Path("a/b"))
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"data file nowhere/d\.jsonl cannot be read: No such file"):
        read_records(Path("nowhere/d.jsonl"))
    write(hub / "d.jsonl", [{"a": 1}])
    with pytest.raises(DataError, match=r"d\.jsonl is a file and has no subset 'x'; set `subset` to null"):
        read_records(Path("d.jsonl"), subset="x")


def test_every_published_set_has_a_section_of_its_name():
    names = {name for name, *_ in QUESTIONS} | {
        "squad",
        "tulu3_sft_mixture",
        "Nemotron-Cascade-2-SFT-Math",
        "HelpSteer3",
        "Tulu3Preference",
        "UltraFeedback",
    }
    kinds = (
        OpenMathInstruct2Config, MathProblemsConfig, Gsm8kConfig, MathConfig, SquadConfig, ConversationsConfig,
        PublishedPairsConfig,
    )  # fmt: skip
    assert {value for kind in kinds for value in _names(kind)} == names


def _names(kind: type) -> Sequence[str]:
    from typing import get_args

    from nemo_offload_rl.keys.section import keys_of

    hint, _ = keys_of(kind)["dataset_name"]
    return get_args(get_args(hint)[0])
