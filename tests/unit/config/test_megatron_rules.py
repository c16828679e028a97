"""Every rule of the Megatron backend is broken once; a configuration that uses every offload key passes."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_offload_rl.backends.dtensor import rules as dtensor
from nemo_offload_rl.backends.megatron import rules
from nemo_offload_rl.backends.megatron.supported import ROPE_TYPES, unsupported_layers, unsupported_rope
from nemo_offload_rl.config.rules import (
    DISTILLATION_RULES,
    DPO_RULES,
    GRPO_RULES,
    SFT_RULES,
    algorithm,
    base,
    broken,
    cluster,
    evaluation,
    memory,
    model,
    rollouts,
    supervised,
    training,
)
from nemo_offload_rl.config.validate import validate_keys
from nemo_offload_rl.errors import ConfigError
from nemo_offload_rl.keys.master import GrpoMasterConfig
from nemo_offload_rl.models.families import MEGATRON as BACKEND
from nemo_offload_rl.models.families import unsupported_family
from nemo_offload_rl.models.rope import rope_type
from nemo_offload_rl.utils.config import load_config

CPU = "tests/unit/config/cpu.yaml"
KEY = "policy.megatron_cfg"
OPTIMIZER = f"{KEY}.optimizer"
MEGATRON = [f"{KEY}.enabled=true", "policy.dtensor_cfg.enabled=false", "policy.precision=bfloat16"]
TWO_WORKERS = "cluster.cpu_workers_per_node=2"
CPU_OFFLOAD = [f"{OPTIMIZER}.optimizer_cpu_offload=true", f"{OPTIMIZER}.optimizer_offload_fraction=0.5"]
MOMENTS = [f"{OPTIMIZER}.exp_avg_dtype=bfloat16", f"{OPTIMIZER}.exp_avg_sq_dtype=bfloat16"]
STATES = f"{OPTIMIZER}.offload_optimizer_states=true"
OFFLOAD = f"{KEY}.fine_grained_activation_offloading=true"
PEFT = f"{KEY}.peft"
ADAPTERS = f"{PEFT}.enabled=true"
SCHEDULER = f"{KEY}.scheduler"
SELECTIVE = [f"{KEY}.activation_checkpointing=true", f"{KEY}.recompute_granularity=selective"]
LOCAL = f"{KEY}.transformer_impl=local"
RULES = {rule.__name__: rule for rule in rules.RULES}

DENSE = {"model_type": "qwen3", "num_attention_heads": 6, "num_hidden_layers": 4}
EXPERTS = {**DENSE, "model_type": "qwen3_moe", "num_experts": 3}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
WINDOW = {**DENSE, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 3}
LATENT = {
    "model_type": "deepseek_v3",
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
LAYERS = {**WINDOW, "layer_types": ["full_attention", "sliding_attention"]}

# rule name -> overrides that break it, words that its message must have, config.json of the model or None for a hub's
BROKEN: dict[str, list[tuple[list[str], str, dict[str, Any] | None]]] = {
    "megatron_sizes_divide_the_world": [
        ([f"{KEY}.tensor_model_parallel_size=2"], "2 x pipeline_model_parallel_size 1 x context", None),
        (
            [
                f"{KEY}.pipeline_model_parallel_size=2",
                f"{KEY}.context_parallel_size=2",
                "cluster.cpu_workers_per_node=6",
            ],
            "= 4 does not divide the 6 policy workers",
            None,
        ),
    ],
    "megatron_expert_sizes_divide_the_world": [
        ([f"{KEY}.expert_model_parallel_size=2"], "which share the experts equally", None)
    ],
    "megatron_experts_can_be_dealt_out": [
        ([f"{KEY}.expert_model_parallel_size=2", TWO_WORKERS], "has no experts; set it to 1", DENSE),
        ([f"{KEY}.expert_model_parallel_size=2", TWO_WORKERS], "does not divide the 3 experts of the model", EXPERTS),
    ],
    "megatron_tensor_parallel_experts_need_sequence_parallel": [
        ([f"{KEY}.tensor_model_parallel_size=2", TWO_WORKERS], "set sequence_parallel to true", EXPERTS)
    ],
    "megatron_experts_are_not_gathered_over_devices": [
        ([f"{KEY}.expert_model_parallel_size=2", f"{KEY}.moe_token_dispatcher_type=allgather"], "to alltoall", None)
    ],
    "megatron_takes_the_whole_model": [
        ([], "has model_type deepseek_v4, but", {"model_type": "deepseek_v4"}),
        (
            [],
            "has mscale 1.0 and mscale_all_dim 0.7, but",
            {**LATENT, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
        ),
        ([], "has model_type gpt_neox, but", {"model_type": "gpt_neox"}),
        ([], "has conv_kernel 3, but that backend has conv", {"model_type": "nemotron_h", "conv_kernel": 3}),
        ([], "has model_type None, but", {}),
        ([], "has layers with a sliding window, which", WINDOW),
        ([], "has layers with a sliding window, which", LAYERS),
        ([], "has attention_bias true, whose biases", {**DENSE, "attention_bias": True}),
        ([], "has attention_bias true, whose biases", {**EXPERTS, "attention_bias": True}),
        ([], "has mlp_bias true, whose biases", {**DENSE, "model_type": "llama", "mlp_bias": True}),
        ([], "has hidden_act gelu, but that backend computes only silu", {**DENSE, "hidden_act": "gelu"}),
        ([], "but that backend computes only gelu_pytorch_tanh", {"model_type": "gemma", "hidden_act": "gelu"}),
        (
            [],
            "has num_experts_per_tok 8 and topk_group 1, but",
            {"model_type": "glm4_moe", "num_experts_per_tok": 8, "n_group": 2, "topk_group": 1},
        ),
        ([], "has num_experts_per_tok 1, but", {**EXPERTS, "num_experts_per_tok": 1}),
        ([], "has norm_topk_prob false, but", {"model_type": "glm4_moe", "norm_topk_prob": False}),
        ([], "has routed_scaling_factor 2.5, which only", {**EXPERTS, "routed_scaling_factor": 2.5}),
        ([], "has num_shared_experts 0, but", {"model_type": "exaone_moe", "num_shared_experts": 0}),
        (
            [],
            "has first_k_dense_replace 0, but mlp_layer_types has 1 dense",
            {"model_type": "hy_v3", "first_k_dense_replace": 0},
        ),
        (
            [],
            "has layer_types that do not alternate",
            {"model_type": "gpt_oss", "layer_types": ["sliding_attention"] * 2},
        ),
        ([], "has tie_word_embeddings false, but", {"model_type": "gemma", "tie_word_embeddings": False}),
        ([], "has tie_word_embeddings true, but", {"model_type": "glm4_moe", "tie_word_embeddings": True}),
        ([], "has rms_norm_eps 0.001, but", {"model_type": "nemotron", "rms_norm_eps": 0.001}),
        (
            [],
            "has quantization_config with quant_method awq, but",
            {**DENSE, "quantization_config": {"quant_method": "awq"}},
        ),
        ([], "has rope_type dynamic, whose", {**DENSE, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ([], "has rope_type longrope, but", {**DENSE, "rope_parameters": {"rope_type": "longrope"}}),
        ([], "has rope_type linear without factor", {**DENSE, "rope_scaling": {"rope_type": "linear"}}),
        ([], "has partial_rotary_factor 0.5, but", {**DENSE, "partial_rotary_factor": 0.5}),
        (
            [],
            "has partial_rotary_factor 0.5, but",
            {**DENSE, "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
        ),
        ([], "by layer type, which the", {**DENSE, "rope_parameters": {"full_attention": YARN}}),
        ([], "has rotary embeddings 'yarn', which is not a mapping", {**DENSE, "rope_scaling": "yarn"}),
        (["+policy.hf_config_overrides.attention_bias=true"], "has attention_bias true, whose biases", DENSE),
    ],
    "fused_rotary_embeddings_have_no_factor": [
        ([], "set it to false", {**DENSE, "rope_parameters": YARN}),
        ([], "set it to false", {**DENSE, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
        ([], "the attention factor 0.6 of", {**DENSE, "rope_parameters": {**YARN, "attention_factor": 0.6}}),
    ],
    "flexible_dispatch_needs_several_devices": [
        ([f"{KEY}.moe_token_dispatcher_type=flex"], "only sends tokens to other devices; set it to alltoall", EXPERTS)
    ],
    "router_losses_need_experts": [
        ([f"{KEY}.moe_router_load_balancing_type=aux_loss"], "no experts; set it to none", DENSE),
        (
            [f"{KEY}.moe_router_load_balancing_type=global_aux_loss", f"{KEY}.moe_aux_loss_coeff=0"],
            "moe_aux_loss_coeff is 0, so the loss has no effect",
            None,
        ),
    ],
    "losses_of_sequences_need_padded_batches": [
        (
            [f"{KEY}.moe_router_load_balancing_type=seq_aux_loss", "policy.sequence_packing.enabled=true"],
            "routers take a packed row for one sequence; set the type to aux_loss",
            EXPERTS,
        )
    ],
    "updated_expert_biases_exist": [
        ([f"{KEY}.moe_router_bias_update_rate=0.001"], "models of type qwen3_moe have no expert bias", EXPERTS),
        (
            [f"{KEY}.moe_router_bias_update_rate=0.001", ADAPTERS],
            "leave the model's own weights and expert biases unchanged",
            None,
        ),
    ],
    "megatron_layers_divide_over_devices": [
        (
            [f"{KEY}.tensor_model_parallel_size=2", TWO_WORKERS],
            "97 channels of MLPs",
            {**DENSE, "intermediate_size": 97},
        ),
        ([f"{KEY}.tensor_model_parallel_size=2", TWO_WORKERS], "389 tokens of the", {**DENSE, "vocab_size": 389}),
        (
            [f"{KEY}.tensor_model_parallel_size=2", TWO_WORKERS],
            "3 key-value heads",
            {**DENSE, "num_key_value_heads": 3},
        ),
        ([f"{KEY}.tensor_model_parallel_size=4", "cluster.cpu_workers_per_node=4"], "6 attention heads", DENSE),
        ([f"{KEY}.tensor_model_parallel_size=2", TWO_WORKERS], "3 groups of heads", {**DENSE, "n_groups": 3}),
    ],
    "megatron_splits_the_layers_of_the_family": [
        (
            [f"{KEY}.tensor_model_parallel_size=2", TWO_WORKERS],
            "models of type olmoe have norms over all heads",
            {**DENSE, "model_type": "olmoe"},
        ),
        (
            [LOCAL, f"{KEY}.tensor_model_parallel_size=2", TWO_WORKERS],
            "only its own heads' part of the gradients of latent attention's keys",
            {**EXPERTS, "kv_lora_rank": 32},
        ),
        (
            [f"{KEY}.context_parallel_size=2", "policy.make_sequence_length_divisible_by=4", TWO_WORKERS],
            "does not split such rows over devices; set it to 1",
            {**EXPERTS, "model_type": "qwen3_next"},
        ),
        (
            [f"{KEY}.tensor_model_parallel_size=2", TWO_WORKERS],
            "norms after linear attention; set sequence_parallel to true",
            {**DENSE, "model_type": "qwen3_5_text"},
        ),
        (
            [f"{KEY}.context_parallel_size=2", "policy.make_sequence_length_divisible_by=4", TWO_WORKERS],
            r"carry states along rows (Mamba layers), and",
            {**DENSE, "model_type": "nemotron_h"},
        ),
    ],
    "megatron_layers_divide_over_stages": [
        ([f"{KEY}.pipeline_model_parallel_size=3", "cluster.cpu_workers_per_node=3"], "4 layers for 3 stages", DENSE),
        (
            [f"{KEY}.pipeline_model_parallel_size=2", TWO_WORKERS, f"{KEY}.num_layers_in_last_pipeline_stage=4"],
            "leaves 0 of the model's 4 layers for 1 stages",
            DENSE,
        ),
        ([f"{KEY}.num_layers_in_first_pipeline_stage=1"], "set both to null", None),
    ],
    "megatron_sequence_parallel_needs_tensor_parallel": [
        ([f"{KEY}.sequence_parallel=true"], "tensor_model_parallel_size is 1", None)
    ],
    "megatron_lengths_can_be_split": [
        ([f"{KEY}.context_parallel_size=2", TWO_WORKERS], "into 4 equal pieces, for context_parallel_size 2;", None),
        (
            [f"{KEY}.tensor_model_parallel_size=2", f"{KEY}.sequence_parallel=true", TWO_WORKERS],
            "into 2 equal pieces, for sequence_parallel over tensor_model_parallel_size 2;",
            None,
        ),
    ],
    "local_layers_take_padded_batches": [
        ([LOCAL, "policy.sequence_packing.enabled=true"], "would mix the sequences of a packed row", None)
    ],
    "local_layers_keep_sequences_whole": [
        ([LOCAL, f"{KEY}.context_parallel_size=2"], "sees only one device's part", None),
    ],
    "local_layers_have_no_precision_aware_optimizer": [([LOCAL], "use_precision_aware_optimizer is true", None)],
    "eight_bit_layers_are_transformer_engines": [([LOCAL, f"{KEY}.fp8_cfg.enabled=true"], "set it to false", None)],
    "eight_bit_products_have_whole_blocks": [
        (
            [f"{KEY}.fp8_cfg.enabled=true"],
            "the model's hidden_size is 40, 40 on each device",
            {**DENSE, "hidden_size": 40, "head_dim": 32},
        ),
        (
            [f"{KEY}.fp8_cfg.enabled=true", f"{KEY}.tensor_model_parallel_size=4", "cluster.cpu_workers_per_node=4"],
            "the model's intermediate_size is 96, 24 on each device",
            {**DENSE, "hidden_size": 64, "intermediate_size": 96},
        ),
    ],
    "cleared_fp8_caches_exist": [([f"{KEY}.fp8_cfg.force_clear_fp8_caches=true"], "there are no such caches", None)],
    "deferred_logits_need_chunks": [([f"{KEY}.defer_fp32_logits=true"], "for instance to 1024", None)],
    "megatron_precision_is_said_once": [
        (["policy.precision=float32"], "set bf16=false fp16=false", None),
        ([f"{OPTIMIZER}.fp16=true"], "policy.precision is bfloat16", None),
    ],
    "megatron_optimizer_lives_in_one_place": [([*CPU_OFFLOAD, STATES], "set one of them to false", None)],
    "megatron_offload_fraction_is_positive": [
        ([f"{OPTIMIZER}.optimizer_cpu_offload=true"], "optimizer_offload_fraction is 0", None),
        ([STATES, f"{OPTIMIZER}.offload_optimizer_states_fraction=0"], "offload_optimizer_states_fraction is 0", None),
    ],
    "megatron_overlap_needs_cpu_offload": [
        ([f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true"], "set optimizer_cpu_offload to true", None)
    ],
    "megatron_offload_needs_the_distributed_optimizer": [
        ([*CPU_OFFLOAD, f"{OPTIMIZER}.use_distributed_optimizer=false"], "optimizer_cpu_offload is true", None),
        ([STATES, f"{OPTIMIZER}.use_distributed_optimizer=false"], "offload_optimizer_states is true", None),
    ],
    "megatron_offloaded_states_are_shards": [([STATES, f"{OPTIMIZER}.optimizer=sgd"], "does not shard sgd", None)],
    "megatron_precision_aware_optimizer_is_available": [
        ([f"{OPTIMIZER}.optimizer=sgd"], "optimizer is sgd with use_distributed_optimizer true", None),
        ([f"{OPTIMIZER}.use_distributed_optimizer=false"], "use_distributed_optimizer false", None),
    ],
    "megatron_distributed_optimizer_can_be_sharded": [
        ([f"{OPTIMIZER}.optimizer=sgd"], "megatron-core does not shard its states", None)
    ],
    "megatron_cpu_offload_is_precision_aware": [
        ([*CPU_OFFLOAD, f"{OPTIMIZER}.use_precision_aware_optimizer=false"], "masters that stay on the GPU", None)
    ],
    "megatron_cpu_offload_needs_half_precision": [
        ([*CPU_OFFLOAD, "policy.precision=float32"], "set precision to bfloat16", None)
    ],
    "megatron_16_bit_moments_are_transformer_engines": [
        (
            [*MOMENTS, f"{OPTIMIZER}.use_precision_aware_optimizer=false"],
            "use_precision_aware_optimizer is false",
            None,
        ),
        ([*CPU_OFFLOAD, *MOMENTS], "moments of optimizer_cpu_offload are float32", None),
        ([MOMENTS[0]], "exp_avg_dtype is bfloat16 and exp_avg_sq_dtype is float32", None),
    ],
    "megatron_parameter_gather_overlaps_only_shards": [
        ([f"{OPTIMIZER}.use_distributed_optimizer=false"], "no parameters are gathered", None)
    ],
    "megatron_learning_rates_are_in_order": [
        ([f"{OPTIMIZER}.lr=1e-7"], "min_lr is 5e-07, above policy.megatron_cfg.optimizer.lr 1e-07", None),
        ([f"{SCHEDULER}.lr_warmup_init=1e-5"], "lr_warmup_init is 1e-05, above", None),
        ([f"{SCHEDULER}.lr_decay_iters=13"], "lr_warmup_iters is 13, not below lr_decay_iters 13", None),
    ],
    "megatron_weight_decay_does_not_fall": [
        ([f"{SCHEDULER}.end_weight_decay=0.1"], "constant needs equal values", None),
        (
            [f"{SCHEDULER}.end_weight_decay=0", f"{SCHEDULER}.weight_decay_incr_style=linear"],
            "linear needs an end that is not below",
            None,
        ),
    ],
    "activation_offloading_names_its_modules": [
        ([OFFLOAD], "set it, for instance to [core_attn,attn_proj]", None),
        ([OFFLOAD, f"{KEY}.offload_modules=[]"], "names nothing", None),
    ],
    "activation_offloading_knows_its_modules": [
        ([OFFLOAD, f"{KEY}.offload_modules=[core_atn]"], "did you mean core_attn?", None),
        ([OFFLOAD, f"{KEY}.offload_modules=[zebra]"], "use some of attn_norm, qkv_linear", None),
    ],
    "recomputation_knows_its_modules": [([f"{KEY}.recompute_modules=[layer_norm]"], "did you mean layernorm?", None)],
    "recomputed_modules_exist": [
        ([*SELECTIVE, f"{KEY}.recompute_modules=[]"], "or to null for [core_attn]", None),
        ([*SELECTIVE, LOCAL, f"{KEY}.recompute_modules=[moe_act]"], "or name moe", EXPERTS),
        ([*SELECTIVE, f"{KEY}.recompute_modules=[mla_up_proj]"], "has no latent attention; remove it", EXPERTS),
        ([*SELECTIVE, f"{KEY}.recompute_modules=[mlp,moe_act]"], "has moe_act, but config.json of", DENSE),
    ],
    "offloaded_projection_needs_its_attention": [
        ([OFFLOAD, f"{KEY}.offload_modules=[attn_proj]"], "add core_attn", None)
    ],
    "offloaded_experts_exist": [
        ([OFFLOAD, f"{KEY}.offload_modules=[moe_act,expert_fc1]"], "has expert_fc1 and moe_act, but config.json", DENSE)
    ],
    "offloaded_norms_exist": [
        ([OFFLOAD, f"{KEY}.offload_modules=[attn_norm]"], "nothing would move; remove it, or name qkv_linear", EXPERTS),
        ([OFFLOAD, f"{KEY}.offload_modules=[core_attn,mlp_norm]"], "has mlp_norm, but in this model", DENSE),
    ],
    "activation_offloading_needs_transformer_engine": [
        ([OFFLOAD, LOCAL, f"{KEY}.offload_modules=[core_attn]"], "transformer_impl is local", None)
    ],
    "activation_offloading_excludes_full_recomputation": [
        (
            [OFFLOAD, f"{KEY}.offload_modules=[mlp_norm]", f"{KEY}.activation_checkpointing=true"],
            "keeps no activations that could be offloaded",
            None,
        )
    ],
    "recomputed_modules_are_not_offloaded": [
        (
            [
                OFFLOAD,
                f"{KEY}.offload_modules=[moe_act]",
                f"{KEY}.activation_checkpointing=true",
                f"{KEY}.recompute_granularity=selective",
                f"{KEY}.recompute_modules=[moe]",
            ],
            "drops their activations",
            None,
        ),
        (
            [
                OFFLOAD,
                f"{KEY}.offload_modules=[core_attn]",
                f"{KEY}.activation_checkpointing=true",
                f"{KEY}.recompute_granularity=selective",
            ],
            "(null stands for core_attn) both have core_attn",
            None,
        ),
    ],
    "offload_variable_is_left_alone": [
        (
            [OFFLOAD, f"{KEY}.offload_modules=[core_attn]", f"{KEY}.env_vars={{NVTE_CPU_OFFLOAD_V1: '0'}}"],
            "workers set that themselves; remove it",
            None,
        )
    ],
    "megatron_cuda_graphs_are_off": [([f"{KEY}.cuda_graph_impl=local"], "set it to none", None)],
    "megatron_adapters_need_whole_dense_models": [
        *(
            ([ADAPTERS, f"{KEY}.{name}=2"], f"set {name} to 1", None)
            for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        ),
        ([ADAPTERS], "a mixture-of-experts model gets no adapters", EXPERTS),
    ],
    "megatron_adapters_stand_alone": [
        ([ADAPTERS, f"{KEY}.fp8_cfg.enabled=true"], "fp8_cfg.enabled are both true", None),
        ([ADAPTERS, OFFLOAD], "fine_grained_activation_offloading are both true", None),
    ],
    "megatron_adapters_have_their_layers": [
        (
            [ADAPTERS, f"{PEFT}.target_modules=[linear_qkv]", f"{PEFT}.exclude_modules=[linear_fc1]"],
            "empty one of them",
            None,
        ),
        ([ADAPTERS, f"{PEFT}.exclude_modules=[q_proj]"], "has q_proj, which is none of", None),
        (
            [ADAPTERS, f"{PEFT}.exclude_modules=[linear_qkv,linear_proj,linear_fc1,linear_fc2]"],
            "none would be trained; remove one",
            None,
        ),
    ],
    "megatron_adapters_name_their_layers": [
        ([ADAPTERS, f"{PEFT}.target_modules=[linear_qkv,q_proj]"], "has q_proj, which is neither", None),
        (
            [ADAPTERS, f"{PEFT}.target_modules=['*.layers.4.*.linear_qkv']"],
            "fits full names of such layers only",
            DENSE,
        ),
        ([ADAPTERS, f"{PEFT}.target_modules=['*.layers.0.*']"], "fits full names of such layers only", DENSE),
    ],
}
LAYER_KEYS = ("attention_bias", "mlp_bias", "hidden_act")
CONFIG_KEYS = st.sampled_from(
    [*LAYER_KEYS, "model_type", "quantization_config", "rope_parameters", "rope_scaling", "partial_rotary_factor"]
)
ROPE_KEYS = st.sampled_from(["rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "full_attention"])
CASES = [(name, *case) for name, cases in BROKEN.items() for case in cases]


def config(overrides: list[str], model: dict[str, int] | None, folder: Path) -> GrpoMasterConfig:
    name = "some/hub-model"
    if model is not None:
        (folder / "config.json").write_text(json.dumps(model))
        name = str(folder)
    return validate_keys(load_config(CPU, [*MEGATRON, f"policy.model_name={name}", *overrides]), GrpoMasterConfig)


def test_every_rule_is_broken_here() -> None:
    assert set(BROKEN) == set(RULES)


MODULES = [rules.model, rules.optimizer, rules.activations, dtensor, algorithm, base, cluster, evaluation, memory]
MODULES += [model, rollouts, supervised, training]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_rule_of_a_module_is_checked(module) -> None:
    public = {name: f for name, f in inspect.getmembers(module, inspect.isfunction) if not name.startswith("_")}
    of_run = [f for f in public.values() if next(iter(inspect.signature(f).parameters)) in ("cfg", "account")]
    found = {f.__name__ for f in of_run if f.__module__ == module.__name__ and f.__annotations__["return"] is not int}
    checked = [GRPO_RULES, DISTILLATION_RULES, SFT_RULES, DPO_RULES, evaluation.EVAL_RULES]
    assert found and found <= {rule.__name__ for several in checked for rule in several}


@pytest.mark.parametrize(
    ("name", "overrides", "words", "model"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)]
)
def test_a_broken_rule_ends_in_one_line_with_its_fix_and_is_silent_while_another_backend_trains(
    name: str, overrides: list[str], words: str, model: dict[str, int] | None, tmp_path: Path
) -> None:
    cfg = config(overrides, model, tmp_path)
    message = RULES[name](cfg)
    assert message is not None
    assert words in message
    assert "\n" not in message
    assert ";" in message, "the fix follows a semicolon"
    megatron = replace(cfg.policy.megatron_cfg, enabled=False)
    assert RULES[name](replace(cfg, policy=replace(cfg.policy, megatron_cfg=megatron))) is None


SETTINGS = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.sampled_from(["yarn", "linear", "silu", "", "x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(ROPE_KEYS, inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(CONFIG_KEYS, SETTINGS))
def test_a_config_json_of_any_contents_is_let_through_or_refused_in_one_line(model: dict[str, Any]) -> None:
    for reason in (unsupported_family(model, BACKEND), unsupported_layers(model), unsupported_rope(model)):
        assert reason is None or (reason and "\n" not in reason)
    if unsupported_rope(model) is None:
        assert rope_type(model) in ROPE_TYPES


def broken_rules(overrides: list[str], model: dict[str, int] | None, folder: Path) -> list[str]:
    cfg = config(overrides, model, folder)
    return [name for name, rule in RULES.items() if rule(cfg) is not None]


@pytest.mark.parametrize(
    ("overrides", "model"),
    [
        ([], None),
        ([*CPU_OFFLOAD, f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true"], None),
        ([f"{OPTIMIZER}.optimizer_cpu_offload=true", f"{OPTIMIZER}.optimizer_offload_fraction=1"], None),
        ([*CPU_OFFLOAD, f"{OPTIMIZER}.optimizer=sgd", f"{OPTIMIZER}.use_precision_aware_optimizer=false"], None),
        ([STATES, f"{OPTIMIZER}.offload_optimizer_states_fraction=0.25"], None),
        ([OFFLOAD, f"{KEY}.offload_modules=[qkv_linear,core_attn,attn_proj]"], DENSE),
        ([OFFLOAD, f"{KEY}.offload_modules=[mlp_norm,expert_fc1,moe_act]"], EXPERTS),
        (
            [
                OFFLOAD,
                f"{KEY}.offload_modules=[core_attn,attn_proj]",
                f"{KEY}.activation_checkpointing=true",
                f"{KEY}.recompute_granularity=selective",
                f"{KEY}.recompute_modules=[mlp,layernorm]",
            ],
            DENSE,
        ),
        ([OFFLOAD, f"{KEY}.offload_modules=[core_attn]", f"{KEY}.env_vars={{NVTE_CPU_OFFLOAD_V1: '1'}}"], None),
        ([*SELECTIVE, f"{KEY}.recompute_modules=[moe,moe_act]"], EXPERTS),
        ([ADAPTERS, f"{PEFT}.target_modules=['*.layers.3.*.linear_qkv','*fc1',linear_fc2]"], DENSE),
        ([f"{SCHEDULER}.lr_decay_iters=14", f"{OPTIMIZER}.lr=5e-7"], None),
        (
            [f"{SCHEDULER}.end_weight_decay=0.1", f"{SCHEDULER}.weight_decay_incr_style=cosine"],
            None,
        ),
        ([f"{KEY}.apply_rope_fusion=false"], {**DENSE, "rope_parameters": YARN}),
        ([], {**DENSE, "model_type": "qwen2", "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1e6}),
        ([], {**EXPERTS, "mlp_only_layers": [1], "decoder_sparse_step": 2, "attention_bias": False}),
        (
            [
                LOCAL,
                f"{OPTIMIZER}.use_precision_aware_optimizer=false",
                "policy.precision=float32",
                f"{OPTIMIZER}.bf16=false",
            ],
            None,
        ),
        (
            [
                f"{KEY}.pipeline_model_parallel_size=3",
                "cluster.cpu_workers_per_node=3",
                f"{KEY}.num_layers_in_first_pipeline_stage=1",
                f"{KEY}.num_layers_in_last_pipeline_stage=1",
            ],
            DENSE,
        ),
        (
            [
                f"{KEY}.tensor_model_parallel_size=2",
                f"{KEY}.sequence_parallel=true",
                f"{KEY}.context_parallel_size=2",
                "cluster.cpu_workers_per_node=4",
                "policy.make_sequence_length_divisible_by=8",
            ],
            DENSE,
        ),
    ],
)
def test_combinations_that_work_break_no_rule(overrides: list[str], model: dict[str, int] | None, tmp_path: Path):
    assert broken_rules(overrides, model, tmp_path) == []


def test_data_parallel_workers_are_what_the_parallel_sizes_leave(tmp_path: Path) -> None:
    sizes = [f"{KEY}.tensor_model_parallel_size=2", f"{KEY}.pipeline_model_parallel_size=2"]
    cfg = config([*sizes, "cluster.cpu_workers_per_node=12", "policy.train_global_batch_size=64"], None, tmp_path)
    assert any("3 data-parallel workers" in message for message in broken(GRPO_RULES.rules, cfg))


def test_a_share_of_the_optimizer_above_one_is_no_share() -> None:
    with pytest.raises(ConfigError, match=r"optimizer_offload_fraction: given 1\.5, wanted number >= 0 and <= 1"):
        validate_keys(load_config(CPU, [f"{OPTIMIZER}.optimizer_offload_fraction=1.5"]), GrpoMasterConfig)
