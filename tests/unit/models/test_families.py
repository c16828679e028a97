"""Records of model families against the tests' list, and against what `transformers` declares."""

from __future__ import annotations

from typing import Any

import pytest
from model_families import FAMILIES as TINY
from model_families import family_config, trained_by
from models_page import BY_ENGINE, EVERYWHERE, PAGE, read_results, with_table

from nemo_offload_rl.backends.dtensor.supported import declared_plan, split_problem, unsupported
from nemo_offload_rl.models.families import DTENSOR, FAMILIES, has_sliding_window, logits_divisor
from nemo_offload_rl.models.served import is_served_on_gpus_only, unserved
from nemo_offload_rl.models.shape import ModelShape


def test_every_record_has_a_tiny_model_and_its_backends_train_it() -> None:
    by_type: dict[str, set[str]] = {}
    for name in TINY:
        by_type.setdefault(family_config(name).model_type, set()).update(trained_by(name))
    assert by_type == {name: set(family.trained_by) for name, family in FAMILIES.items()}


def test_the_page_is_made_of_what_was_seen_of_every_row() -> None:
    results = read_results()
    rows = {f"{name}/{backend}": family_config(name).model_type for name in TINY for backend in trained_by(name)}
    assert {key: entry["model_type"] for key, by_machine in results.items() for entry in by_machine.values()} == rows
    for key, by_machine in results.items():
        config = family_config(key.rpartition("/")[0]).to_dict()
        is_served = FAMILIES[config["model_type"]].is_served and not is_served_on_gpus_only(config)
        by_engine = set(BY_ENGINE) if is_served else set()
        assert set(EVERYWHERE) - set(BY_ENGINE) | by_engine == set(EVERYWHERE) & set(by_machine["CPU"]["facts"])
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page, results), "run python tests/support/models_page.py"


# What transformers' plan, or its absence, or a size, leaves whole.
UNSPLIT = {
    "cohere-norms-tied": "has no norms of queries and keys, which use_qk_norm asks for",
    "gemma4-shared-tied": "splits layers.*.experts.gate_up_proj of gemma4_text as packed_colwise",
    "gemma4-tied": "splits layers.*.experts.gate_up_proj of gemma4_text as packed_colwise",
    "falcon_h1": "does not split layers with states",
    "falcon_h1-norm-tied": "does not split layers with states",
    "granitemoehybrid-attention-tied": "does not split layers with states",
    "granitemoehybrid-tied": "does not split layers with states, which granitemoehybrid has",
    "hunyuan": "declares no tensor-parallel plan for hunyuan_v1_dense",
    "lfm2-tied": "does not split layers with states, which lfm2 has",
    "llama-odd": "does not divide the 389 tokens of the vocabulary",
    "nemotron_h": "does not split layers with states, which nemotron_h has",
    "olmo_hybrid": "does not split layers with states, which olmo_hybrid has",
    "olmo_hybrid-rotated": "does not split layers with states, which olmo_hybrid has",
    "qwen3_5-tied": "does not split layers with states, which qwen3_5_text has",
    "stablelm": "declares no tensor-parallel plan for stablelm",
}


@pytest.mark.parametrize("name", [name for name in TINY if DTENSOR in trained_by(name)])
def test_the_dtensor_backend_knows_the_plan_of_every_dense_family_that_it_trains(name: str) -> None:
    config = family_config(name).to_dict()
    problem = split_problem(config, declared_plan(config["model_type"]), 2)
    if name in UNSPLIT or ModelShape.of(config).num_experts:
        assert UNSPLIT.get(name, "set it to 1") in str(problem)
    else:
        assert problem is None
        assert "does not divide the 4 attention heads" in str(
            split_problem(config, declared_plan(config["model_type"]), 3)
        )


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("mixtral", "splits layers.*.mlp.experts.gate_up_proj of mixtral as packed_colwise"),
        ("deepseek_v3", "of deepseek_v3 as packed_colwise, which the DTensor backend does not know; set it to 1"),
        ("gpt2", "declares no tensor-parallel plan for gpt2"),
    ],
)
def test_a_plan_with_an_unknown_style_or_none_is_refused_by_name(model_type: str, words: str) -> None:
    config = {"model_type": model_type}
    assert words in str(split_problem(config, declared_plan(model_type), 2))
    assert split_problem(config, declared_plan(model_type), 1) is None


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("deepseek_v3", {"topk_method": None}, "topk_method null, but the model library takes noaux_tc"),
        ("deepseek_v3", {"scoring_func": "softmax"}, 'scoring_func "softmax", but the model library takes sigmoid'),
        ("gpt_oss", {"attention_bias": False}, "attention_bias false, but the engine has biases in all projections"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0, which the engine would leave out"),
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob true, which the engine would leave out"),
        ("olmoe", {"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06, but the engine takes 1e-05"),
        ("olmoe", {"tie_word_embeddings": True}, "tie_word_embeddings true, but the engine would have two matrices"),
        (
            "qwen2_moe",
            {"use_sliding_window": True},
            "use_sliding_window true, whose windows the engine would give to other layers",
        ),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy"},
            'topk_method "group_limited_greedy", but the model library computes only greedy',
        ),
        (
            "qwen3_5-tied",
            {"attn_output_gate": False},
            "attn_output_gate false, but the model library has output gates of attention",
        ),
        ("glm4_moe_lite", {"first_k_dense_replace": 3}, "first_k_dense_replace 3, but the model library takes 1"),
        (
            "minimax_m2",
            {"use_routing_bias": False},
            "use_routing_bias false, but the model library chooses experts with a bias",
        ),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias false, but the engine has biases of queries, keys and values"),
    ],
)
def test_what_of_a_family_is_not_trained_is_refused_by_its_key(name: str, changes: dict[str, Any], words: str) -> None:
    assert unsupported(family_config(name).to_dict()) is None
    assert unsupported(family_config(name, **changes).to_dict()) == words


LONGEST = 1024
TURNS = ["sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
SCALED = YARN | {"beta_fast": 32.0, "beta_slow": 1.0}
# Each seen to sample from another function than Hugging Face's, or not to start, with vLLM 0.25.1 on a CPU.
OTHERWISE: list[tuple[str, dict[str, Any], str]] = [
    ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_type default, but the"),
    ("gpt_oss", {"layer_types": ["full_attention"] * 4}, "layer_types other than sliding_attention and full"),
    ("llama", {"sliding_window": 8}, "sliding_window 8 that no layer has"),
    ("smollm3-tied", {"sliding_window": 8}, "sliding_window 8 that no layer has"),
    ("olmo3", {"layer_types": ["full_attention"] * 2}, "sliding_window 8 that no layer has"),
    ("qwen3-window", {"max_window_layers": 2, "layer_types": None}, "sliding_window 8 that no layer has"),
    ("qwen3-window", {"max_window_layers": 1, "layer_types": None}, "layers with and without a sliding window"),
    ("phi3-window", {"layer_types": TURNS}, "layer_types that differ"),
    ("qwen3_next", {"tie_word_embeddings": True}, "tie_word_embeddings true, but the engine would have two"),
    ("qwen3_next", {"qkv_bias": True}, "qkv_bias true, for which the engine would add biases"),
    ("qwen3_5_moe", {"attention_bias": True}, "attention_bias true, which the engine would leave out"),
    ("qwen3", {"attention_bias": True}, "attention_bias true, which the engine would leave out"),
    ("cohere-tied", {"tie_word_embeddings": False}, "tie_word_embeddings false, but the engine has one matrix"),
    ("glm4_moe", {"tie_word_embeddings": True}, "tie_word_embeddings true, but the engine would have two"),
    ("seed_oss", {"mlp_bias": True}, "mlp_bias true, which the engine would leave out"),
    ("olmo2", {"hidden_act": "gelu"}, "hidden_act gelu, and the engine computes silu"),
    ("arcee", {"hidden_act": "silu"}, "hidden_act silu, and the engine computes relu2"),
    ("lfm2-tied", {"tie_word_embeddings": False}, "tie_word_embeddings false, but the engine has one matrix"),
    ("gemma2-tied", {"hidden_activation": "gelu"}, "hidden_activation gelu, and the engine computes gelu_py"),
    ("glm", {"rope_parameters": None, "partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25, but the engine"),
    ("gpt_oss", {"rope_parameters": SCALED | {"attention_factor": 0.7}}, "an attention factor of 0.7, which the eng"),
    ("gpt_oss", {"rope_parameters": SCALED | {"attn_factor": 0.5}}, "an attention factor of 0.569315, which the"),
    ("llama", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope_type proportional, which"),
    ("gemma3-tied", {"rope_parameters": {turn: {"rope_dim": 16} for turn in TURNS}}, "rope_dim of rotary"),
    ("deepseek_v3", {"rope_parameters": YARN | {"truncate": False}}, "truncate false of rotary embeddings, which"),
    ("deepseek_v3", {"rope_parameters": YARN | {"apply_yarn_scaling": False}}, "apply_yarn_scaling false, for which"),
]


@pytest.mark.parametrize(("name", "changes", "words"), OTHERWISE)
def test_what_the_engine_computes_otherwise_is_refused_beside_one(
    name: str, changes: dict[str, Any], words: str
) -> None:
    config = family_config(name).to_dict()
    assert unserved(config, LONGEST) is None
    assert words in str(unserved(config | changes, LONGEST))


def test_what_the_engine_computes_alike_is_served() -> None:
    llama = family_config("llama").to_dict()
    for changes in ({}, {"attention_factor": 0.7}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"attn_factor": 0.5}):
        assert unserved(llama | {"rope_parameters": YARN | changes}, LONGEST) is None
    assert unserved(llama | {"sliding_window": LONGEST}, LONGEST) is None
    qwen = family_config("qwen3").to_dict()
    assert (
        unserved(qwen | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}, LONGEST) is None
    )


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5, but models of its family rotate whole"),
        ("glm4", {"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25 and 0.5, inside and outside"),
        (
            "mistral-window",
            {"layer_types": TURNS},
            "for which the model library would load it as model_type m",
        ),
        ("llama", {"rope_parameters": YARN | {"extrapolation_factor": 0.5}}, "extrapolation_factor 0.5 of rotary emb"),
        (
            "llama",
            {"rope_parameters": YARN | {"factor": "4"}},
            "factor '4' of rotary embeddings, which is not a number",
        ),
        ("olmo3", {"rope_parameters": dict.fromkeys(TURNS, YARN)}, "rotary embeddings by layer type, which the model"),
        ("phi3", {"rope_parameters": YARN | {"short_mscale": 1.1}}, "short_mscale 1.1 and long_mscale None, but"),
        ("olmo3", {"sliding_window": None}, "layer_types with sliding_attention, but no sliding_window that is used"),
        ("qwen3", {"layer_types": TURNS, "sliding_window": 8}, "layer_types with sliding_attention, but no sliding_w"),
    ],
)
def test_settings_that_the_model_library_reads_otherwise_are_refused(
    name: str, changes: dict[str, Any], words: str
) -> None:
    config = family_config(name).to_dict()
    assert unsupported(config) is None
    assert words in str(unsupported(config | changes))


def test_windows_and_divisors_are_read_as_each_family_names_them() -> None:
    configs = {name: family_config(name).to_dict() for name in TINY}
    windowed = {name for name in TINY if has_sliding_window(configs[name], LONGEST)}
    in_turns = {name for name in TINY if "sliding_attention" in TINY[name][1].get("layer_types", ())}
    assert windowed == in_turns | {"exaone_moe"} | {name for name in TINY if "window" in name}
    assert not any(has_sliding_window(configs[name], 8) for name in TINY)  # rows that no window is smaller than
    assert has_sliding_window(configs["phi3-longrope"], 262145)
    qwen = {"model_type": "qwen2", "sliding_window": 4, "num_hidden_layers": 4, "max_window_layers": 2}
    assert has_sliding_window(qwen | {"use_sliding_window": True}, LONGEST)
    assert not has_sliding_window(qwen | {"use_sliding_window": False}, LONGEST)
    whole = {"use_sliding_window": True, "layer_types": ["full_attention"] * 4}
    assert not has_sliding_window(qwen | whole, LONGEST)
    moe = qwen | {"model_type": "qwen3_moe", "max_window_layers": 4}  # all of its layers, whatever that key says
    assert has_sliding_window(moe | {"use_sliding_window": True}, LONGEST) and not has_sliding_window(moe, LONGEST)
    assert logits_divisor({"model_type": "granite", "logits_scaling": 8.0}) == 8.0
    assert logits_divisor({"model_type": "llama", "logits_scaling": 8.0}) == 1.0


def test_sizes_are_those_of_the_config_under_every_familys_names() -> None:
    shape = ModelShape.of(family_config("qwen3_moe").to_dict())
    assert (shape.num_experts, shape.num_active_experts, shape.num_shared_experts) == (4, 2, 0)
    assert (shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (64, 4, 2, 32)
    old = ModelShape.of({"hidden_size": 64, "num_attention_heads": 4})
    assert (old.num_kv_heads, old.head_dim, old.num_experts, old.vocab_size) == (4, 16, 0, None)
    deepseek = ModelShape.of({"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1})
    assert (deepseek.num_experts, deepseek.num_active_experts, deepseek.num_shared_experts) == (8, 3, 1)
    assert ModelShape.of(family_config("deepseek_v3").to_dict()).head_dim == 48 + 16
    # What a file leaves to the model library's default, or what that will refuse, is unknown.
    for sizes in ({"qk_nope_head_dim": 128}, {"qk_nope_head_dim": None, "qk_rope_head_dim": 64}, {"head_dim": 64}):
        assert (
            ModelShape.of({"kv_lora_rank": 512, "hidden_size": 64, "num_attention_heads": 4, **sizes}).head_dim is None
        )
    assert ModelShape.of({"hidden_size": "64", "num_attention_heads": 4}).head_dim is None
    hybrid = family_config("nemotron_h")  # transformers writes the kinds of its layers, not their number
    assert "num_hidden_layers" not in hybrid.to_dict()
    assert ModelShape.of(hybrid.to_dict()).num_layers == hybrid.num_hidden_layers
    assert not has_sliding_window({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4}, LONGEST)
