"""Configurations of SFT and DPO: the shipped ones, their rules, and what becomes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_offload_rl.config.keys import walk_keys
from nemo_offload_rl.config.rules import DPO_RULES, GRPO_RULES, SFT_RULES, check_rules
from nemo_offload_rl.config.validate import validate_keys
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.data import (
    MixtureKeys,
    OpenAIFormatConfig,
)
from nemo_offload_rl.keys.master import DpoMasterConfig, SftMasterConfig
from nemo_offload_rl.runs.loading import load_dpo_config, load_grpo_config, load_sft_config
from nemo_offload_rl.utils.config import load_config

CONFIGS = Path("examples/configs")
SFT, DPO = CONFIGS / "sft.yaml", CONFIGS / "dpo.yaml"
ARITHMETIC = "{dataset_name: arithmetic, seed: 1, num_digits: 1, operators: ['+'], size: 9, holdout: 1}"
CHATS = "{dataset_name: OpenAIFormatDataset, path: a.jsonl, chat_key: messages, split_validation_size: 0, seed: 1}"

# rule name -> file, overrides that break it, and words that its message must have
BROKEN: dict[str, tuple[Path, list[str], str]] = {
    "longest_row_fits_the_policy": (SFT, ["data.max_input_seq_length=4097"], "above policy.max_total_sequence_length"),
    "validation_has_rows": (SFT, ["data.train.split_validation_size=0"], "sft.val_period=0"),
    "validation_sets_are_used_whole": (
        SFT,
        [f"data.validation={CHATS.replace('_size: 0', '_size: 0.1')}"],
        "set data.validation.split_validation_size to 0",
    ),
    "validation_batch_divides_over_workers": (
        DPO,
        ["cluster.gpus_per_node=3", "policy.train_global_batch_size=129"],
        "dpo.val_global_batch_size 32 does not divide by the 3",
    ),
    "mixtures_have_their_weights": (
        SFT,
        ["~data.train", f"+data.train={{dataset_name: mixture, weights: [1], datasets: [{ARITHMETIC}, {CHATS}]}}"],
        "write one weight for each",
    ),
    "data_sets_name_no_environment": (SFT, ["++data.train.env_name=math"], "data.train.env_name is set"),
    "pairs_fit_a_micro_batch_made_by_tokens": (
        DPO, ["policy.sequence_packing.train_mb_tokens=4095"], "below twice policy.max_total_sequence_length 2048"
    ),
    "the_loss_has_a_term": (DPO, ["dpo.preference_loss_weight=0"], "both 0"),
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("sft*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_sft_configuration_passes_every_check(path: Path) -> None:
    load_sft_config(path)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("dpo*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_dpo_configuration_passes_every_check(path: Path) -> None:
    load_dpo_config(path)


def test_every_rule_of_sft_and_dpo_is_broken_here() -> None:
    known = {rule.__name__ for rule in GRPO_RULES}
    assert {rule.__name__ for rule in (*SFT_RULES, *DPO_RULES)} - known == set(BROKEN) - known


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_ends_in_one_line_with_its_fix(name: str) -> None:
    path, overrides, words = BROKEN[name]
    rules: Any = SFT_RULES if path == SFT else DPO_RULES
    schema: Any = SftMasterConfig if path == SFT else DpoMasterConfig
    cfg = validate_keys(load_config(path, overrides), schema)
    message = {rule.__name__: rule for rule in rules}[name](cfg)
    assert message is not None
    assert words in message
    assert "\n" not in message
    assert ";" in message, "the fix follows a semicolon"
    with pytest.raises(ConfigError):
        check_rules(cfg, rules)


def test_rules_of_training_hold_for_sft_and_dpo_too() -> None:
    with pytest.raises(ConfigError, match=r"policy\.optimizer\.kwargs\.weight_decai is not an argument"):
        load_sft_config(SFT, ["+policy.optimizer.kwargs.weight_decai=1"])
    with pytest.raises(ConfigError, match=r"val:loss, but dpo\.val_period is 0"):
        load_dpo_config(DPO, ["dpo.val_period=0"])


@pytest.mark.parametrize("schema", [SftMasterConfig, DpoMasterConfig], ids=lambda schema: schema.__name__)
def test_every_key_is_documented(schema: type) -> None:
    keys = list(walk_keys(schema))
    assert [key.path for key in keys if not key.description] == []
    assert [key.path for key in keys if key.description and not key.description.endswith((".", "`"))] == []


def test_keys_of_generation_are_unknown_and_nothing_of_them_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"policy\.generation: unknown key"):
        load_sft_config(SFT, ["+policy.generation={}"])
    policy = load_sft_config(SFT).worker
    assert (policy.colocated, policy.engine_memory_share, policy.logprob_temperature) == (False, 0.0, 1.0)


def test_batch_sizes_of_dpo_count_pairs() -> None:
    overrides = ["policy.train_global_batch_size=6", "policy.train_micro_batch_size=3", "policy.logprob_batch_size=5"]
    policy = load_dpo_config(DPO, overrides).worker
    assert policy.train_global_batch_size == 12
    assert policy.train_micro_batch_size == 6
    assert policy.logprob_batch_size == 10


def test_data_sets_of_a_mixture_inherit_the_default_task() -> None:
    both = f"[{ARITHMETIC}, {CHATS}]"
    overrides = ["~data.train", "+data.train={dataset_name: mixture, weights: [1, 0.5], datasets: " + both + "}"]
    train = load_sft_config(SFT, [*overrides, "data.default.system_prompt_file=s.txt"]).data.train
    assert isinstance(train, MixtureKeys)
    assert train.weights == (1.0, 0.5)
    assert isinstance(train.datasets[1], OpenAIFormatConfig)
    assert [source.system_prompt_file for source in train.datasets] == ["s.txt", "s.txt"]
    with pytest.raises(ConfigError, match=r"data\.train\.datasets\.1\.chat_kei: unknown key; did you mean .*chat_key"):
        load_sft_config(SFT, [override.replace("chat_key", "chat_kei") for override in overrides])


def test_a_configuration_of_another_algorithm_is_refused_with_its_launch_script() -> None:
    with pytest.raises(ConfigError, match=r"sft\.yaml configures sft, not dpo; start it with examples/run_sft\.py"):
        load_dpo_config(SFT)
    with pytest.raises(ConfigError, match=r"configures dpo, not grpo; .*run_dpo\.py"):
        load_grpo_config(DPO)
    with pytest.raises(ConfigError, match=r"sft\.val_period: missing.*defaults: sft\.yaml"):
        load_sft_config(SFT, ["~sft.val_period"])
