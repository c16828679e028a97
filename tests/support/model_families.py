"""Tiny models of every family that is trained: the rows of the matrix (`unit/models/test_matrix.py`).

Sizes are those that vLLM runs on a CPU: attention heads of 32. A new family is one line of `FAMILIES` beside its record
in `models/families.py`; another line for each setting that makes it compute something else. Each family has a row with
the settings of a checkpoint that people train (`published`), of which only width, depth and windows are smaller.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE, make_tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from nemo_offload_rl.backends.dtensor.loading import make_buffers_of_biases
from nemo_offload_rl.backends.dtensor.state_mixers import norms_in_torch, without_kernels
from nemo_offload_rl.backends.dtensor.supported import unsupported as dtensor_refuses
from nemo_offload_rl.backends.megatron.supported import unsupported as megatron_refuses
from nemo_offload_rl.models.families import DTENSOR, MEGATRON, unread_tensors

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,  # wide logits, so that greedy choices have clear margins
    "pad_token_id": 256,
    "eos_token_id": 257,
    "bos_token_id": None,
    "dtype": "float32",
    "attention_dropout": 0.1,  # trained without: the references are in eval mode
}
_LINES = Path(__file__).parents[1].joinpath("unit/models/published.jsonl").read_text().splitlines()
PUBLISHED: dict[str, dict[str, Any]] = {config.pop("name"): config for config in map(json.loads, _LINES)}
"""What config.json of published models says of their function, sizes left out, by a short name."""
_OF_SIZES = ("model_type", "num_hidden_layers", "max_window_layers", "num_experts_per_tok", "tie_word_embeddings")
_WINDOW_SIZE = 8  # in the place of any other: rows here are short
_GROWS_FROM = 64  # tokens from which queries of Ministral 3 grow with their positions


def published(name: str, num_layers: int = 2) -> dict[str, Any]:
    """Settings of a published model for a tiny one: its window and its lists by layer or by frequency are shorter."""
    settings = {key: value for key, value in PUBLISHED[name].items() if key not in _OF_SIZES}
    if not settings.get("attention_dropout"):
        settings.pop("attention_dropout", None)
    if (window := settings.get("sliding_window")) is not None and window < settings["max_position_embeddings"]:
        settings["sliding_window"] = _WINDOW_SIZE
    if "layer_types" in settings:
        *first, last = settings["layer_types"]
        settings["layer_types"] = [*first[: num_layers - 1], last]
    if (rope := settings.get("rope_parameters") or {}).get("llama_4_scaling_beta"):
        settings["rope_parameters"] = rope | {"original_max_position_embeddings": _GROWS_FROM}
    rope = dict(settings.get("rope_scaling") or {})
    for key in ("short_factor", "long_factor"):
        if key in rope:
            settings["rope_scaling"] = rope = rope | {key: rope[key][::4]}  # heads of 32 numbers, not 128
    return settings


_QWEN3 = {"hidden_size": 64, "head_dim": 32}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_MOE = {**_QWEN3, **_EXPERTS, "moe_intermediate_size": 48, "norm_topk_prob": True}
_QWEN2_MOE = {**_EXPERTS, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80}
# As DeepSeek-V3: latent attention with heads of 48 + 16 numbers and values of 32, the best experts of the best group.
_DEEPSEEK = {
    "hidden_size": 64,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 256,
}
# As gpt-oss: windows in every other layer, scores that take part in the softmax alone, biases of experts and routers.
_GPT_OSS = {
    **_QWEN3,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 256,
        "truncate": False,
    },
}
_BIASED_EXPERTS = {
    **_MOE,
    "num_hidden_layers": 3,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
}
# Windows in two layers; the third has neither a window nor rotary embeddings.
_EXAONE_MOE = {
    **_BIASED_EXPERTS,
    "is_moe_layer": [False, True, True],  # as vLLM reads it
    "sliding_window": 8,
    "sliding_window_pattern": 3,
    "routed_scaling_factor": 1.5,
}
# As GLM-4.7-Flash and DeepSeek-V2: latent attention whose heads have values of their own size.
_LATENT = {
    "hidden_size": 64,
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "num_hidden_layers": 3,
}
_EXPERT_BIASES = ("e_score_correction_bias", "expert_bias", "layer_scalar")
_DOTS1 = {"moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3}
_HUNYUAN_MOE = {"num_experts": 4, "moe_topk": [2] * 2, "num_shared_expert": [1] * 2, "moe_intermediate_size": [96] * 2}
_HY_V3 = {**_BIASED_EXPERTS, "expert_hidden_dim": 48, "router_scaling_factor": 1.5, "qk_norm": True, "route_norm": True}
# Two convolutions and an attention layer.
_LFM2 = {"block_dim": 128, "block_ff_dim": 144, "block_multiple_of": 16, "conv_dim": 128, "num_hidden_layers": 3}
_LFM2_MOE = {**_EXPERTS, "moe_intermediate_size": 48, "num_dense_layers": 1}
_NEMOTRON_H = {
    "head_dim": 32,
    "chunk_size": 16,
    "mamba_head_dim": 16,
    "mamba_num_heads": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
}
_NEMOTRON_MOE = {"moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 64, "n_routed_experts": 8}
_FALCON_H1 = {
    "head_dim": 32,
    "mamba_chunk_size": 16,
    "mamba_d_head": 16,
    "mamba_d_ssm": 96,
    "mamba_d_state": 16,
    "mamba_n_heads": 6,
}
# A divisor of the logits that leaves greedy choices their margins.
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.2,
    "logits_scaling": 1.5,
}
_GRANITE_4 = {
    **_GRANITE,
    "num_hidden_layers": 3,
    "mamba_chunk_size": 16,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_heads": 16,
    "shared_intermediate_size": 96,
}
# As GLM-4.5: a dense layer first, half of a head rotated, experts that every token has, choice by bias.
_GLM4_MOE = {
    **_QWEN3,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "attention_bias": True,
    "routed_scaling_factor": 1.5,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Gated delta nets in two of three layers, with two heads of values for each of keys; part of an attention head rotated.
_DELTA_NET = {
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_OLMO_HYBRID = {key: value for key, value in _DELTA_NET.items() if key != "head_dim"} | {"linear_value_head_dim": 64}
# A layer that sees the last tokens only, and one that sees all.
_WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "initializer_range": 0.15, **_WINDOW}
# Heads of full attention are larger, and their keys are their values.
_GEMMA_4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
    "final_logit_softcapping": 5.0,
    "initializer_range": 0.15,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
# As E2B: embeddings of each layer, and layers with the keys and values of earlier ones, whose MLPs are wider.
_GEMMA_4_SMALL = {
    **_GEMMA_4,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "use_double_wide_mlp": True,
}
_QWEN_WINDOW = {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("afmoe", {**_MOE, **published("trinity-mini", 3), "num_hidden_layers": 3}),
    "arcee": ("arcee", published("arcee")),
    "cohere-tied": ("cohere", published("command-r")),
    "cohere-norms-tied": ("cohere", {"logit_scale": 0.7, "use_qk_norm": True}),
    "cohere2-tied": ("cohere2", published("commandr7b")),
    "cwm": ("cwm", {"head_dim": 32, "bos_token_id": 257, **published("cwm")}),
    "deepseek_v2": (
        "deepseek_v2",
        {**_LATENT, **published("deepseek-v2-lite"), "kv_lora_rank": 32, "initializer_range": 0.15},
    ),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "deepseek_v3-four": (
        "deepseek_v3",
        {**_DEEPSEEK, **published("dsv3"), "q_lora_rank": 40, "num_experts_per_tok": 4, "initializer_range": 0.15},
    ),
    "deepseek_v3-yarn": ("deepseek_v3", {**_DEEPSEEK, "rope_parameters": _DEEPSEEK_YARN}),
    "deepseek_v3-moonlight": ("deepseek_v3", {**_DEEPSEEK, **published("moonlight"), "n_group": 1, "topk_group": 1}),
    "dots1": ("dots1", {**_QWEN3, **published("dots1"), **_DOTS1}),
    "ernie4_5": ("ernie4_5", {"head_dim": 32, **published("ernie")}),
    "ernie4_5_moe-tied": (
        "ernie4_5_moe",
        {**_QWEN3, **published("ernie-21b-a3b"), "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48},
    ),
    "exaone4": ("exaone4", published("exaone4-32b")),
    "exaone_moe": ("exaone_moe", {**published("k-exaone"), **_EXAONE_MOE}),
    "falcon_h1": ("falcon_h1", {**published("falcon-h1-0.5b"), **_FALCON_H1, "lm_head_multiplier": 0.5}),
    "falcon_h1-norm-tied": (
        "falcon_h1",
        {
            **published("falcon-h1-0.5b"),
            **_FALCON_H1,
            "lm_head_multiplier": 0.5,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
        },
    ),
    "gemma-tied": ("gemma", {"head_dim": 32, **published("gemma")}),
    # Caps of 5, not 50 and 30: the scores of a tiny model are small.
    "gemma2-tied": (
        "gemma2",
        {**published("gemma2"), **_GEMMA, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 5.0},
    ),
    "gemma3-tied": ("gemma3_text", {**published("gemma3-4b-text"), **_GEMMA}),
    "gemma4-tied": ("gemma4_text", _GEMMA_4),
    "gemma4-shared-tied": ("gemma4_text", {**published("gemma-4-e2b-text", 4), **_GEMMA_4_SMALL}),
    "gemma4-experts-tied": (
        "gemma4_text",
        {
            **_GEMMA_4,
            "enable_moe_block": True,
            "hidden_size": 64,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
        },
    ),
    "glm": ("glm", {"head_dim": 32, **published("glm-9b")}),
    "glm4": ("glm4", {"head_dim": 32, **published("glm4")}),
    "glm4_moe": ("glm4_moe", {**published("glm45"), **_GLM4_MOE}),
    "glm4_moe_lite": ("glm4_moe_lite", {**_LATENT, **published("glm-4.7-flash")}),
    "gpt_oss": ("gpt_oss", {**_GPT_OSS, **published("gptoss", 4)}),
    "granite": ("granite", {**published("granite-3.3-8b"), "attention_multiplier": 0.2}),
    "granite-tied": ("granite", {**published("granite-3.0-8b"), **_GRANITE}),
    "granitemoehybrid-tied": ("granitemoehybrid", {**published("granite-4.0-h-micro", 3), **_GRANITE_4}),
    "granitemoehybrid-moe-tied": (
        "granitemoehybrid",
        {**published("granite-4.0-h-tiny", 3), **_GRANITE_4, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "granitemoehybrid-attention-tied": (
        "granitemoehybrid",
        {**published("granite-4.0-micro"), **_GRANITE, "shared_intermediate_size": 96},
    ),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 32, **published("hunyuan")}),
    "hunyuan_moe-tied": ("hunyuan_v1_moe", {**_QWEN3, **published("hunyuan-a13b"), **_HUNYUAN_MOE}),
    "hy_v3": ("hy_v3", {**published("hy3"), **_HY_V3}),
    "hyperclovax": ("hyperclovax", published("hyperclovax-14b")),
    "jais2": ("jais2", published("jais2-8b")),
    "lfm2-tied": ("lfm2", {**published("lfm2-1.2b", 3), **_LFM2}),
    "lfm2_moe-tied": ("lfm2_moe", {**published("lfm2-8b-a1b", 3), **_LFM2, **_LFM2_MOE}),
    "llama": ("llama", published("llama31")),
    "llama-tied": ("llama", published("llama32-3b")),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-odd": ("llama", {"vocab_size": 389, "head_dim": 64}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "minimax_m2": (
        "minimax_m2",
        {**published("minimax-m2"), **_QWEN3, "rotary_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "ministral3-tied": ("ministral3", {**_QWEN3, **published("ministral-3-3b")}),
    "mistral": ("mistral", {"head_dim": 32, **published("mistral-7b-v0.3")}),
    "mistral-window": ("mistral", {"head_dim": 32, **published("mistral01")}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, **published("mixtral")}),
    "mixtral-window-tied": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "nemotron": ("nemotron", published("nemotron")),
    "nemotron_h": ("nemotron_h", {**published("nemotron-h-8b"), **_NEMOTRON_H, "hybrid_override_pattern": "M-*M"}),
    "nemotron_h-latent": (
        "nemotron_h",
        {**_NEMOTRON_H, **_NEMOTRON_MOE, "moe_latent_size": 64, "hybrid_override_pattern": "ME*E"},
    ),
    "nemotron_h-moe": (
        "nemotron_h",
        {**published("nemotron-3-nano"), **_NEMOTRON_H, **_NEMOTRON_MOE, "hybrid_override_pattern": "ME*E"},
    ),
    "olmo2": ("olmo2", published("olmo2")),
    "olmo3": ("olmo3", published("olmo3")),
    "olmo_hybrid": ("olmo_hybrid", {**published("olmo-hybrid-7b"), **_OLMO_HYBRID}),
    "olmo_hybrid-rotated": ("olmo_hybrid", {**_OLMO_HYBRID, "rope_parameters": {"rope_theta": 1e4}}),
    "olmoe": ("olmoe", {**_EXPERTS, **published("olmoe")}),
    "phi3": ("phi3", published("phi4")),
    "phi3-partial": ("phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "phi3-longrope": ("phi3", published("phi4-mini")),
    "phi3-window": ("phi3", published("phi3-4k")),
    "qwen2": ("qwen2", published("qwen2.5")),  # queries, keys and values have biases
    "qwen2-window": ("qwen2", _QWEN_WINDOW),
    "qwen2-tied": ("qwen2", {}),
    "qwen2_moe": ("qwen2_moe", {**_QWEN2_MOE, **published("qwen1.5-moe")}),
    "qwen2_moe-dense-tied": ("qwen2_moe", {**_QWEN2_MOE, "decoder_sparse_step": 2, "norm_topk_prob": True}),
    "qwen3": ("qwen3", {**_QWEN3, **published("qwen3-8b-yarn")}),
    "qwen3-window": ("qwen3", {**_QWEN3, **_QWEN_WINDOW}),
    "qwen3-tied": ("qwen3", {**_QWEN3, **published("r1-0528-qwen3-8b")}),
    "qwen3_moe": ("qwen3_moe", {**_MOE, **published("qwen3-30b")}),
    "qwen3_moe-dense": ("qwen3_moe", {**_MOE, "mlp_only_layers": [0]}),
    "qwen3_moe-tied": ("qwen3_moe", _MOE),
    "qwen3_5-tied": ("qwen3_5_text", {**published("qwen3.5-4b-text"), **_DELTA_NET}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**_QWEN2_MOE, **published("qwen3.5-35b-a3b-text"), **_DELTA_NET}),
    "qwen3_next": ("qwen3_next", {**_QWEN2_MOE, **published("qwen3-next-80b-a3b"), **_DELTA_NET}),
    "seed_oss": ("seed_oss", {"head_dim": 32, **published("seedoss")}),
    "solar_open": ("solar_open", {**_QWEN3, **published("solar-open-100b"), **_DOTS1}),
    "stablelm": ("stablelm", published("stablelm2")),
    "starcoder2": ("starcoder2", {**published("starcoder2-3b"), "sliding_window": None}),
    "starcoder2-window": ("starcoder2", published("starcoder2-3b")),
    # Of its two layers one has no rotary embeddings; its own padding token is beyond this vocabulary.
    "smollm3-tied": ("smollm3", {**published("smollm3"), "no_rope_layer_interval": 2}),
}
"""Model type and sizes by name; one that ends in `-tied` has one matrix for embedding and output."""


def trained_by(family: str) -> list[str]:
    """Backends that train the model of a name."""
    config = family_config(family).to_dict()
    checks = {DTENSOR: dtensor_refuses, MEGATRON: megatron_refuses}
    return [backend for backend, refuses in checks.items() if refuses(config) is None]


def family_config(family: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a name; `changes` replace sizes."""
    model_type, sizes = FAMILIES[family]
    is_tied = family.endswith("-tied")
    if "rope_parameters" in changes:
        sizes = {key: value for key, value in sizes.items() if key != "rope_scaling"}  # which would count instead
    return AutoConfig.for_model(model_type, **{**_SIZES, **sizes, "tie_word_embeddings": is_tied, **changes})


def make_family(family: str, seed: int) -> Any:
    """A float32 model in eval mode, drawn from `seed`."""
    return drawn_model(family_config(family), seed)


def drawn_model(config: PreTrainedConfig, seed: int) -> Any:
    """A float32 model in eval mode, drawn from `seed`; vectors too, which would all start as zero or one."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        norms_in_torch(config)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            if name.endswith("sinks"):
                parameter.mul_(0.05)  # vLLM rounds them to bfloat16 on a CPU, which shows in larger ones
        for name, buffer in model.named_buffers():
            if name.endswith((*_EXPERT_BIASES, "layer_scalar")):
                buffer.add_(0.2 * torch.randn_like(buffer))
    return as_published(model.float().eval())


def as_published(model: Any) -> Any:
    """Hugging Face's model, changed in place where transformers computes another function than the published one.

    It leaves out `attn_factor` of YaRN, scales rotary embeddings of OLMo 3's layers with a window too, rotates whole
    heads of MiniMax-M2, scores of DeepSeek-V2 lack a factor, and tokens of Nemotron-H's Mamba layers see later ones.
    """
    without_kernels(model)
    make_buffers_of_biases(model)
    rope, rotary = getattr(model.config, "rope_parameters", None) or {}, getattr(model.base_model, "rotary_emb", None)
    if model.config.model_type == "minimax_m2":
        part = {"partial_rotary_factor": model.config.rotary_dim / model.config.head_dim}
        model.base_model.rotary_emb = type(rotary)(_with_rope(model.config, {**rope, **part}))
    if model.config.model_type in ("deepseek_v2", "glm4_moe_lite"):
        all_dim, factor = rope.get("mscale_all_dim", 0), rope.get("factor", 1)
        for layer in model.base_model.layers:
            layer.self_attn.scaling = (0.1 * all_dim * math.log(factor) + 1) ** 2 / math.sqrt(48 + 16)
            for norm in (layer.self_attn.kv_a_layernorm, getattr(layer.self_attn, "q_a_layernorm", None)):
                if norm is not None:
                    norm.variance_epsilon = model.config.rms_norm_eps
    if model.config.model_type == "nemotron_h":
        for layer in model.base_model.layers:
            if layer.block_type == "mamba":
                layer.mixer.torch_forward = partial(_token_by_token, layer.mixer)
    if rope.get("attn_factor") is not None:
        rotary.attention_scaling = rope["attn_factor"] * (0.1 * math.log(rope["factor"]) + 1)
    if model.config.model_type == "olmo3":
        rotate = type(rotary)(_with_rope(model.config, {"rope_theta": rope["rope_theta"]}))
        for layer in model.base_model.layers:
            if layer.self_attn.sliding_window is not None:
                layer.self_attn.forward = partial(_attend_rotated_by, rotate, layer.self_attn.forward)
    return model


def _token_by_token(mixer: Any, hidden: Tensor, *_: Any) -> Tensor:
    """A Mamba-2 layer as its recurrence: state = exp(step rate) state + step key value."""
    inner, size, length = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size, hidden.shape[1]
    gate, mixed, steps = mixer.in_proj(hidden).split([inner, inner + 2 * size, mixer.num_heads], dim=-1)
    mixed = mixer.act(mixer.conv1d(mixed.transpose(1, 2))[..., :length].transpose(1, 2))
    values, *others = mixed.split([inner, size, size], dim=-1)
    values = values.unflatten(-1, (mixer.num_heads, -1))
    num_repeats = mixer.num_heads // mixer.n_groups
    keys, queries = (it.unflatten(-1, (mixer.n_groups, -1)).repeat_interleave(num_repeats, 2) for it in others)
    steps = torch.nn.functional.softplus(steps + mixer.dt_bias)
    kept, made = (-mixer.A_log.exp() * steps).exp(), []
    state = torch.zeros(())
    for token in range(length):
        given = (steps[:, token, :, None] * values[:, token])[..., None] * keys[:, token, :, None]
        state = kept[:, token, :, None, None] * state + given
        made.append((state * queries[:, token, :, None]).sum(-1) + mixer.D[:, None] * values[:, token])
    return mixer.out_proj(mixer.norm(torch.stack(made, dim=1).flatten(2), gate))


def _with_rope(config: Any, rope: dict[str, Any]) -> Any:
    return config.__class__(**{**config.to_dict(), "rope_parameters": rope})


def _attend_rotated_by(rotate: Any, attend: Any, hidden_states: Tensor, **given: Any) -> Any:
    positions = torch.arange(hidden_states.shape[1]).unsqueeze(0)
    return attend(hidden_states, **{**given, "position_embeddings": rotate(hidden_states, positions)})


def save_family_folder(path: Path, family: str, seed: int = 0) -> Any:
    """Write weights, config and tokenizer to `path`, as Hugging Face and vLLM read them."""
    model = make_family(family, seed)
    save_as_published(path, model)
    if unread_tensors(model.config.to_dict()) is not None:
        add_unread_tensors(path / "model.safetensors")
    return model


def save_as_published(path: Path, model: Any) -> None:
    """Write weights, config and tokenizer; transformers 5.12.1 names embeddings of Nemotron-H as nobody else does."""
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    if model.config.model_type == "nemotron_h":
        tensors = load_file(path / "model.safetensors")
        tensors["backbone.embeddings.weight"] = tensors.pop("backbone.embedding.weight")
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def add_unread_tensors(path: Path) -> None:
    """Add what published files of models with shared keys have, transformers leaves out, and vLLM asks for."""
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("self_attn.q_norm.weight")]:
        tensors.setdefault(name.replace("q_norm", "k_norm"), torch.full_like(tensors[name], 7.0))
    save_file(tensors, path, metadata={"format": "pt"})


# What checkpoints of a family call parts of its modules.
_HUB_NAMES = {
    "ernie4_5_moe": {".mlp.gate.moe_statics.": ".mlp.moe_statics."},
    "exaone_moe": {".mlp.gate.e_score_correction_bias": ".mlp.e_score_correction_bias"},
    "hy_v3": {
        ".mlp.gate.": ".mlp.router.gate.",
        ".mlp.e_score_correction_bias": ".mlp.expert_bias",
        ".mlp.shared_experts.": ".mlp.shared_mlp.",
    },
    "minimax_m2": {".mlp.": ".block_sparse_moe."},
    "mixtral": {".mlp.": ".block_sparse_moe."},
    "nemotron_h": {"model.": "backbone."},
}


def checkpoint_name(model: Any, name: str) -> str:
    """What checkpoints of its family call a tensor of a model."""
    for own, there in _HUB_NAMES.get(model.config.model_type, {}).items():
        name = name.replace(own, there)
    return name


def checkpoint_tensors(model: Any) -> dict[str, Tensor]:
    """The tensors of a model as its family's checkpoints have them: each expert on its own, but for gpt-oss."""
    is_stacked = model.config.model_type in ("gpt_oss", "gemma4_text")
    is_mixtral = model.config.model_type in ("lfm2_moe", "mixtral", "minimax_m2")
    *halves, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    biases = {name: bias for name, bias in model.named_buffers() if name.endswith(_EXPERT_BIASES)}
    tensors = {checkpoint_name(model, name): bias for name, bias in biases.items()}
    for own_name, parameter in model.named_parameters():
        name = checkpoint_name(model, own_name)
        place, _, projection = name.rpartition(".experts.")
        if not place or is_stacked:
            tensors[name] = parameter.detach()
            continue
        for expert, weight in enumerate(parameter.detach()):
            parts = zip(halves, weight.chunk(2), strict=True) if projection == "gate_up_proj" else [(down, weight)]
            parts = [(projection, weight)] if projection == "up_proj" else parts  # without a gate
            tensors |= {f"{place}.experts.{expert}.{part}.weight": tensor for part, tensor in parts}
    return tensors
