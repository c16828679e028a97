from __future__ import annotations

import copy
import re
from functools import cache, reduce
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nemo_offload_rl.config.validate import missing_key_message, validate_keys
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import GrpoMasterConfig
from nemo_offload_rl.runs.loading import load_grpo_config
from nemo_offload_rl.runs.rollouts import counts_other_probabilities, has_needless_logprobs
from nemo_offload_rl.utils.config import flatten_keys, load_config

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


def test_text_on_the_command_line_is_text_and_typed_keys_keep_their_types() -> None:
    texts = {
        "logger.log_dir": "runs/007 a=b #1, ü",
        "env.arithmetic.retry_message": "[x, y] = 1e3",
        "logger.wandb.name": "007",
    }
    overrides = [f"{key}={text}" for key, text in texts.items()]
    config = load_grpo_config(CPU, [*overrides, "grpo.max_rollout_turns=2", "policy.max_grad_norm=2", "grpo.seed=7"])
    assert config.logger.wandb is not None
    found = (config.logger.log_dir, config.env["arithmetic"].retry_message, config.logger.wandb.name)
    assert found == tuple(texts.values())
    assert config.policy.max_grad_norm == 2.0 and config.grpo.seed == 7


@pytest.mark.parametrize("plus", ["", "++"])
def test_a_key_without_a_use_here_is_refused_with_what_to_do(plus: str) -> None:
    told = message(f"{plus}policy.reference_dir=/scratch")
    assert told.startswith("policy.reference_dir: removed; leave it out: the reference is in host memory")
    told = message(f"{plus}policy.use_coalesced_optimizer_offload=true")
    assert "leave it out: with policy.use_pinned_optimizer_offload, which is on by default, all" in told


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
        ("loss_fn.ratio_clip_max=inf", "loss_fn.ratio_clip_max: given inf, wanted finite number >= 0"),
        ("policy.max_grad_norm=nan", "policy.max_grad_norm: given nan, wanted finite number > 0 or null"),
        (
            "loss_fn.reference_policy_kl_type=k4",
            "given the text 'k4', wanted one of k1, k2, k3, k1+, k3+, k1w, k2w, k3w",
        ),
        ("policy.precision=null", "policy.precision: given null, wanted one of float32, bfloat16, float16"),
        (
            "policy.megatron_cfg.optimizer.exp_avg_dtype=float16",
            "optimizer.exp_avg_dtype: given the text 'float16', wanted one of float32, bfloat16",
        ),
        ("policy.megatron_cfg.optimizer.exp_avg_sq_dtype=fp8", "given the text 'fp8', wanted one of float32, bfloat16"),
        ("policy.tokenizer=x", "policy.tokenizer: given the text 'x', wanted mapping"),
        ("data.train.operators=[/]", "data.train.operators.0: given the text '/', wanted one of +, -, *"),
        ("data.train.dataset_name=foo", "data.train.dataset_name: given 'foo', wanted one of 'arithmetic'"),
        ("~data.train.dataset_name", "data.train.dataset_name: missing"),
        ("~grpo.val_period", "val_period"),
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


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["policy.train_global_batch_size=64"], False),  # several updates
        (["loss_fn.force_on_policy_ratio=true"], False),
        (["loss_fn.use_cispo=true"], False),
        (["loss_fn.disable_ppo_ratio=true"], False),
        (["grpo.seq_logprob_error_threshold=2"], False),
        (["policy.dropout=true"], False),
        (["policy.dtensor_cfg.lora_cfg.enabled=true"], True),
        (["policy.dtensor_cfg.lora_cfg.enabled=true", "policy.dtensor_cfg.lora_cfg.dropout=0.1"], False),
    ],
)
def test_a_logprob_pass_is_needless_where_the_ratio_is_1_and_nothing_else_reads_it(overrides, expected) -> None:
    assert has_needless_logprobs(load_grpo_config(CPU, overrides)) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], False),
        (["policy.generation.vllm_cfg.precision=fp8"], True),
        (["policy.generation.vllm_cfg.kv_cache_dtype=fp8"], True),
        (["policy.generation.vllm_cfg.precision=fp8", "loss_fn.use_importance_sampling_correction=true"], False),
    ],
)
def test_samples_of_an_engine_in_8_bits_ask_for_a_correction(overrides, expected) -> None:
    assert counts_other_probabilities(load_grpo_config(CPU, overrides)) == expected


# ---------------------------------------------------------------- hints


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "grpo.val_start_at=-1",
            "grpo.val_start_at: unknown key; grpo has ",
        ),  # not val_at_start, which is not a number
        ("grpo.val_at_strat=true", "did you mean grpo.val_at_start?"),
        (
            "policy.dtensor_cfg.lora_cfg.lora_A_init_method=xavier",
            "did you mean policy.dtensor_cfg.lora_cfg.lora_A_init?",
        ),
        ("policy.dtensor_cfg.moe_router_dtype=null", "unknown key; policy.dtensor_cfg has "),
        ("policy.nonsense=1", "policy.nonsense: unknown key; policy has "),
        ("data.train.split=a", "data.train.split: a key of another kind of data.train than this one"),
        (
            "data.train.env_name=no",
            "data.train.env_name: not set by the file; write +data.train.env_name",
        ),
        (
            "policy.optimizer.kwargs.foreach=true",
            "not set by the file; write +policy.optimizer.kwargs.foreach to add it",
        ),
        ("data.train.datasets.0.path=x", "data.train.datasets: a key of another kind of data.train than this one"),
        ("policy.scheduler.7.name=x", "policy.scheduler has 0 entries and none with the index 7; set the whole list"),
        ("policy.optimizer.kwargs.lr.x=1", "policy.optimizer.kwargs.lr is the value"),
        ("data.train.env_name=math", "not set by the file; write +data.train.env_name to add it"),
    ],
)
def test_a_hint_names_a_key_that_takes_the_value_and_a_plus_only_where_one_may_be_added(override, expected) -> None:
    text = message(override)
    assert expected in text
    assert ("write +" in text) == ("write +" in expected)


PATHS = [key for key in flatten_keys(raw()) if "." in key]
VALUES = (
    st.none() | st.booleans() | st.integers(-1, 9) | st.floats(0, 1) | st.sampled_from(["x", "mean", "bfloat16", []])
)


@st.composite
def misspelt(draw) -> tuple[str, Any]:
    """A key with a letter lost or twice, in its own section or another one, and a value of its own or another's."""
    path = draw(st.sampled_from(PATHS))
    parent, _, leaf = path.rpartition(".")
    at = draw(st.integers(0, len(leaf) - 1))
    leaf = draw(st.sampled_from([leaf, leaf[:at] + leaf[at + 1 :], leaf[:at] + leaf[at] + leaf[at:], f"{leaf}_x"]))
    section = draw(st.just(parent) | st.sampled_from([path.rpartition(".")[0] for path in PATHS]))
    own = reduce(lambda node, part: node[int(part)] if isinstance(node, list) else node[part], path.split("."), raw())
    return f"{section}.{leaf}" if leaf else f"{section}.q", draw(st.just(own) | VALUES)


def problems_at(values: dict[str, Any], path: str) -> list[str]:
    try:
        validate_keys(values, GrpoMasterConfig)
    except ConfigError as error:
        return [line for line in str(error).split("; also ") if line.startswith((f"{path}:", f"{path}."))]
    return []


@settings(max_examples=20)
@given(misspelt())
def test_what_a_hint_says_passes_the_check_once_it_is_done(case: tuple[str, Any]) -> None:
    path, value = case
    if path in PATHS:
        return
    plain = copy.deepcopy(raw())
    text = missing_key_message(GrpoMasterConfig, plain, path, value)
    assert "\n" not in text and plain == raw()
    added, meant = re.search(r"write \+(\S+) to add", text), re.search(r"did you mean (\S+)\?", text)
    for found in filter(None, (added, meant)):
        changed = load_config_with(found[1], value)
        assert problems_at(changed, found[1]) == [], text
    if added is None:
        refused = load_config_with(path, value)
        assert problems_at(refused, path) != [], "an addition would have been right"


def load_config_with(path: str, value: Any) -> dict[str, Any]:
    values = OmegaConf.create(copy.deepcopy(raw()))
    OmegaConf.update(values, path, value, merge=False, force_add=True)
    return OmegaConf.to_container(values)  # type: ignore[return-value]
