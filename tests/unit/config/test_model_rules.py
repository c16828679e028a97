"""What is said of a model before Ray starts, from its config.json alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hub_cache import fill_hub_cache
from model_families import FAMILIES as TINY
from model_families import family_config, trained_by
from policy_cases import make_settings
from tiny_models import save_model_folder

from nemo_offload_rl.backends.alternatives import advice
from nemo_offload_rl.backends.dtensor.rules import (
    dtensor_trains_the_model,
    experts_divide_over_devices,
    host_held_layers_pass_on_hidden_states,
    host_held_training_draws_nothing,
    rows_of_the_model_can_be_shared,
    sequence_parallelism_splits_the_model,
)
from nemo_offload_rl.backends.dtensor.supported import STYLES, declared_plan, sequence_problem
from nemo_offload_rl.backends.factory import check_model
from nemo_offload_rl.backends.hf.served_adapters import served_adapters, the_engine_can_apply_adapters
from nemo_offload_rl.config.rules.model import (
    RULES,
    eight_bit_layers_have_whole_blocks,
    engines_share_out_experts_over_their_devices,
    replayed_experts_are_told,
    rotary_embeddings_keep_their_base,
    rotary_frequencies_of_engine_and_policy_agree,
)
from nemo_offload_rl.config.validate import validate_keys
from nemo_offload_rl.errors import ConfigError, UserError
from nemo_offload_rl.keys.engine import ServedAdapters
from nemo_offload_rl.keys.master import GrpoMasterConfig
from nemo_offload_rl.models.families import DTENSOR, FAMILIES, MEGATRON
from nemo_offload_rl.models.served import is_served_on_gpus_only
from nemo_offload_rl.runs.loading import load_grpo_config
from nemo_offload_rl.utils.config import load_config

CPU = "tests/unit/config/cpu.yaml"
LLAMA: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}

# config.json, and words of the refusal
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "phimoe"}, "model_type phimoe, but that backend trains afmoe, arcee, cohere, cohere2,"),
    ({"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2"}}, "model_type qwen2_vl"),
    ({"model_type": "dbrx"}, "model_type dbrx"),
    ({"model_type": "deepseek_v4"}, "model_type deepseek_v4"),
    (
        {"model_type": "llava", "text_config": {"model_type": "llama"}},
        "model_type llava, which reads more than text, but that backend trains only the language model, in a folder "
        "of model_type llama",
    ),
    ({"model_type": "bamba"}, "model_type bamba"),
    ({}, "model_type None"),
    ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "none of which is a causal language model"),
    ({**LLAMA, "quantization_config": {"quant_method": "awq"}}, "quant_method awq, but only fp8, mxfp4 and 16-bit"),
    (
        {**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
        "which is no pair of sizes",
    ),
    ({**LLAMA, "rope_scaling": "linear"}, "rotary embeddings 'linear', which is not a mapping"),
    ({**LLAMA, "rope_scaling": {"type": "ntk"}}, "rope_type ntk, but transformers knows default, linear,"),
    ({**LLAMA, "rope_parameters": {"rope_theta": None}}, "rope_theta null, but it is the base of the frequencies"),
]
ACCEPTED: list[dict[str, Any]] = [
    LLAMA,
    {**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    {"model_type": "qwen2", "use_sliding_window": True},
    {"model_type": "qwen3", "rope_scaling": None},
    {"model_type": "qwen3_moe", "num_experts": 4},
    {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {
        "model_type": "deepseek_v3",
        "kv_lora_rank": 512,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_attention_heads": 128,
    },
]


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 12, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("model", "overrides", "words"),
    [
        (EXPERTS, ["policy.dtensor_cfg.expert_parallel_size=8"], "12 experts.*; use one of 1, 2, 3, 4, 6, 12"),
        (LLAMA, ["policy.dtensor_cfg.expert_parallel_size=8"], r"the model \(llama\) has no experts; set it to 1"),
        (
            EXPERTS,
            ["policy.dtensor_cfg.expert_parallel_size=2", "policy.dtensor_cfg.tensor_parallel_size=2"],
            "and tensor_parallel_size=2 do not work together; set one of them to 1",
        ),
        (EXPERTS, ["policy.dtensor_cfg.expert_parallel_size=4"], None),
    ],
)
def test_experts_divide_evenly_or_are_refused(
    tmp_path: Path, model: dict[str, Any], overrides: list[str], words: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    overrides = [f"policy.model_name={tmp_path}", "cluster.cpu_workers_per_node=8", *overrides]
    message = experts_divide_over_devices(validate_keys(load_config(CPU, overrides), GrpoMasterConfig))
    assert message is None if words is None else re.search(words, str(message)), message


def test_a_plan_whose_parts_do_not_end_in_one_split_of_rows_excludes_sequence_parallelism(tmp_path: Path) -> None:
    for family in FAMILIES.values():
        plan = declared_plan(family.model_type)
        if DTENSOR in family.trained_by and {*plan.values()} <= {*STYLES}:  # the others are not split at all
            assert sequence_problem({"model_type": "known"}, plan) is None
    plan = {"layers.*.self_attn.o_proj": "rowwise", "layers.*.mlp.up_proj": "colwise"}
    for broken in (plan, {**plan, "layers.*.mlp.a": "rowwise", "layers.*.mlp.b": "rowwise"}, {"layers.*.w": "rowwise"}):
        message = sequence_problem({"model_type": "odd"}, broken)
        assert message is not None and "plan for odd" in message and message.endswith("; set it to false")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    overrides = [f"policy.model_name={tmp_path}", "cluster.cpu_workers_per_node=2"]
    overrides += ["policy.dtensor_cfg.tensor_parallel_size=2", "policy.dtensor_cfg.sequence_parallel=true"]
    cfg = validate_keys(load_config(CPU, overrides), GrpoMasterConfig)
    assert sequence_parallelism_splits_the_model(cfg) is None


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (LLAMA, None),
        ({"model_type": "mistral", "sliding_window": 8}, None),
        (
            {"model_type": "gemma2", "attn_logit_softcapping": 50.0},
            r"\(gemma2\) soft-caps attention scores.*; set it to 1",
        ),
        ({"model_type": "qwen3_next"}, r"\(qwen3_next\) carries states along rows.*; set it to 1"),
        ({"model_type": "gpt_oss"}, r"\(gpt_oss\) has attention sinks.*; set it to 1"),
        (
            {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            r"embeddings \(dynamic\).*whole rows; set it to 1$",
        ),
        (
            {"model_type": "phi3", "original_max_position_embeddings": 8, "rope_scaling": {"rope_type": "longrope"}},
            "set it to 1, or policy.max_total_sequence_length to at most 8$",
        ),
        (
            {"model_type": "phi3", "original_max_position_embeddings": 32, "rope_scaling": {"rope_type": "longrope"}},
            None,
        ),
    ],
)
def test_rows_that_devices_share_are_refused_where_a_model_needs_them_whole(
    tmp_path: Path, model: dict[str, Any], words: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    overrides = [f"policy.model_name={tmp_path}", "cluster.cpu_workers_per_node=2"]
    cfg = validate_keys(load_config(CPU, [*overrides, "policy.dtensor_cfg.context_parallel_size=2"]), GrpoMasterConfig)
    message = rows_of_the_model_can_be_shared(cfg)
    assert message is None if words is None else re.search(words, str(message)), message
    assert rows_of_the_model_can_be_shared(validate_keys(load_config(CPU, overrides), GrpoMasterConfig)) is None


@pytest.mark.parametrize(
    ("rate", "dropout", "words"),
    [(0.1, True, "set policy.dropout to false"), (0.1, False, None), (0.0, True, None)],
)
def test_state_on_the_host_excludes_dropout_of_the_model(
    tmp_path: Path, rate: float, dropout: bool, words: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "attention_dropout": rate}))
    overrides = [f"policy.model_name={tmp_path}", f"policy.dropout={dropout}", "policy.dtensor_cfg.cpu_offload=true"]
    message = host_held_training_draws_nothing(validate_keys(load_config(CPU, overrides), GrpoMasterConfig))
    assert message is None if words is None else str(message).endswith(words)


def test_state_on_the_host_excludes_layers_with_the_keys_of_others(tmp_path: Path) -> None:
    for name, words in (("gemma4-tied", None), ("gemma4-shared-tied", "keys and values of earlier layers")):
        (tmp_path / "config.json").write_text(json.dumps(family_config(name).to_dict()))
        overrides = [f"policy.model_name={tmp_path}", "policy.dtensor_cfg.cpu_offload=true"]
        message = host_held_layers_pass_on_hidden_states(validate_keys(load_config(CPU, overrides), GrpoMasterConfig))
        assert message is None if words is None else words in str(message)


def message_about(folder: Path, model: dict[str, Any], *overrides: str) -> str | None:
    (folder / "config.json").write_text(json.dumps(model))
    cfg = validate_keys(load_config(CPU, [f"policy.model_name={folder}", *overrides]), GrpoMasterConfig)
    assert rotary_embeddings_keep_their_base in RULES
    return dtensor_trains_the_model(cfg)


@pytest.mark.parametrize(("model", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_model_that_the_dtensor_backend_does_not_train_is_refused_in_one_line(
    tmp_path: Path, model: dict[str, Any], words: str
) -> None:
    message = message_about(tmp_path, model)
    assert message is not None
    assert words in message
    assert "\n" not in message
    assert message.endswith("; use another model (docs/reference/models.md)")
    with pytest.raises(ConfigError, match=words):
        load_grpo_config(CPU, [f"policy.model_name={tmp_path}"])
    other = ["policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true"]
    assert message_about(tmp_path, model, *other) is None


def test_a_refusal_names_another_backend_only_if_that_trains_the_model() -> None:
    biased, dynamic = {**LLAMA, "mlp_bias": True}, {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    nemotron, gpt = {"model_type": "nemotron", "hidden_act": "relu2"}, {"model_type": "gpt2"}
    assert (
        advice(biased, MEGATRON)
        == advice(dynamic, MEGATRON)
        == ("use policy.dtensor_cfg, which trains this model, or another model")
    )
    assert advice(nemotron, DTENSOR) == "use policy.megatron_cfg, which trains this model, or another model"
    nothing = "use another model (docs/reference/models.md)"
    assert advice(nemotron, DTENSOR, has_gpus=False) == advice(gpt, DTENSOR) == advice(gpt, MEGATRON) == nothing
    assert advice({**nemotron, "mlp_bias": True}, DTENSOR) == nothing
    assert advice({**LLAMA, "quantization_config": {"quant_method": "awq"}}, MEGATRON) == nothing


@pytest.mark.parametrize("model", ACCEPTED)
def test_the_families_that_it_trains_pass(tmp_path: Path, model: dict[str, Any]) -> None:
    assert message_about(tmp_path, model) is None


@pytest.mark.parametrize("name", [name for name in TINY if DTENSOR in trained_by(name)])
def test_grpo_takes_every_model_that_the_matrix_has_seen_served(tmp_path: Path, name: str) -> None:
    family_config(name).save_pretrained(tmp_path)
    if is_served_on_gpus_only(family_config(name).to_dict()):
        with pytest.raises(ConfigError, match=r"has Mamba layers .* which vLLM computes on GPUs only; set"):
            load_grpo_config(CPU, [f"policy.model_name={tmp_path}"])
        load_grpo_config(CPU, [f"policy.model_name={tmp_path}", "cluster.gpus_per_node=1"])
    elif FAMILIES[family_config(name).model_type].is_served:
        load_grpo_config(CPU, [f"policy.model_name={tmp_path}"])
    else:
        with pytest.raises(ConfigError, match=r"which vLLM 0\.25\.1 does not serve \(SFT and DPO train it\)"):
            load_grpo_config(CPU, [f"policy.model_name={tmp_path}"])


def test_caches_of_layers_with_states_are_not_kept_on_the_host(tmp_path: Path) -> None:
    family_config("qwen3_5-tied").save_pretrained(tmp_path)
    keys = ["enabled=true", "order=finished", "in_flight_weight_updates=true", "paused_kv=host"]
    overrides = [f"policy.model_name={tmp_path}", *(f"grpo.async_grpo.{key}" for key in keys)]
    overrides += [
        "policy.generation.vllm_cfg.async_engine=true",
        "loss_fn.use_importance_sampling_correction=true",
        "policy.generation.colocated.enabled=true",
    ]
    with pytest.raises(ConfigError, match=r"\(qwen3_5_text\) have states, .* set it to recompute or auto"):
        load_grpo_config(CPU, overrides)
    load_grpo_config(CPU, [*overrides, "grpo.async_grpo.paused_kv=auto"])


@pytest.mark.parametrize("rope", [{"type": "dynamic", "factor": 2.0}, {"rope_type": "longrope"}])
def test_frequencies_that_change_with_a_batch_are_refused_beside_an_engine(
    tmp_path: Path, rope: dict[str, Any]
) -> None:
    (kind,) = {"dynamic", "longrope"} & set(rope.values())
    assert message_about(tmp_path, {**LLAMA, "rope_scaling": rope}) is None  # DTensor alone computes them
    with pytest.raises(ConfigError, match=f"rope_type {kind}, .* but not in the engine; use another"):
        load_grpo_config(CPU, [f"policy.model_name={tmp_path}"])


def test_long_rope_is_trained_beside_an_engine_up_to_the_length_where_it_changes(tmp_path: Path) -> None:
    rope = {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = {"model_type": "phi3", "original_max_position_embeddings": 64, "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(model))
    lengths = ("policy.max_total_sequence_length", "policy.generation.vllm_cfg.max_model_len")
    overrides = [f"policy.model_name={tmp_path}", *(f"{key}=64" for key in lengths)]
    overrides += ["data.max_input_seq_length=32"]
    load_grpo_config(CPU, overrides)
    with pytest.raises(ConfigError, match="change in rows of more than 64 tokens; set policy") as error:
        load_grpo_config(CPU, [*overrides, f"{lengths[0]}=65"])
    assert "\n" not in str(error.value)


def test_hunyuans_larger_base_is_trained_beside_an_engine_up_to_the_models_positions(tmp_path: Path) -> None:
    model = family_config("hunyuan").to_dict()
    (tmp_path / "config.json").write_text(json.dumps(model | {"max_position_embeddings": 64}))
    lengths = ("policy.max_total_sequence_length", "policy.generation.vllm_cfg.max_model_len")
    overrides = [f"policy.model_name={tmp_path}", *(f"{key}=64" for key in lengths), "data.max_input_seq_length=32"]
    load_grpo_config(CPU, overrides)
    with pytest.raises(ConfigError, match="change in rows of more than 64 tokens; set policy"):
        load_grpo_config(CPU, [*overrides, f"{lengths[0]}=65"])
    plain = {**model["rope_parameters"], "alpha": None}
    (tmp_path / "config.json").write_text(json.dumps(model | {"rope_parameters": plain}))
    with pytest.raises(ConfigError, match=r"rope_type dynamic, .* but not in the engine; use another"):
        load_grpo_config(CPU, overrides)


def test_an_override_of_dropout_needs_the_key_that_trains_with_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    rate = "+policy.hf_config_overrides.attention_dropout"
    overrides = [f"policy.model_name={tmp_path}", f"{rate}=0.1"]
    with pytest.raises(
        ConfigError, match=r"attention_dropout is 0.1, but policy\.dropout is false.*; set policy.dropout"
    ):
        load_grpo_config(CPU, overrides)
    load_grpo_config(CPU, [*overrides, "policy.dropout=true"])
    load_grpo_config(CPU, [overrides[0], f"{rate}=0.0"])


def test_windows_that_the_engine_does_not_serve_are_refused_beside_one(tmp_path: Path) -> None:
    model = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "num_hidden_layers": 4}
    assert message_about(tmp_path, model | {"max_window_layers": 2}) is None
    with pytest.raises(ConfigError, match="layers with and without a sliding window, which the engine does not serve"):
        load_grpo_config(CPU, [f"policy.model_name={tmp_path}"])
    assert message_about(tmp_path, model | {"max_window_layers": 0}) is None
    load_grpo_config(CPU, [f"policy.model_name={tmp_path}"])


# overrides, config.json beside Llama's, words of the refusal
UNSPLIT: list[tuple[int, dict[str, Any], str]] = [
    (4, {"num_attention_heads": 6}, "tensor_parallel_size 4 does not divide the 6 attention heads of the model"),
    (4, {"num_attention_heads": 4, "num_key_value_heads": 2}, "2 key-value heads"),
    (2, {"intermediate_size": 33}, "33 channels of MLPs"),
    (2, {"vocab_size": 33}, "33 tokens of the vocabulary"),
    (
        2,
        {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]},
        "does not split layers with states, which qwen3_5_text has; set it to 1",
    ),
]


@pytest.mark.parametrize(("size", "sizes", "words"), UNSPLIT, ids=[words for *_, words in UNSPLIT])
def test_a_model_that_cannot_be_split_is_refused_in_one_line(
    tmp_path: Path, size: int, sizes: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | sizes))
    overrides = [f"policy.model_name={tmp_path}", f"cluster.cpu_workers_per_node={size}"]
    load_grpo_config(CPU, overrides)
    with pytest.raises(ConfigError, match=words) as error:
        load_grpo_config(CPU, [*overrides, f"policy.dtensor_cfg.tensor_parallel_size={size}"])
    assert "\n" not in str(error.value)


# devices of an engine, config.json beside Llama's, words of the refusal; None where it is taken
BLOCKS: list[tuple[int, dict[str, Any], str | None]] = [
    (1, {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}, None),
    (1, {"hidden_size": 192}, "hidden_size of .* has 192 on each device; set precision to bfloat16"),
    (1, {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 3}, "queries of .* has 192"),
    (2, {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 1}, None),
    (
        2,
        {"hidden_size": 256, "intermediate_size": 384, "head_dim": 128, "num_attention_heads": 4},
        r"intermediate_size of .* has 192 on each device; lower .*tensor_parallel_size from 2, or set precision",
    ),
    (
        2,
        {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 4, "moe_intermediate_size": 128, "num_experts": 4},
        "moe_inter.* 64",
    ),
    (1, {"hidden_size": 256, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "q_lora_rank": 40}, "40"),
]


@pytest.mark.parametrize(("size", "sizes", "words"), BLOCKS, ids=[str(words) for *_, words in BLOCKS])
def test_layers_in_8_bits_have_whole_blocks(
    tmp_path: Path, size: int, sizes: dict[str, Any], words: str | None
) -> None:
    plain = {"intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | plain | sizes))
    engine = "policy.generation.vllm_cfg"
    overrides = [f"policy.model_name={tmp_path}", f"{engine}.tensor_parallel_size={size}"]
    cfg = validate_keys(load_config(CPU, [*overrides, f"{engine}.precision=fp8"]), GrpoMasterConfig)
    message = eight_bit_layers_have_whole_blocks(cfg)
    assert (message is None) if words is None else re.search(words, message or "") and "\n" not in (message or "")
    whole = [[f"{engine}.precision=fp8", f"{engine}.expert_parallel_size={size}"]] if "moe" in str(words) else []
    assert not whole or f"set {engine}.expert_parallel_size to {size}, so that experts stay whole" in str(message)
    for allowed in ([], [f"{engine}.precision=fp8", f"+{engine}.quantization_ignored_layer_kws=[mlp]"], *whole):
        cfg = validate_keys(load_config(CPU, [*overrides, *allowed]), GrpoMasterConfig)
        assert eight_bit_layers_have_whole_blocks(cfg) is None


@pytest.mark.parametrize(
    ("family", "sizes", "overrides", "words"),
    [
        ("qwen3-tied", {}, [], "has no experts; set enabled to false"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, [], "has one expert for each token"),
        ("hunyuan_moe-tied", {}, [], "model_type hunyuan_v1_moe, for which vLLM 0.25.1 does not find"),
        ("mixtral-window-tied", {}, [], "has a sliding window in all layers"),
        ("qwen3_moe", {}, ["policy.generation.vllm_cfg.precision=fp8"], "an engine on a CPU with .*precision fp8"),
        ("qwen3_moe", {}, [], None),
    ],
)
def test_experts_are_replayed_where_the_engine_tells_them(
    tmp_path: Path, family: str, sizes: dict[str, Any], overrides: list[str], words: str | None
) -> None:
    family_config(family, **sizes).save_pretrained(tmp_path)
    keys = [f"policy.model_name={tmp_path}", "policy.router_replay.enabled=true", *overrides]
    cfg = validate_keys(load_config(CPU, keys), GrpoMasterConfig)
    message = replayed_experts_are_told(cfg)
    assert (message is None) if words is None else re.search(words, message or "") and "\n" not in (message or "")


def test_an_engine_shares_out_the_experts_that_a_model_has_over_its_own_devices(tmp_path: Path) -> None:
    engine, sizes = "policy.generation.vllm_cfg", (("tensor", 2), ("expert", 2))

    def problem(model: dict[str, Any], *sizes: tuple[str, int]) -> str | None:
        (tmp_path / "config.json").write_text(json.dumps(model))
        overrides = [f"{engine}.{name}_parallel_size={size}" for name, size in sizes]
        cfg = validate_keys(load_config(CPU, [f"policy.model_name={tmp_path}", *overrides]), GrpoMasterConfig)
        return engines_share_out_experts_over_their_devices(cfg)

    moe = {**LLAMA, "num_experts": 4}
    assert problem(moe) is problem(moe, *sizes) is problem(LLAMA, ("tensor", 2)) is None
    assert "set it to 2, or both to 4" in str(problem(moe, ("tensor", 2), ("expert", 4)))
    assert "has no experts; set it to 1" in str(problem(LLAMA, *sizes))
    assert "does not divide the 5 experts" in str(problem({**LLAMA, "num_experts": 5}, *sizes))


def test_overrides_count_as_the_models_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    dynamic = "+policy.hf_config_overrides.rope_parameters={rope_type: dynamic, rope_theta: 1}"
    cfg = validate_keys(load_config(CPU, [f"policy.model_name={tmp_path}", dynamic]), GrpoMasterConfig)
    assert "rope_type dynamic" in str(rotary_frequencies_of_engine_and_policy_agree(cfg))


def test_rows_longer_than_the_models_positions_are_refused_unless_vllm_is_told_to_allow_them(tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", raising=False)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 100}))
    overrides = [f"policy.model_name={tmp_path}", "policy.generation.vllm_cfg.max_model_len=200"]
    overrides += ["policy.max_total_sequence_length=200"]
    load_grpo_config(CPU, [*overrides[:1], *(line.replace("200", "100") for line in overrides[1:])])
    with pytest.raises(ConfigError, match=r"max_model_len 200 is above the 100 tokens that config.json of") as error:
        load_grpo_config(CPU, overrides)
    assert "\n" not in str(error.value)
    doubled = "{rope_type: linear, factor: 2.0, rope_theta: 1e4}"
    load_grpo_config(CPU, [*overrides, f"+policy.hf_config_overrides.rope_parameters={doubled}"])
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    load_grpo_config(CPU, overrides)


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_an_override_of_the_rotary_embeddings_has_their_base(tmp_path: Path, backend: str) -> None:
    enabled = [f"policy.{name}_cfg.enabled={str(name == backend).lower()}" for name in ("dtensor", "megatron")]
    rope = "+policy.hf_config_overrides.rope_parameters={rope_type: linear, factor: 2.0}"
    cfg = validate_keys(load_config(CPU, [*enabled, rope]), GrpoMasterConfig)
    assert "has no rope_theta" in str(rotary_embeddings_keep_their_base(cfg))
    for nothing in ("null", "linear", "{}"):
        emptied = f"+policy.hf_config_overrides.rope_parameters={nothing}"
        cfg = validate_keys(load_config(CPU, [*enabled, emptied]), GrpoMasterConfig)
        assert "has no rope_theta" in str(rotary_embeddings_keep_their_base(cfg))
    cfg = validate_keys(load_config(CPU, [*enabled, rope.replace("}", ", rope_theta: 1e4}")]), GrpoMasterConfig)
    assert rotary_embeddings_keep_their_base(cfg) is None


def test_a_model_of_a_hub_is_judged_by_what_the_cache_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "phimoe"}))
    fill_hub_cache(monkeypatch, tmp_path / "cache", "some/phimoe", tmp_path / "model")
    cfg = validate_keys(load_config(CPU, ["policy.model_name=some/phimoe"]), GrpoMasterConfig)
    assert "model_type phimoe" in str(dtensor_trains_the_model(cfg))
    with pytest.raises(ConfigError, match="model_type phimoe"):
        load_grpo_config(CPU, ["policy.model_name=some/phimoe"])
    # What was never used is not known by rules: the run looks once more, before Ray.
    config = load_grpo_config(CPU, ["policy.model_name=some/unknown"])
    with pytest.raises(UserError, match="is not a folder, and neither the model hub nor its cache"):
        check_model(config.worker)


def test_a_home_folder_is_written_out_once_for_all_who_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(LLAMA))
    config = load_grpo_config(CPU, ["policy.model_name=~/m", "policy.tokenizer.name=~/t", "logger.log_dir=~/a b"])
    model, tokenizer = str(tmp_path / "m"), str(tmp_path / "t")
    assert config.policy.model_name == config.engine.model_name == model
    assert config.policy.tokenizer.name == tokenizer
    assert config.resolved["policy"]["model_name"] == model
    assert config.logger.log_dir == str(tmp_path / "a b")
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "phimoe"}))
    with pytest.raises(ConfigError, match="model_type phimoe"):
        load_grpo_config(CPU, ["policy.model_name=~/m"])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"]}, r"\(3\) must be equal to the number of .*layer"),
        ({"num_attention_heads": 3, "hidden_size": 64}, r"The hidden size \(64\) is not a multiple of the number of"),
        ({"dtype": "float42"}, "has no attribute 'float42'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "Missing required keys in `rope_parameters`"),
    ],
)
def test_what_the_model_library_refuses_of_a_config_ends_the_run_in_one_line_before_ray(
    tmp_path: Path, model: dict[str, Any], words: str
) -> None:
    save_model_folder(tmp_path, 0)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **model}))
    settings = make_settings(tmp_path)
    with pytest.raises(UserError, match=words) as error:
        check_model(settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "words"), [("{", "is not valid JSON"), ("[]", "holds no JSON object")])
def test_a_config_that_is_none_is_named_before_ray(tmp_path: Path, text: str, words: str) -> None:
    save_model_folder(tmp_path, 0)
    (tmp_path / "config.json").write_text(text)
    config = load_grpo_config(CPU, [f"policy.model_name={tmp_path}"])
    with pytest.raises(UserError, match=words):
        check_model(config.worker)


def test_megatron_needs_the_name_of_the_models_class(tmp_path: Path) -> None:
    save_model_folder(tmp_path, 0)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": None}))
    check_model(make_settings(tmp_path))
    with pytest.raises(ConfigError, match="has no architectures"):
        check_model(make_settings(tmp_path, backend="megatron"))


@pytest.mark.parametrize("backend", ["dtensor", "megatron"])
def test_weights_of_another_shape_than_the_config_s_are_told_before_ray(tmp_path: Path, backend: str) -> None:
    save_model_folder(tmp_path, 0)
    config = json.loads((tmp_path / "config.json").read_text())
    check_model(make_settings(tmp_path, backend=backend))
    rows, width = config["intermediate_size"], config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 2 * rows}))
    told = rf"layers\.0\.mlp\.down_proj\.weight: \({width}, {rows}\) instead of \({width}, {2 * rows}\) \(/.*tensors\);"
    with pytest.raises(UserError, match=told):
        check_model(make_settings(tmp_path, backend=backend))


LORA = "policy.dtensor_cfg.lora_cfg"
ENGINE = "policy.generation.vllm_cfg"
ALL = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
MEGATRON_LORA = ["policy.dtensor_cfg.enabled=false", "policy.megatron_cfg.enabled=true"]
MEGATRON_LORA += ["policy.megatron_cfg.peft.enabled=true", "policy.megatron_cfg.peft.dim=200"]
TWO_LAYERS = [f"{LORA}.match_all_linear=false", f"{LORA}.target_modules=[q_proj,self_attn.v_proj]"]
WITH_OUTPUT = [f"{LORA}.match_all_linear=false", f"{LORA}.target_modules=['*']"]


@pytest.mark.parametrize(
    ("model", "overrides", "expected"),
    [
        ({}, [f"{LORA}.enabled=false"], None),
        ({}, [], ServedAdapters(8, ALL)),
        ({}, [f"{LORA}.dim=17", *TWO_LAYERS], ServedAdapters(32, ("q_proj", "v_proj"))),
        ({}, [*MEGATRON_LORA, "policy.megatron_cfg.peft.exclude_modules=[linear_qkv]"], ServedAdapters(256, ALL[4:])),
        ({}, ["policy.generation.enable_lora=false"], "enable_lora is false"),
        ({}, ["policy.generation.enable_lora=null"], "the engine shares the policy's devices"),
        ({}, [f"{LORA}.dim=513"], "rank 512 at most, and theirs is 513"),
        ({}, [f"{ENGINE}.precision=fp8"], "8 bits"),
        ({}, WITH_OUTPUT, "the output layer has an adapter"),
        ({}, [*WITH_OUTPUT, f"{LORA}.exclude_modules=[lm_head]"], ServedAdapters(8, ALL)),
        ({"model_type": "qwen3_moe", "num_experts": 4}, [], "mixture of experts"),
        ({"model_type": "glm4"}, [], "no adapters for model_type glm4"),
        ({"quantization_config": {"quant_method": "fp8"}}, [], "the model's folder are quantized"),
    ],
)
def test_the_engine_applies_adapters_where_it_can_and_says_why_elsewhere(
    tmp_path: Path, model: dict[str, Any], overrides: list[str], expected: ServedAdapters | str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | model))
    shares = "policy.generation.enable_lora=null" in overrides
    all_overrides = [f"policy.model_name={tmp_path}", f"{LORA}.enabled=true", f"{LORA}.dim=8", *overrides]
    all_overrides += [f"policy.generation.colocated.enabled={str(shares).lower()}"]
    if "policy.megatron_cfg.enabled=true" in overrides:
        all_overrides = [it for it in all_overrides if not it.startswith(LORA)]
    cfg = validate_keys(load_config(CPU, all_overrides), GrpoMasterConfig)
    found = served_adapters(cfg)
    assert expected in found if isinstance(expected, str) and isinstance(found, str) else found == expected
    given = any("enable_lora" in override for override in overrides)
    wanted = validate_keys(load_config(CPU, [*all_overrides, "policy.generation.enable_lora=true"]), GrpoMasterConfig)
    problem = the_engine_can_apply_adapters(wanted)
    if isinstance(expected, ServedAdapters) or given:
        assert problem is None
    else:
        assert (expected or "no adapters are trained") in (problem or "")
