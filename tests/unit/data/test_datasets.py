import json
import re
from copy import deepcopy
from dataclasses import replace

import pytest
from tiny_models import EOS_TOKEN, make_tokenizer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nemo_offload_rl.data.batch import collate_examples, collate_pairs
from nemo_offload_rl.data.datasets import load_example_pairs, load_examples, load_prompts
from nemo_offload_rl.data.given import with_given_rows
from nemo_offload_rl.data.records import Part
from nemo_offload_rl.data.tokenizer import example_text, whole_text
from nemo_offload_rl.errors import DataError
from nemo_offload_rl.keys.data import (
    ArithmeticConfig,
    BinaryPreferenceConfig,
    DataConfig,
    DataDefaultConfig,
    DpoDataConfig,
    DpoDefaultConfig,
    GrpoMixtureConfig,
    OpenAIFormatConfig,
    ResponseDatasetConfig,
    SftDataConfig,
    SftDefaultConfig,
    SftMixtureConfig,
)

TASK = {"processor": "math_hf_data_processor", "env_name": "arithmetic"}
ARITHMETIC = ArithmeticConfig(
    dataset_name="arithmetic", **TASK, num_digits=2, operators=("+",), size=20, holdout=5, seed=0
)
TOKENIZER = make_tokenizer()
TOKENIZER.chat_template = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}>{% endif %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def load(
    train=ARITHMETIC,
    validation=None,
    max_input_seq_length=64,
    chat_template_kwargs=None,
    overlong_rows="error",
    bad_rows="error",
):
    settings = data_config(train, validation, max_input_seq_length, overlong_rows, bad_rows)
    return load_prompts(settings, TOKENIZER, chat_template_kwargs)


def data_config(train, validation=None, max_input_seq_length=64, overlong_rows="error", bad_rows="error"):
    return DataConfig(
        max_input_seq_length=max_input_seq_length,
        overlong_rows=overlong_rows,
        bad_rows=bad_rows,
        add_bos=True,
        shuffle=True,
        train=train,
        validation=validation,
        default=DataDefaultConfig(prompt_file=None, system_prompt_file=None, **TASK),
    )


def write_jsonl(path, num_rows=4) -> ResponseDatasetConfig:
    path.write_text("".join(f'{{"q": "what is {row}?", "a": "{row}"}}\n' for row in range(num_rows)))
    return ResponseDatasetConfig(
        dataset_name="ResponseDataset",
        **TASK,
        path=str(path),
        input_key="q",
        output_key="a",
        split_validation_size=0.0,
        seed=0,
    )


def test_prompts_are_rendered_with_the_chat_template_and_carry_answer_and_environment():
    prompts = load()
    assert (len(prompts.train), len(prompts.validation)) == (20, 5)
    for prompt in prompts.train:
        assert prompt.text.endswith("=>")  # the template's generation prompt
        assert TOKENIZER.decode(prompt.token_ids) == prompt.text
        assert prompt.reference_answer == str(sum(prompt.metadata["operands"]))
        assert prompt.env_name == "arithmetic"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [((42.0, -7.0, "x"), ["42", "-7", "x"]), ((42.0, 0.5), ["42.0", "0.5"]), ((42, "7.0"), ["42", "7.0"])],
)
def test_whole_numbers_of_a_column_of_floats_are_read_as_such_with_a_warning(tmp_path, caplog, answers, expected):
    source = write_jsonl(tmp_path / "a.jsonl")
    lines = [json.dumps({"q": f"{row}?", "a": answer}) for row, answer in enumerate(answers)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert [prompt.reference_answer for prompt in load(source).train] == expected
    told = "2 of 3 answers in the field a are whole numbers with a decimal point, such as 42.0; they are read"
    assert any(told in message for message in caplog.messages) == ("x" in answers)


def test_prompt_file_and_system_prompt_surround_the_question(tmp_path):
    (tmp_path / "prompt.txt").write_text('Solve {} and answer as {"answer": ...}.')
    (tmp_path / "system.txt").write_text("Be brief. ")
    files = {"prompt_file": str(tmp_path / "prompt.txt"), "system_prompt_file": str(tmp_path / "system.txt")}
    source = replace(write_jsonl(tmp_path / "d.jsonl"), **files)
    first = load(source).train[0]
    assert first.text == 'Be brief. Solve what is 0? and answer as {"answer": ...}.>'


def test_a_prompt_of_messages_is_what_the_chat_template_makes_of_all_of_them(tmp_path):
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    (tmp_path / "d.jsonl").write_text(json.dumps({"q": messages, "a": "1"}) + "\n")
    (tmp_path / "prompt.txt").write_text("Solve {}")
    (tmp_path / "system.txt").write_text("Be brief. ")
    source = replace(write_jsonl(tmp_path / "other.jsonl"), path=str(tmp_path / "d.jsonl"))
    (prompt,) = load(source).train
    assert prompt.text == TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert (prompt.question, prompt.messages) == ("u", tuple(messages))
    files = {"prompt_file": str(tmp_path / "prompt.txt"), "system_prompt_file": str(tmp_path / "system.txt")}
    messages[1]["content"] = "Solve u"  # the system prompt of its own stays
    (prompt,) = load(replace(source, **files)).train
    assert prompt.text == TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "sub")]
TURNS = [
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "What is 1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
]
SHOWS_TOOLS = (
    "{{ tools | tojson }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
    "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def in_file(path, write, input_key):
    source = replace(write_jsonl(path), input_key=input_key)
    write(path)
    return data_config(replace(source, output_key="answer" if input_key == "prompt" else input_key), None, 2000)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "sharegpt", "python", "datasets", "pandas"])
def test_a_prompt_is_what_transformers_renders_whatever_form_and_source_it_has(tmp_path, form):
    from datasets import Dataset

    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]
    rows = [{"prompt": parts, "answer": ["2", "two"], "tools": json.dumps(TOOLS)}, {"prompt": parts, "answer": ["2"]}]
    rows[0]["level"] = {"a": None, "b": 1}  # which rewards read, is left as it is
    table = Dataset.from_list(rows)
    names = {"role": "from", "content": "value"}
    shared = [{names.get(key, key): value for key, value in turn.items()} for turn in TURNS]
    answered = {"conversations": [*shared, {"from": "gpt", "value": "2"}], "tools": TOOLS}
    text = json.dumps({**rows[0], "tools": TOOLS}) + "\n"
    settings = {
        "jsonl": lambda: in_file(tmp_path / "d.jsonl", lambda path: path.write_text(text), "prompt"),
        "parquet": lambda: in_file(tmp_path / "d.parquet", table.to_parquet, "prompt"),
        "sharegpt": lambda: in_file(
            tmp_path / "d.json", lambda path: path.write_text(json.dumps([answered])), "conversations"
        ),
        "python": lambda: with_given_rows(data_config(ARITHMETIC, None, 2000), [answered], None),
        "datasets": lambda: with_given_rows(data_config(ARITHMETIC, None, 2000), table, None),
        "pandas": lambda: with_given_rows(
            data_config(ARITHMETIC, None, 2000), table.to_pandas().to_dict("records"), None
        ),
    }[form]()
    tokenizer = deepcopy(TOKENIZER)
    tokenizer.chat_template = SHOWS_TOOLS
    prompt = load_prompts(settings, tokenizer, None).train[0]
    assert prompt.text == tokenizer.apply_chat_template(TURNS, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert prompt.question == "What is 1+1?"
    assert prompt.reference_answer == ("2" if form in ("sharegpt", "python") else ["2", "two"])
    if form in ("datasets", "pandas"):
        assert prompt.metadata["level"] == {"a": None, "b": 1}


def test_unusable_rows_of_every_kind_are_left_out_and_told_with_file_and_line(tmp_path, caplog):
    answers = [str(number) for number in range(15)]
    lines = [json.dumps({"q": f"what is {answer}?", "a": answer}) for answer in answers]
    lines[1:1] = ["oops", '{"q": "no answer"}', '{"q": [{"role": "system", "content": "x"}], "a": "1"}']
    lines.insert(5, '{"q": "no template", "a": "1", "tools": [{"name": "add"}]}')
    source = write_jsonl(tmp_path / "d.jsonl")
    (tmp_path / "d.jsonl").write_text("\n".join([*lines, *["{}"] * 20]))
    with pytest.raises(DataError, match=r"d\.jsonl:2 is not JSON .*; or leave such rows out with data\.bad_rows=drop"):
        load(source)
    prompts = load(replace(source, split_validation_size=5), bad_rows="drop")
    kept = [prompt.reference_answer for prompt in (*prompts.train, *prompts.validation)]
    assert (sorted(kept), len(prompts.validation)) == (sorted(answers), 5)
    (told,) = [message for message in caplog.messages if "cannot be used" in message]
    assert told.startswith("24 of 39 rows of d cannot be used and are left out (data.bad_rows=drop):\n  ")
    places = [line.split()[0].rstrip(":").rpartition(":")[2] for line in told.splitlines()[1:] if "d.jsonl" in line]
    assert (places, told.splitlines()[-1]) == (["2", "3", "4", *map(str, range(20, 27))], "  and 14 more")
    (tmp_path / "d.jsonl").write_text('{"q": "1"}\n{"q": "2"}\n')
    with pytest.raises(DataError, match=r"d\.jsonl:1 has no field 'a' .* \(no row of d is left: .* left out 2\)"):
        load(source, bad_rows="drop")


def test_a_missing_prompt_file_and_an_unknown_processor_are_errors():
    with pytest.raises(DataError, match=r"prompt_file nowhere\.txt cannot be read"):
        load(replace(ARITHMETIC, prompt_file="nowhere.txt"))
    with pytest.raises(DataError, match=r"processor 'magic' is unknown; .*math_hf_data_processor"):
        load(replace(ARITHMETIC, processor="magic"))


def test_a_prompt_longer_than_the_limit_is_an_error_that_names_the_row(tmp_path):
    source = write_jsonl(tmp_path / "d.jsonl")
    assert len(load(source, max_input_seq_length=11).train) == 4
    with pytest.raises(DataError, match=r"d\.jsonl:1: the row has 11 tokens, more than data\.max_inp.*=10"):
        load(source, max_input_seq_length=10)


@pytest.mark.parametrize("overlong_rows", ["mask", "drop"])
def test_a_prompt_longer_than_the_limit_is_masked_or_dropped_and_counted(tmp_path, caplog, overlong_rows):
    source = write_jsonl(tmp_path / "d.jsonl", num_rows=11)  # the last question has one digit more
    splits = load(source, max_input_seq_length=11, overlong_rows=overlong_rows)
    prompts = splits.train
    assert splits.overlong == {"d": 1}
    assert [prompt.loss_multiplier for prompt in prompts[:10]] == [1.0] * 10
    assert [(len(prompt.token_ids), prompt.loss_multiplier) for prompt in prompts[10:]] == (
        [(4, 0.0)] if overlong_rows == "mask" else []
    )
    assert "1 of 11 rows of d are longer than data.max_input_seq_length=11 tokens, first " in caplog.text
    with pytest.raises(DataError, match=r"and all others of d are longer than data\.max_input_seq_length=10 tokens"):
        load(source, max_input_seq_length=10, overlong_rows=overlong_rows)


def test_characters_that_the_tokenizer_loses_are_told_with_file_and_line(tmp_path, caplog):
    digits = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate("0123?>")}, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=digits, eos_token="?")
    tokenizer.chat_template = TOKENIZER.chat_template
    load_prompts(data_config(write_jsonl(tmp_path / "d.jsonl")), tokenizer, None)
    (told,) = [message for message in caplog.messages if "loses characters" in message]
    assert re.search(r"never sees: a h i s t w \(first in \S*d\.jsonl:1\)", told)


def test_a_validation_set_of_its_own_is_used_whole_beside_what_the_training_data_keep(tmp_path):
    own = write_jsonl(tmp_path / "v.jsonl", num_rows=3)
    prompts = load(replace(ARITHMETIC, holdout=0), validation=own)
    assert [prompt.reference_answer for prompt in prompts.validation] == ["0", "1", "2"]
    prompts = load(ARITHMETIC, validation=own)
    held_out = [prompt.text for prompt in load(ARITHMETIC).validation]
    assert [prompt.text for prompt in prompts.validation if prompt.data_set == "arithmetic"] == held_out
    assert len(prompts.validation) == 5 + 3
    problems = load(write_jsonl(tmp_path / "t.jsonl"), validation=ARITHMETIC).validation
    assert [prompt.text for prompt in problems] == held_out, "not those that training may see"


def test_every_data_set_of_a_mixture_is_among_the_first_validation_rows(tmp_path):
    sizes = {"a": 2, "b": 40, "c": 3}
    sources = tuple(write_jsonl(tmp_path / f"{name}.jsonl", num_rows=size) for name, size in sizes.items())
    prompts = load(validation=GrpoMixtureConfig(dataset_name="mixture", datasets=sources, weights=(1.0, 1.0, 1.0)))
    names = [prompt.data_set for prompt in prompts.validation]
    assert names[:8] == ["arithmetic", "a", "b", "c"] * 2
    assert {name: names.count(name) for name in sizes} == sizes
    kept = load(
        GrpoMixtureConfig(
            dataset_name="mixture", datasets=(ARITHMETIC, replace(ARITHMETIC, operators=("-",))), weights=(1.0, 9.0)
        )
    )
    assert [prompt.data_set for prompt in kept.validation] == ["arithmetic_1", "arithmetic_2"] * 5
    assert [prompt.data_set for prompt in kept.train] == ["arithmetic_1"] * 20 + ["arithmetic_2"] * 20


def test_a_data_set_that_keeps_every_row_for_validation_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"data\.train has no rows"):
        load(replace(write_jsonl(tmp_path / "d.jsonl", num_rows=1), split_validation_size=0.9))


# -- SFT and DPO


def supervised(train, validation=None, **changes) -> SftDataConfig:
    settings = SftDataConfig(
        max_input_seq_length=64,
        add_bos=True,
        shuffle=True,
        train=train,
        validation=validation,
        loss_span="response",
        overlong_rows="error",
        add_eos=True,
        default=SftDefaultConfig(prompt_file=None, system_prompt_file=None, processor="math_hf_data_processor"),
    )
    return replace(settings, **changes)


def texts(examples):
    return [example_text(example, whole_text(TOKENIZER)) for example in examples]


def load_sft(settings):
    return load_examples(settings, TOKENIZER, None, last_turn_only=False)


def write_chats(path) -> OpenAIFormatConfig:
    rows = [
        {"chat": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {
            "chat": [
                {"role": "system", "content": "own "},
                {"role": "user", "content": "c"},
                {"role": "assistant", "content": "d"},
            ]
        },
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return OpenAIFormatConfig(
        dataset_name="OpenAIFormatDataset",
        **TASK,
        path=str(path),
        chat_key="chat",
        split_validation_size=0.0,
        seed=0,
    )


def test_prompts_with_completions_become_examples_through_the_prompt_files(tmp_path):
    (tmp_path / "prompt.txt").write_text("Q: {} A:")
    source = replace(write_jsonl(tmp_path / "d.jsonl", num_rows=2), prompt_file=str(tmp_path / "prompt.txt"))
    assert texts(load_sft(supervised(source)).train) == [f"Q: what is {row}? A:>[[{row}{EOS_TOKEN}]]" for row in (0, 1)]


def test_unusable_rows_of_sft_and_dpo_are_left_out_too(tmp_path):
    source = write_jsonl(tmp_path / "d.jsonl", num_rows=1)
    with (tmp_path / "d.jsonl").open("a") as file:
        file.write('{"q": "1+1?", "a": ["2", "two"]}\n')
    assert len(load_sft(supervised(source, bad_rows="drop")).train) == 1
    with pytest.raises(DataError, match=r"d\.jsonl:2: there are 2 answers, and SFT imitates one; name it"):
        load_sft(supervised(source))
    chats = write_chats(tmp_path / "chats.jsonl")
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write('{"chat": [{"from": "human", "value": "a"}]}\n')
    assert len(load_sft(supervised(chats, bad_rows="drop")).train) == 2
    rows = [{"prompt": "q", "chosen": "good", "rejected": other} for other in ("bad", "good")]
    pairs = with_given_rows(supervised_pairs(bad_rows="drop"), rows, None)
    assert len(load_example_pairs(pairs, TOKENIZER, None).train) == 1


def supervised_pairs(**changes) -> DpoDataConfig:
    source = BinaryPreferenceConfig(
        dataset_name="BinaryPreferenceDataset", path="pairs", prompt_key="p", chosen_key="c", rejected_key="r"
    )
    return DpoDataConfig(max_input_seq_length=64, train=source, default=DpoDefaultConfig(), **changes)


def test_conversations_get_the_system_prompt_where_they_have_none(tmp_path):
    (tmp_path / "system.txt").write_text("S ")
    source = replace(write_chats(tmp_path / "d.jsonl"), system_prompt_file=str(tmp_path / "system.txt"))
    assert texts(load_sft(supervised(source)).train) == [f"S a>[[b{EOS_TOKEN}]]", f"own c>[[d{EOS_TOKEN}]]"]


def test_a_mixture_keeps_its_parts_and_collects_what_they_keep_for_validation(tmp_path):
    mixture = SftMixtureConfig(
        dataset_name="mixture", datasets=(ARITHMETIC, write_chats(tmp_path / "d.jsonl")), weights=(1.0, 3.0)
    )
    examples = load_sft(supervised(mixture))
    assert examples.parts == (Part(20, 1.0), Part(2, 3.0))
    assert (len(examples.train), len(examples.validation)) == (22, 5)
    prompts = load(replace_all(mixture))
    assert prompts.parts == (Part(20, 1.0), Part(20, 3.0))


def replace_all(mixture: SftMixtureConfig) -> SftMixtureConfig:
    """The same with data that has questions and answers."""
    return replace(mixture, datasets=(ARITHMETIC, ARITHMETIC))


def test_a_row_that_is_too_long_is_an_error_or_left_out_as_told(tmp_path, caplog):
    source = write_jsonl(tmp_path / "d.jsonl")
    settings = supervised(source, max_input_seq_length=12)
    with pytest.raises(DataError, match=r"d\.jsonl:1: the row has 13 tokens, more than .*overlong_rows=drop"):
        load_sft(settings)
    for way in ("drop", "mask"):
        with pytest.raises(DataError, match=r"this row and all others of d are longer than .*raise the limit"):
            load_sft(replace(settings, overlong_rows=way))
    long = tmp_path / "long.jsonl"
    long.write_text('{"q": "short", "a": "x"}\n{"q": "very much longer", "a": "x"}\n')
    settings = replace(settings, train=replace(source, path=str(long)))
    kept = load_sft(replace(settings, overlong_rows="drop"))
    assert (len(kept.train), kept.overlong) == (1, {"long": 1})
    masked = load_sft(replace(settings, overlong_rows="mask"))
    assert [(len(row.token_ids), row.loss_multiplier) for row in masked.train] == [
        (len(kept.train[0].token_ids), 1),
        (4, 0),
    ]
    assert masked.overlong == {"long": 1}
    assert "1 of 2 rows of long are longer than data.max_input_seq_length=12 tokens, first " in caplog.text
    batch = collate_examples(masked.train, pad_id=0)
    assert batch.sample_mask.tolist() == [1, 0]
    assert not batch.loss_mask[1].any()


def test_a_pair_is_too_long_where_one_response_is_and_both_are_masked(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"p": "q", "c": "good", "r": "bad"}\n{"p": "q", "c": "good", "r": "very, very bad"}\n')
    source = BinaryPreferenceConfig(
        dataset_name="BinaryPreferenceDataset", **TASK, path=str(path), prompt_key="p", chosen_key="c",
        rejected_key="r", split_validation_size=0.0, seed=0,
    )  # fmt: skip
    settings = supervised(source, max_input_seq_length=12, overlong_rows="mask")
    pairs = load_example_pairs(settings, TOKENIZER, None)
    assert collate_pairs(pairs.train, pad_id=0).sample_mask.tolist() == [1, 1, 0, 0]
    assert pairs.overlong == {"pairs": 1}
    assert len(load_example_pairs(replace(settings, overlong_rows="drop"), TOKENIZER, None).train) == 1


def test_pairs_count_their_responses_and_begin_with_the_same_prompt(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"p": "q", "c": "good", "r": "bad"}\n')
    source = BinaryPreferenceConfig(
        dataset_name="BinaryPreferenceDataset",
        **TASK,
        path=str(path),
        prompt_key="p",
        chosen_key="c",
        rejected_key="r",
        split_validation_size=0.0,
        seed=0,
    )
    (pair,) = load_example_pairs(supervised(source), TOKENIZER, None).train
    assert texts([pair.chosen, pair.rejected]) == [f"q>[[good{EOS_TOKEN}]]", f"q>[[bad{EOS_TOKEN}]]"]
