"""The demo's ingredients; the demo as a whole is a functional test."""

import importlib.util
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest

from nemo_offload_rl.data.arithmetic import load_arithmetic
from nemo_offload_rl.data.tokenizer import load_tokenizer
from nemo_offload_rl.environments.interfaces import Response
from nemo_offload_rl.environments.math import ArithmeticEnvironment
from nemo_offload_rl.keys.data import ArithmeticConfig, TokenizerConfig

TASK = {"processor": "math_hf_data_processor", "env_name": "arithmetic"}


def load_script(name: str) -> ModuleType:
    path = Path(__file__).parents[3] / "examples" / "demo" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demonstrations = load_script("demonstrations")
make_model = load_script("make_model")


@pytest.mark.parametrize(
    ("left", "right", "careful", "forgetful"),
    [
        (37, 58, "15,9=95", "15,8=85"),
        (99, 99, "18,19=198", "18,18=88"),
        (8, 5, "13=13", "13=3"),
        (5, 97, "12,10=102", "12,9=92"),
        (11, 22, "3,3=33", "3,3=33"),
    ],
)
def test_sums_are_worked_out_column_by_column(left, right, careful, forgetful):
    assert demonstrations.work_out(left, right) == careful
    assert demonstrations.work_out(left, right, forget_carries=True) == forgetful


def test_careful_demonstrations_are_all_right_and_forgetful_ones_only_where_nothing_is_carried():
    settings = ArithmeticConfig(
        dataset_name="arithmetic", **TASK, num_digits=2, operators=("+",), size=500, holdout=0, seed=1
    )
    rows = load_arithmetic(settings).train

    def share_correct(forgetful_share: float) -> float:
        drawn = islice(demonstrations.demonstrate(rows, forgetful_share=forgetful_share, seed=2), 1000)
        responses = [
            Response(
                prompt_text=row.question,
                text=row.answer,
                truncated=False,
                reference_answer=str(sum(row.metadata["operands"])),
                metadata=row.metadata,
            )
            for row in drawn
        ]
        return sum(score.correct for score in ArithmeticEnvironment().step(responses)) / len(responses)

    assert share_correct(0.0) == 1.0
    assert 0.2 < share_correct(1.0) < 0.4  # 0.55 ** 2 of all additions carry nowhere


def test_the_model_folder_has_a_character_tokenizer_with_a_chat_template_and_seeded_weights(tmp_path):
    make_model.write_model_folder(tmp_path / "a", seed=1)
    make_model.write_model_folder(tmp_path / "b", seed=1)
    make_model.write_model_folder(tmp_path / "c", seed=2)
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"] != weights["c"]

    settings = TokenizerConfig(name=str(tmp_path / "a"), chat_template=None, chat_template_kwargs=None)
    tokenizer = load_tokenizer(settings)
    messages = [{"role": "user", "content": "37+58="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<user>37+58=<assistant>"
    assert len(tokenizer.encode(text, add_special_tokens=False)) == 8
    answer = tokenizer.encode("15,9=95", add_special_tokens=False)
    assert len(answer) == 7
    assert tokenizer.decode([*answer, tokenizer.eos_token_id], skip_special_tokens=True) == "15,9=95"


def test_of_each_pair_the_better_answer_is_right_and_the_worse_one_is_wrong():
    rows = demonstrations.problems(seed=3).validation
    for row, pair in zip(rows, demonstrations.pairs(rows), strict=True):
        assert pair["prompt"] == row.question
        assert pair["chosen"].rpartition("=")[2] == row.answer
        assert pair["rejected"].rpartition("=")[2] != row.answer
