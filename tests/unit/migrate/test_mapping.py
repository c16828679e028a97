"""Small files in NeMo-RL's format, written here, and what becomes of their keys."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from nemo_rl_files import distillation_file, dpo_file, eval_file, grpo_file, sft_file

from nemo_offload_rl.config.keys import known_keys
from nemo_offload_rl.config.nemo_rl import is_nemo_rl
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import (
    DistillationMasterConfig,
    DpoMasterConfig,
    EvalMasterConfig,
    GrpoMasterConfig,
    SftMasterConfig,
)
from nemo_offload_rl.migrate import migrate, migrate_file
from nemo_offload_rl.migrate.count import check
from nemo_offload_rl.migrate.draft import CONVERSIONS, at, leaves, matches, put
from nemo_offload_rl.migrate.mapping import EXEMPLARS, rule_for
from nemo_offload_rl.migrate.policy import is_trained, model_type
from nemo_offload_rl.migrate.report import Outcome
from nemo_offload_rl.migrate.rules import FEATURES, IGNORED, RENAMED, SAME, Off, Renamed, Same
from nemo_offload_rl.utils.config import load_config

FILES = {"grpo": grpo_file, "sft": sft_file, "dpo": dpo_file, "distillation": distillation_file, "eval": eval_file}
SCHEMAS = {
    "grpo": GrpoMasterConfig,
    "sft": SftMasterConfig,
    "dpo": DpoMasterConfig,
    "distillation": DistillationMasterConfig,
    "eval": EvalMasterConfig,
}


AHEAD = {
    "policy__generation__colocated": {"enabled": False, "resources": {"gpus_per_node": 1, "num_nodes": 1}},
    "policy__generation__vllm_cfg__async_engine": True,
    "loss_fn__use_importance_sampling_correction": True,
    "cluster__gpus_per_node": 2,
}
ONE_AHEAD = {
    "enabled": True,
    "order": "data",
    "max_trajectory_age_steps": 1,
    "in_flight_weight_updates": False,
    "recompute_kv_cache_after_weight_updates": False,
    "paused_kv": "recompute",
    "paused_kv_host_gib": 8.0,
}


ENGINE = "policy.generation.vllm_cfg"
EIGHT_BITS = {
    "policy__generation__vllm_cfg__use_deep_gemm": True,
    "policy__generation__vllm_cfg__quantization_ignored_layer_kws": ["a_proj"],
}


FUSED_ADAM = {
    "name": "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
    "kwargs": {"lr": 1e-6, "exp_avg_dtype": "torch.bfloat16", "master_weights": True, "store_param_remainders": True},
}
AUTOMODEL = {
    "policy__model_name": "Qwen/Qwen3-30B-A3B",
    "policy__hf_config_overrides": {"router_aux_loss_coef": 0.0},
    "policy__dtensor_cfg__automodel_kwargs": {
        "backend": {"_target_": "BackendConfig", "attn": "flash", "experts": "gmm", "fake_balanced_gate": False},
        "freeze_config": {"freeze_vision_tower": True, "freeze_language_model": False},
        "use_liger_kernel": True,
    },
}
# What Automodel trains in another way than Hugging Face's model, and how that is told.
WITH_LOSS = "config.json's auxiliary loss of routers (set router_aux_loss_coef to 0 in hf_config_overrides)"
NOT_PLAIN: list[tuple[dict[str, Any], str]] = [
    ({"policy__hf_config_overrides": {}}, WITH_LOSS),
    ({"policy__hf_config_overrides": {"router_aux_loss_coef": 0.001}}, WITH_LOSS),
    (
        {"policy__model_name": "moonshotai/Moonlight-16B-A3B-Instruct"},
        "expert biases that move after each step (Automodel's deepseek_v3)",
    ),
    (
        {"policy__model_name": "google/gemma-4-26B-A4B-it"},
        "experts with their scale in the weights (Automodel's gemma4)",
    ),
    (
        {"policy__model_name": "somebody/unknown"},
        "Automodel's model of a family whose routers are not known to train as Hugging Face's",
    ),
    (
        {"policy__dtensor_cfg__automodel_kwargs": {"backend": {"attn": "flash", "fake_balanced_gate": True}}},
        "Automodel's backend.fake_balanced_gate",
    ),
    (
        {"policy__dtensor_cfg__moe_parallelizer": {"lm_head_precision": "float32"}},
        "settings of DTensor's expert parallelism",
    ),
]


def changed(config: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with values at dotted keys, whose dots are written as two underscores."""
    copied = copy.deepcopy(dict(config))
    for key, value in changes.items():
        put(copied, key.replace("__", "."), value)
    return copied


@pytest.mark.parametrize("algorithm", FILES)
def test_a_file_of_theirs_becomes_a_whole_configuration_that_passes_every_check(algorithm):
    migration = migrate(FILES[algorithm]())
    assert migration.algorithm == algorithm
    assert migration.report.missing == {}
    check(algorithm, migration.config)


@pytest.mark.parametrize("algorithm", FILES)
def test_each_of_their_keys_has_one_row_and_each_of_ours_has_a_row_or_is_below_one(algorithm):
    theirs = FILES[algorithm]()
    migration = migrate(theirs)
    told = [row.theirs for row in migration.report.rows if row.theirs]
    assert len(told) == len(set(told))
    for path, _ in leaves(theirs):
        assert any(path == key or path.startswith(f"{key}.") for key in told), path
    ours = {row.ours for row in migration.report.rows if row.ours}
    for path, _ in leaves(migration.config):
        assert any(path == key or path.startswith(f"{key}.") for key in ours), path


@pytest.mark.parametrize("algorithm", FILES)
def test_what_is_taken_over_as_it_is_has_their_value(algorithm):
    theirs = FILES[algorithm]()
    migration = migrate(theirs)
    rows = [row for row in migration.report.of(Outcome.SAME) if not row.ours.startswith("data.")]
    assert len(rows) > (15 if algorithm == "eval" else 30)
    for row in rows:
        assert at(migration.config, row.ours) == at(theirs, row.theirs), row


def test_rules_name_only_keys_that_are_here():
    known = {key for schema in SCHEMAS.values() for key in known_keys(schema)}
    targets = [pattern for pattern, rule in SAME.items() if isinstance(rule, Same)]
    targets += [rule.to for rule in RENAMED.values() if isinstance(rule, Renamed)]
    free = ("policy.hf_config_overrides", "policy.tokenizer.chat_template_kwargs", "policy.generation.vllm_kwargs")
    free += ("policy.megatron_cfg.env_vars", "policy.generation.vllm_cfg.http_server_serving_chat_kwargs")
    free += ("tokenizer.chat_template_kwargs",)
    for target in targets:
        assert target in known or target.startswith(free), target


def test_no_key_is_in_two_tables():
    tables = (SAME, RENAMED, IGNORED, FEATURES)
    for index, table in enumerate(tables):
        for other in tables[index + 1 :]:
            assert not table.keys() & other.keys()
    converted = {pattern for conversion in CONVERSIONS for pattern in conversion.keys}
    for table in tables:
        exact = {pattern for pattern in table if not pattern.endswith(".*")}
        assert not exact & converted


OFF_RULES = {path: rule for path, rule in FEATURES.items() if isinstance(rule, Off) and not path.endswith(".*")}
_ACTIVE = {"on_policy_distillation"}


@pytest.mark.parametrize("path", sorted(OFF_RULES.keys() - _ACTIVE))
def test_a_feature_that_is_not_here_is_an_error_where_it_is_on_and_nothing_where_it_is_off(path):
    rule = OFF_RULES[path]
    algorithm = "grpo"
    backend = {"policy__megatron_cfg__enabled": True, "policy__dtensor_cfg__enabled": False}
    theirs = changed(FILES[algorithm](), **(backend if path.startswith("policy.megatron_cfg") else {}))
    put(theirs, path, "something else")
    feature = rule.feature.replace("{value}", "something else")
    migration = migrate(theirs)
    assert path in migration.report.missing[feature]
    told = r"^this NeMo-RL configuration uses (1 feature that is|\d+ features that are) not available here: "
    with pytest.raises(ConfigError, match=told):
        migration.check()
    for value in rule.values:
        put(theirs, path, value)
        assert path not in migrate(theirs).report.missing.get(feature, [])


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_fn__use_cispo": True, "loss_fn__ratio_clip_max": 5.0, "grpo__seq_logprob_error_threshold": 2.0},
        {"loss_fn__disable_ppo_ratio": True, "grpo__advantage_clip_low": -100, "grpo__advantage_clip_high": 100},
        {
            "grpo__adv_estimator__name": "reinforce_plus_plus",
            "grpo__adv_estimator__minus_baseline": False,
            "loss_fn__use_kl_in_reward": True,
            "loss_fn__reference_policy_kl_type": "k1",
        },
        {
            "loss_fn__use_importance_sampling_correction": True,
            "loss_fn__truncated_importance_sampling_type": "icepop",
            "loss_fn__truncated_importance_sampling_ratio": 5.0,
            "loss_fn__truncated_importance_sampling_ratio_min": 0.5,
        },
    ],
)
def test_the_keys_of_an_algorithm_are_taken_over_as_they_are(changes):
    migration = migrate(changed(grpo_file(), **changes))
    assert migration.report.missing == {}
    check("grpo", migration.config)
    for key, value in changes.items():
        assert at(migration.config, key.replace("__", ".")) == value


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"grpo__adv_estimator__name": "gdpo"}, "advantage estimator gdpo"),
        ({"loss_fn__use_kl_in_reward": True}, "a KL without effect (use_kl_in_reward without reinforce_plus_plus)"),
        (
            {
                "grpo__adv_estimator__name": "reinforce_plus_plus",
                "loss_fn__use_kl_in_reward": True,
                "loss_fn__kl_output_clamp_value": None,
            },
            "clamps of the KL that do not act on the KL in the reward",
        ),
    ],
)
def test_an_algorithm_that_means_something_else_there_is_refused(changes, feature):
    assert feature in migrate(changed(grpo_file(), **changes)).report.missing


def test_bounds_of_weights_that_are_not_applied_are_left_out():
    bounds = {"type": "tis", "ratio": 2.0, "ratio_min": 0.1}
    changes = {f"loss_fn__truncated_importance_sampling_{name}": value for name, value in bounds.items()}
    migration = migrate(changed(grpo_file(), **changes))
    check("grpo", migration.config)
    for key in changes:
        assert at(migration.config, key.replace("__", ".")) is None


def test_a_key_that_no_rule_names_is_an_error_and_never_dropped():
    migration = migrate(changed(grpo_file(), loss_fn__use_magic=False))
    assert migration.report.missing == {"loss_fn.use_magic": ["loss_fn.use_magic"]}


def test_a_feature_with_many_keys_is_one_error():
    section = "policy__dtensor_cfg__moe_parallelizer__"
    theirs = changed(grpo_file(), **{f"{section}a": 1, f"{section}b": 2})
    (found,) = migrate(theirs).report.missing.items()
    keys = ["policy.dtensor_cfg.moe_parallelizer.a", "policy.dtensor_cfg.moe_parallelizer.b"]
    assert found == ("settings of DTensor's expert parallelism", keys)


def test_values_of_a_backend_that_is_off_are_not_read():
    theirs = changed(grpo_file(), policy__megatron_cfg__moe_enable_deepep=True, policy__megatron_cfg__anything=3)
    assert migrate(theirs).report.missing == {}


@pytest.mark.parametrize("is_on", [True, False])
def test_files_of_the_requests_that_named_our_keys_are_theirs(is_on):
    keys = ("use_pinned_optimizer_offload", "offload_optimizer_states_for_logprob", "use_coalesced_optimizer_offload")
    theirs = changed(grpo_file(), **{f"policy__{key}": is_on for key in keys})
    del theirs["policy"]["offload_optimizer_for_logprob"]
    migration = migrate(theirs)
    assert migration.report.missing == {}
    assert [at(migration.config, f"policy.{key}") for key in keys[:2]] == [is_on, is_on]
    check("grpo", migration.config)


def test_our_own_files_are_not_taken_for_theirs():
    for name in EXEMPLARS.values():
        config = load_config(Path("examples/configs") / name)
        assert not is_nemo_rl(config)
        with pytest.raises(ConfigError, match="none of the keys that only NeMo-RL has"):
            migrate(config)
    with pytest.raises(ConfigError, match="is not a file for one of grpo, distillation, sft, dpo"):
        migrate({"ppo": {}, "grpo": {}})


def test_defaults_are_relative_to_the_file_that_names_them_and_later_parents_win(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(grpo_file()))
    (tmp_path / "a/more.yaml").write_text("grpo: {num_prompts_per_step: 4, seed: 5}\n")
    (tmp_path / "a/leaf.yaml").write_text(
        "defaults: [../base.yaml, more.yaml]\ngrpo: {num_generations_per_prompt: 8}\n"
    )
    (tmp_path / "a/b/run.yaml").write_text(
        "defaults: ../leaf.yaml\npolicy: {train_global_batch_size: '${mul:${grpo.num_prompts_per_step}, 8}'}\n"
    )
    config = migrate_file(tmp_path / "a/b/run.yaml").config
    assert config["grpo"]["num_prompts_per_step"] == 4 and config["grpo"]["seed"] == 5
    assert config["policy"]["train_global_batch_size"] == 32


def test_a_prompt_file_is_theirs_and_never_one_of_the_same_name_here(tmp_path):
    """This repository has an examples/prompts/cot.txt too, with other words."""
    theirs = changed(grpo_file(), data__default__prompt_file="examples/prompts/cot.txt")
    (tmp_path / "examples/configs").mkdir(parents=True)
    path = tmp_path / "examples/configs/run.yaml"
    path.write_text(yaml.safe_dump(theirs))
    assert migrate_file(path).config["data"]["default"]["prompt_file"] == str(
        tmp_path / "examples/configs/examples/prompts/cot.txt"
    )
    (tmp_path / "examples/prompts").mkdir()
    (tmp_path / "examples/prompts/cot.txt").write_text("{}")
    found = migrate_file(path).config["data"]["default"]["prompt_file"]
    assert found == str(tmp_path / "examples/prompts/cot.txt")


@settings(max_examples=60)
@given(nodes=st.integers(1, 8), gpus=st.integers(2, 8), engine_nodes=st.integers(1, 7), engine_gpus=st.integers(1, 7))
def test_trainer_and_engines_together_have_the_devices_of_their_cluster(nodes, gpus, engine_nodes, engine_gpus):
    if nodes == 1:
        engine_nodes, engine_gpus = 1, min(engine_gpus, gpus - 1)
    else:
        engine_nodes, engine_gpus = min(engine_nodes, nodes - 1), gpus
    where = "policy__generation__colocated"
    theirs = changed(
        grpo_file(),
        cluster__num_nodes=nodes,
        cluster__gpus_per_node=gpus,
        **{
            f"{where}__enabled": False,
            f"{where}__resources__gpus_per_node": engine_gpus,
            f"{where}__resources__num_nodes": engine_nodes,
        },
    )
    config = migrate(theirs).config
    resources = config["policy"]["generation"]["colocated"]["resources"]
    trainer = config["cluster"]["num_nodes"] * config["cluster"]["gpus_per_node"]
    assert trainer + resources["num_nodes"] * resources["gpus_per_node"] == nodes * gpus
    assert trainer > 0 and resources == {"gpus_per_node": engine_gpus, "num_nodes": engine_nodes}


MEGATRON = {"policy__megatron_cfg__enabled": True, "policy__dtensor_cfg__enabled": False}
SHARED_ROWS = {
    "policy__dtensor_cfg__context_parallel_size": 2,
    "policy__sequence_packing__enabled": False,
    "cluster__gpus_per_node": 2,
}
PLAIN_DAPO = {
    "grpo__use_dynamic_sampling": True,
    "grpo__dynamic_sampling_max_gen_batches": 5,
    "grpo__adv_estimator__use_leave_one_out_baseline": False,
    "grpo__use_leave_one_out_baseline": False,
}
MOE = {**MEGATRON, "policy__model_name": "Qwen/Qwen3-30B-A3B"}


@pytest.mark.parametrize(
    ("changes", "key", "expected"),
    [
        ({"policy__refit_buffer_size_gb": 3}, "policy.refit_buffer_size_gib", 1.5),
        ({"grpo__val_period": -1}, "grpo.val_period", 0),
        ({"grpo__max_val_samples": 16, "grpo__val_batch_size": 5}, "grpo.max_val_samples", 15),
        ({"grpo__adv_estimator__use_leave_one_out_baseline": False}, "grpo.use_leave_one_out_baseline", False),
        ({"policy__tokenizer__chat_template": "default"}, "policy.tokenizer.chat_template", "default"),
        ({"policy__offload_optimizer_for_logprob": True}, "policy.offload_optimizer_states_for_logprob", True),
        ({"loss_fn__use_on_policy_kl_approximation": True}, "loss_fn.reference_policy_kl_type", "k3w"),
        ({}, "loss_fn.reference_policy_kl_type", "k3w"),
        ({"loss_fn__reference_policy_kl_type": "k2"}, "loss_fn.reference_policy_kl_type", "k2w"),
        ({"policy__generation__top_p": 0.9}, "policy.generation.top_p", 0.9),
        ({"loss_fn__truncated_importance_sampling_ratio": 2}, "loss_fn.truncated_importance_sampling_ratio", None),
        ({"policy__generation__top_k": -1}, "policy.generation.top_k", None),
        ({"policy__generation__temperature": 0.7}, "policy.generation.val_temperature", 0.7),
        ({"policy__generation__vllm_kwargs": {"kv_cache_memory_bytes": 2**31}},
         "policy.generation.vllm_cfg.kv_cache_memory_gib", 2.0),
        ({"checkpointing__metric_name": "val:total_reward/mean"}, "checkpointing.metric_name", "val:reward"),
        ({"grpo__val_period": 0}, "checkpointing.metric_name", None),
        ({"grpo__val_period": 7, "grpo__max_num_steps": 20, "checkpointing__save_period": 10},
         "checkpointing.metric_name", None),
        ({"policy__dtensor_cfg__tensor_parallel_size": 2, "cluster__gpus_per_node": 2},
         "policy.dtensor_cfg.torch_compile", False),
        ({"policy__dtensor_cfg__cpu_offload": True}, "policy.dtensor_cfg.cpu_offload", False),
        ({"policy__dtensor_cfg__cpu_offload": True}, "policy.dtensor_cfg.offload_optimizer_states", True),
        ({}, "policy.dtensor_cfg.offload_optimizer_states", False),
        (SHARED_ROWS, "policy.dtensor_cfg.context_parallel_size", 2),
        (SHARED_ROWS, "policy.dtensor_cfg.torch_compile", False),
        (SHARED_ROWS, "policy.dtensor_cfg.activation_checkpointing", False),
        ({**SHARED_ROWS, "policy__sequence_packing__enabled": True}, "policy.dtensor_cfg.context_parallel_size", 1),
        ({**SHARED_ROWS, "policy__sequence_packing__enabled": True},
         "policy.dtensor_cfg.activation_checkpointing", True),
        ({"policy__dtensor_cfg__sequence_parallel": True}, "policy.dtensor_cfg.sequence_parallel", False),
        ({"policy__dtensor_cfg__sequence_parallel": True, "policy__dtensor_cfg__tensor_parallel_size": 2,
          "cluster__gpus_per_node": 2}, "policy.dtensor_cfg.sequence_parallel", True),
        ({"policy__hf_config_overrides": {"rope_scaling": {"rope_type": "linear", "factor": 2, "rope_theta": 9}}},
         "policy.hf_config_overrides", {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 9}}),
        ({"grpo__batch_multiplier": 3}, "grpo.batch_multiplier", 3),
        ({"checkpointing__checkpoint_must_save_by": "00:03:45:00"}, "checkpointing.checkpoint_must_save_by",
         "00:03:45:00"),
        (PLAIN_DAPO, "grpo.dynamic_sampling_max_gen_batches", 6),
        ({"async_rl__sampler": {"name": "in_order", "max_lookahead_versions": 0}}, "grpo.async_grpo.enabled", False),
        ({"grpo__async_grpo": None}, "grpo.async_grpo.enabled", False),
        ({**AHEAD, "grpo__async_grpo": {"enabled": True, "max_generation_failures": 0}}, "grpo.async_grpo", ONE_AHEAD),
        ({**AHEAD, "grpo__async_grpo": {"enabled": True, "max_trajectory_age_steps": 8,
                                        "in_flight_weight_updates": True}},
         "grpo.async_grpo", {**ONE_AHEAD, "max_trajectory_age_steps": 8, "in_flight_weight_updates": True}),
        ({**AHEAD, "async_rl__sampler": {"name": "in_order", "max_lookahead_versions": 2},
          "async_rl__recompute_kv_cache_after_weight_updates": True, "async_rl__max_inflight_prompts": 4},
         "grpo.async_grpo",
         {**ONE_AHEAD, "max_trajectory_age_steps": 2, "in_flight_weight_updates": True,
          "recompute_kv_cache_after_weight_updates": True}),
        ({**AHEAD, "async_rl__sampler": {"name": "windowed", "max_staleness_versions": 3}}, "grpo.async_grpo.order",
         "finished"),
        ({**AHEAD, "async_rl__sampler": {"name": "ready_first", "max_staleness_versions": 2}}, "grpo.async_grpo",
         {**ONE_AHEAD, "order": "finished", "max_trajectory_age_steps": 2, "in_flight_weight_updates": True}),
        ({**AHEAD, "async_rl__sampler": {"name": "weight_fifo"}}, "grpo.async_grpo",
         {**ONE_AHEAD, "in_flight_weight_updates": True}),
        ({"policy__generation__vllm_cfg__env_vars": {"NCCL_ALGO": "Ring"}}, "grpo.seed", 7),
        ({**EIGHT_BITS, "policy__generation__vllm_cfg__precision": "fp8"}, f"{ENGINE}.precision", "fp8"),
        ({**EIGHT_BITS, "policy__generation__vllm_cfg__precision": "fp8"}, f"{ENGINE}.use_deep_gemm", True),
        (
            {**EIGHT_BITS, "policy__generation__vllm_cfg__precision": "fp8"},
            f"{ENGINE}.quantization_ignored_layer_kws",
            ["a_proj"],
        ),
        (EIGHT_BITS, f"{ENGINE}.use_deep_gemm", None),
        (EIGHT_BITS, f"{ENGINE}.precision", "bfloat16"),
        ({**MEGATRON, "policy__megatron_cfg__moe_token_dispatcher_type": "flex"},
         "policy.megatron_cfg.moe_token_dispatcher_type", "alltoall"),
        ({**MEGATRON, "policy__megatron_cfg__moe_token_dispatcher_type": "allgather"},
         "policy.megatron_cfg.moe_token_dispatcher_type", "allgather"),
        ({**MEGATRON, "policy__megatron_cfg__use_fused_linear_logprobs": True}, "policy.logprob_chunk_size", 256),
        ({"grpo__reward_shaping__stop_properly_penalty_coef": 0.5}, "grpo.reward_shaping.stop_properly_penalty_coef",
         0.5),
        ({"policy__generation__vllm_kwargs": {"mamba_ssm_cache_dtype": "float32"}}, "policy.generation.vllm_kwargs",
         {"mamba_ssm_cache_dtype": "float32"}),
        ({**MEGATRON, "policy__megatron_cfg__moe_router_load_balancing_type": "aux_loss"},
         "policy.megatron_cfg.moe_router_load_balancing_type", "none"),
        ({**MEGATRON, "policy__megatron_cfg__moe_router_bias_update_rate": 0.001},
         "policy.megatron_cfg.moe_router_bias_update_rate", 0.0),
        ({**MOE, "policy__megatron_cfg__moe_router_load_balancing_type": "aux_loss",
          "policy__megatron_cfg__moe_aux_loss_coeff": 0.01}, "policy.megatron_cfg.moe_router_load_balancing_type",
         "aux_loss"),
        ({**MOE, "policy__megatron_cfg__moe_router_load_balancing_type": "aux_loss",
          "policy__megatron_cfg__moe_aux_loss_coeff": 0.01}, "policy.megatron_cfg.moe_aux_loss_coeff", 0.01),
        ({**MOE, "policy__model_name": "zai-org/GLM-4.5-Air", "policy__megatron_cfg__moe_router_bias_update_rate": 0.1,
          "policy__megatron_cfg__moe_router_enable_expert_bias": True},
         "policy.megatron_cfg.moe_router_bias_update_rate", 0.1),
        ({"policy__dtensor_cfg__lora_cfg": {"enabled": True, "match_all_linear": True}},
         "policy.dtensor_cfg.lora_cfg.target_modules", ["*"]),
        ({"policy__dtensor_cfg__lora_cfg": {"enabled": True, "match_all_linear": True}},
         "policy.dtensor_cfg.lora_cfg.match_all_linear", False),
        ({"policy__dtensor_cfg__lora_cfg": {"enabled": True, "match_all_linear": False, "target_modules": [],
                                            "exclude_modules": ["*out_proj*"]}},
         "policy.dtensor_cfg.lora_cfg.target_modules", ["*"]),
        ({"policy__dtensor_cfg__lora_cfg": {"enabled": True, "target_modules": []}},
         "policy.dtensor_cfg.lora_cfg.target_modules", ["*_proj"]),
        ({"policy__dtensor_cfg__lora_cfg": {"enabled": True, "match_all_linear": False, "target_modules": ["q_proj"]}},
         "policy.dtensor_cfg.lora_cfg.target_modules", ["q_proj"]),
        ({"policy__generation__vllm_cfg__tensor_parallel_size": 2, "cluster__gpus_per_node": 2,
          "policy__generation__vllm_cfg__expert_parallel_size": 2,
          "policy__generation__vllm_cfg__enable_expert_parallel": True}, f"{ENGINE}.expert_parallel_size", 2),
        ({"grpo__use_dynamic_sampling": True, "grpo__adv_estimator__use_leave_one_out_baseline": False},
         "grpo.dynamic_sampling_drops", "responses"),
        ({"grpo__use_dynamic_sampling": True, "grpo__use_leave_one_out_baseline": False},
         "grpo.dynamic_sampling_drops", "groups"),
        ({"policy__optimizer": FUSED_ADAM}, "policy.optimizer.name", "nemo_offload_rl.optim.AdamW"),
        ({"policy__optimizer": FUSED_ADAM}, "policy.optimizer.kwargs",
         {"lr": 1e-6, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "float32"}),
        (AUTOMODEL, "policy.model_name", "Qwen/Qwen3-30B-A3B"),
        (AUTOMODEL, "policy.hf_config_overrides.router_aux_loss_coef", None),
        ({**AUTOMODEL, "policy__model_name": "Qwen/Qwen3-8B", "policy__hf_config_overrides": {}},
         "policy.model_name", "Qwen/Qwen3-8B"),
        *(
            ({**AUTOMODEL, "policy__model_name": model, "policy__hf_config_overrides": {},
              "policy__dtensor_cfg__moe_parallelizer": {"ignore_router_for_ac": True}}, "policy.model_name", model)
            for model in ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16", "zai-org/GLM-4.7-Flash",
                          "MiniMaxAI/MiniMax-M2.7")
        ),
        ({"policy__generation__vllm_kwargs": {"language_model_only": True}}, "policy.generation.vllm_kwargs", {}),
        ({"policy__megatron_cfg__freeze_config": {"freeze_vision_model": True, "freeze_language_model": False}},
         "policy.megatron_cfg.freeze_config", None),
        ({}, "grpo.max_token_mult_prob_error", None),
        ({}, "data.add_bos", False),
        ({}, "data.overlong_rows", "mask"),
    ],
)  # fmt: skip
def test_a_key_with_another_meaning_here_is_converted(changes, key, expected):
    migration = migrate(changed(grpo_file(), **changes))
    assert migration.report.missing == {}
    assert at(migration.config, key) == expected


def test_an_evaluation_keeps_its_model_and_finds_its_data_set_below_validation():
    config = migrate(eval_file()).config
    assert config["data"]["validation"] == {"dataset_name": "AIME2024", "repeat": 3}
    assert (config["generation"]["top_k"], config["generation"]["num_prompts_per_step"]) == (None, None)
    assert (config["data"]["max_input_seq_length"], config["data"]["add_bos"]) == (63, False)
    assert config["eval"] | {"k_value": 2, "seed": 7, "greedy": False, "max_samples": None} == config["eval"]
    missing = migrate(changed(eval_file(), data__dataset_name="gpqa", env__math__verifier_type="english_multichoice"))
    assert missing.report.missing.keys() == {"evaluation on gpqa", "verifier english_multichoice"}


def test_a_teacher_keeps_what_it_is_read_with_and_lies_on_devices_as_here():
    migration = migrate(changed(distillation_file(), teacher__logprob_chunk_size=32, distillation__max_val_samples=10))
    assert migration.report.missing == {}
    teacher = migration.config["teacher"]
    assert (teacher["model_name"], teacher["precision"]) == ("meta-llama/Llama-3.2-3B", "float32")
    assert (teacher["logprob_chunk_size"], teacher["dtensor_cfg"]) == (32, {"tensor_parallel_size": 1})
    assert migration.config["distillation"]["max_val_samples"] == 8
    assert "grpo" not in migration.config


@pytest.mark.parametrize(
    ("algorithm", "given", "expected"),
    [("sft", True, "response_and_end"), ("sft", False, "message"), ("dpo", True, "message"), ("dpo", False, "message")],
)
def test_what_counts_of_a_message_depends_on_whether_the_prompt_has_the_speakers_name(algorithm, given, expected):
    theirs = changed(FILES[algorithm](), data__add_generation_prompt=given)
    assert migrate(theirs).config["data"]["loss_span"] == expected
    del theirs["data"]["add_generation_prompt"]
    assert migrate(theirs).config["data"]["loss_span"] == "message"


@pytest.mark.parametrize(
    ("algorithm", "changes", "feature"),
    [
        ("grpo", {"async_rl__sampler": {"name": "custom", "target": "mine:Sampler"}},
         "a sampler of your own (mine:Sampler)"),
        ("grpo", {**AHEAD, "async_rl__sampler": {"name": "windowed", "sample_freshest_first": True}},
         "the newest rollouts first; here the oldest are"),
        ("grpo", {"async_rl__max_buffered_rollouts": 3},
         "rollouts of older weights without loss_fn.use_importance_sampling_correction"),
        ("grpo", {**AHEAD, "async_rl__rollout_failure": {"max_skipped_prompts": 1}},
         "steps without the prompts that failed"),
        ("grpo", {**AHEAD, "async_rl__max_buffered_rollouts": 3, "grpo__adv_estimator__name": "reinforce_plus_plus",
                  "async_rl__min_groups_for_streaming_train": 1},
         "advantages of parts of a step (reinforce_plus_plus)"),
        ("grpo", {**AHEAD, "async_rl__new_key": 3}, "async_rl.new_key"),
        ("grpo", {**AHEAD, "grpo__async_grpo": {"enabled": True, "max_generation_failures": 2}},
         "rollouts that may fail"),
        ("grpo", {"policy__generation__vllm_cfg__env_vars": {"A": "b"}}, "environment variables of the engine"),
        ("grpo", {"policy__generation__vllm_cfg__is_mx": True}, "mxfp8 in the engine"),
        (
            "grpo",
            {"policy__generation__vllm_cfg__pow2_weight_scaling_factors": True},
            "scales of 8-bit weights or inputs that are powers of two",
        ),
        ("grpo", {"policy__hf_config_overrides": {"rope_scaling": {"rope_type": "linear", "factor": 2}}},
         "rope_scaling without rope_theta (NeMo-RL keeps that of config.json)"),
        ("grpo", {**MOE, "policy__megatron_cfg__moe_router_load_balancing_type": "aux_loss"},
         "an auxiliary loss of routers whose weight is left to the model (moe_aux_loss_coeff)"),
        ("grpo", {**MOE, "policy__megatron_cfg__moe_router_bias_update_rate": 0.001},
         "updates of expert biases (of a model that is not known to have them)"),
        ("grpo", {**MOE, "policy__megatron_cfg__moe_router_enable_expert_bias": True},
         "biases of experts (of a model that is not known to have them)"),
        ("grpo", {"policy__optimizer": {**FUSED_ADAM, "kwargs": {"lr": 1e-6}}},
         f"optimizer {FUSED_ADAM['name']} with other arguments"),
        *(("grpo", {**AUTOMODEL, **other}, told) for other, told in NOT_PLAIN),
        ("sft", {"policy__dtensor_cfg__automodel_kwargs": {"freeze_config": {"freeze_language_model": True}}},
         "frozen parts of the model"),
        ("grpo", {"policy__generation__vllm_kwargs": {"language_model_only": False}},
         "policy.generation.vllm_kwargs.language_model_only"),
        ("distillation", {"teacher__generation__temperature": 0.5}, "a teacher with a temperature of its own"),
        ("distillation", {"teacher__dtensor_cfg__enabled": False},
         "a teacher on another backend than the policy's"),
        ("grpo", {"data__train": {"dataset_name": "geometry3k"}}, "data set geometry3k"),
        ("grpo", {"data__train": {"dataset_name": "squad"}}, "data set squad"),
        ("grpo", {"data__train": [{"dataset_name": "DeepScaler"}, {"dataset_name": "avqa"}]}, "data set avqa"),
        ("grpo", {"env__math__math_verify_impl": "another"}, "verifier another"),
        ("grpo", {"policy__generation__vllm_cfg__tensor_parallel_size": 16}, "an engine over several hosts"),
        ("grpo", {"policy__generation__vllm_cfg__expert_parallel_size": 4},
         "engines that share experts (expert_parallel_size above tensor_parallel_size)"),
        ("grpo", {"policy__generation__vllm_kwargs": {"load_format": "dummy"}},
         "policy.generation.vllm_kwargs.load_format"),
        ("dpo", {"data__train": {"dataset_name": "squad", "split": "train"}}, "data set squad"),
    ],
)  # fmt: skip
def test_a_meaning_that_is_not_here_is_an_error_and_no_silent_pass(algorithm, changes, feature):
    assert feature in migrate(changed(FILES[algorithm](), **changes)).report.missing


HELD_BACK = {"split_validation_size": 0.0, "seed": 42}


@pytest.mark.parametrize(
    ("algorithm", "theirs", "ours"),
    [
        ("grpo", {"dataset_name": "DAPOMath17K"}, {"dataset_name": "DAPOMath17K"}),
        ("grpo", {"dataset_name": "AIME2024", "repeat": 16}, {"dataset_name": "AIME2024", "repeat": 16}),
        ("grpo", {"dataset_name": "gsm8k", "subset": None, "split": "test"},
         {"dataset_name": "gsm8k", "subset": "main", "split": "test", "extract_answer": True}),
        ("grpo", {"dataset_name": "OpenMathInstruct-2"},
         {"dataset_name": "OpenMathInstruct-2", "split": "train_1M", "output_key": "expected_answer",
          "split_validation_size": 0.05}),
        ("sft", {"dataset_name": "OpenMathInstruct-2", "output_key": "generated_solution", "split": "train",
                 "split_validation_size": 0.0},
         {"dataset_name": "OpenMathInstruct-2", "split": "train", "output_key": "generated_solution"}),
        ("sft", {"dataset_name": "squad", "split": "train", "split_validation_size": 0.3},
         {"dataset_name": "squad", "split": "train"}),
        ("sft", {"dataset_name": "squad", "data_path": "own.jsonl"},
         {"dataset_name": "squad", "path": "own.jsonl", "split": "train"}),
        ("sft", {"dataset_name": "tulu3_sft_mixture", "seed": 3},
         {"dataset_name": "tulu3_sft_mixture", "max_samples": None, "split_validation_size": 0.05, "seed": 3}),
        ("sft", {"dataset_name": "Nemotron-Cascade-2-SFT-Math", "max_samples": 9},
         {"dataset_name": "Nemotron-Cascade-2-SFT-Math", "max_samples": 9, "split_validation_size": 0.05}),
        ("dpo", {"dataset_name": "HelpSteer3", "split": "validation"},
         {"dataset_name": "HelpSteer3", "split": "validation"}),
        ("dpo", {"dataset_name": "Tulu3Preference"}, {"dataset_name": "Tulu3Preference"}),
        ("dpo", {"dataset_name": "BinaryPreferenceDataset", "data_path": "owner/pairs", "subset": "one"},
         {"dataset_name": "BinaryPreferenceDataset", "path": "owner/pairs", "subset": "one", "split": "train",
          "prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}),
        ("grpo", {"dataset_name": "ResponseDataset", "data_path": "owner/set", "input_key": "q", "split": "dev"},
         {"dataset_name": "ResponseDataset", "path": "owner/set", "subset": None, "split": "dev", "input_key": "q",
          "output_key": "output"}),
        ("grpo", [{"dataset_name": "DeepScaler"}, {"dataset_name": "DAPOMath17K"}],
         {"dataset_name": "mixture", "weights": None, "datasets": [
             {"dataset_name": "DeepScaler", **HELD_BACK}, {"dataset_name": "DAPOMath17K", **HELD_BACK}]}),
    ],
)  # fmt: skip
def test_a_data_set_of_theirs_is_the_one_of_that_name_here(algorithm, theirs, ours):
    migration = migrate(
        changed(FILES[algorithm](), data__train=theirs, data__validation=None, **{f"{algorithm}__val_period": 0,
                f"{algorithm}__val_at_start": False, f"{algorithm}__val_at_end": False})
    )  # fmt: skip
    assert migration.report.missing == {}
    expected = ours if ours["dataset_name"] == "mixture" else {**HELD_BACK, **ours}
    assert migration.config["data"]["train"] == expected
    check(algorithm, migration.config)


def test_the_dapo_verifier_is_taken_over():
    migration = migrate(changed(grpo_file(), env__math__math_verify_impl="dapo_math_verify"))
    assert migration.report.missing == {}
    assert migration.config["env"]["math"]["math_verify_impl"] == "dapo_math_verify"


def test_a_published_model_is_known_by_its_name_and_a_folder_by_its_config(tmp_path):
    for name, kind in (
        ("meta-llama/Llama-3.1-8B-Instruct", "llama"),
        ("meta-llama/Llama-3.2-11B-Vision", None),
        ("allenai/Llama-3.1-Tulu-3-8B-SFT", "llama"),
        ("Qwen/Qwen3-0.6B", "qwen3"),
        ("Qwen/Qwen3-30B-A3B", "qwen3_moe"),
        ("Qwen/Qwen3.5-9B-Base", "qwen3_5"),
        ("Qwen/Qwen3.5-35B-A3B-Base", "qwen3_5_moe"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3_next"),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", "qwen3_vl_moe"),
        ("Qwen/Qwen2.5-VL-3B-Instruct", None),
        ("Qwen/Qwen2.5-Math-7B", "qwen2"),
        ("someone/new-model", None),
        (None, None),
    ):
        assert model_type(name) == kind
    assert is_trained("Qwen/Qwen3-30B-A3B", "megatron") and is_trained("Qwen/Qwen3-30B-A3B", "dtensor")
    assert is_trained("google/gemma-3-1b-it", "dtensor") and is_trained("google/gemma-3-27b-it", "dtensor")
    assert is_trained("Qwen/Qwen3-VL-4B-Instruct", "dtensor") and not is_trained("google/gemma-3-27b-it", "megatron")
    assert is_trained("zai-org/GLM-4.7-Flash", "dtensor") and is_trained("Qwen/Qwen3.5-9B-Base", "megatron")
    assert not is_trained("someone/new-model", "dtensor")
    (tmp_path / "config.json").write_text('{"model_type": "granite"}')
    assert model_type(str(tmp_path)) == "granite" and is_trained(str(tmp_path), "dtensor")


def test_experts_are_balanced_nowhere_so_only_models_without_them_may_ask_for_it(tmp_path):
    key = "policy.megatron_cfg.moe_router_load_balancing_type"
    theirs = changed(
        grpo_file(),
        policy__megatron_cfg__enabled=True,
        policy__dtensor_cfg__enabled=False,
        policy__megatron_cfg__moe_router_load_balancing_type="aux_loss",
    )
    for name, has_experts in (("meta-llama/Llama-3.2-1B", False), ("someone/new-model", True)):
        theirs["policy"]["model_name"] = name
        assert (key in str(migrate(theirs).report.missing)) == has_experts
    for num_experts in (0, 8):
        (tmp_path / "config.json").write_text(json.dumps({"num_experts": num_experts}))
        theirs["policy"]["model_name"] = str(tmp_path)
        assert (key in str(migrate(theirs).report.missing)) == bool(num_experts)


@pytest.mark.parametrize("algorithm", FILES)
def test_whatever_stands_at_a_key_the_answer_is_a_configuration_or_one_line(algorithm):
    theirs = FILES[algorithm]()
    paths = [path for path, _ in leaves(theirs)]
    values = itertools.cycle([None, "text", [], {"a": {"b": 1}}, -3])
    for path in (*paths, *sorted({path.rpartition(".")[0] for path in paths})):
        broken = changed(theirs)
        put(broken, path, next(values))
        try:
            migrate(broken).check()
        except ConfigError as error:
            assert "\n" not in str(error)


def test_the_most_exact_rule_holds():
    assert isinstance(rule_for("policy.dtensor_cfg.automodel_kwargs.force_hf"), Off)
    assert rule_for("policy.nothing.of.theirs") is None
    assert matches("a.b.*", "a.b") and matches("a.b.*", "a.b.c.d") and not matches("a.b.*", "a.bc")
