from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from nemo_rl_files import distillation_file
from tiny_models import VOCAB_SIZE, make_tokenizer, qwen3_config, save_model_folder

from nemo_offload_rl.config.rules import DISTILLATION_RULES, GRPO_RULES
from nemo_offload_rl.config.validate import validate_keys
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import DistillationMasterConfig
from nemo_offload_rl.runs.distillation import check_vocabularies
from nemo_offload_rl.runs.loading import load_distillation_config, load_grpo_config
from nemo_offload_rl.utils.config import load_config

CONFIGS = sorted(Path("examples/configs").glob("distillation*.yaml"))
CPU = "examples/configs/distillation_arithmetic_cpu.yaml"
MEGATRON = "examples/configs/distillation_math_megatron.yaml"

BROKEN = {
    "a_top_k_is_needed_for_what_is_outside_of_it": (
        CPU,
        ["loss_fn.zero_outside_topk=true", "distillation.topk_logits_k=null"],
        "which compares whole distributions",
    ),
    "the_teachers_tensor_parallel_size_divides_the_workers": (
        CPU,
        ["teacher.dtensor_cfg.tensor_parallel_size=2"],
        "does not divide the 1 policy workers",
    ),
    "a_megatron_teacher_is_spread_as_the_policy": (
        MEGATRON,
        ["teacher.dtensor_cfg.tensor_parallel_size=2"],
        "spreads the teacher as policy.megatron_cfg says",
    ),
    "a_megatron_teacher_has_no_streamed_layers": (
        MEGATRON,
        ["teacher.stream_layers=true"],
        "keeps a model in few large buffers",
    ),
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_passes_every_check(path: Path) -> None:
    config = load_distillation_config(path)
    teacher = config.teacher_worker.model
    assert teacher.model_name == config.teacher.model_name != config.worker.model_name
    assert teacher.optimizer is None and teacher.logprob_temperature == config.worker.logprob_temperature
    assert teacher.backend.section == config.worker.backend.section


def test_the_exemplar_sets_every_required_key() -> None:
    validate_keys(load_config("examples/configs/distillation_math.yaml"), DistillationMasterConfig)


def test_every_rule_of_distillation_is_broken_here() -> None:
    own = {rule.__name__ for rule in DISTILLATION_RULES} - {rule.__name__ for rule in GRPO_RULES}
    assert own == set(BROKEN)


@pytest.mark.parametrize(("path", "overrides", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_ends_in_one_line_with_its_fix(path: str, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        load_distillation_config(path, overrides)
    assert "\n" not in str(raised.value) and ";" in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["loss_fn.mixed_kl_weight=1.5"], "loss_fn.mixed_kl_weight: given 1.5"),
        (["loss_fn.kl_type=jsd"], "loss_fn.kl_type: given the text 'jsd'"),
        (["distillation.topk_logits_k=0"], "distillation.topk_logits_k: given 0"),
        (["policy.train_global_batch_size=100"], "distillation.num_prompts_per_step 64"),
        (["policy.generation.temperature=0"], "no distribution to learn from"),
        (["checkpointing.enabled=true", "checkpointing.metric_name=train:shaped_reward_mean"], "does not measure"),
        (["+grpo.seed=1"], "grpo"),
    ],
)
def test_bad_values_are_told_by_the_keys_of_distillation(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_distillation_config(CPU, overrides)


def test_files_of_another_algorithm_are_told_apart() -> None:
    with pytest.raises(ConfigError, match=r"start it with examples/run_distillation.py"):
        load_grpo_config(CPU)
    with pytest.raises(ConfigError, match=r"start it with examples/run_grpo.py"):
        load_distillation_config("examples/configs/grpo_arithmetic_cpu.yaml")


def test_a_file_of_nemo_rl_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(yaml.safe_dump(distillation_file()))
    config = load_distillation_config(tmp_path / "theirs.yaml", ["distillation.topk_logits_k=5"])
    assert (config.teacher_worker.topk, config.teacher.model_name) == (5, "meta-llama/Llama-3.2-3B")
    assert config.loss_fn.mixed_kl_weight == 0.25


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    save_model_folder(tmp_path / "student", 0)
    save_model_folder(tmp_path / "teacher", 1, qwen3_config(num_layers=3))

    def check(*overrides: str) -> None:
        names = [f"policy.model_name={tmp_path / 'student'}", f"teacher.model_name={tmp_path / 'teacher'}"]
        check_vocabularies(load_distillation_config(CPU, [*names, *overrides]))

    check()
    with pytest.raises(ConfigError, match=f"but the vocabulary has {VOCAB_SIZE} tokens; lower it"):
        check("distillation.topk_logits_k=400")
    with pytest.raises(ConfigError, match=rf"vocab_size of 400 .* one of {VOCAB_SIZE}"):
        check("teacher.hf_config_overrides={vocab_size: 400}")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path / "teacher")
    with pytest.raises(ConfigError, match=r"number tokens differently \(1 entries, 'another' among them\)"):
        check()


def test_what_is_inherited_can_be_taken_away(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text("a: {b: 1, c: {d: 2}}\ne: {f: 3}\n")
    (tmp_path / "child.yaml").write_text("defaults: parent.yaml\na: {c: {_remove_: true}}\ne: {_remove_: true}\n")
    (tmp_path / "grandchild.yaml").write_text("defaults: child.yaml\ne: {g: 4}\n")
    assert load_config(tmp_path / "child.yaml") == {"a": {"b": 1}}
    assert load_config(tmp_path / "grandchild.yaml") == {"a": {"b": 1}, "e": {"g": 4}}
