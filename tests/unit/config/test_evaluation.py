"""The configuration of an evaluation: the shipped one, its rules, and which folder a checkpoint stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_offload_rl.config.convert import model_folder
from nemo_offload_rl.config.rules.evaluation import EVAL_RULES
from nemo_offload_rl.errors import ConfigError, DataError
from nemo_offload_rl.keys.published import MathProblemsConfig
from nemo_offload_rl.runs.evaluation import run_eval
from nemo_offload_rl.runs.loading import load_eval_config, load_grpo_config

EVAL = Path("examples/configs/eval.yaml")
BROKEN: dict[str, tuple[list[str], str]] = {
    "k_is_at_most_the_number_of_responses": (["eval.k_value=2"], "eval.k_value 2 is above"),
    "several_responses_are_sampled": (["eval.num_tests_per_prompt=4"], "all responses to a prompt are the same"),
    "prompts_leave_room_for_a_response": (["data.max_input_seq_length=2048"], "leaves no room for a response"),
    "evaluated_environments_exist": (["data.default.env_name=chess"], "scored by the environment chess"),
    "every_row_is_evaluated": (["+data.validation.split_validation_size=0.1"], "all rows are evaluated"),
    "evaluating_engine_fits_its_devices": (["cluster.gpus_per_node=0"], "kv_cache_memory_gib is null"),
    "evaluation_serves_no_endpoint": (["+generation.vllm_cfg.expose_http_server=true"], "serves nothing over HTTP"),
    "evaluation_kwargs_are_allowed": (["+generation.vllm_kwargs.load_format=dummy"], "generation.vllm_kwargs.load_f"),
}


def test_the_shipped_evaluation_passes_every_check_and_loads_the_models_own_weights() -> None:
    config = load_eval_config(EVAL)
    assert config.engine.model_name == config.tokenizer.name == config.generation.model_name
    assert config.engine.vllm_kwargs == {"load_format": "auto"}
    assert isinstance(config.data.validation, MathProblemsConfig)
    assert config.data.validation.env_name == "math"


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_says_which_keys_to_change(rule: str) -> None:
    overrides, message = BROKEN[rule]
    with pytest.raises(ConfigError) as caught:
        load_eval_config(EVAL, overrides)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_rule_of_evaluations_is_broken_once() -> None:
    assert {rule.__name__ for rule in EVAL_RULES} == set(BROKEN)


def test_greedy_and_sampled_differ_in_the_temperature_alone() -> None:
    more = ["generation.temperature=0.7", "generation.top_p=0.9", "generation.top_k=5", "eval.num_tests_per_prompt=4"]
    generation = load_eval_config(EVAL, more).generation
    sampled, greedy = generation.sampling(greedy=False), generation.sampling(greedy=True)
    assert (sampled.temperature, sampled.top_p, sampled.top_k) == (0.7, 0.9, 5)
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, None)
    assert sampled.max_new_tokens == greedy.max_new_tokens == 2048


def test_a_run_of_another_kind_is_told_its_script() -> None:
    with pytest.raises(ConfigError, match=r"configures eval, not grpo; start it with examples/run_eval\.py"):
        load_grpo_config(EVAL)
    with pytest.raises(ConfigError, match=r"configures grpo, not eval; start it with examples/run_grpo\.py"):
        load_eval_config("examples/configs/grpo_math_1B.yaml")


def make(folder: Path, *files: str) -> None:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


def test_a_checkpoint_stands_for_its_model_folder_and_a_run_for_its_newest(tmp_path: Path) -> None:
    make(tmp_path, "step_9/hf/config.json", "step_9/progress.json", "step_10/hf/config.json", "step_11.partial/x")
    assert model_folder(str(tmp_path)) == str(tmp_path / "step_10/hf")
    assert model_folder(str(tmp_path / "step_9")) == str(tmp_path / "step_9/hf")
    assert model_folder(str(tmp_path / "step_9/hf")) == str(tmp_path / "step_9/hf")
    assert model_folder("Qwen/Qwen2.5-1.5B") == "Qwen/Qwen2.5-1.5B"
    make(tmp_path, "step_12/progress.json", "other/readme")
    with pytest.raises(ConfigError, match=r"checkpoint step_12 has no model folder hf/.*save_consolidated=true"):
        model_folder(str(tmp_path))
    with pytest.raises(ConfigError, match=r"is a folder without config\.json and no checkpoint"):
        model_folder(str(tmp_path / "other"))


def test_a_folder_for_results_that_cannot_be_written_is_told_before_anything_is_sampled(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = load_eval_config(EVAL, [f"eval.save_path={tmp_path}/file/out"])
    with pytest.raises(
        ConfigError, match=r"eval\.save_path .*/file/out cannot be written: Not a directory; name another"
    ):
        run_eval(config)


def test_errors_of_code_that_training_shares_name_the_keys_of_an_evaluation(tmp_path: Path) -> None:
    config = load_eval_config(EVAL, ["eval.save_path=null", f"tokenizer.name={tmp_path}"])
    with pytest.raises(DataError, match=r"no tokenizer can be loaded from .*; set tokenizer\.name to a folder"):
        run_eval(config)
