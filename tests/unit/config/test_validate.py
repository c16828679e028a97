from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest

from nemo_offload_rl.config import load_grpo_config
from nemo_offload_rl.config.schema import GrpoMasterConfig
from nemo_offload_rl.config.validate import validate_keys
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.utils.config import load_config

CPU = "tests/unit/config/cpu.yaml"


@cache
def raw() -> dict[str, Any]:
    return load_config(CPU)


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_grpo_config(CPU, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "+policy.trian_micro_batch_size=4",
            "policy.trian_micro_batch_size: unknown key; did you mean policy.train_micro",
        ),
        ("++policy.x=y", "policy.x: unknown key; policy has "),
        ("+grpo.train_global_batch_size=4", "did you mean policy.train_global_batch_size?"),
        ("+env.arithmetic.num_wokers=3", "did you mean env.arithmetic.num_workers?"),
        ("+data.train.num_digit=3", "did you mean data.train.num_digits?"),
        ("++policy.scheduler=[{nam: x}]", "policy.scheduler.0.nam: unknown key; did you mean policy.scheduler.0.name?"),
        ("+nonsense=3", "nonsense: unknown key; the configuration has "),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(override: str, expected: str) -> None:
    assert expected in message(override)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("grpo.max_num_steps=abc", "grpo.max_num_steps: given the text 'abc', wanted integer >= 1"),
        ("grpo.max_num_steps=1.5", "grpo.max_num_steps: given 1.5, wanted integer >= 1"),
        ("grpo.max_num_steps=true", "grpo.max_num_steps: given true, wanted integer >= 1"),
        ("grpo.max_num_steps=0", "grpo.max_num_steps: given 0, wanted integer >= 1"),
        ("grpo.val_at_start=1", "grpo.val_at_start: given 1, wanted true or false"),
        ("loss_fn.ratio_clip_min=2", "loss_fn.ratio_clip_min: given 2, wanted number >= 0 and <= 1"),
        ("loss_fn.ratio_clip_c=0.5", "loss_fn.ratio_clip_c: given 0.5, wanted number > 1 or null"),
        ("loss_fn.reference_policy_kl_type=k4", "given the text 'k4', wanted one of k1, k2, k3, k1+, k3+"),
        ("policy.precision=null", "policy.precision: given null, wanted one of float32, bfloat16, float16"),
        ("policy.tokenizer=x", "policy.tokenizer: given the text 'x', wanted mapping"),
        ("data.train.operators=[/]", "data.train.operators.0: given the text '/', wanted one of +, -, *"),
        ("data.train.dataset_name=foo", "data.train.dataset_name: given 'foo', wanted one of 'arithmetic'"),
        ("~data.train.dataset_name", "data.train.dataset_name: missing"),
        ("~grpo.seed", "seed"),
        ("~data.train.size", "data.train.size: missing; set it"),
        ("env.arithmetic.num_workers=-1", "env.arithmetic.num_workers: given -1, wanted integer >= 0"),
    ],
)
def test_a_wrong_value_says_what_was_given_and_what_is_wanted(override: str, expected: str) -> None:
    assert expected in message(override)


def test_a_misspelt_key_in_a_file_gives_one_problem_and_not_a_missing_key_too() -> None:
    values = copy.deepcopy(raw())
    values["grpo"]["max_num_stepz"] = values["grpo"].pop("max_num_steps")
    with pytest.raises(ConfigError) as caught:
        validate_keys(values, GrpoMasterConfig)
    assert str(caught.value) == "grpo.max_num_stepz: unknown key; did you mean grpo.max_num_steps?"


def test_many_problems_stay_in_one_line_with_their_number() -> None:
    values = copy.deepcopy(raw())
    for key in ("num_prompts_per_step", "max_num_steps", "max_num_epochs", "val_period", "val_batch_size"):
        values["grpo"][key] = "x"
    with pytest.raises(ConfigError, match="and 2 more problems"):
        validate_keys(values, GrpoMasterConfig)


def test_an_integer_is_accepted_where_a_number_is_wanted() -> None:
    assert load_grpo_config(CPU, ["policy.max_grad_norm=null"]).policy.max_grad_norm is None
    config = load_grpo_config(CPU, ["loss_fn.ratio_clip_max=1", "policy.max_grad_norm=2"])
    assert config.policy.max_grad_norm == 2.0


def test_the_section_of_weights_and_biases_may_be_deleted() -> None:
    assert load_grpo_config(CPU, ["~logger.wandb"]).logger.wandb is None


def test_the_megatron_section_may_be_deleted() -> None:
    load_grpo_config(CPU, ["~policy.megatron_cfg"])
