from dataclasses import replace

import pytest
from tiny_models import make_tokenizer

from nemo_offload_rl.data.datasets import load_prompts
from nemo_offload_rl.data.settings import ArithmeticSettings, DataSettings, ResponseDatasetSettings, TaskSettings
from nemo_offload_rl.errors import DataError

TASK = TaskSettings(
    prompt_file=None, system_prompt_file=None, processor="math_hf_data_processor", env_name="arithmetic"
)
ARITHMETIC = ArithmeticSettings(task=TASK, num_digits=2, operators=("+",), size=20, holdout=5, seed=0)
TOKENIZER = make_tokenizer()
TOKENIZER.chat_template = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def load(train=ARITHMETIC, validation=None, max_input_seq_length=64, chat_template_kwargs=None):
    settings = DataSettings(max_input_seq_length=max_input_seq_length, shuffle=True, train=train, validation=validation)
    return load_prompts(settings, TOKENIZER, chat_template_kwargs)


def write_jsonl(path, num_rows=4) -> ResponseDatasetSettings:
    path.write_text("".join(f'{{"q": "what is {row}?", "a": "{row}"}}\n' for row in range(num_rows)))
    return ResponseDatasetSettings(
        task=TASK, path=str(path), input_key="q", output_key="a", split_validation_size=0.0, seed=0
    )


def test_prompts_are_rendered_with_the_chat_template_and_carry_answer_and_environment():
    prompts = load()
    assert (len(prompts.train), len(prompts.validation)) == (20, 5)
    for prompt in prompts.train:
        assert prompt.text.endswith("=>")  # the template's generation prompt
        assert TOKENIZER.decode(prompt.token_ids) == prompt.text
        assert prompt.reference_answer == str(sum(prompt.metadata["operands"]))
        assert prompt.env_name == "arithmetic"


def test_prompt_file_and_system_prompt_surround_the_question(tmp_path):
    (tmp_path / "prompt.txt").write_text('Solve {} and answer as {"answer": ...}.')
    (tmp_path / "system.txt").write_text("Be brief. ")
    task = replace(TASK, prompt_file=str(tmp_path / "prompt.txt"), system_prompt_file=str(tmp_path / "system.txt"))
    source = replace(write_jsonl(tmp_path / "d.jsonl"), task=task)
    first = load(source).train[0]
    assert first.text == 'Be brief. Solve what is 0? and answer as {"answer": ...}.>'


@pytest.mark.parametrize(("template", "count"), [("no place", 0), ("{} and {}", 2)])
def test_a_prompt_file_needs_exactly_one_place_for_the_question(tmp_path, template, count):
    (tmp_path / "prompt.txt").write_text(template)
    source = replace(ARITHMETIC, task=replace(TASK, prompt_file=str(tmp_path / "prompt.txt")))
    with pytest.raises(DataError, match=rf"has {count} places marked \{{\}}"):
        load(source)


def test_a_missing_prompt_file_and_an_unknown_processor_are_errors():
    with pytest.raises(DataError, match=r"prompt_file nowhere\.txt cannot be read"):
        load(replace(ARITHMETIC, task=replace(TASK, prompt_file="nowhere.txt")))
    with pytest.raises(DataError, match=r"processor 'magic' is unknown; .*math_hf_data_processor"):
        load(replace(ARITHMETIC, task=replace(TASK, processor="magic")))


def test_a_prompt_longer_than_the_limit_is_an_error_that_names_the_row(tmp_path):
    source = write_jsonl(tmp_path / "d.jsonl")
    assert len(load(source, max_input_seq_length=11).train) == 4
    with pytest.raises(DataError, match=r"d\.jsonl:1: the prompt has 11 tokens, more than data\.max_inp.*=10"):
        load(source, max_input_seq_length=10)


def test_a_validation_set_of_its_own_is_used_whole(tmp_path):
    prompts = load(ARITHMETIC, validation=write_jsonl(tmp_path / "v.jsonl", num_rows=3))
    assert [prompt.reference_answer for prompt in prompts.validation] == ["0", "1", "2"]


def test_a_data_set_that_keeps_every_row_for_validation_is_an_error(tmp_path):
    with pytest.raises(DataError, match=r"data\.train has no rows"):
        load(replace(write_jsonl(tmp_path / "d.jsonl", num_rows=1), split_validation_size=0.9))
